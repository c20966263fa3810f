#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/explain.hpp>
#include <ulysses/exchange/exchange.hpp>
#include <ulysses/exchange/regions.hpp>

namespace ulysses::inline ULYSSES_ABI {

/// Step 5, all-to-all from head-local to sequence-local, second half: lists the copies of this
/// rank's tokens out of the outboxes of the ranks that computed them. The caller has published and
/// moves them. *Shape*: per rank [B, rows, h, Dv] of its items -> o [B, s, Hq, Dv].
template <class Exchange, class T>
void to_tokens(Exchange& moving, plan const& moves, typename Exchange::window const& outbox,
               region const& place, token_view<T> const& o) {
    moving.get(moves.output_moves(), outbox, place, o);
}

/// Step 5 backward, its adjoint: the same blocks turned round. A replicated token's row was handed to
/// every rank, so that its gradient is the sum, in rank order, of what all of them hold: the caller
/// adds what is listed.
/// *Shape*: dO [B, s, Hq, Dv] -> per rank [B, rows, h, Dv] of its items.
template <class Exchange, class T>
void to_tokens_backward(Exchange& moving, plan const& moves, typename Exchange::window const& inbox,
                        backward_regions const& places, token_view<T> const& dout) {
    moving.put(moves.output_gradient(), inbox, places.dout, places.dout_slots, dout);
}

/// Both refuse views of another layout.
template <class Exchange, class Window, class O>
    requires other_layout_than<sequence_local, O>
void to_tokens(Exchange&, plan const&, Window const&, region const&, O const&) {
    static_assert(explain_exchange_layout<O>());
}
template <class Exchange, class Window, class DO>
    requires other_layout_than<sequence_local, DO>
void to_tokens_backward(Exchange&, plan const&, Window const&, backward_regions const&, DO const&) {
    static_assert(explain_exchange_layout<DO>());
}

}  // namespace ulysses::inline ULYSSES_ABI
