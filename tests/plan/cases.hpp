#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/shape.hpp>
#include <ulysses/plan/sequence.hpp>

#include "../sanitizers.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

/// Random layers, token orders and groups for the tests of the plan.
namespace plan_cases {

namespace uly = ulysses;
using std::int64_t;

/// How many random cases a property is tried on: `all`, or a twentieth in a build that checks every
/// access; ULYSSES_TEST_CASES says it otherwise.
inline std::uint64_t how_many(std::uint64_t all) {
    if (auto const* given = std::getenv("ULYSSES_TEST_CASES"))
        return std::max<std::uint64_t>(1, std::strtoull(given, nullptr, 10));
    return TEST_UNDER_SANITIZER ? all / 20 : all;
}

using runs = std::vector<uly::token_run>;
using random_engine = std::mt19937_64;

inline std::size_t at(int64_t index) { return static_cast<std::size_t>(index); }

inline int64_t below(random_engine& random, int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<std::uint64_t>(limit));
}

enum class order_kind { equal, uneven, one_rank, zigzag, striped, shuffled, mixed };
inline constexpr int order_kinds = 7;

/// A token order of `tokens` over `ranks`, each token once.
inline std::vector<runs> random_order(random_engine& random, order_kind kind, int ranks,
                                      int64_t tokens) {
    std::vector<runs> all(at(ranks));
    auto const rank = [&] { return at(below(random, ranks)); };
    switch (kind) {
        case order_kind::equal:
            for (int64_t r = 0, first = 0; r < ranks; ++r) {
                auto const count = tokens / ranks + (r < tokens % ranks ? 1 : 0);
                all[at(r)].push_back({first, count});
                first += count;
            }
            break;
        case order_kind::uneven: {  // contiguous; many ranks with nothing
            std::vector<int64_t> cuts{0, tokens};
            for (int r = 1; r < ranks; ++r)
                cuts.push_back(below(random, 3) == 0 ? 0 : below(random, tokens + 1));
            std::sort(cuts.begin(), cuts.end());
            for (int64_t r = 0; r < ranks; ++r)
                all[at(r)].push_back({cuts[at(r)], cuts[at(r + 1)] - cuts[at(r)]});
            break;
        }
        case order_kind::one_rank: all[rank()].push_back({0, tokens}); break;
        case order_kind::zigzag:
            for (int64_t chunk = 0; chunk < 2 * ranks; ++chunk) {
                auto const first = tokens * chunk / (2 * ranks);
                auto const owner = chunk < ranks ? chunk : 2 * ranks - 1 - chunk;
                all[at(owner)].push_back({first, tokens * (chunk + 1) / (2 * ranks) - first});
            }
            break;
        case order_kind::striped:
            for (int64_t r = 0; r < std::min<int64_t>(ranks, tokens); ++r)
                all[at(r)].push_back({r, (tokens - r + ranks - 1) / ranks, ranks});
            break;
        case order_kind::shuffled:
        case order_kind::mixed:
            for (int64_t first = 0; first < tokens;) {
                auto const count = std::min(tokens - first, 1 + below(random, 9));
                auto const stride = kind == order_kind::mixed ? 1 + below(random, 3) : 1;
                for (int64_t offset = 0; offset < std::min(stride, count); ++offset)
                    all[rank()].push_back(
                        {first + offset, (count - offset + stride - 1) / stride, stride});
                first += count;
            }
            for (auto& each : all) std::shuffle(each.begin(), each.end(), random);
            break;
    }
    return all;
}

/// A group, a layer and a step that has a plan.
struct problem {
    int ranks = 1;
    uly::shape layer;
    int64_t batch = 1, row_multiple = 1;
    std::vector<runs> queries, keys;  ///< keys empty: the queries
    bool equal_shares = false;        ///< every rank holds as many tokens, of queries and of keys
    std::vector<int64_t> documents, lengths, positions;  ///< what is packed
    std::vector<std::uint8_t> present;
    std::vector<uly::window> windows;  ///< the layer's, so that a problem is moved and not copied

    uly::sequence step() const {
        auto result = uly::sequence::of(batch, queries, keys);
        result.pack({.documents = documents,
                     .lengths = lengths,
                     .query_positions = positions,
                     .present = present});
        return result;
    }
    /// True when every row of a head sees every key, or every one before it.
    bool plain() const {
        return layer.window == uly::window{} && windows.empty() && documents.empty() &&
               lengths.empty() && positions.empty() && present.empty();
    }

    std::string text() const {
        auto text =
            uly::concat(ranks, " ranks, heads ", layer.heads, "/", layer.kv_heads,
                        layer.mask == uly::mask::causal ? ", causal" : ", full",
                        layer.assignment == uly::assignment::whole_heads ? ", whole heads" : "",
                        ", batch ", batch, ", row_multiple ", row_multiple);
        auto const add = [&](char const* name, std::vector<runs> const& orders) {
            text += uly::concat(", ", name);
            for (auto const& each : orders) {
                text += " [";
                for (auto const& run : each)
                    text += uly::concat("{", run.begin, ",", run.count, ",", run.stride, "}");
                text += "]";
            }
        };
        add("queries", queries);
        if (!keys.empty()) add("keys", keys);
        text += uly::concat(", window ", layer.window.left, " ", layer.window.right);
        for (auto const& [name, list] : {std::pair{", documents", &documents},
                                         {", lengths", &lengths},
                                         {", positions", &positions}})
            for (std::size_t i = 0; i < list->size(); ++i)
                text += uly::concat(i == 0 ? name : "", " ", (*list)[i]);
        for (auto const& each : windows) text += uly::concat(", head ", each.left, " ", each.right);
        for (std::size_t i = 0; i < present.size(); ++i)
            text += uly::concat(i == 0 ? ", present " : "", int{present[i]});
        return text;
    }
};

inline uly::window random_window(random_engine& random, int64_t keys) {
    return {below(random, 3) == 0 ? -1 : below(random, keys),
            below(random, 3) == 0 ? -1 : below(random, keys)};
}

/// A window for each head: in runs, in turn, or any.
inline void random_windows(random_engine& random, problem& p, int64_t keys) {
    uly::window const some[] = {random_window(random, keys), random_window(random, keys), {}};
    auto const every = 1 + below(random, p.layer.heads);
    for (int64_t h = 0; h < p.layer.heads; ++h)
        p.windows.push_back(some[every == 1 ? below(random, 3) : h / every % 3]);
    p.layer.head_windows = p.windows;
}

/// Keys with holes, and padding on either side of some samples.
inline std::vector<std::uint8_t> random_present(random_engine& random, int64_t batch,
                                                int64_t keys) {
    std::vector<std::uint8_t> present;
    for (int64_t b = 0; b < batch; ++b) {
        auto const hole = below(random, 4), first = below(random, 2) * below(random, keys + 1),
                   end = keys - below(random, 2) * below(random, keys + 1);
        for (int64_t key = 0; key < keys; ++key)
            present.push_back(first <= key && key < end && (hole == 0 || below(random, 4) >= hole));
    }
    return present;
}

/// In half of the problems a window, documents, padding, or queries that stand elsewhere.
inline void random_rule(random_engine& random, problem& p) {
    auto const step = p.step();
    auto const tokens = step.queries().total(), keys = step.keys().total();
    if (below(random, 4) == 0)
        p.layer.window = random_window(random, keys);
    else if (below(random, 8) == 0)
        random_windows(random, p, keys);
    if (below(random, 4) != 0) return;
    if (below(random, 2) == 0)
        for (int64_t b = 0; b < p.batch; ++b) p.lengths.push_back(below(random, keys + 1));
    if (below(random, 2) == 0)
        for (int64_t b = 0; b < p.batch; ++b)
            p.positions.push_back(below(random, keys + tokens) - tokens);
    if (below(random, 2) == 0) p.present = random_present(random, p.batch, keys);
    if (tokens == keys || !p.positions.empty())
        for (int64_t first = below(random, keys); first <= p.batch * keys;
             first += 1 + below(random, keys))
            p.documents.push_back(first);
}

inline problem random_problem(std::uint64_t seed) {
    random_engine random{seed};
    problem p;
    p.ranks = 1 + static_cast<int>(below(random, 17));
    p.layer.kv_heads = 1 + below(random, 8);
    p.layer.heads = p.layer.kv_heads * (1 + below(random, 24 / p.layer.kv_heads));
    p.layer.head_dim = 1 + below(random, 4);
    p.layer.value_dim = 1 + below(random, 4);
    p.layer.mask = below(random, 2) == 0 ? uly::mask::full : uly::mask::causal;
    p.layer.assignment =
        below(random, 5) == 0 ? uly::assignment::whole_heads : uly::assignment::balanced;
    p.batch = 1 + below(random, 2);
    p.row_multiple = below(random, 2) == 0 ? 1 : 1 + below(random, 8);
    // Often fewer tokens than ranks; sometimes as many for each.
    auto const length = [&] {
        if (below(random, 3) == 0) return p.ranks * (1 + below(random, 60 / p.ranks));
        return below(random, 4) == 0 ? 1 + below(random, p.ranks) : 1 + below(random, 60);
    };
    auto const order = [&](int64_t tokens) {
        auto const kind = static_cast<order_kind>(below(random, order_kinds));
        return random_order(random, kind, p.ranks, tokens);
    };
    p.queries = order(length());
    if (p.layer.mask == uly::mask::full && below(random, 3) == 0) p.keys = order(length());
    auto const counts_equal = [](std::vector<runs> const& orders) {
        auto const count = [](runs const& of) {
            int64_t sum = 0;
            for (auto const& run : of) sum += run.count;
            return sum;
        };
        return std::all_of(orders.begin(), orders.end(),
                           [&](runs const& each) { return count(each) == count(orders[0]); });
    };
    p.equal_shares = counts_equal(p.queries) && counts_equal(p.keys);
    random_rule(random, p);
    return p;
}

}  // namespace plan_cases
