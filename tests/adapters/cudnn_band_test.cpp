// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/sdpa_key.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <random>

namespace uly = ulysses;

TEST_CASE("cudnn: a band says what rows see, key by key, over the fewest keys") {
    std::mt19937_64 random{1};
    auto const below = [&](std::int64_t limit) {
        return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
    };
    int banded = 0, from_last = 0;
    for (int trial = 0; trial < 2000; ++trial) {
        uly::visibility rule;
        rule.mask = below(2) == 0 ? uly::mask::causal : uly::mask::full;
        rule.queries = rule.keys = 1 + below(40);
        if (below(2) == 0) rule.keys += below(10);
        if (below(2) == 0) rule.window.left = below(45);
        if (below(3) == 0) rule.window.right = below(45);
        auto const begin = below(rule.queries);
        auto const rows = 1 + below(rule.queries - begin);
        auto const seen = uly::banded_keys_of(rule, begin, rows);
        CAPTURE(trial);
        REQUIRE(seen.keys == rule.keys_of_rows(0, begin, begin + rows));
        for (std::int64_t i = 0; i < rows; ++i)
            for (auto j = seen.keys.begin; j < seen.keys.end; ++j)
                REQUIRE(seen.band.sees(i, j - seen.keys.begin, rows, seen.keys.size()) ==
                        rule.sees(0, begin + i, j));
        // cuDNN takes a left bound of 1 and more.
        REQUIRE(seen.band.left != 0);
        banded += seen.band != uly::sdpa_band{};
        from_last += seen.band.from_last;
    }
    CHECK(banded > 500);
    CHECK(from_last > 200);
}

TEST_CASE("cudnn: what one band does not say is refused") {
    uly::visibility rule{.mask = uly::mask::full, .window = {2, 2}, .queries = 4, .keys = 9};
    rule.window = {-1, 0};
    CHECK_NOTHROW(uly::banded_keys_of(rule, 0, 4));
    uly::sample_keys const samples[] = {{0, 5, 5, 0, 0}, {0, 9, 5, 0, 0}};
    rule.samples = samples;
    CHECK_THROWS_AS(uly::banded_keys_of(rule, 0, 4), uly::unsupported);
    // Queries at positions before the first key.
    uly::visibility const before{.mask = uly::mask::causal, .queries = 9, .keys = 4};
    CHECK_THROWS_AS(uly::banded_keys_of(before, 0, 9), uly::unsupported);
    CHECK_NOTHROW(uly::banded_keys_of(before, 5, 4));
}

TEST_CASE("cudnn: keys that differ in one thing are other keys, and hash apart") {
    uly::sdpa_key const base{.rows = 128, .keys = 128};
    uly::sdpa_key_hash const hash;
    auto const differs = [&](auto const& change) {
        auto other = base;
        change(other);
        CHECK_FALSE(other == base);
        CHECK(hash(other) != hash(base));
    };
    differs([](auto& k) { k.backward = true; });
    differs([](auto& k) { k.deterministic = true; });
    differs([](auto& k) { k.sinks = true; });
    differs([](auto& k) { k.type = uly::dtype::f16; });
    differs([](auto& k) { k.rows = 64; });
    differs([](auto& k) { k.scale = 0.5; });
    differs([](auto& k) { k.dropout = 0.5; });
    differs([](auto& k) { k.band.left = 3; });
    differs([](auto& k) { k.band.from_last = true; });
    differs([](auto& k) { k.dq[2] = 7; });
    differs([](auto& k) { k.bias_type = uly::dtype::f32; });
    differs([](auto& k) { k.bias_strides[1] = 7; });
    CHECK(hash(base) == hash(uly::sdpa_key{base}));
}
