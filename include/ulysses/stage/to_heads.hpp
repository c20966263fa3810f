#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/explain.hpp>
#include <ulysses/exchange/exchange.hpp>
#include <ulysses/exchange/regions.hpp>

namespace ulysses::inline ULYSSES_ABI {

/// Step 3, all-to-all from sequence-local to head-local, first half: lists the copies of a rank's
/// tokens into the inboxes of the ranks that compute with them. The caller moves and publishes
/// them. *Shape*: q [B, s, Hq, D], k [B, s, Hkv, D], v [B, s, Hkv, Dv] -> per rank [B, rows, h, D]
/// of its items.
template <class Exchange, class Regions, class T>
void to_heads(Exchange& moving, plan const& moves, typename Exchange::window const& inbox,
              Regions const& places, token_view<T> const& q, token_view<T> const& k,
              token_view<T> const& v) {
    moving.put(moves.query_moves(), inbox, places.q, q);
    moving.put(moves.key_moves(), inbox, places.k, k);
    moving.put(moves.key_moves(), inbox, places.v, v);
}

/// Likewise with a cache, `memory`: k and v go to their places in it.
template <class Exchange, class Regions, class T>
void to_heads(Exchange& moving, plan const& moves, typename Exchange::window const& inbox,
              Regions const& places, typename Exchange::window const& memory,
              cache_regions const& keys, token_view<T> const& q, token_view<T> const& k,
              token_view<T> const& v) {
    moving.put(moves.query_moves(), inbox, places.q, q);
    moving.put(moves.key_moves(), memory, keys.k, k);
    moving.put(moves.key_moves(), memory, keys.v, v);
}

/// Step 3 backward, its adjoint: the same blocks read back, and where a key-value head was used by
/// several ranks their parts summed in rank order. Of a replicated token a rank gets what it computed
/// itself, or zero: the gradient is the sum over ranks.
/// *Shape*: dq, dk, dv of the ranks' items -> dq [B, s, Hq, D], dk [B, s, Hkv, D], dv [B, s, Hkv,
/// Dv].
template <class Exchange, class T>
void to_heads_backward(Exchange& moving, plan const& moves, typename Exchange::window const& outbox,
                       backward_regions const& places, token_view<T> const& dq,
                       token_view<T> const& dk, token_view<T> const& dv) {
    // Wider elements first: in a message, operands lie one behind the other without padding.
    moving.sum(moves.key_returns(), outbox, places.dk, dk);
    moving.sum(moves.key_returns(), outbox, places.dv, dv);
    moving.get(moves.query_moves(), outbox, places.dq, dq);
    moving.zero(moves.query_zeros(), dq);
}

/// Both refuse views of another layout.
template <class Exchange, class Window, class Regions, class Q, class K, class V>
    requires other_layout_than<sequence_local, Q, K, V>
void to_heads(Exchange&, plan const&, Window const&, Regions const&, Q const&, K const&, V const&) {
    static_assert(explain_exchange_layout<Q, K, V>());
}
template <class Exchange, class Window, class DQ, class DK, class DV>
    requires other_layout_than<sequence_local, DQ, DK, DV>
void to_heads_backward(Exchange&, plan const&, Window const&, backward_regions const&, DQ const&,
                       DK const&, DV const&) {
    static_assert(explain_exchange_layout<DQ, DK, DV>());
}

}  // namespace ulysses::inline ULYSSES_ABI
