#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/space.hpp>

#include <concepts>
#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

/// One operand of a product: row-major storage, `stride` elements between rows. When `transposed`,
/// the operand is the transpose of what is stored.
template <class T>
struct gemm_operand {
    T const* data = nullptr;
    std::int64_t stride = 0;
    bool transposed = false;
    std::int64_t batch_stride = 0;
};

/// C = alpha * op(A) * op(B) + beta * C, row-major, for each of `batch` products. op(A) is [m, k],
/// op(B) is [k, n], C is [m, n]. With beta 0, C is not read.
template <class T>
struct gemm_call {
    std::int64_t m = 0, n = 0, k = 0;
    T alpha = T(1);
    gemm_operand<T> a{};
    gemm_operand<T> b{};
    T beta = T(0);
    T* c = nullptr;
    std::int64_t c_stride = 0;
    std::int64_t batch = 1;
    std::int64_t c_batch_stride = 0;
};

/// A matrix product for elements of type T.
///
/// Requirements:
/// 1. `gemm(call)` is const. On the host it may be called by several threads at once on different C,
///    and has finished when it returns; where the space has queues the call is a
///    `queued<gemm_call<T>, space_type>`, and is ordered on its queue.
/// 2. Equal calls give equal bits. m, n or k of zero is allowed: k = 0 scales C by beta.
/// 3. `rows_independent`: true when a row of C has the same bits whatever the number of rows in the
///    call. Functors built on a GEMM for which it is false ask for cuts on their own tile grid.
template <class G, class T>
concept gemm_for = requires(G const& gemm, functor_call_t<gemm_call<T>, G> const& call) {
    typename G::space_type;
    gemm(call);
    { G::rows_independent } -> std::convertible_to<bool>;
};

}  // namespace ulysses::inline ULYSSES_ABI
