#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/visibility.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

/// Whether a row reaches a key, holes included, by the words of the rule, one after the other: what
/// the library says in ranges is compared with it.
inline bool reaches(ulysses::visibility const& rule, std::int64_t b, std::int64_t row,
                    std::int64_t key) {
    auto position = row + rule.keys - rule.queries;
    if (!rule.samples.empty()) {
        auto const& own = rule.samples[static_cast<std::size_t>(b)];
        position = row + own.position;
        if (key < own.begin || key >= own.end) return false;
        // The document of a key is the last that begins at or before it.
        auto const document = [&](std::int64_t place) {
            std::int64_t which = 0;
            for (std::int64_t d = 0; d < own.documents; ++d)
                if (rule.documents[static_cast<std::size_t>(own.first_document + d)] <= place)
                    which = d;
            return which;
        };
        if (document(key) != document(position)) return false;
    }
    if (rule.mask == ulysses::mask::causal && key > position) return false;
    if (rule.window.left >= 0 && key < position - rule.window.left) return false;
    return rule.window.right < 0 || key <= position + rule.window.right;
}

/// Whether it sees the key: one that it reaches and that is there.
inline bool sees(ulysses::visibility const& rule, std::int64_t b, std::int64_t row,
                 std::int64_t key) {
    if (!rule.present.empty() && rule.present[static_cast<std::size_t>(b * rule.keys + key)] == 0)
        return false;
    return reaches(rule, b, row, key);
}

/// The keys from the first to the last that any of the rows of any of `samples` samples reaches.
inline ulysses::index_range seen_by_rows(ulysses::visibility const& rule, std::int64_t samples,
                                         std::int64_t begin, std::int64_t end) {
    auto first = rule.keys;
    std::int64_t last = 0;
    for (std::int64_t b = 0; b < samples; ++b)
        for (auto row = begin; row < end; ++row)
            for (std::int64_t key = 0; key < rule.keys; ++key)
                if (reaches(rule, b, row, key))
                    first = std::min(first, key), last = std::max(last, key + 1);
    return first < last ? ulysses::index_range{first, last} : ulysses::index_range{};
}
