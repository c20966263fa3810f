#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/explain.hpp>
#include <ulysses/stage/project_in.hpp>

namespace ulysses::inline ULYSSES_ABI {

/// Step 6: o [B, s, Hq, Dv] -> y [B, s, C], local to a rank's tokens.
template <class Projection, class T, class Weights>
void project_out(Projection const& projection, sequence const& step, int rank,
                 token_view<T const> o, Weights const& weights, token_view<T> y,
                 typename Projection::space_type::queue queue = {}) {
    static_assert(projection_for<Projection, T, Weights> ||
                  explain_projection<Projection, T, Weights>());
    projection.project_out(projection_call_of<typename Projection::space_type>(step, rank, queue),
                           o, weights, y);
}

/// Step 6 backward, before the exchange: dy [B, s, C] -> dout [B, s, Hq, Dv], overwritten.
template <class Projection, class T, class Weights>
void project_out_backward(Projection const& projection, sequence const& step, int rank,
                          Weights const& weights, token_view<T const> dy, token_view<T> dout,
                          typename Projection::space_type::queue queue = {}) {
    projection.project_out_backward(
        projection_call_of<typename Projection::space_type>(step, rank, queue), weights, dy, dout);
}

/// Step 6 backward, once o is at hand: the output weights' gradients, added to.
template <class Projection, class T, class Gradients>
void project_out_gradients(Projection const& projection, sequence const& step, int rank,
                           token_view<T const> o, token_view<T const> dy,
                           Gradients const& gradients,
                           typename Projection::space_type::queue queue = {}) {
    projection.project_out_gradients(
        projection_call_of<typename Projection::space_type>(step, rank, queue), o, dy, gradients);
}

/// All three refuse views of another layout.
template <class Projection, class Weights, class O, class Y, class... Queue>
    requires other_layout_than<sequence_local, O, Y>
void project_out(Projection const&, sequence const&, int, O const&, Weights const&, Y const&,
                 Queue const&...) {
    static_assert(explain_projection_layout<O, Y>());
}
template <class Projection, class Weights, class DY, class DO, class... Queue>
    requires other_layout_than<sequence_local, DY, DO>
void project_out_backward(Projection const&, sequence const&, int, Weights const&, DY const&,
                          DO const&, Queue const&...) {
    static_assert(explain_projection_layout<DY, DO>());
}
template <class Projection, class O, class DY, class Gradients, class... Queue>
    requires other_layout_than<sequence_local, O, DY>
void project_out_gradients(Projection const&, sequence const&, int, O const&, DY const&,
                           Gradients const&, Queue const&...) {
    static_assert(explain_projection_layout<O, DY>());
}

}  // namespace ulysses::inline ULYSSES_ABI
