// SPDX-License-Identifier: Apache-2.0

#include "../../examples/10_gpu/attention.hpp"
#include "cuda_runtime.hpp"

/// What examples/10_gpu/kernels.cu defines, run by a stream of the double.
namespace engine {

cudaError_t launch(cudaStream_t stream, causal_attention const& work) {
    return doubles::enqueue(stream, [=] {
        for (std::int64_t i = 0; i < work.threads(); ++i) work(i);
    });
}

}  // namespace engine
