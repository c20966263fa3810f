#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "tensor.hpp"

#include <ulysses/core/gemm.hpp>
#include <ulysses/projection/dense.hpp>

#ifdef TRAIN_LM_CBLAS
#include <ulysses/adapters/cblas.hpp>
#else
#include <ulysses/gemm/builtin.hpp>
#endif

#include <string_view>

/// Matrix products of the model, by the GEMM functor that attention uses too.
namespace lm {

#ifdef TRAIN_LM_CBLAS
using gemm = ulysses::cblas;
inline constexpr std::string_view gemm_name = "CBLAS";
#else
using gemm = ulysses::builtin_gemm;
inline constexpr std::string_view gemm_name = "the built-in GEMM";
#endif

using ulysses::weight_view;

template <class T>
weight_view<T> transposed(weight_view<T> w) {
    w.transposed = !w.transposed;
    return w;
}

/// y = x W;  x [n, K], W [K, N] -> y [n, N]
template <class T>
void linear(tensor<T> const& x, weight_view<T const> const& w, tensor<T> const& y) {
    gemm{}(ulysses::gemm_call<T>{.m = x.rows(),
                                 .n = y.width(),
                                 .k = x.width(),
                                 .a = {x.data(), x.width()},
                                 .b = {w.data, w.stride, w.transposed},
                                 .c = y.data(),
                                 .c_stride = y.width()});
}

/// dx = dy W^T
template <class T>
void linear_backward(tensor<T> const& dy, weight_view<T const> const& w, tensor<T> const& dx) {
    linear(dy, transposed(w), dx);
}

/// dW += x^T dy
template <class T>
void linear_gradient(tensor<T> const& x, tensor<T> const& dy, weight_view<T> const& dw) {
    if (x.rows() == 0) return;
    auto const& left = dw.transposed ? dy : x;
    auto const& right = dw.transposed ? x : dy;
    gemm{}(ulysses::gemm_call<T>{.m = left.width(),
                                 .n = right.width(),
                                 .k = x.rows(),
                                 .a = {left.data(), left.width(), true},
                                 .b = {right.data(), right.width()},
                                 .beta = T(1),
                                 .c = dw.data,
                                 .c_stride = dw.stride});
}

}  // namespace lm
