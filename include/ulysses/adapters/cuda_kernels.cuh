#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cuda.hpp>
#include <ulysses/adapters/cuda_epilogues.hpp>
#include <ulysses/adapters/cuda_flags.hpp>
#include <ulysses/adapters/cuda_launch.hpp>

#include <cuda_runtime.h>

/// The kernels of the CUDA adapters. One `.cu` file of a program includes this header:
///
///     #include <ulysses/adapters/cuda_kernels.cuh>
///
/// compiled by nvcc with -std=c++20, and as the rest with or without exceptions.
#if CUDART_VERSION < 12010
#error "ulysses needs CUDA 12.1: kernels take parameters of more than 4 KiB"
#endif

namespace ulysses::inline ULYSSES_ABI::detail {

/// body(tile, thread) for each thread of each thread block.
template <class Body>
__global__ void __launch_bounds__(block_threads) run_tiles(__grid_constant__ Body const body) {
    body(static_cast<std::int64_t>(blockIdx.x), static_cast<int>(threadIdx.x));
}

struct device_launcher {
    template <class Body>
    static cudaError_t run(cudaStream_t stream, std::int64_t tiles, Body const& body) {
        // Its own result: the last error may be of a call of somebody else.
        void* parameters[] = {const_cast<Body*>(&body)};
        return cudaLaunchKernel(run_tiles<Body>, dim3(static_cast<unsigned>(tiles)),
                                dim3(block_threads), parameters, 0, stream);
    }
};

cudaError_t launch_copies(cudaStream_t stream, std::span<block_copy const> blocks) {
    return copies_by<device_launcher>(stream, blocks);
}
cudaError_t launch_bytes(cudaStream_t stream, void* to, std::span<std::byte const> bytes) {
    return bytes_by<device_launcher>(stream, to, bytes);
}
cudaError_t launch_sums(cudaStream_t stream, dtype to, dtype from,
                        std::span<block_sum const> sums) {
    return sums_by<device_launcher>(stream, to, from, sums);
}
cudaError_t launch_epilogue(cudaStream_t stream, dtype type, rope_turns const& turns) {
    return epilogue_by<device_launcher>(stream, type, turns);
}
cudaError_t launch_epilogue(cudaStream_t stream, dtype type, norm_rows const& work) {
    return epilogue_by<device_launcher>(stream, type, work);
}
cudaError_t launch_flags(cudaStream_t stream, flag_fence const& half) {
    return device_launcher::run(stream, 1, half);
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
