// SPDX-License-Identifier: Apache-2.0

#include <ulysses/stage/shard.hpp>

#include "../pipeline/orders.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

namespace uly = ulysses;
using namespace pipeline_test;

namespace {

/// [S, B, C], tokens first.
struct token_first {
    double* memory;
    std::array<int64_t, 3> sizes;
    static constexpr auto order = uly::axes::sbhd;
    double* data() const { return memory; }
    std::array<int64_t, 3> extents() const { return sizes; }
};

/// [B, S, C]
struct batch_first {
    double* memory;
    std::array<int64_t, 3> sizes;
    double* data() const { return memory; }
    std::array<int64_t, 3> extents() const { return sizes; }
};

}  // namespace

TEST_CASE("shard: every rank gets its tokens in its order, unshard puts each back") {
    constexpr int64_t batch = 2, channels = 3;
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        auto const ranks = static_cast<int>(1 + below(random, 8));
        auto const tokens = 1 + below(random, 30);
        auto const step = uly::sequence::of(batch, random_orders(random, tokens, ranks));
        std::vector<double> global, back(static_cast<std::size_t>(batch * tokens * channels), -1);
        for (std::size_t i = 0; i < back.size(); ++i) global.push_back(static_cast<double>(i));
        batch_first const whole{global.data(), {batch, tokens, channels}};
        batch_first const returned{back.data(), {batch, tokens, channels}};
        for (int r = 0; r < ranks; ++r) {
            auto const count = step.queries().count(r);
            std::vector<double> memory(static_cast<std::size_t>(batch * count * channels) + 1, -2);
            token_first const local{memory.data(), {count, batch, channels}};
            uly::shard(step, r, whole, local);
            for (int64_t s = 0; s < count; ++s)
                for (int64_t b = 0; b < batch; ++b)
                    for (int64_t c = 0; c < channels; ++c)
                        CHECK(memory[static_cast<std::size_t>((s * batch + b) * channels + c)] ==
                              global[static_cast<std::size_t>(
                                  (b * tokens + step.queries().position(r, s)) * channels + c)]);
            CHECK(memory.back() == -2);
            // Other ranks' places keep what they held.
            auto const before = std::count(back.begin(), back.end(), -1.0);
            uly::unshard(step, r, local, returned);
            CHECK(before - std::count(back.begin(), back.end(), -1.0) == batch * count * channels);
        }
        CHECK(back == global);
    }
}

TEST_CASE("shard: every rank gets a replicated token, unshard of any writes the same") {
    constexpr int64_t tokens = 7;
    auto const step = uly::sequence::of(1, replicated_front(3, tokens, 2));
    std::vector<double> global{0, 1, 2, 3, 4, 5, 6}, back(7, -1);
    batch_first const whole{global.data(), {1, tokens, 1}}, returned{back.data(), {1, tokens, 1}};
    std::vector<std::vector<double>> const expected{{0, 1, 2, 3, 4}, {0, 1, 2, 5, 6}};
    for (int r = 0; r < 2; ++r) {
        std::vector<double> memory(5);
        batch_first const local{memory.data(), {1, 5, 1}};
        uly::shard(step, r, whole, local);
        CHECK(memory == expected[static_cast<std::size_t>(r)]);
        uly::unshard(step, r, local, returned);
    }
    CHECK(back == global);
}

TEST_CASE("shard: extents that do not fit the step are refused, with both sides named") {
    auto const step = uly::sequence::split(2, 1, 5);
    std::vector<double> memory(100);
    auto const of = [&](int64_t tokens, int64_t channels) {
        return batch_first{memory.data(), {1, tokens, channels}};
    };
    auto const apart = batch_first{memory.data() + 50, {1, 3, 2}};
    uly::where const nowhere{};
    CHECK_THROWS_WITH_AS(
        uly::shard(step, 0, of(4, 2), apart, nowhere),
        "ulysses: shard: global: extents [batch, tokens, heads, dim] must fit the step "
        "and shape: got [1, 4, 1, 2], expected [1, 5, 1, 2]",
        uly::invalid_tensor);
    // Rank 1 holds two of the five.
    CHECK_THROWS_WITH_AS(
        uly::shard(step, 1, of(5, 2), apart, nowhere),
        "ulysses: shard: local: extents [batch, tokens, heads, dim] must fit the step "
        "and shape: got [1, 3, 1, 2], expected [1, 2, 1, 2]",
        uly::invalid_tensor);
    CHECK_THROWS_AS(uly::unshard(step, 0, of(3, 2), batch_first{memory.data() + 50, {1, 5, 3}}),
                    uly::invalid_tensor);
    CHECK_THROWS_AS(uly::unshard(step, 0, batch_first{nullptr, {1, 3, 2}}, of(5, 2)),
                    uly::invalid_tensor);
}
