#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cuda.hpp>
#include <ulysses/core/buffer.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/gemm.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/space.hpp>

#include <cublas_v2.h>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#if CUBLAS_VERSION < 120000
#error "ulysses needs cuBLAS 12: sizes are of 64 bits"
#endif

/// A matrix product by cuBLAS, on the queue of each call:
///
///     ulysses::dense projection{ulysses::cublas{}, ulysses::rope{layer.head_dim}};
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

/// *Throws* `transport_error` with cuBLAS's own words, or `out_of_memory`.
inline void expect_cublas(cublasStatus_t result, std::string_view call) {
    if (result == CUBLAS_STATUS_SUCCESS) return;
    if (result == CUBLAS_STATUS_ALLOC_FAILED)
        raise(errc::out_of_memory, {}, "cublas", "memory must be available", call, ": ",
              cublasGetStatusString(result));
    raise(errc::transport, {}, "cublas", "a call of cuBLAS must succeed", call, ": ",
          cublasGetStatusName(result), " (", static_cast<int>(result), "), ",
          cublasGetStatusString(result));
}

/// The stride of a stored matrix of `columns` columns; with one row, or nothing in it, any will do.
inline std::int64_t cublas_stride(std::int64_t stride, std::int64_t rows, std::int64_t columns,
                                  std::string_view what) {
    auto const least = std::max<std::int64_t>(columns, 1);
    if (rows <= 1 || columns <= 0) return least;
    if (stride < least)
        raise(errc::invalid_tensor, {}, "cublas", "rows must not overlap", what, " stride ", stride,
              ", columns ", columns);
    return stride;
}

template <class T>
inline constexpr cudaDataType_t cublas_type = dtype_of<T> == dtype::f64   ? CUDA_R_64F
                                              : dtype_of<T> == dtype::f32 ? CUDA_R_32F
                                              : dtype_of<T> == dtype::f16 ? CUDA_R_16F
                                                                          : CUDA_R_16BF;

}  // namespace detail

struct cublas_options {
    /// Device memory that products on a stream may use; what cuBLAS itself takes on Hopper.
    std::size_t workspace_bytes = std::size_t{32} << 20;
    bool tf32 = false;  ///< products of float in TF32, whose factors have 10 bits after the point
};

/// Products of double, float, half and bf16 in device memory, accumulated in `accumulator_t<T>`. Each
/// stream has a handle and a workspace of its own, made in its first call, so that calls may be
/// captured in a graph after it. The bits of a row depend on the number of rows in the call.
///
/// *Thread safety*: copies share handles and belong to the thread of one rank; streams outlive them.
/// *Throws* `invalid_tensor` when a stride is shorter than a row, or products of a batch overlap;
/// `transport_error`, `out_of_memory`; `invalid_call` when the first call on a stream is captured.
class cublas {
   public:
    using space_type = cuda_space;
    static constexpr bool rows_independent = false;

    explicit cublas(cublas_options const& given = {}) : all_(std::make_shared<streams>(given)) {}

    template <element T>
    void operator()(queued<gemm_call<T>, cuda_space> const& call) const {
        using scale = accumulator_t<T>;
        if (call.m <= 0 || call.n <= 0 || call.batch <= 0) return;
        auto const k = std::max<std::int64_t>(call.k, 0);
        auto const stride_of = [&](gemm_operand<T> const& operand, std::int64_t rows,
                                   std::int64_t columns, std::string_view what) {
            return operand.transposed ? detail::cublas_stride(operand.stride, columns, rows, what)
                                      : detail::cublas_stride(operand.stride, rows, columns, what);
        };
        auto const lda = stride_of(call.a, call.m, k, "a");
        auto const ldb = stride_of(call.b, k, call.n, "b");
        auto const ldc = detail::cublas_stride(call.c_stride, call.m, call.n, "c");
        check_batch(call.m, call.n, ldc, call.batch, call.c_batch_stride);
        auto const trans = [](gemm_operand<T> const& operand) {
            return operand.transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
        };
        auto const alpha = static_cast<scale>(call.alpha), beta = static_cast<scale>(call.beta);
        // Column by column, as cuBLAS reads them, these are C^T = op(B)^T op(A)^T.
        detail::expect_cublas(
            cublasGemmStridedBatchedEx_64(
                handle_of(call.queue), trans(call.b), trans(call.a), call.n, call.m, k, &alpha,
                call.b.data, detail::cublas_type<T>, ldb, call.b.batch_stride, call.a.data,
                detail::cublas_type<T>, lda, call.a.batch_stride, &beta, call.c,
                detail::cublas_type<T>, ldc, call.c_batch_stride, call.batch,
                std::same_as<scale, double> ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F,
                CUBLAS_GEMM_DEFAULT),
            "cublasGemmStridedBatchedEx");
    }

   private:
    static void check_batch(std::int64_t m, std::int64_t n, std::int64_t stride, std::int64_t batch,
                            std::int64_t given) {
        if (batch <= 1) return;
        auto const apart = given < 0 ? -given : given;
        auto const behind = apart >= n && (apart - n) / stride >= m - 1;
        auto const in_turn = apart >= n && (stride - n) / apart >= batch - 1;  // row by row
        if (!behind && !in_turn)
            raise(errc::invalid_tensor, {}, "cublas", "products of a batch must not overlap",
                  "batch stride ", given, ", ", m, " rows of ", n, " at stride ", stride);
    }

    /// What products on one stream need.
    struct per_stream {
        per_stream() = default;
        per_stream(per_stream&& other) noexcept
            : stream(other.stream),
              workspace(std::move(other.workspace)),
              handle(std::exchange(other.handle, nullptr)) {}
        ~per_stream() {
            if (handle != nullptr) cublasDestroy(handle);
        }

        cudaStream_t stream = nullptr;
        buffer<cuda_space> workspace;
        cublasHandle_t handle = nullptr;
    };
    struct streams {
        explicit streams(cublas_options const& options) : given(options) {}

        cublas_options given;
        std::vector<per_stream> list;
    };

    cublasHandle_t handle_of(cuda_space::queue const& queue) const {
        for (auto const& each : all_->list)
            if (each.stream == queue.stream) return each.handle;
        auto const& given = all_->given;
        per_stream made;
        made.stream = queue.stream;
        constexpr std::size_t alignment = 256;
        void* memory = made.workspace.reserve(given.workspace_bytes + alignment, queue).data();
        auto room = given.workspace_bytes + alignment;
        memory = std::align(alignment, given.workspace_bytes, memory, room);
        detail::expect_cublas(cublasCreate(&made.handle), "cublasCreate");
        detail::expect_cublas(cublasSetStream(made.handle, queue.stream), "cublasSetStream");
        // After the stream, which takes it back.
        detail::expect_cublas(cublasSetWorkspace(made.handle, memory, given.workspace_bytes),
                              "cublasSetWorkspace");
        auto const mode = given.tf32 ? CUBLAS_TF32_TENSOR_OP_MATH : CUBLAS_DEFAULT_MATH;
        detail::expect_cublas(
            cublasSetMathMode(
                made.handle,
                static_cast<cublasMath_t>(mode | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
            "cublasSetMathMode");
        return all_->list.emplace_back(std::move(made)).handle;
    }

    std::shared_ptr<streams> all_;
};

static_assert(gemm_for<cublas, float> && gemm_for<cublas, double> && gemm_for<cublas, half> &&
              gemm_for<cublas, bf16>);

}  // namespace ulysses::inline ULYSSES_ABI
