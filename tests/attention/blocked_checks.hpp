#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/blocked.hpp>
#include <ulysses/attention/reference.hpp>

#include "problem.hpp"

#include <doctest/doctest.h>

/// What must hold for blocked attention over any GEMM.
namespace attention_test {

inline sizes random_sizes(std::mt19937_64& random) {
    int64_t const tokens[] = {1, 2, 17, 64, 100, 127, 128, 129, 200, 256, 257, 300, 400};
    auto const below = [&](int64_t limit) {
        return static_cast<int64_t>(random() % static_cast<std::uint64_t>(limit));
    };
    sizes s{};
    s.batch = 1 + below(2);
    s.tokens = s.keys = tokens[below(13)];
    s.kv_heads = 1 + below(2), s.group = 1 + below(3);
    s.dim = 1 + below(40), s.value_dim = 1 + below(40);
    s.mask = below(3) == 0 ? ulysses::mask::full : ulysses::mask::causal;
    if (s.mask == ulysses::mask::full && below(2) == 0) s.keys = tokens[below(13)];
    s.begin = below(2) == 0 ? 0 : below(s.tokens);
    s.rows = below(2) == 0 ? s.tokens - s.begin : 1 + below(s.tokens - s.begin);
    s.held = seen_by(s, s.rows - 1);
    s.held += below(s.keys - s.held + 1);
    s.scale = below(4) == 0 ? -0.3 : 1 / std::sqrt(static_cast<double>(s.dim));
    s.layout = static_cast<order>(below(4));
    return s;
}

template <class Attention, class T>
void compare_with_reference() {
    for (std::uint64_t seed = 1; seed <= 16; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        auto p = random_problem<T>(random, random_sizes(random));
        INFO(p.size.text());
        auto exact = converted<double>(p);
        exact.forward(ulysses::reference_attention{});
        exact.backward(ulysses::reference_attention{});
        p.forward(Attention{});
        auto const bound = bounds_of(p);
        CHECK(largest_difference(p.o, exact.o) <= bound.o);
        CHECK(largest_difference(p.lse, exact.lse) <= bound.lse);
        p.backward(Attention{});
        CHECK(largest_difference(p.dq, exact.dq) <= bound.dq);
        CHECK(largest_difference(p.dk, exact.dk) <= bound.dk);
        CHECK(largest_difference(p.dv, exact.dv) <= bound.dv);
    }
}

/// Rows [begin, end) alone, over the keys they see or some more, have the bits they have in the
/// whole.
template <class Attention, class T>
void compare_cuts(std::vector<int64_t> const& cuts, ulysses::mask mask) {
    auto const tokens = cuts.back();
    std::mt19937_64 random{static_cast<std::uint64_t>(tokens)};
    auto whole = random_problem<T>(random, {.batch = 2,
                                            .tokens = tokens,
                                            .keys = tokens,
                                            .kv_heads = 1,
                                            .group = 2,
                                            .dim = 24,
                                            .value_dim = 17,
                                            .mask = mask,
                                            .rows = tokens,
                                            .held = tokens,
                                            .scale = 0.2});
    whole.forward(Attention{});
    whole.backward(Attention{});
    for (std::size_t c = 0; c + 1 < cuts.size(); ++c) {
        auto const begin = cuts[c], end = cuts[c + 1];
        CAPTURE(begin);
        CAPTURE(end);
        auto const needed = mask == ulysses::mask::full ? tokens : end;
        auto const layout = static_cast<order>(c % 4);
        for (auto held : {needed, std::min(needed + 5, tokens)}) {
            auto part = item_of(whole, begin, end - begin, held, layout);
            part.forward(Attention{});
            CHECK(same_rows(part.o, whole.o, begin));
            CHECK(same_rows(part.lse, whole.lse, begin));
            part.backward(Attention{});
            CHECK(same_rows(part.dq, whole.dq, begin));
        }
    }
    for (auto layout : {order::tokens_first, order::padded, order::batch_inner}) {
        auto moved = item_of(whole, 0, tokens, tokens, layout);
        moved.forward(Attention{});
        moved.backward(Attention{});
        CHECK(same_rows(moved.o, whole.o, 0));
        CHECK(same_rows(moved.dq, whole.dq, 0));
        CHECK(same_rows(moved.dk, whole.dk, 0));
        CHECK(same_rows(moved.dv, whole.dv, 0));
    }
}

}  // namespace attention_test
