#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/plan/sequence.hpp>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

/// Token orders that tests deal a sequence out by.
namespace pipeline_test {

using std::int64_t;
using orders = std::vector<std::vector<ulysses::token_run>>;  // one list of runs a rank

/// Uniform in 0 .. limit - 1, the same with every standard library.
inline int64_t below(std::mt19937_64& random, int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<std::uint64_t>(limit));
}

/// Contiguous shares of the given sizes.
inline orders contiguous(std::vector<int64_t> const& counts) {
    orders all;
    int64_t begin = 0;
    for (auto const count : counts) {
        all.push_back({{begin, count}});
        begin += count;
    }
    return all;
}

inline orders equal_shares(int64_t tokens, int ranks) {
    std::vector<int64_t> counts;
    for (int r = 0; r < ranks; ++r) counts.push_back(tokens / ranks + (r < tokens % ranks ? 1 : 0));
    return contiguous(counts);
}

/// Rank r holds the r-th and the r-th last of 2 P segments, which balances a causal mask elsewhere.
inline orders zigzag(int64_t tokens, int ranks) {
    orders all(static_cast<std::size_t>(ranks));
    auto const edge = [&](int64_t i) { return tokens * i / (2 * ranks); };
    for (int r = 0; r < ranks; ++r) {
        auto const last = 2 * ranks - 1 - r;
        all[static_cast<std::size_t>(r)] = {{edge(r), edge(r + 1) - edge(r)},
                                            {edge(last), edge(last + 1) - edge(last)}};
    }
    return all;
}

/// The first `count` tokens on every rank, then equal shares.
inline orders replicated_front(int64_t count, int64_t tokens, int ranks) {
    auto all = equal_shares(tokens - count, ranks);
    for (auto& runs : all) {
        for (auto& run : runs) run.begin += count;
        runs.insert(runs.begin(), {0, count, 1, true});
    }
    return all;
}

/// Rank r holds every P-th token from r on.
inline orders striped(int64_t tokens, int ranks) {
    orders all;
    for (int64_t r = 0; r < ranks; ++r)
        all.push_back({{r, tokens > r ? (tokens - r + ranks - 1) / ranks : 0, ranks}});
    return all;
}

/// Segments of random lengths dealt to random ranks in random order; some ranks may hold nothing.
inline orders scattered(std::mt19937_64& random, int64_t tokens, int ranks) {
    std::vector<ulysses::token_run> segments;
    for (int64_t begin = 0; begin < tokens;) {
        auto const count = 1 + below(random, std::min<int64_t>(tokens - begin, 1 + tokens / 3));
        segments.push_back({begin, count});
        begin += count;
    }
    std::shuffle(segments.begin(), segments.end(), random);
    orders all(static_cast<std::size_t>(ranks));
    for (auto const& segment : segments)
        all[static_cast<std::size_t>(below(random, ranks))].push_back(segment);
    return all;
}

inline orders random_orders(std::mt19937_64& random, int64_t tokens, int ranks) {
    switch (below(random, 5)) {
        case 0: return equal_shares(tokens, ranks);
        case 1: return zigzag(tokens, ranks);
        case 2: return striped(tokens, ranks);
        case 3: return scattered(random, tokens, ranks);
        default: break;
    }
    std::vector<int64_t> counts(static_cast<std::size_t>(ranks));
    for (int64_t left = tokens; left > 0;) {
        auto const part = 1 + below(random, left);
        counts[static_cast<std::size_t>(below(random, ranks))] += part;
        left -= part;
    }
    return contiguous(counts);
}

}  // namespace pipeline_test
