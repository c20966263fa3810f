#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/plan/line.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

/// The words a plan is written in: blocks of rows between one rank's tokens and another's regions.
///
/// Every block knows a third place, its rows in a *message*, for ranks that do not reach each
/// other's memory: what one rank sends another of one operand is the region of the rank that
/// computes, with the rows of all other ranks' tokens left out; of o, those of replicated tokens
/// come last. Both ends know it from their plans alone.
///
/// Tokens that every rank holds move less than others: a rank computes with its own copy of them,
/// and what it found, the output, goes to all.
namespace ulysses::inline ULYSSES_ABI {

/// Tokens of one rank against rows of a region: [batch, token, head] on both sides. In the list of
/// a rank's blocks the tokens are its own and the region is the peer's; in its list of arrivals the
/// other way round.
struct plan_block {
    int peer = 0;
    std::int64_t token = 0;   ///< first token, counted on the rank that holds it
    std::int64_t tokens = 0;  ///< how many, consecutive
    std::int64_t head = 0;    ///< first head (of queries or of keys)
    std::int64_t heads = 0;
    std::int64_t row = 0;                           ///< first row in the region
    std::array<std::int64_t, 3> row_strides{};      ///< rows per batch, token, head in the region
    std::int64_t message_row = 0;                   ///< first row in the message
    std::array<std::int64_t, 3> message_strides{};  ///< likewise in the message
    std::int64_t sample = 0;                        ///< first sample, that both rows are of
    std::int64_t samples = -1;                      ///< how many; -1: the whole batch

    std::int64_t samples_of(std::int64_t batch) const { return samples < 0 ? batch : samples; }
};

/// Both directions of an operand between a rank and its peers.
struct plan_moves {
    std::span<plan_block const> blocks;    ///< this rank's tokens in the peers' regions
    std::span<plan_block const> arrivals;  ///< the peers' tokens in this rank's regions
};

/// How the gradient of the output reaches the ranks that compute: a row of a replicated token is
/// the sum, in rank order, of what all ranks hold of it.
struct plan_output_gradient {
    plan_moves sharded;   ///< rows of tokens that one rank holds
    plan_moves partials;  ///< rows of replicated tokens in slots, one slot of each region a rank
    /// This rank's rows of replicated tokens: in the query region, and as message rows in a slot.
    std::span<plan_block const> sums;
    std::int64_t slot_rows = 0;  ///< rows from slot to slot, the same on every rank
};

/// Where one rank's part of a sum lies.
struct plan_source {
    int peer = 0;
    std::int64_t row = 0;
    std::int64_t message_row = 0;
    std::array<std::int64_t, 3> message_strides{};
};

/// Local tokens of one key-value head that several ranks computed with, or none: their rows are
/// summed in rank order. `sources` index the plan's list.
struct plan_sum {
    std::int64_t token = 0, tokens = 0;
    std::int64_t head = 0, heads = 0;
    std::size_t first_source = 0, sources = 0;
    std::array<std::int64_t, 3> row_strides{};  ///< in every source's region
};

/// How the gradients of keys and values come back to the rank that holds the tokens.
struct plan_returns {
    plan_moves moves;                    ///< all rows that were computed with
    std::span<plan_block const> single;  ///< those that one rank computed
    std::span<plan_sum const> sums;      ///< those that several ranks computed, or none
    std::span<plan_source const> sources;
};

/// One work item of this rank and where its rows lie in its own regions.
struct planned_item {
    work_item work;
    std::int64_t query_row = 0;  ///< first row in the query region, strides [rows, 1, batch * rows]
    std::int64_t key_row = 0;    ///< row of its first key-value head and key in the key region
};

/// Rows exchanged with one peer.
struct plan_rows {
    std::int64_t queries_to = 0;    ///< query rows of this rank's tokens that the peer computes
    std::int64_t queries_from = 0;  ///< query rows of the peer's tokens that this rank computes
    std::int64_t keys_to = 0;       ///< key rows of this rank's tokens that the peer needs
    std::int64_t keys_from = 0;     ///< key rows of the peer's tokens that this rank needs
    std::int64_t outputs_to = 0;    ///< as queries_to and queries_from, of o and dO: with rows of
    std::int64_t outputs_from = 0;  ///< replicated tokens, whose queries every rank has
};

}  // namespace ulysses::inline ULYSSES_ABI
