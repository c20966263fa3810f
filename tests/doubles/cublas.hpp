#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cublas_v2.h>

#include <cstdint>

/// A double of cuBLAS over the built-in GEMM, on the streams of the double of the CUDA runtime: what is
/// multiplied is converted to the type of the computation first. It refuses what cuBLAS documents as
/// invalid, and a handle that was given no workspace, which it writes to in each product: two streams
/// that share one are a race.
namespace doubles {

/// What all handles were last set to.
cublasMath_t cublas_math_mode();
/// Products that were enqueued since the start, and handles that are alive.
std::uint64_t cublas_products();
int cublas_handles();
/// Of the last product, whether it was multiplied or not.
struct cublas_sizes {
    std::int64_t m, n, k, lda, ldb, ldc;
};
cublas_sizes last_cublas_sizes();
/// The next call that sets or enqueues something returns `status` in place of doing it.
void fail_cublas(cublasStatus_t status);

}  // namespace doubles
