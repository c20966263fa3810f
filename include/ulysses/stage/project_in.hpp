#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/explain.hpp>
#include <ulysses/core/projection.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/tensor_view.hpp>
#include <ulysses/plan/sequence.hpp>

namespace ulysses::inline ULYSSES_ABI {

/// The global positions of a rank's tokens, and the step's documents, for projections and their
/// epilogues. *Thread safety*: points into the step.
template <class Space = host_space>
queued<projection_call, Space> projection_call_of(sequence const& step, int rank,
                                                  typename Space::queue queue = {}) {
    auto const position = [](void const* orders, int r, std::int64_t token) {
        return static_cast<token_orders const*>(orders)->position(r, token);
    };
    auto const run = [](void const* orders, int r, std::int64_t token) {
        return static_cast<token_orders const*>(orders)->run_from(r, token);
    };
    return {{{&step.queries(), rank, position, run},
             {&step.keys(), rank, position, run},
             step.visible({}),
             step.packed().has_past()},
            queue};
}

/// Step 2: x [B, s, C] -> q [B, s, Hq, D], k [B, s, Hkv, D], v [B, s, Hkv, Dv], local to a rank's
/// tokens.
template <class Projection, class T, class Weights>
void project_in(Projection const& projection, sequence const& step, int rank, token_view<T const> x,
                Weights const& weights, token_view<T> q, token_view<T> k, token_view<T> v,
                typename Projection::space_type::queue queue = {}) {
    static_assert(projection_for<Projection, T, Weights> ||
                  explain_projection<Projection, T, Weights>());
    projection.project_in(projection_call_of<typename Projection::space_type>(step, rank, queue), x,
                          weights, q, k, v);
}

/// Step 2 backward: dq, dk, dv -> dx [B, s, C], overwritten, and the weights' gradients, added to.
template <class Projection, class T, class Weights, class Gradients>
void project_in_backward(Projection const& projection, sequence const& step, int rank,
                         token_view<T const> x, Weights const& weights, token_view<T> dq,
                         token_view<T> dk, token_view<T> dv, token_view<T> dx,
                         Gradients const& gradients,
                         typename Projection::space_type::queue queue = {}) {
    static_assert(differentiable_projection_for<Projection, T, Weights, Gradients> ||
                  explain_differentiable_projection<Projection, T, Weights, Gradients>());
    projection.project_in_backward(
        projection_call_of<typename Projection::space_type>(step, rank, queue), x, weights, dq, dk,
        dv, dx, gradients);
}

/// Both refuse views of another layout.
template <class Projection, class Weights, class X, class Q, class K, class V, class... Queue>
    requires other_layout_than<sequence_local, X, Q, K, V>
void project_in(Projection const&, sequence const&, int, X const&, Weights const&, Q const&,
                K const&, V const&, Queue const&...) {
    static_assert(explain_projection_layout<X, Q, K, V>());
}
template <class Projection, class Weights, class X, class DQ, class DK, class DV, class DX,
          class Gradients, class... Queue>
    requires other_layout_than<sequence_local, X, DQ, DK, DV, DX>
void project_in_backward(Projection const&, sequence const&, int, X const&, Weights const&,
                         DQ const&, DK const&, DV const&, DX const&, Gradients const&,
                         Queue const&...) {
    static_assert(explain_projection_layout<X, DQ, DK, DV, DX>());
}

}  // namespace ulysses::inline ULYSSES_ABI
