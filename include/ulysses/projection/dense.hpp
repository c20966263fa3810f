#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/buffer.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/gemm.hpp>
#include <ulysses/core/projection.hpp>
#include <ulysses/core/row_sums.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/view_copy.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

/// Dense projections over a GEMM functor, with optional bias and an epilogue on q and k.
namespace ulysses::inline ULYSSES_ABI {

/// A weight matrix of `in` rows and `out` columns, row-major with `stride` elements between rows,
/// as in y = x W. `transposed`: stored as [out, in], as in y = x W^T.
template <class T>
struct weight_view {
    T* data = nullptr;
    std::int64_t stride = 0;
    bool transposed = false;

    /// A view of mutable elements is a view of const ones.
    template <class U>
        requires(std::is_same_v<U, T const> && !std::is_same_v<U, T>)
    constexpr operator weight_view<U>() const { return {data, stride, transposed}; }
};

/// Weights of one layer: q [C, Hq D], k [C, Hkv D], v [C, Hkv Dv], o [Hq Dv, C]. Biases have one
/// element for each column of their matrix; null: none.
template <class T>
struct dense_weights {
    weight_view<T const> q{}, k{}, v{}, o{};
    T const* q_bias = nullptr;
    T const* k_bias = nullptr;
    T const* v_bias = nullptr;
    T const* o_bias = nullptr;
    T const* q_norm = nullptr;  ///< [D], of an epilogue that normalises, as qk_norm; null: ones
    T const* k_norm = nullptr;
};

/// Gradients are added to, so that they sum over micro-batches. They are this rank's part of the
/// gradient of the token-sum loss: summed over ranks they are the whole. A null matrix, bias or norm
/// is skipped.
template <class T>
struct dense_gradients {
    weight_view<T> q{}, k{}, v{}, o{};
    T* q_bias = nullptr;
    T* k_bias = nullptr;
    T* v_bias = nullptr;
    T* o_bias = nullptr;
    T* q_norm = nullptr;
    T* k_norm = nullptr;
};

/// Leaves q and k as they are. An epilogue with state, such as RoPE, has the same two members:
/// `forward(call, q, k)` changes them in place after the projection; `backward(call, dq, dk)` turns
/// their gradients into those of the projection's outputs.
///
/// One that says `static constexpr bool takes_weights = true`, such as qk_norm, has
/// `forward(call, weights, q, k)` and `backward(call, weights, q, k, dq, dk)`. Its backward is given q
/// and k as the projection made them, computed again and packed, and leaves in their rows what each
/// adds to the gradients of `q_norm` and `k_norm`.
///
/// Where the space has queues, `call` is a `queued<projection_call, space>`.
struct no_epilogue {
    template <class T>
    static constexpr void forward(projection_call const&, token_view<T>, token_view<T>) {}
    template <class T>
    static constexpr void backward(projection_call const&, token_view<T>, token_view<T>) {}
};

namespace detail {

template <class Epilogue>
inline constexpr bool takes_weights = false;
template <class Epilogue>
    requires requires { Epilogue::takes_weights; }
inline constexpr bool takes_weights<Epilogue> = Epilogue::takes_weights;

}  // namespace detail

/// On the queue of its calls: products by the GEMM, which writes and reads the views in place, biases
/// and their gradients by the sums of the space.
///
/// *Thread safety*: one per rank, as it has a workspace for backward; a copy begins with none.
template <class Gemm, class Epilogue = no_epilogue>
class dense {
    static_assert(multiplies_some_element<Gemm>());

   public:
    using space_type = typename Gemm::space_type;
    /// A projection_call, on a queue where the space has such.
    using call_type = functor_call_t<projection_call, Gemm>;

    explicit constexpr dense(Gemm gemm, Epilogue epilogue = {})
        : gemm_(gemm), epilogue_(std::move(epilogue)) {}

    /// Step 2: x [B, s, C] -> q [B, s, Hq, D], k [B, s, Hkv, D], v [B, s, Hkv, Dv].
    template <class T>
        requires gemm_for<Gemm, T>
    void project_in(call_type const& call, token_view<T const> x, dense_weights<T> const& weights,
                    token_view<T> q, token_view<T> k, token_view<T> v) const {
        auto const queue = queue_of_call<space_type>(call);
        multiply(queue, x, weights.q, weights.q_bias, q);
        multiply(queue, x, weights.k, weights.k_bias, k);
        multiply(queue, x, weights.v, weights.v_bias, v);
        if constexpr (detail::takes_weights<Epilogue>)
            epilogue_.forward(call, weights, q, k);
        else
            epilogue_.forward(call, q, k);
    }

    /// dq, dk, dv -> dx [B, s, C], overwritten, and the weights' gradients, added to.
    template <class T>
        requires gemm_for<Gemm, T>
    void project_in_backward(call_type const& call, token_view<T const> x,
                             dense_weights<T> const& weights, token_view<T> dq, token_view<T> dk,
                             token_view<T> dv, token_view<T> dx,
                             dense_gradients<T> const& gradients) const {
        auto const queue = queue_of_call<space_type>(call);
        if constexpr (detail::takes_weights<Epilogue>) {
            auto const elements = static_cast<std::size_t>(dq.size() + dk.size());
            auto* const memory =
                reinterpret_cast<T*>(memory_.again.reserve(elements * sizeof(T), queue).data());
            token_view<T> const q(memory, dq.extents), k(memory + dq.size(), dk.extents);
            multiply(queue, x, weights.q, weights.q_bias, q);
            multiply(queue, x, weights.k, weights.k_bias, k);
            epilogue_.backward(call, weights, q, k, dq, dk);
            add_rows_of<T>(queue, gradients.q_norm, q);
            add_rows_of<T>(queue, gradients.k_norm, k);
        } else {
            epilogue_.backward(call, dq, dk);
        }
        multiply_back<T>(queue, dq, weights.q, T(0), dx);
        multiply_back<T>(queue, dk, weights.k, T(1), dx);
        multiply_back<T>(queue, dv, weights.v, T(1), dx);
        accumulate<T>(queue, x, dq, gradients.q, gradients.q_bias);
        accumulate<T>(queue, x, dk, gradients.k, gradients.k_bias);
        accumulate<T>(queue, x, dv, gradients.v, gradients.v_bias);
    }

    /// Step 6: o [B, s, Hq, Dv] -> y [B, s, C].
    template <class T>
        requires gemm_for<Gemm, T>
    void project_out(call_type const& call, token_view<T const> o, dense_weights<T> const& weights,
                     token_view<T> y) const {
        multiply(queue_of_call<space_type>(call), o, weights.o, weights.o_bias, y);
    }

    /// dy [B, s, C] -> dout [B, s, Hq, Dv], overwritten.
    template <class T>
        requires gemm_for<Gemm, T>
    void project_out_backward(call_type const& call, dense_weights<T> const& weights,
                              token_view<T const> dy, token_view<T> dout) const {
        multiply_back<T>(queue_of_call<space_type>(call), dy, weights.o, T(0), dout);
    }

    /// The output weight's gradient, added to.
    template <class T>
        requires gemm_for<Gemm, T>
    void project_out_gradients(call_type const& call, token_view<T const> o, token_view<T const> dy,
                               dense_gradients<T> const& gradients) const {
        accumulate<T>(queue_of_call<space_type>(call), o, dy, gradients.o, gradients.o_bias);
    }

   private:
    using queue_type = typename space_type::queue;

    struct workspace {
        buffer<space_type> again{};  // q and k once more
        buffer<space_type> sums{};
        workspace() = default;
        workspace(workspace const&) noexcept {}
        workspace& operator=(workspace const&) noexcept { return *this; }
    };

    /// Rows of a view as matrices: one when batch and tokens lie at one stride, else one a sample.
    template <class T>
    struct matrix_rows {
        T* data;
        std::int64_t rows, columns, stride;
    };
    template <class T>
    static bool one_stride(token_view<T> const& view) {
        return view.batch() == 1 || view.strides[0] == view.tokens() * view.strides[1];
    }
    template <class A, class B, class Use>
    static void for_rows(token_view<A> const& a, token_view<B> const& b, Use const& use) {
        auto const columns_a = a.heads() * a.dim();
        auto const columns_b = b.heads() * b.dim();
        if (one_stride(a) && one_stride(b)) {
            auto const rows = a.batch() * a.tokens();
            if (rows > 0)
                use(matrix_rows<A>{a.data, rows, columns_a, a.strides[1]},
                    matrix_rows<B>{b.data, rows, columns_b, b.strides[1]});
            return;
        }
        for (std::int64_t i = 0; i < a.batch() && a.tokens() > 0; ++i)
            use(matrix_rows<A>{a.row(i, 0, 0), a.tokens(), columns_a, a.strides[1]},
                matrix_rows<B>{b.row(i, 0, 0), b.tokens(), columns_b, b.strides[1]});
    }

    template <class T>
    void product(queue_type queue, gemm_call<T> const& call) const {
        if constexpr (std::is_same_v<functor_call_t<gemm_call<T>, Gemm>, gemm_call<T>>)
            gemm_(call);
        else
            gemm_(queued<gemm_call<T>, space_type>{call, queue});
    }

    /// out = in W + bias
    template <class T>
    void multiply(queue_type queue, token_view<T const> in, weight_view<T const> const& weight,
                  T const* bias, token_view<T> out) const {
        if (bias != nullptr) repeat_row<space_type>(queue, out, bias);
        for_rows(in, out, [&](auto const& a, auto const& c) {
            product(queue, gemm_call<T>{.m = c.rows,
                                        .n = c.columns,
                                        .k = a.columns,
                                        .a = {a.data, a.stride},
                                        .b = {weight.data, weight.stride, weight.transposed},
                                        .beta = bias != nullptr ? T(1) : T(0),
                                        .c = c.data,
                                        .c_stride = c.stride});
        });
    }

    /// din = beta din + dout W^T
    template <class T>
    void multiply_back(queue_type queue, token_view<T const> dout,
                       weight_view<T const> const& weight, T beta, token_view<T> din) const {
        for_rows(dout, din, [&](auto const& a, auto const& c) {
            product(queue, gemm_call<T>{.m = c.rows,
                                        .n = c.columns,
                                        .k = a.columns,
                                        .a = {a.data, a.stride},
                                        .b = {weight.data, weight.stride, !weight.transposed},
                                        .beta = beta,
                                        .c = c.data,
                                        .c_stride = c.stride});
        });
    }

    /// dW += in^T dout, dbias += column sums of dout
    template <class T>
    void accumulate(queue_type queue, token_view<T const> in, token_view<T const> dout,
                    weight_view<T> const& gradient, T* bias_gradient) const {
        auto const columns = dout.heads() * dout.dim();
        add_rows_of<T>(queue, bias_gradient,
                       {dout.data,
                        {dout.batch(), dout.tokens(), 1, columns},
                        {dout.strides[0], dout.strides[1], columns, 1}});
        if (gradient.data == nullptr) return;
        for_rows(in, dout, [&](auto const& a, auto const& b) {
            auto call = gemm_call<T>{.m = a.columns,
                                     .n = b.columns,
                                     .k = a.rows,
                                     .a = {a.data, a.stride, true},
                                     .b = {b.data, b.stride},
                                     .beta = T(1),
                                     .c = gradient.data,
                                     .c_stride = gradient.stride};
            if (gradient.transposed) {
                call.m = b.columns;
                call.n = a.columns;
                call.a = {b.data, b.stride, true};
                call.b = {a.data, a.stride};
            }
            product(queue, call);
        });
    }

    /// gradient += the sum of the rows, where it is wanted.
    template <class T>
    void add_rows_of(queue_type queue, T* gradient, token_view<T const> const& rows) const {
        if (gradient != nullptr) add_rows<space_type>(queue, memory_.sums, gradient, rows);
    }

    [[no_unique_address]] Gemm gemm_;
    [[no_unique_address]] Epilogue epilogue_;
    mutable workspace memory_{};
};

}  // namespace ulysses::inline ULYSSES_ABI
