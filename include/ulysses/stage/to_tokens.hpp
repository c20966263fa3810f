#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/exchange/exchange.hpp>
#include <ulysses/exchange/regions.hpp>

namespace ulysses::inline ULYSSES_ABI {

/// Step 5, all-to-all from head-local to sequence-local, second half: lists the copies of this
/// rank's tokens out of the outboxes of the ranks that computed them. The caller has published and
/// moves them. *Shape*: per rank [B, rows, h, Dv] of its items -> o [B, s, Hq, Dv].
template <class Exchange, class T>
void to_tokens(Exchange& moving, plan const& moves, typename Exchange::window const& outbox,
               region const& place, token_view<T> const& o) {
    moving.get(moves.query_blocks(), outbox, place, o);
}

/// Step 5 backward, its adjoint: the same blocks turned round.
/// *Shape*: dO [B, s, Hq, Dv] -> per rank [B, rows, h, Dv] of its items.
template <class Exchange, class T>
void to_tokens_backward(Exchange& moving, plan const& moves, typename Exchange::window const& inbox,
                        region const& place, token_view<T> const& dout) {
    moving.put(moves.query_blocks(), inbox, place, dout);
}

}  // namespace ulysses::inline ULYSSES_ABI
