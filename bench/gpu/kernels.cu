// SPDX-License-Identifier: Apache-2.0

#include "attention_rows.hpp"

#include <ulysses/adapters/cuda_kernels.cuh>

namespace ulysses_bench {

namespace {

template <class Rows>
__global__ void __launch_bounds__(attention_threads) run_rows(__grid_constant__ Rows const rows) {
    rows(static_cast<std::int64_t>(blockIdx.x) * attention_threads + threadIdx.x);
}

template <class Rows>
cudaError_t launch_rows(cudaStream_t stream, Rows const& rows) {
    auto const blocks = (rows.threads() + attention_threads - 1) / attention_threads;
    run_rows<<<static_cast<unsigned>(blocks), attention_threads, 0, stream>>>(rows);
    return cudaGetLastError();
}

}  // namespace

cudaError_t launch(cudaStream_t stream, forward_rows const& rows) {
    return launch_rows(stream, rows);
}
cudaError_t launch(cudaStream_t stream, backward_rows const& rows) {
    return launch_rows(stream, rows);
}

}  // namespace ulysses_bench
