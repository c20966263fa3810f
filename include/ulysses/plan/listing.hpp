#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/index_range.hpp>
#include <ulysses/plan/blocks.hpp>
#include <ulysses/plan/placed_runs.hpp>
#include <ulysses/plan/share.hpp>
#include <ulysses/plan/token_order.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// How blocks are listed: a rank's runs of tokens against rows of a region.
namespace ulysses::inline ULYSSES_ABI {

/// The lists behind `plan_moves`.
struct move_lists {
    std::vector<plan_block> blocks, arrivals;

    /// How far the lists go.
    struct sizes {
        std::size_t blocks = 0, arrivals = 0;
    };

    void clear() {
        blocks.clear();
        arrivals.clear();
    }
    sizes size() const { return {blocks.size(), arrivals.size()}; }
    plan_moves all() const { return {blocks, arrivals}; }
    plan_moves before(sizes const& end) const {
        return {std::span(blocks).first(end.blocks), std::span(arrivals).first(end.arrivals)};
    }
};

/// Heads of a region that share the rows of a range of tokens.
struct region_heads {
    int peer;
    std::int64_t head, heads;
    std::int64_t row;  ///< of the first head and sample and the range's first token
    std::array<std::int64_t, 3> strides;
    std::int64_t sample = 0, samples = -1;  ///< as in plan_block
};

/// Lists the tokens of `runs` that lie in `rows`; returns how many message rows they take from
/// `first_message_row` on.
inline std::int64_t list_blocks(std::vector<plan_block>& list, placed_runs runs, index_range rows,
                                region_heads const& place, std::int64_t batch,
                                std::int64_t first_message_row) {
    std::int64_t count = 0;
    for (auto const& each : runs) count += each.run.within(rows.begin, rows.end).size();
    auto const samples = place.samples < 0 ? batch : place.samples;
    std::array const message_strides{count, std::int64_t{1}, samples * count};
    std::int64_t listed = 0;
    for_tokens(
        runs, rows,
        [&](std::int64_t token, std::int64_t tokens, std::int64_t global, std::int64_t stride) {
            plan_block block{place.peer,      token,
                             tokens,          place.head,
                             place.heads,     place.row + global - rows.begin,
                             place.strides,   first_message_row + listed,
                             message_strides, place.sample,
                             place.samples};
            block.row_strides[1] = stride;
            list.push_back(block);
            listed += tokens;
        });
    return place.heads * samples * count;
}

/// Message rows to a peer and from it.
struct rows_moved {
    std::int64_t to = 0, from = 0;
};

/// One direction between two ranks: the tokens of one, and the share of the other that computes.
struct listing_side {
    std::vector<plan_block>& blocks;
    placed_runs runs;
    rank_share const& share;
    int peer;
};

/// What the lists of one rank are made from: the token orders of an operand, and who computes what.
struct listing {
    rank_shares const& shares;
    token_orders const& orders;
    int rank;
    run_lister& runs_of;

    /// Lists both directions between the rank and a peer, in messages behind the rows `first`;
    /// returns where they end. `cover(side, row)` lists the rows of tokens that a share needs,
    /// in a message from `row` on, and returns the message row behind them.
    template <class Cover>
    rows_moved both(move_lists& lists, int peer, held which, rows_moved first,
                    Cover const& cover) const {
        listing_side const to{lists.blocks, runs_of(orders, rank, which), shares[peer], peer};
        auto const end_to = cover(to, first.to);
        listing_side const from{lists.arrivals, runs_of(orders, peer, which), shares[rank], peer};
        return {end_to, cover(from, first.from)};
    }
};

}  // namespace ulysses::inline ULYSSES_ABI
