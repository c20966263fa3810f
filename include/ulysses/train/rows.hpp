#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/gemm.hpp>
#include <ulysses/core/index_range.hpp>
#include <ulysses/projection/dense.hpp>

#include <cstdint>
#include <string_view>
#include <type_traits>

/// Tokens as rows of a matrix, and their products with weights.
namespace ulysses::inline ULYSSES_ABI {

/// [rows, width], `stride` elements between rows; a rank's tokens [B, s, C] are B * s rows.
template <class T>
struct row_view {
    T* data = nullptr;
    std::int64_t rows = 0, width = 0, stride = 0;

    row_view() = default;
    constexpr row_view(T* first, std::int64_t count, std::int64_t columns)
        : row_view(first, count, columns, columns) {}
    constexpr row_view(T* first, std::int64_t count, std::int64_t columns, std::int64_t step)
        : data(first), rows(count), width(columns), stride(step) {}

    /// A view of mutable elements is a view of const ones.
    template <class U>
        requires(std::is_same_v<U, T const> && !std::is_same_v<U, T>)
    constexpr operator row_view<U>() const { return {data, rows, width, stride}; }
    constexpr T* row(std::int64_t i) const { return data + i * stride; }
    constexpr row_view slice(index_range part) const {
        return {data + part.begin * stride, part.size(), width, stride};
    }
};

namespace detail {

/// *Throws* `invalid_tensor` unless `x` is [rows, width] of rows that do not overlap.
template <class T>
void check_rows(std::string_view operation, row_view<T> const& x, std::int64_t rows,
                std::int64_t width, where at) {
    if (x.rows != rows || x.width != width)
        raise(errc::invalid_tensor, at, operation, "operands must have one row a token", "[",
              x.rows, ", ", x.width, "], expected [", rows, ", ", width, "]");
    if (rows > 0 && width > 0 && (x.data == nullptr || x.stride < width))
        raise(errc::invalid_tensor, at, operation, "rows must have memory and must not overlap",
              x.data == nullptr ? "null" : "not null", ", stride ", x.stride, ", width ", width);
}

/// y = x W + beta y;  x [n, K], W [K, N] -> y [n, N]
template <class Gemm, class T>
void multiply_rows(Gemm const& gemm, row_view<T const> x, weight_view<T const> const& w,
                   row_view<T> y, T beta = T(0)) {
    gemm(gemm_call<T>{.m = x.rows,
                      .n = y.width,
                      .k = x.width,
                      .a = {x.data, x.stride},
                      .b = {w.data, w.stride, w.transposed},
                      .beta = beta,
                      .c = y.data,
                      .c_stride = y.stride});
}

/// dx = dy W^T + beta dx
template <class Gemm, class T>
void multiply_rows_back(Gemm const& gemm, row_view<T const> dy, weight_view<T const> w,
                        row_view<T> dx, T beta = T(0)) {
    w.transposed = !w.transposed;
    multiply_rows(gemm, dy, w, dx, beta);
}

/// dW += x^T dy; a null gradient is skipped.
template <class Gemm, class T>
void add_weight_gradient(Gemm const& gemm, row_view<T const> x, row_view<T const> dy,
                         weight_view<T> const& dw) {
    if (dw.data == nullptr || x.rows == 0) return;
    auto const& left = dw.transposed ? dy : x;
    auto const& right = dw.transposed ? x : dy;
    gemm(gemm_call<T>{.m = left.width,
                      .n = right.width,
                      .k = x.rows,
                      .a = {left.data, left.stride, true},
                      .b = {right.data, right.stride},
                      .beta = T(1),
                      .c = dw.data,
                      .c_stride = dw.stride});
}

}  // namespace detail
}  // namespace ulysses::inline ULYSSES_ABI
