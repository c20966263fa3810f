#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "harness.hpp"

#include <doctest/doctest.h>

/// Problems whose layers and steps ask for one thing or two of what a layer may ask for.
namespace pipeline_test {

template <class T>
void draw(std::mt19937_64& random, std::vector<T>& values, int64_t count, double largest) {
    values.clear();
    for (int64_t i = 0; i < count; ++i)
        values.push_back(static_cast<T>(
            static_cast<float>(largest * static_cast<double>(below(random, 1001)) / 1000)));
}

/// What a layer may ask for, one at a time.
enum class feature {
    softcap,
    alibi,
    bias,
    sinks,
    dropout,
    causal,
    window,
    documents,
    lengths,
    positions,
    head_windows,
    holes
};
inline constexpr int feature_count = 12;

/// Windows that shapes refer to, which own none.
inline std::vector<std::vector<ulysses::window>> window_lists;

inline void add(std::mt19937_64& random, ulysses::shape& layer, feature what, int64_t keys) {
    switch (what) {
        case feature::softcap:
            layer.logits.softcap = 0.25 + 0.25 * static_cast<double>(below(random, 8));
            break;
        case feature::alibi: layer.logits.alibi = true; break;
        case feature::bias: layer.logits.bias = true; break;
        case feature::sinks: layer.logits.sinks = true; break;
        case feature::dropout:
            layer.dropout = 0.1 * static_cast<double>(1 + below(random, 8));
            break;
        case feature::causal: layer.mask = ulysses::mask::causal; break;
        case feature::window: layer.window = {below(random, keys), below(random, keys)}; break;
        case feature::head_windows: {
            auto& list = window_lists.emplace_back();
            for (int64_t h = 0; h < layer.heads; ++h)
                list.push_back(h > 0 && below(random, 2) == 0
                                   ? list.back()
                                   : ulysses::window{below(random, keys), below(random, keys)});
            layer.head_windows = list;
            break;
        }
        default: break;
    }
}

template <class T>
void bring(std::mt19937_64& random, problem<T>& p, feature what) {
    auto const some = [&](int64_t all) { return below(random, 2) == 0 ? 1 : all; };
    switch (what) {
        case feature::alibi: draw(random, p.slopes, p.layer.heads, 0.5); break;
        case feature::sinks: draw(random, p.sinks, p.layer.heads, 2); break;
        case feature::bias:
            p.bias = tensor<T>({some(p.batch), some(p.layer.heads), some(p.tokens), some(p.keys)});
            fill_uniform(random, p.bias);
            break;
        case feature::dropout:
            p.dropout = {.seed = random(), .step = random(), .layer = 3, .first_sample = 7};
            break;
        case feature::documents:
            for (int64_t first = below(random, p.keys); first <= p.batch * p.keys;
                 first += 1 + below(random, p.keys))
                p.documents.push_back(first);
            break;
        case feature::lengths:
            for (int64_t b = 0; b < p.batch; ++b) p.lengths.push_back(below(random, p.keys + 1));
            break;
        case feature::positions:
            for (int64_t b = 0; b < p.batch; ++b)
                p.positions.push_back(below(random, p.keys + p.tokens) - p.tokens);
            break;
        case feature::holes:
            for (int64_t i = 0; i < p.batch * p.keys; ++i)
                p.present.push_back(below(random, 3) == 0 ? 0 : 1);
            break;
        default: break;
    }
}

template <class T>
void check_bounds(results<T> const& seen, results<double> const& exact, bounds const& allowed) {
    CHECK(largest_difference(seen.o, exact.o) <= allowed.o);
    CHECK(largest_difference(seen.lse, exact.lse) <= allowed.lse);
    CHECK(largest_difference(seen.dq, exact.dq) <= allowed.dq);
    CHECK(largest_difference(seen.dk, exact.dk) <= allowed.dk);
    CHECK(largest_difference(seen.dv, exact.dv) <= allowed.dv);
    CHECK(largest_difference(seen.dsinks, exact.dsinks) <= allowed.dsinks);
    CHECK(largest_difference(seen.dbias, exact.dbias) <= allowed.dbias);
}

/// A problem whose layer has both features, of a length that is drawn unless it is given.
template <class T>
problem<T> problem_with(std::uint64_t seed, feature one, feature other, int64_t length = 0) {
    std::mt19937_64 random{seed};
    auto const kv_heads = 1 + below(random, 3);
    ulysses::shape layer{.heads = kv_heads * (1 + below(random, 3)),
                         .kv_heads = kv_heads,
                         .head_dim = 1 + below(random, 12),
                         .value_dim = 1 + below(random, 12)};
    auto const drawn = below(random, 6) == 0 ? 250 + below(random, 20) : 1 + below(random, 40);
    auto const tokens = length > 0 ? length : drawn;
    auto const batch = 1 + below(random, 2);
    add(random, layer, one, tokens);
    if (other != one) add(random, layer, other, tokens);
    // Windows are a layer's or its heads'.
    if (!layer.head_windows.empty()) layer.window = {};
    auto p = make_problem<T>(seed, layer, batch, tokens);
    bring(random, p, one);
    if (other != one) bring(random, p, other);
    return p;
}

}  // namespace pipeline_test
