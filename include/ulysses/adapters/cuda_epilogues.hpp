#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cuda_launch.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/projection/qk_norm.hpp>
#include <ulysses/projection/rope.hpp>

#include <cuda_runtime_api.h>

#include <cstdint>

/// The epilogues of `dense` as launches, as cuda_blocks.hpp and cuda_launch.hpp have copies.
namespace ulysses::inline ULYSSES_ABI::detail {

/// A thread turns one pair of one row, in all heads: they share its sine and cosine, and neighbouring
/// threads have neighbouring pairs.
template <class T>
struct turn_tiles {
    rope_turns turns;

    std::int64_t threads() const { return turns.rows * turns.pairs; }
    ULYSSES_HD void operator()(std::int64_t tile, int thread) const {
        auto const at = divided(tile * block_threads + thread, turns.pairs);
        if (at.value < turns.rows) turns.turn_heads<T>(at.value, at.rest);
    }
};

/// A thread takes one row of one head: its sums have the order of the host's.
template <class T>
struct norm_tiles {
    static constexpr int wide = 16 / sizeof(T);

    norm_rows work;
    bool aligned;

    std::int64_t threads() const { return work.count(); }
    ULYSSES_HD void operator()(std::int64_t tile, int thread) const {
        auto const row = tile * block_threads + thread;
        auto const& extents = work.extents;
        if (row >= extents[0] * extents[1] * extents[2]) return;
        auto const head = divided(row, extents[2]);
        auto const token = divided(head.value, extents[1]);
        if (aligned)
            work.row<wide, T>(token.value, token.rest, head.rest);
        else
            work.row<1, T>(token.value, token.rest, head.rest);
    }
};

template <class Launcher, class T>
cudaError_t epilogue_of(cudaStream_t stream, rope_turns const& turns) {
    return threads_by<Launcher>(stream, turn_tiles<T>{turns});
}
template <class Launcher, class T>
cudaError_t epilogue_of(cudaStream_t stream, norm_rows const& work) {
    return threads_by<Launcher>(stream, norm_tiles<T>{work, work.aligned(16, sizeof(T))});
}

template <class Launcher, class Work>
cudaError_t epilogue_by(cudaStream_t stream, dtype type, Work const& work) {
    if (type == dtype::f64) return epilogue_of<Launcher, double>(stream, work);
    if (type == dtype::f32) return epilogue_of<Launcher, float>(stream, work);
    if (type == dtype::f16) return epilogue_of<Launcher, half>(stream, work);
    return epilogue_of<Launcher, bf16>(stream, work);
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
