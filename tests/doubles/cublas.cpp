// SPDX-License-Identifier: Apache-2.0

#include "cublas.hpp"

#include "cuda_runtime.hpp"

#include <ulysses/core/gemm.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/gemm/builtin.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

struct cublasContext {
    cudaStream_t stream = nullptr;
    std::byte* workspace = nullptr;
    std::size_t bytes = 0;
};

namespace {

thread_local doubles::cublas_sizes last_sizes{};
std::atomic<std::uint64_t> products{0};
std::atomic<int> handles{0};
std::atomic<cublasMath_t> math{CUBLAS_DEFAULT_MATH};
std::atomic<cublasStatus_t> next_status{CUBLAS_STATUS_SUCCESS};

/// A column-major matrix as the row-major one that has its memory: its transpose.
struct matrix {
    void const* data;
    std::int64_t rows, columns, stride;  // as stored, by rows
    bool transposed;
};

template <class T, class Sum>
std::vector<Sum> packed(matrix const& from, std::int64_t offset) {
    std::vector<Sum> to(static_cast<std::size_t>(from.rows * from.columns));
    auto const* const first = static_cast<T const*>(from.data) + offset;
    for (std::int64_t i = 0; i < from.rows; ++i)
        for (std::int64_t j = 0; j < from.columns; ++j)
            to[static_cast<std::size_t>(i * from.columns + j)] =
                static_cast<Sum>(first[i * from.stride + j]);
    return to;
}

/// One product, row-major: c [m, n] = alpha op(a) op(b) + beta c. In place where no type is converted.
template <class T>
void multiply(std::int64_t m, std::int64_t n, std::int64_t k, double alpha, double beta,
              matrix const& a, std::int64_t a_offset, matrix const& b, std::int64_t b_offset, T* c,
              std::int64_t c_stride) {
    using sum = ulysses::accumulator_t<T>;
    auto const left = packed<T, sum>(a, a_offset), right = packed<T, sum>(b, b_offset);
    auto out = beta != 0 ? packed<T, sum>({c, m, n, c_stride, false}, 0)
                         : std::vector<sum>(static_cast<std::size_t>(m * n));
    ulysses::builtin_gemm{}(ulysses::gemm_call<sum>{.m = m,
                                                    .n = n,
                                                    .k = k,
                                                    .alpha = static_cast<sum>(alpha),
                                                    .a = {left.data(), a.columns, a.transposed},
                                                    .b = {right.data(), b.columns, b.transposed},
                                                    .beta = static_cast<sum>(beta),
                                                    .c = out.data(),
                                                    .c_stride = n});
    for (std::int64_t i = 0; i < m; ++i)
        for (std::int64_t j = 0; j < n; ++j)
            c[i * c_stride + j] = static_cast<T>(out[static_cast<std::size_t>(i * n + j)]);
}

cublasStatus_t asked_to_fail() { return next_status.exchange(CUBLAS_STATUS_SUCCESS); }

}  // namespace

namespace doubles {

cublasMath_t cublas_math_mode() { return math; }
std::uint64_t cublas_products() { return products; }
int cublas_handles() { return handles; }
cublas_sizes last_cublas_sizes() { return last_sizes; }
void fail_cublas(cublasStatus_t status) { next_status = status; }

}  // namespace doubles

extern "C" {

char const* cublasGetStatusName(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        default: return "a status of the double";
    }
}
char const* cublasGetStatusString(cublasStatus_t) { return "the double's words"; }

cublasStatus_t cublasCreate_v2(cublasHandle_t* handle) {
    if (auto const failed = asked_to_fail(); failed != CUBLAS_STATUS_SUCCESS) return failed;
    *handle = new cublasContext;
    ++handles;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    --handles;
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    *handle = {.stream = stream};  // a stream takes the workspace back
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t handle, void* workspace, std::size_t bytes) {
    if (reinterpret_cast<std::uintptr_t>(workspace) % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
    handle->workspace = static_cast<std::byte*>(workspace);
    handle->bytes = bytes;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t mode) {
    math = mode;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasGemmStridedBatchedEx_64(
    cublasHandle_t handle, cublasOperation_t trans_a, cublasOperation_t trans_b, std::int64_t m,
    std::int64_t n, std::int64_t k, void const* alpha, void const* a, cudaDataType a_type,
    std::int64_t lda, long long a_stride, void const* b, cudaDataType b_type, std::int64_t ldb,
    long long b_stride, void const* beta, void* c, cudaDataType c_type, std::int64_t ldc,
    long long c_stride, std::int64_t batch, cublasComputeType_t compute, cublasGemmAlgo_t) {
    last_sizes = {m, n, k, lda, ldb, ldc};
    if (auto const failed = asked_to_fail(); failed != CUBLAS_STATUS_SUCCESS) return failed;
    auto const wide = compute == CUBLAS_COMPUTE_64F;
    if (handle->workspace == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (a_type != c_type || b_type != c_type || wide != (c_type == CUDA_R_64F) ||
        (!wide && compute != CUBLAS_COMPUTE_32F))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    auto const a_turned = trans_a == CUBLAS_OP_T, b_turned = trans_b == CUBLAS_OP_T;
    auto const least = [](std::int64_t rows) { return rows > 1 ? rows : 1; };
    if (m < 0 || n < 0 || k < 0 || batch < 0 || lda < least(a_turned ? k : m) ||
        ldb < least(b_turned ? n : k) || ldc < least(m))
        return CUBLAS_STATUS_INVALID_VALUE;
    ++products;
    matrix const left = {b, b_turned ? k : n, b_turned ? n : k, ldb, b_turned};
    matrix const right = {a, a_turned ? m : k, a_turned ? k : m, lda, a_turned};
    auto const scale = [&](void const* from) {
        return wide ? *static_cast<double const*>(from)
                    : static_cast<double>(*static_cast<float const*>(from));
    };
    auto const run = [=, alpha_value = scale(alpha), beta_value = scale(beta),
                      workspace = handle->workspace, bytes = handle->bytes]<class T>(T*) {
        for (std::size_t i = 0; i < bytes; i += bytes / 4 + 1) workspace[i] = std::byte{7};
        for (std::int64_t i = 0; i < batch; ++i)
            multiply<T>(n, m, k, alpha_value, beta_value, left, i * b_stride, right, i * a_stride,
                        static_cast<T*>(c) + i * c_stride, ldc);
    };
    doubles::enqueue(handle->stream, [=] {
        if (c_type == CUDA_R_64F) run(static_cast<double*>(nullptr));
        if (c_type == CUDA_R_32F) run(static_cast<float*>(nullptr));
        if (c_type == CUDA_R_16F) run(static_cast<ulysses::half*>(nullptr));
        if (c_type == CUDA_R_16BF) run(static_cast<ulysses::bf16*>(nullptr));
    });
    return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
