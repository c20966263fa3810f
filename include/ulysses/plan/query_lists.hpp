#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/index_range.hpp>
#include <ulysses/plan/blocks.hpp>
#include <ulysses/plan/listing.hpp>
#include <ulysses/plan/placed_runs.hpp>
#include <ulysses/plan/share.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// A plan's lists of operands with query heads: q and o, and their gradients.
///
/// First come the blocks of sharded tokens, then those of replicated tokens with the rank itself,
/// then those with its peers: q moves along the first two, o along all.
class query_lists {
   public:
    /// `heads`: the query heads that are dealt. Sets each peer's rows in `rows`.
    void rebuild(listing const& from, index_range heads, std::span<plan_rows> rows) {
        moves_.clear();
        partials_.clear();
        zeros_.clear();
        slot_rows_ = 0;
        for (int peer = 0; peer < from.shares.ranks(); ++peer) {
            auto& with = rows[static_cast<std::size_t>(peer)];
            auto const ends = list(from, moves_, peer, held::sharded);
            with.queries_to = with.outputs_to = ends.to;
            with.queries_from = with.outputs_from = ends.from;
        }
        sharded_ = own_ = moves_.size();
        if (from.orders.replicated() == 0) return;
        list_replicated(from, rows);
        list_zeros(from.shares[from.rank].items, heads, from.orders.total(),
                   from.runs_of(from.orders, from.rank, held::replicated));
    }

    /// Of q and dq.
    plan_moves moves() const { return moves_.before(own_); }
    /// Rows of dq that this rank leaves zero.
    std::span<plan_sum const> zeros() const { return zeros_; }
    /// Of o.
    plan_moves output_moves() const { return moves_.all(); }
    /// Of dO.
    plan_output_gradient output_gradient() const {
        return {moves_.before(sharded_), partials_.all(),
                std::span(moves_.arrivals)
                    .subspan(sharded_.arrivals, own_.arrivals - sharded_.arrivals),
                slot_rows_};
    }
    /// Rows of one rank's slot.
    std::int64_t slot_rows() const { return slot_rows_; }

   private:
    /// The rows that a share's items cover.
    static rows_moved list(listing const& from, move_lists& lists, int peer, held which,
                           rows_moved first = {}) {
        auto const& shares = from.shares;
        return from.both(
            lists, peer, which, first, [&](listing_side const& side, std::int64_t row) {
                auto const& share = side.share;
                for (std::size_t i = 0; i < share.items.size(); ++i) {
                    auto const& item = share.items[i];
                    row += list_blocks(side.blocks, side.runs, {item.row_begin, item.row_end},
                                       {side.peer, item.head_begin, item.heads(),
                                        share.query_row[i], shares.query_strides(item)},
                                       shares.batch(), row);
                }
                return row;
            });
    }

    /// Behind the blocks of sharded tokens those of replicated ones; and the slots of their
    /// gradients.
    void list_replicated(listing const& from, std::span<plan_rows> rows) {
        auto& own = rows[static_cast<std::size_t>(from.rank)];
        own.queries_from += list(from, moves_, from.rank, held::replicated).from;
        own.queries_to = own.outputs_to = own.outputs_from = own.queries_from;
        own_ = moves_.size();
        for (int peer = 0; peer < from.shares.ranks(); ++peer) {
            slot_rows_ = std::max(slot_rows_, list(from, partials_, peer, held::replicated).to);
            if (peer == from.rank) continue;
            auto& with = rows[static_cast<std::size_t>(peer)];
            auto const ends =
                list(from, moves_, peer, held::replicated, {with.queries_to, with.queries_from});
            with.outputs_to = ends.to;
            with.outputs_from = ends.from;
        }
        // In a slot, rows lie as in the message.
        auto const place = [&](plan_block& block, int slot) {
            block.row = slot * slot_rows_ + block.message_row;
            block.row_strides = block.message_strides;
        };
        for (auto& block : partials_.blocks) place(block, from.rank);
        for (auto& block : partials_.arrivals) place(block, block.peer);
    }

    /// The rows of the rank's replicated tokens that it does not compute. Its items lie on the line
    /// one behind the other, so these are all before the first and all behind the last.
    void list_zeros(work_items const& items, index_range heads, std::int64_t queries,
                    placed_runs runs) {
        auto const zeros = [&](std::int64_t head, std::int64_t head_end, index_range rows) {
            if (head == head_end) return;
            for_tokens(runs, rows,
                       [&](std::int64_t token, std::int64_t tokens, std::int64_t, std::int64_t) {
                           zeros_.push_back({token, tokens, head, head_end - head});
                       });
        };
        index_range const all{0, queries};
        if (items.empty()) return zeros(heads.begin, heads.end, all);
        auto const &first = items.front(), &last = items.back();
        zeros(heads.begin, first.head_begin, all);
        zeros(first.head_begin, first.head_begin + 1, {0, first.row_begin});
        zeros(last.head_end - 1, last.head_end, {last.row_end, queries});
        zeros(last.head_end, heads.end, all);
    }

    move_lists moves_;
    move_lists::sizes sharded_, own_;  ///< where the lists go on with replicated tokens
    move_lists partials_;
    std::vector<plan_sum> zeros_;
    std::int64_t slot_rows_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI
