#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/index_range.hpp>
#include <ulysses/core/visibility.hpp>
#include <ulysses/plan/blocks.hpp>
#include <ulysses/plan/listing.hpp>
#include <ulysses/plan/placed_runs.hpp>
#include <ulysses/plan/share.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// Calls `use(sample, samples, key, tokens)` for neighbouring samples whose keys go to one place in
/// a cache: the first `tokens` of the step's, to rows `key` and on.
template <class Use>
void for_each_append(visibility const& rule, std::int64_t batch, Use const& use) {
    for (std::int64_t b = 0; b < batch;) {
        auto const own = rule.sample(b);
        auto next = b + 1;
        for (; next < batch; ++next)
            if (auto const other = rule.sample(next);
                other.position != own.position || other.end != own.end)
                break;
        if (own.position < own.end) use(b, next - b, own.position, own.end - own.position);
        b = next;
    }
}

/// A plan's lists of operands with key-value heads: k and v, which go to a region or to a cache,
/// and their gradients, which come back from regions.
class key_lists {
   public:
    /// Lists each row that a share's items see, once; and what returns of it. `heads`: the
    /// key-value heads that are dealt. Sets each peer's rows in `rows`.
    void rebuild(listing const& from, index_range heads, std::span<plan_rows> rows) {
        list_moves(from, rows, [&](listing_side const& side, std::int64_t row) {
            return list_seen(from.shares, side, row);
        });
        list_returns(from, heads);
    }

    /// Lists all rows of the step's, which go to caches; nothing returns. `rule`: the step's.
    void rebuild_for_cache(listing const& from, visibility const& rule, std::span<plan_rows> rows) {
        list_moves(from, rows, [&](listing_side const& side, std::int64_t row) {
            return list_appended(from.shares, rule, side, row);
        });
    }

    plan_moves moves() const { return moves_.all(); }
    plan_returns returns() const { return {moves(), single_, sums_, sources_}; }

   private:
    static std::int64_t list_seen(rank_shares const& shares, listing_side const& side,
                                  std::int64_t row) {
        auto& [blocks, runs, share, peer] = side;
        for (auto head = share.kv_begin; head < share.kv_end;) {
            auto const end = share.same_keys_end(head);
            auto const group = static_cast<std::ptrdiff_t>(blocks.size());
            for (auto const span : share.keys_of(head))
                row += list_blocks(blocks, runs, span,
                                   {peer, head, end - head, shares.key_row(share, head, span.begin),
                                    shares.key_strides()},
                                   shares.batch(), row);
            std::sort(blocks.begin() + group, blocks.end(),
                      [](auto const& a, auto const& b) { return a.token < b.token; });
            head = end;
        }
        return row;
    }

    static std::int64_t list_appended(rank_shares const& shares, visibility const& rule,
                                      listing_side const& side, std::int64_t row) {
        auto const& share = side.share;
        if (share.kv_begin == share.kv_end) return row;
        for_each_append(
            rule, shares.batch(),
            [&](std::int64_t sample, std::int64_t samples, std::int64_t key, std::int64_t tokens) {
                row += list_blocks(side.blocks, side.runs, {0, tokens},
                                   {side.peer, share.kv_begin, share.kv_end - share.kv_begin,
                                    sample * shares.key_capacity() + key, shares.key_strides(),
                                    sample, samples},
                                   shares.batch(), row);
            });
        return row;
    }

    template <class Cover>
    void list_moves(listing const& from, std::span<plan_rows> rows, Cover const& cover) {
        moves_.clear();
        first_block_.clear();
        single_.clear();
        sums_.clear();
        sources_.clear();
        for (int peer = 0; peer < from.shares.ranks(); ++peer) {
            auto& with = rows[static_cast<std::size_t>(peer)];
            first_block_.push_back(moves_.blocks.size());
            auto const ends =
                from.both(moves_, peer, peer == from.rank ? held::all : held::sharded, {}, cover);
            with.keys_to = ends.to;
            with.keys_from = ends.from;
        }
        first_block_.push_back(moves_.blocks.size());
    }

    /// Who computed with a key-value head: the gradient of its keys returns from all of them; of a
    /// replicated key to each of them its own part, to others zero.
    void list_returns(listing const& from, index_range heads) {
        for (auto head = heads.begin; head < heads.end;) {
            users_.clear();
            for (int peer = 0; peer < from.shares.ranks(); ++peer) {
                auto const& share = from.shares[peer];
                if (share.kv_begin <= head && head < share.kv_end) users_.push_back(peer);
            }
            auto const end = users_.size() == 1 ? end_of_only_user(from.shares, head) : head + 1;
            list_returns_of(from, {head, end});
            head = end;
        }
    }

    /// Heads of one and the same user return together: up to where it needs other keys, or another
    /// rank's heads begin.
    std::int64_t end_of_only_user(rank_shares const& shares, std::int64_t head) const {
        auto end = shares[users_[0]].same_keys_end(head);
        for (int peer = 0; peer < shares.ranks(); ++peer) {
            auto const& share = shares[peer];
            if (peer != users_[0] && share.kv_begin < share.kv_end && share.kv_end > head)
                end = std::min(end, std::max(head + 1, share.kv_begin));
        }
        return end;
    }

    void list_returns_of(listing const& from, index_range heads) {
        edges_.assign({0, from.orders.total()});
        for (auto const user : users_)
            for (auto const span : from.shares[user].keys_of(heads.begin)) {
                edges_.push_back(span.begin);
                edges_.push_back(span.end);
            }
        std::sort(edges_.begin(), edges_.end());
        for (std::size_t e = 0; e + 1 < edges_.size(); ++e) {
            index_range const rows{edges_[e], edges_[e + 1]};
            if (rows.begin == rows.end) continue;
            list_returns_in(from, heads, rows, held::sharded);
            if (from.orders.replicated() > 0) list_returns_in(from, heads, rows, held::replicated);
        }
    }

    void list_returns_in(listing const& from, index_range heads, index_range rows, held which) {
        for_tokens(
            from.runs_of(from.orders, from.rank, which), rows,
            [&](std::int64_t token, std::int64_t tokens, std::int64_t global, std::int64_t stride) {
                auto const first = sources_.size();
                for (auto const user : users_) {
                    if (which == held::replicated && user != from.rank) continue;
                    if (covers(from.shares[user].keys_of(heads.begin), rows))
                        sources_.push_back(
                            source_of(from.shares, user, heads.begin, token, global));
                }
                auto strides = from.shares.key_strides();
                strides[1] = stride;
                add_return({token, tokens, heads.begin, heads.size(), first,
                            sources_.size() - first, strides});
            });
    }

    /// A sum of one source is a block.
    void add_return(plan_sum const& sum) {
        if (sum.sources != 1) {
            sums_.push_back(sum);
            return;
        }
        auto const& only = sources_.back();
        single_.push_back({only.peer, sum.token, sum.tokens, sum.head, sum.heads, only.row,
                           sum.row_strides, only.message_row, only.message_strides});
        sources_.pop_back();
    }

    /// Where the rows of a key-value head and one of the rank's tokens lie with a peer that sees
    /// them, its message included.
    plan_source source_of(rank_shares const& shares, int peer, std::int64_t head,
                          std::int64_t token, std::int64_t global) const {
        auto const at = static_cast<std::size_t>(peer);
        auto const blocks = std::span(moves_.blocks)
                                .subspan(first_block_[at], first_block_[at + 1] - first_block_[at]);
        // In order of head, then of token: the last that begins no later than these.
        auto const heads = std::prev(std::upper_bound(
            blocks.begin(), blocks.end(), head,
            [](std::int64_t wanted, plan_block const& block) { return wanted < block.head; }));
        auto const& block =
            *std::prev(std::upper_bound(blocks.begin(), blocks.end(), std::pair{heads->head, token},
                                        [](auto const& wanted, plan_block const& each) {
                                            return wanted < std::pair{each.head, each.token};
                                        }));
        return {peer, shares.key_row(shares[peer], head, global),
                block.message_row + (head - block.head) * block.message_strides[2] + token -
                    block.token,
                block.message_strides};
    }

    move_lists moves_;
    std::vector<std::size_t> first_block_;  ///< in moves_, by peer
    std::vector<plan_block> single_;
    std::vector<plan_sum> sums_;
    std::vector<plan_source> sources_;
    std::vector<int> users_;  ///< of the heads that are being listed, in rank order
    std::vector<std::int64_t> edges_;
};

}  // namespace ulysses::inline ULYSSES_ABI
