#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/index_range.hpp>

#include <algorithm>
#include <cstdint>
#include <span>

/// Which keys a query row sees: what the layer asks for (mask, window) and what the step brings
/// (documents, padding, positions), on global indices.
///
/// A row sees one range of keys, and of it those that are there. As rows go on, neither end of the
/// range goes back: what a run of rows sees together lies between its first row's begin and its
/// last row's end.
namespace ulysses::inline ULYSSES_ABI {

/// Which keys a query row may see, by its position.
enum class mask : std::uint8_t {
    full,    ///< every key
    causal,  ///< keys at or before the row's own position
};

/// A sliding window: keys from `left` before a row's position to `right` after it; -1: no limit on
/// that side.
struct window {
    std::int64_t left = -1, right = -1;
    friend constexpr bool operator==(window const&, window const&) = default;
};

/// What one sample of a step brings.
struct sample_keys {
    std::int64_t begin = 0, end = 0;  ///< keys that are there; the others are padding
    std::int64_t position = 0;        ///< of query row 0; a key's position is its global index
    std::int64_t first_document = 0, documents = 0;  ///< its part of the list of documents
};

/// The rule of one layer and step. Does not own its lists.
struct visibility {
    ulysses::mask mask = ulysses::mask::full;
    ulysses::window window{};
    std::int64_t queries = 0, keys = 0;         ///< global lengths
    std::span<sample_keys const> samples{};     ///< one a sample; empty: all alike, nothing padded
    std::span<std::int64_t const> documents{};  ///< first keys, ascending within a sample
    /// [samples, keys], 0 for a key that is padding; empty: all that `samples` say are there.
    std::span<std::uint8_t const> present{};

    /// True when every sample has the same rule.
    constexpr bool uniform() const { return samples.empty(); }

    /// Without a list of samples the last query row is at the last key's position.
    constexpr sample_keys sample(std::int64_t b) const {
        if (samples.empty()) return {0, keys, keys - queries, 0, 0};
        return samples[static_cast<std::size_t>(b)];
    }

    /// The document that position `p` lies in: an index into `documents`, -1 where there are none.
    constexpr std::int64_t document_of(sample_keys const& own, std::int64_t p) const {
        if (own.documents == 0) return -1;
        auto const first = documents.begin() + own.first_document;
        auto const after = std::upper_bound(first, first + own.documents, p);
        return std::max<std::int64_t>(after - documents.begin() - 1, own.first_document);
    }

    /// The keys of a document that are there; of the whole sample where there are no documents.
    constexpr index_range document(sample_keys const& own, std::int64_t which) const {
        if (which < 0) return {own.begin, own.end};
        auto const begin = documents[static_cast<std::size_t>(which)];
        auto const last = which + 1 == own.first_document + own.documents;
        auto const end = last ? own.end : documents[static_cast<std::size_t>(which + 1)];
        return {std::clamp(begin, own.begin, own.end), std::clamp(end, own.begin, own.end)};
    }

    /// Whether a key of sample `b` is there; asked of keys in a row's range only.
    constexpr bool there(std::int64_t b, std::int64_t key) const {
        return present.empty() || present[static_cast<std::size_t>(b * keys + key)] != 0;
    }

    /// Whether query row `row` of sample `b` sees a key.
    constexpr bool sees(std::int64_t b, std::int64_t row, std::int64_t key) const {
        auto const range = keys_of(b, row);
        return range.begin <= key && key < range.end && there(b, key);
    }

    /// The range of keys that global query row `row` of sample `b` sees, holes included.
    constexpr index_range keys_of(std::int64_t b, std::int64_t row) const {
        auto const own = sample(b);
        auto const p = row + own.position;
        auto [begin, end] = document(own, document_of(own, p));
        if (mask == ulysses::mask::causal) end = std::min(end, p + 1);
        if (window.right >= 0) end = std::min(end, p + 1 + window.right);
        if (window.left >= 0) begin = std::clamp(p - window.left, begin, own.end);
        return {begin, std::max(begin, end)};
    }

    /// The keys that rows [begin, end) of sample `b` see together.
    constexpr index_range keys_of_rows(std::int64_t b, std::int64_t begin, std::int64_t end) const {
        return begin < end ? index_range{keys_of(b, begin).begin, keys_of(b, end - 1).end}
                           : index_range{};
    }
};

}  // namespace ulysses::inline ULYSSES_ABI
