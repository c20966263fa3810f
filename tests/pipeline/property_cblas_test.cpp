// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cblas.hpp>

#include "features.hpp"

#include <doctest/doctest.h>

using namespace pipeline_test;

namespace {

using cblas_attention = ulysses::blocked_attention<ulysses::cblas>;

template <class T>
void compare_with_one_rank(std::uint64_t seed, int64_t tokens) {
    CAPTURE(seed);
    CAPTURE(tokens);
    std::mt19937_64 random{seed};
    auto const kv_heads = 1 + below(random, 2);
    auto const p = make_problem<T>(
        seed,
        {.heads = kv_heads * (1 + below(random, 3)),
         .kv_heads = kv_heads,
         .head_dim = 4 + below(random, 40),
         .value_dim = 4 + below(random, 40),
         .mask = below(random, 3) == 0 ? ulysses::mask::full : ulysses::mask::causal},
        1, tokens);
    INFO(p.text());
    auto const one = compute_alone<cblas_attention>(p);
    // Exact enough for float, and much faster than the reference at this length: in double.
    auto const exact = compute_alone<builtin_attention>(converted<double>(p));
    auto const bound = bounds_of(p, 8);
    CHECK(largest_difference(one.o, exact.o) <= bound.o);
    CHECK(largest_difference(one.lse, exact.lse) <= bound.lse);
    CHECK(largest_difference(one.dq, exact.dq) <= bound.dq);
    for (int ranks : {2, 3, 4, 8}) {
        CAPTURE(ranks);
        auto const order = random_orders(random, tokens, ranks);
        // Cuts lie on the tile grid: the functor asks for it, so that a row has the bits of one
        // rank.
        ulysses::plan moves;
        moves.rebuild(p.layer, ulysses::sequence::of(1, order), ranks, 0,
                      cblas_attention::row_multiple());
        for (int r = 0; r < ranks; ++r)
            for (auto const& item : moves.items(r))
                CHECK(item.row_begin % cblas_attention::tile_rows == 0);
        auto const many = compute<cblas_attention>(p, order);
        CHECK(same_bits(many.o, one.o));
        CHECK(same_bits(many.lse, one.lse));
        CHECK(same_bits(many.dq, one.dq));
        CHECK(largest_difference(many.dk, exact.dk) <= bound.dk);
        CHECK(largest_difference(many.dv, exact.dv) <= bound.dv);
    }
}

}  // namespace

TEST_CASE("property, CBLAS: o, lse and dq have the bits of one rank, for cuts on the tile grid") {
    constexpr int64_t lengths[] = {1, 7, 255, 256, 257, 300, 511, 700, 1024, 1300, 2000};
    MESSAGE("seeds 1 .. 11");
    std::uint64_t seed = 0;
    for (auto const tokens : lengths)
        if (++seed % 2 == 0)
            compare_with_one_rank<double>(seed, tokens);
        else
            compare_with_one_rank<float>(seed, tokens);
}

TEST_CASE("property, CBLAS: so they do under every mask and transform of scores") {
    for (int what = 0; what < feature_count; ++what) {
        auto const seed = static_cast<std::uint64_t>(100 + what);
        CAPTURE(seed);
        auto const other = feature{(what + 1 + what / 6) % feature_count};
        auto const p = problem_with<float>(seed, feature{what}, other, 520);
        INFO(p.text());
        std::mt19937_64 random{seed};
        auto const one = compute_alone<cblas_attention>(p);
        auto const exact = compute_alone<builtin_attention>(converted<double>(p));
        check_bounds(one, exact, bounds_of(p, 8));
        for (int ranks : {3, 8}) {
            CAPTURE(ranks);
            auto const many = compute<cblas_attention>(p, random_orders(random, 520, ranks));
            CHECK(same_bits(many.o, one.o));
            CHECK(same_bits(many.lse, one.lse));
            CHECK(same_bits(many.dq, one.dq));
            check_bounds(many, exact, bounds_of(p, 8));
        }
    }
}
