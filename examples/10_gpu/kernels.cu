// SPDX-License-Identifier: Apache-2.0
// The one .cu file of the program: kernels of the engine's own, and those of the library.

#include "attention.hpp"

// [snippet]
#include <ulysses/adapters/cuda_kernels.cuh>

namespace engine {

__global__ void run(__grid_constant__ causal_attention const work) {
    auto const thread = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (thread < work.threads()) work(thread);
}

cudaError_t launch(cudaStream_t stream, causal_attention const& work) {
    auto const blocks = static_cast<unsigned>((work.threads() + 127) / 128);
    if (blocks > 0) run<<<blocks, 128, 0, stream>>>(work);
    return cudaGetLastError();
}

}  // namespace engine
// [/snippet]
