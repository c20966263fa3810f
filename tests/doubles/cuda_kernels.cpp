// SPDX-License-Identifier: Apache-2.0

#include "cuda_runtime.hpp"

#include <ulysses/adapters/cuda.hpp>
#include <ulysses/adapters/cuda_flags.hpp>
#include <ulysses/adapters/cuda_launch.hpp>

/// What cuda_kernels.cuh defines, with the same functors run by a stream of the double, thread after
/// thread.
namespace ulysses::inline ULYSSES_ABI::detail {

namespace {

struct loop_launcher {
    template <class Body>
    static cudaError_t run(cudaStream_t stream, std::int64_t tiles, Body const& body) {
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
cudaError_t launch_sums(cudaStream_t stream, dtype to, dtype from,
                        std::span<block_sum const> sums) {
    return sums_by<loop_launcher>(stream, to, from, sums);
}
cudaError_t launch_flags(cudaStream_t stream, flag_fence const& half) {
    return loop_launcher::run(stream, 1, half);
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
