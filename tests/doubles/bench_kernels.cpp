// SPDX-License-Identifier: Apache-2.0

#include "../../bench/gpu/attention_rows.hpp"
#include "cuda_runtime.hpp"

/// What bench/gpu/kernels.cu defines, run by a stream of the double.
namespace ulysses_bench {

namespace {

template <class Rows>
cudaError_t run_rows(cudaStream_t stream, Rows const& rows) {
    return doubles::enqueue(stream, [=] {
        for (std::int64_t i = 0; i < rows.threads(); ++i) rows(i);
    });
}

}  // namespace

cudaError_t launch(cudaStream_t stream, forward_rows const& rows) { return run_rows(stream, rows); }
cudaError_t launch(cudaStream_t stream, backward_rows const& rows) {
    return run_rows(stream, rows);
}

}  // namespace ulysses_bench
