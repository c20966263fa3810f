#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/plan/hash.hpp>
#include <ulysses/plan/packing.hpp>
#include <ulysses/plan/token_order.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

/// What a rank brings to a step, and what ranks compare of it before anything else.
namespace ulysses::inline ULYSSES_ABI {

/// What one rank brings to `sequence::agree`.
struct sequence_options {
    std::int64_t batch = 1;   ///< samples, equal on every rank
    std::int64_t tokens = 0;  ///< tokens this rank holds of each sample; zero is allowed
    /// Which global tokens they are; empty: ranks hold contiguous shares in rank order.
    std::span<token_run const> order{};
    /// Without an order: how many tokens every rank holds. They are the first of the sequence and
    /// of each rank's `tokens`.
    std::int64_t replicated = 0;
    /// Keys this rank holds when they are another sequence than the queries (cross-attention), else
    /// -1.
    std::int64_t keys = -1;
    std::span<token_run const> key_order{};
    std::int64_t replicated_keys = 0;  ///< as `replicated`, of keys
    packing_options packing{};  ///< documents, lengths, positions and past, equal on every rank
    /// [B, s]: the position of each of this rank's tokens in its document, from which the documents
    /// are found: one begins wherever positions do not grow. Given by every rank that holds tokens.
    std::span<std::int64_t const> positions{};
    /// [B, s], or [B, keys]: whether each of this rank's keys is there; 0: padding. Given by every
    /// rank that holds keys.
    std::span<std::uint8_t const> present{};
};

/// The options of one rank in a record of fixed size.
struct step_record {
    /// Runs of an order that the record has room for.
    static constexpr std::size_t inline_runs = 4;
    /// The lists that are equal on every rank.
    static constexpr std::array<std::string_view, 5> list_names{
        "documents", "lengths", "query_positions", "past", "present"};

    std::int64_t batch = 0;
    std::array<std::int64_t, 2> tokens{};  ///< of queries and of keys
    std::array<std::int64_t, 2> replicated{};
    std::array<std::size_t, 2> runs{};
    std::array<std::array<token_run, inline_runs>, 2> order{};
    std::array<std::size_t, list_names.size()> lists{};       ///< entries of each
    std::array<std::uint64_t, list_names.size()> contents{};  ///< hash of each
    std::int64_t positions = 0, present = 0;  ///< how many it brings of its own tokens

    step_record() = default;
    explicit step_record(sequence_options const& mine)
        : batch(mine.batch),
          tokens{mine.tokens, mine.keys},
          replicated{mine.replicated, mine.replicated_keys},
          runs{mine.order.size(), mine.key_order.size()},
          positions(static_cast<std::int64_t>(mine.positions.size())),
          present(static_cast<std::int64_t>(mine.present.size())) {
        std::copy_n(mine.order.begin(), std::min(inline_runs, mine.order.size()), order[0].begin());
        std::copy_n(mine.key_order.begin(), std::min(inline_runs, mine.key_order.size()),
                    order[1].begin());
        std::array const given{mine.packing.documents, mine.packing.lengths,
                               mine.packing.query_positions, mine.packing.past};
        for (std::size_t i = 0; i < given.size(); ++i) {
            lists[i] = given[i].size();
            word_hash hash;
            for (auto const value : given[i]) hash.add(value);
            contents[i] = hash.value();
        }
        lists[4] = mine.packing.present.size();
        contents[4] = hash_of(mine.packing.present);
    }
};

/// *Throws*, the same on every rank, unless the records of all ranks fit each other: `disagreement`
/// where they must be equal, `invalid_sequence` where one is wrong by itself.
inline void check_records(std::span<step_record const> all, where at) {
    // The field is put together only when it differs: a step that is renewed allocates nothing.
    auto const differs = [&](std::size_t rank, std::string_view what, std::string_view field,
                             auto first, auto other) {
        if (first != other)
            raise(errc::disagreement, at, "sequence",
                  concat(what, field, " must be equal on every rank"), "rank 0 has ", first,
                  ", rank ", rank, " has ", other);
    };
    for (std::size_t r = 0; r < all.size(); ++r) {
        auto const& theirs = all[r];
        differs(r, "", "batch", all[0].batch, theirs.batch);
        differs(r, "", "whether keys are given", all[0].tokens[1] >= 0, theirs.tokens[1] >= 0);
        for (std::size_t i = 0; i < step_record::list_names.size(); ++i) {
            auto const name = step_record::list_names[i];
            differs(r, "the number of ", name, all[0].lists[i], theirs.lists[i]);
            differs(r, "the hash of ", name, all[0].contents[i], theirs.contents[i]);
        }
        if (theirs.tokens[0] < 0 || std::max(theirs.tokens[0], theirs.tokens[1]) >= token_limit)
            raise(errc::invalid_sequence, at, "sequence", "a rank holds 0 .. 2^31 - 1 tokens",
                  "rank ", r, " has ", theirs.tokens[0], ", keys ", theirs.tokens[1]);
        for (std::size_t side = 0; side < 2; ++side) {
            auto const tokens = std::max<std::int64_t>(theirs.tokens[side], 0);
            auto const* const what = side == 0 ? "tokens" : "keys";
            differs(r, "the number of replicated ", what, all[0].replicated[side],
                    theirs.replicated[side]);
            if (theirs.replicated[side] < 0 || theirs.replicated[side] > tokens)
                raise(errc::invalid_sequence, at, "sequence",
                      "replicated tokens are among those of each rank", "rank ", r, " has ", tokens,
                      " ", what, ", ", theirs.replicated[side], " of them replicated");
            if (all[0].replicated[side] > 0 && theirs.runs[side] > 0)
                raise(errc::invalid_sequence, at, "sequence",
                      "replicated tokens come from a number or from an order, not from both",
                      theirs.replicated[side], " replicated ", what, ", rank ", r,
                      " has an order of ", theirs.runs[side], " runs");
        }
        if (theirs.tokens[1] < 0 && theirs.runs[1] > 0)
            raise(errc::invalid_sequence, at, "sequence", "an order of keys needs their count",
                  "rank ", r, " has key_order of ", theirs.runs[1], " runs, keys ",
                  theirs.tokens[1]);
    }
}

}  // namespace ulysses::inline ULYSSES_ABI
