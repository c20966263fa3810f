#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "harness.hpp"

#include <cstddef>
#include <span>
#include <string>
#include <vector>

/// Problems drawn at random: the same from one seed everywhere.
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

inline int64_t random_length(std::mt19937_64& random) {
    constexpr int64_t edges[] = {1, 2, 3, 255, 256, 257, 300};
    // The fp64 reference is quadratic and slow: most sequences are short.
    switch (below(random, 8)) {
        case 0: return edges[below(random, 7)];
        case 1: return 1 + below(random, 300);
        default: return 1 + below(random, 64);
    }
}

/// In a third of the problems documents, padding, or queries that stand elsewhere.
inline void random_packing(std::mt19937_64& random, problem<float>& p) {
    if (below(random, 3) != 0) return;
    if (below(random, 2) == 0)
        for (int64_t b = 0; b < p.batch; ++b) p.lengths.push_back(below(random, p.keys + 1));
    if (below(random, 3) == 0)
        for (int64_t b = 0; b < p.batch; ++b)
            p.positions.push_back(below(random, p.keys + p.tokens) - p.tokens);
    if (p.tokens == p.keys || !p.positions.empty())
        for (int64_t first = below(random, p.keys); first <= p.batch * p.keys;
             first += 1 + below(random, p.keys))
            p.documents.push_back(first);
}

/// Any layer and lengths, with what `random_packing` packs.
inline problem<float> random_problem(std::uint64_t seed, std::mt19937_64& random) {
    auto const heads = 1 + below(random, 12);
    std::vector<int64_t> divisors;
    for (int64_t d = 1; d <= heads; ++d)
        if (heads % d == 0) divisors.push_back(d);
    ulysses::shape layer{.heads = heads,
                         .kv_heads = divisors[static_cast<std::size_t>(
                             below(random, static_cast<int64_t>(divisors.size())))],
                         .head_dim = 1 + below(random, 20),
                         .value_dim = 1 + below(random, 20),
                         .mask =
                             below(random, 3) == 0 ? ulysses::mask::full : ulysses::mask::causal,
                         .assignment = below(random, 8) == 0 ? ulysses::assignment::whole_heads
                                                             : ulysses::assignment::balanced};
    auto const tokens = random_length(random);
    auto const batch = 1 + below(random, tokens > 128 ? 1 : 3);
    auto const cross = layer.mask == ulysses::mask::full && below(random, 2) == 0;
    auto const keys = cross ? random_length(random) : tokens;
    if (below(random, 3) == 0)
        layer.window = {below(random, 3) == 0 ? -1 : below(random, keys),
                        below(random, 3) == 0 ? -1 : below(random, keys)};
    auto p = make_problem<float>(seed, layer, batch, tokens, keys);
    random_packing(random, p);
    return p;
}

struct drawn_problem {
    problem<double> whole;
    orders queries, keys;

    ulysses::sequence step() const { return whole.step(queries, keys); }
    std::string text() const {
        return ulysses::concat(whole.text(), ", ", whole.layer.chunks,
                               whole.layer.overlap ? " chunks, overlapped" : " chunks", ", keep ",
                               static_cast<int>(whole.layer.keep));
    }
};

/// Layers and steps of any kind, or with two of what a layer may ask for; in chunks, by keep policy, with
/// tokens that all ranks hold.
inline drawn_problem draw_problem(std::uint64_t seed, int ranks) {
    std::mt19937_64 random{seed};
    auto const a_feature = [&] { return static_cast<feature>(below(random, feature_count)); };
    auto const one = a_feature(), other = a_feature();
    drawn_problem drawn{.whole = seed % 2 == 0 ? converted<double>(random_problem(seed, random))
                                               : problem_with<double>(seed, one, other),
                        .queries = {},
                        .keys = {}};
    auto& p = drawn.whole;
    constexpr ulysses::keep policies[] = {ulysses::keep::exchanged, ulysses::keep::local,
                                          ulysses::keep::nothing};
    p.layer.keep = policies[seed / 2 % 3];
    if (below(random, 2) == 0) {
        p.layer.chunks = 1 + below(random, p.layer.kv_heads);
        p.layer.overlap = p.layer.chunks > 1 && below(random, 3) != 0;
    }
    auto const plain = p.keys == p.tokens && p.positions.empty();
    drawn.queries = plain && below(random, 3) == 0
                        ? replicated_front(below(random, p.tokens + 1), p.tokens, ranks)
                        : random_orders(random, p.tokens, ranks);
    if (p.keys != p.tokens) drawn.keys = random_orders(random, p.keys, ranks);
    return drawn;
}

/// One rank's results; what is not its own is NaN, or 0 in a sum.
using bytes = std::vector<std::byte>;
inline bytes bytes_of(results<double> const& r) {
    bytes all;
    for (auto const* each : {&r.o, &r.dq, &r.dk, &r.dv, &r.lse, &r.dsinks, &r.dbias}) {
        auto const part = std::as_bytes(std::span(each->memory));
        all.insert(all.end(), part.begin(), part.end());
    }
    return all;
}

template <class Comm>
bytes results_of(Comm const& ranks, drawn_problem const& drawn) {
    results<double> own(drawn.whole);
    compute_rank(ranks, drawn.whole, drawn.step(), builtin_attention{}, own);
    return bytes_of(own);
}

/// Of each of as many threads.
inline std::vector<bytes> results_of_threads(int ranks, drawn_problem const& drawn) {
    std::vector<bytes> all(static_cast<std::size_t>(ranks));
    ulysses::threads::run(ranks, [&](ulysses::threads::communicator thread) {
        all[static_cast<std::size_t>(thread.rank())] = results_of(thread, drawn);
    });
    return all;
}

}  // namespace pipeline_test
