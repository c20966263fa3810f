#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/plan/line.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

/// The words a plan is written in: blocks of rows between a rank's tokens and its peers' regions.
namespace ulysses::inline ULYSSES_ABI {

/// Local tokens of this rank against rows of a peer's region: [batch, token, head] on both sides.
struct plan_block {
    int peer = 0;
    std::int64_t token = 0;   ///< first local token
    std::int64_t tokens = 0;  ///< how many, consecutive
    std::int64_t head = 0;    ///< first head (of queries or of keys)
    std::int64_t heads = 0;
    std::int64_t row = 0;                       ///< first row in the peer's region
    std::array<std::int64_t, 3> row_strides{};  ///< rows per batch, token, head in the region
};

/// Local tokens of one key-value head that several ranks computed with: their rows are summed in
/// rank order. `sources` index the plan's list of (peer, row).
struct plan_sum {
    std::int64_t token = 0, tokens = 0;
    std::int64_t head = 0, heads = 0;
    std::size_t first_source = 0, sources = 0;
    std::array<std::int64_t, 3> row_strides{};
};

struct plan_source {
    int peer = 0;
    std::int64_t row = 0;
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
};

}  // namespace ulysses::inline ULYSSES_ABI
