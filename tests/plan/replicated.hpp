#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/plan/sequence.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

/// Token orders some of whose tokens every rank holds.
namespace replicated_cases {

using orders = std::vector<std::vector<ulysses::token_run>>;

/// Replicates `segments`, which lie apart in a sequence, and deals the other tokens by `rest`, an
/// order of as many tokens as there are others. Each rank lists the segments where it likes.
inline orders with_replicated(std::mt19937_64& random, std::int64_t tokens,
                              std::vector<ulysses::token_run> const& segments, orders const& rest) {
    std::vector<bool> everywhere(static_cast<std::size_t>(tokens));
    for (auto const& run : segments)
        for (std::int64_t i = 0; i < run.count; ++i)
            everywhere[static_cast<std::size_t>(run.at(i))] = true;
    std::vector<std::int64_t> others;
    for (std::int64_t token = 0; token < tokens; ++token)
        if (!everywhere[static_cast<std::size_t>(token)]) others.push_back(token);
    orders all;
    for (auto const& runs : rest) {
        auto& mine = all.emplace_back();
        for (auto const& run : runs)
            for (std::int64_t i = 0; i < run.count; ++i)
                mine.push_back({others[static_cast<std::size_t>(run.at(i))], 1});
        for (auto run : segments) {
            run.replicated = true;
            auto const place = static_cast<std::ptrdiff_t>(random() % (mine.size() + 1));
            mine.insert(mine.begin() + place, run);
        }
    }
    return all;
}

/// Up to three segments, at the front, the end or anywhere, of stride 1 to 3; at most all tokens.
inline std::vector<ulysses::token_run> random_segments(std::mt19937_64& random,
                                                       std::int64_t tokens) {
    auto const below = [&](std::int64_t limit) {
        return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
    };
    std::vector<ulysses::token_run> segments;
    std::int64_t from = 0;
    for (auto count = 1 + below(3); count > 0 && from < tokens; --count) {
        auto const begin = from + (below(2) == 0 ? 0 : below(tokens - from));
        auto const stride = below(3) == 0 ? 1 + below(3) : 1;
        auto const most = (tokens - 1 - begin) / stride + 1;
        ulysses::token_run const run{begin, below(3) == 0 ? most : 1 + below(most), stride};
        segments.push_back(run);
        from = run.last() + 1 + below(2);
    }
    return segments;
}

inline std::int64_t tokens_of(std::vector<ulysses::token_run> const& runs) {
    std::int64_t sum = 0;
    for (auto const& run : runs) sum += run.count;
    return sum;
}

}  // namespace replicated_cases
