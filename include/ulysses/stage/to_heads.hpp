#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/exchange/exchange.hpp>
#include <ulysses/exchange/regions.hpp>

#include <type_traits>

namespace ulysses::inline ULYSSES_ABI {

/// Step 3, all-to-all from sequence-local to head-local, first half: lists the copies of a rank's
/// tokens into the inboxes of the ranks that compute with them. The caller moves and publishes
/// them. *Shape*: q [B, s, Hq, D], k [B, s, Hkv, D], v [B, s, Hkv, Dv] -> per rank [B, rows, h, D]
/// of its items.
template <class Exchange, class Regions, class T>
void to_heads(Exchange& moving, plan const& moves, typename Exchange::window const& inbox,
              Regions const& places, token_view<T> const& q, token_view<T> const& k,
              token_view<T> const& v) {
    moving.put(moves.query_blocks(), inbox, places.q, q);
    moving.put(moves.key_blocks(), inbox, places.k, k);
    moving.put(moves.key_blocks(), inbox, places.v, v);
}

/// Step 3 backward, its adjoint: the same blocks read back, and where a key-value head was used by
/// several ranks their parts summed in rank order.
/// *Shape*: dq, dk, dv of the ranks' items -> dq [B, s, Hq, D], dk [B, s, Hkv, D], dv [B, s, Hkv,
/// Dv].
template <class Exchange, class T>
void to_heads_backward(Exchange& moving, plan const& moves, typename Exchange::window const& outbox,
                       backward_regions const& places, token_view<T> const& dq,
                       token_view<T> const& dk, token_view<T> const& dv) {
    moving.get(moves.query_blocks(), outbox, places.dq, dq);
    auto const key_gradient = [&](region const& place, token_view<T> const& local) {
        if constexpr (std::is_same_v<T, accumulator_t<T>>)
            moving.get(moves.key_returns(), outbox, place, local);
        else
            moving.get_rounded(moves.key_returns(), outbox, place, local);
        moving.sum(moves.key_sums(), moves.sources(), outbox, place, local);
    };
    key_gradient(places.dk, dk);
    key_gradient(places.dv, dv);
}

}  // namespace ulysses::inline ULYSSES_ABI
