// SPDX-License-Identifier: Apache-2.0

#include "cuda_runtime.hpp"

#include <ulysses/adapters/cuda.hpp>
#include <ulysses/adapters/cuda_epilogues.hpp>
#include <ulysses/adapters/cuda_flags.hpp>
#include <ulysses/adapters/cuda_launch.hpp>

#include <atomic>

/// What cuda_kernels.cuh defines, with the same functors run by a stream of the double, thread after
/// thread.
namespace ulysses::inline ULYSSES_ABI::detail {

namespace {

std::atomic<int> launched{0};

struct loop_launcher {
    template <class Body>
    static cudaError_t run(cudaStream_t stream, std::int64_t tiles, Body const& body) {
        if (auto const result = doubles::launched_on(stream); result != cudaSuccess) return result;
        ++launched;
        return doubles::enqueue(stream, [=] {
            for (std::int64_t tile = 0; tile < tiles; ++tile)
                for (int thread = 0; thread < block_threads; ++thread) body(tile, thread);
        });
    }
};

}  // namespace

cudaError_t launch_copies(cudaStream_t stream, std::span<block_copy const> blocks) {
    return copies_by<loop_launcher>(stream, blocks);
}
cudaError_t launch_bytes(cudaStream_t stream, void* to, std::span<std::byte const> bytes) {
    return bytes_by<loop_launcher>(stream, to, bytes);
}
cudaError_t launch_sums(cudaStream_t stream, dtype to, dtype from,
                        std::span<block_sum const> sums) {
    return sums_by<loop_launcher>(stream, to, from, sums);
}
cudaError_t launch_epilogue(cudaStream_t stream, dtype type, rope_turns const& turns) {
    return epilogue_by<loop_launcher>(stream, type, turns);
}
cudaError_t launch_epilogue(cudaStream_t stream, dtype type, norm_rows const& work) {
    return epilogue_by<loop_launcher>(stream, type, work);
}
cudaError_t launch_flags(cudaStream_t stream, flag_fence const& half) {
    if (half.part != fence_part::wait) return loop_launcher::run(stream, 1, half);
    if (auto const result = doubles::launched_on(stream); result != cudaSuccess) return result;
    ++launched;
    static std::uint64_t given_up = 1;
    auto no_wait = half;
    no_wait.silent = &given_up;
    for (int peer = 0; peer < half.ranks; ++peer) {
        // Ranks' streams are made in the order of ranks.
        auto const source = doubles::number(stream) + peer - half.rank;
        auto const waits = peer == half.rank || doubles::told_to_wait(stream, source);
        auto const result =
            doubles::enqueue(stream, [each = waits ? half : no_wait, peer] { each(0, peer); });
        if (result != cudaSuccess) return result;
    }
    return cudaSuccess;
}

}  // namespace ulysses::inline ULYSSES_ABI::detail

int doubles::launches() { return ulysses::detail::launched; }
