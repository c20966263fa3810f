#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/gemm.hpp>
#include <ulysses/core/space.hpp>

#include <cblas.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>

/// A matrix product by the host's BLAS, through its C interface. Link the BLAS of your choice.
///
///     ulysses::blocked_attention attention{ulysses::cblas{}};
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

#if defined(OPENBLAS_VERSION)
using blas_integer = blasint;

/// One BLAS thread per rank: ranks that share one pool of BLAS threads queue on it, and a row's
/// bits would depend on how the pool splits a call. Done once in a process, by whichever rank calls
/// first.
inline void use_one_blas_thread() {
    static bool const done = [] {
        openblas_set_num_threads(1);
        return true;
    }();
    static_cast<void>(done);
}
#else
using blas_integer = int;

inline void use_one_blas_thread() {}
#endif

inline blas_integer blas_size(std::int64_t value, char const* what) {
    if (value > std::numeric_limits<blas_integer>::max())
        raise(errc::unsupported, where{}, "cblas", "a size must fit the BLAS's integer", what, " ",
              value, ", largest ", std::numeric_limits<blas_integer>::max());
    return static_cast<blas_integer>(value);
}

/// The stride of a stored matrix of `columns` columns; with one row, or nothing in it, any will do.
inline blas_integer blas_stride(std::int64_t stride, std::int64_t rows, std::int64_t columns,
                                char const* what) {
    auto const least = std::max<std::int64_t>(columns, 1);
    auto const matters = rows > 1 && columns > 0;
    if (matters && stride < least)
        raise(errc::invalid_tensor, where{}, "cblas", "rows must not overlap", what, " stride ",
              stride, ", columns ", columns);
    return blas_size(matters ? stride : least, what);
}

}  // namespace detail

/// sgemm and dgemm. The bits of a row depend on the number of rows in the call.
///
/// *Thread safety*: the BLAS's; OpenBLAS is set to one thread per calling thread at the first call.
/// *Throws* `unsupported` when a size does not fit the BLAS's integer, `invalid_tensor` when a
/// stride is shorter than a row.
struct cblas {
    using space_type = host_space;
    static constexpr bool rows_independent = false;

    template <class T>
        requires(std::same_as<T, float> || std::same_as<T, double>)
    void operator()(gemm_call<T> const& call) const {
        if (call.m <= 0 || call.n <= 0 || call.batch <= 0) return;
        detail::use_one_blas_thread();
        auto const m = detail::blas_size(call.m, "m");
        auto const n = detail::blas_size(call.n, "n");
        auto const k = detail::blas_size(std::max<std::int64_t>(call.k, 0), "k");
        auto const lda = call.a.transposed ? detail::blas_stride(call.a.stride, k, m, "a")
                                           : detail::blas_stride(call.a.stride, m, k, "a");
        auto const ldb = call.b.transposed ? detail::blas_stride(call.b.stride, n, k, "b")
                                           : detail::blas_stride(call.b.stride, k, n, "b");
        auto const ldc = detail::blas_stride(call.c_stride, m, n, "c");
        auto const trans_a = call.a.transposed ? CblasTrans : CblasNoTrans;
        auto const trans_b = call.b.transposed ? CblasTrans : CblasNoTrans;
        for (std::int64_t i = 0; i < call.batch; ++i) {
            auto const* const a = call.a.data + i * call.a.batch_stride;
            auto const* const b = call.b.data + i * call.b.batch_stride;
            auto* const c = call.c + i * call.c_batch_stride;
            if constexpr (std::same_as<T, float>)
                cblas_sgemm(CblasRowMajor, trans_a, trans_b, m, n, k, call.alpha, a, lda, b, ldb,
                            call.beta, c, ldc);
            else
                cblas_dgemm(CblasRowMajor, trans_a, trans_b, m, n, k, call.alpha, a, lda, b, ldb,
                            call.beta, c, ldc);
        }
    }
};

}  // namespace ulysses::inline ULYSSES_ABI
