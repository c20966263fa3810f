// SPDX-License-Identifier: Apache-2.0

#include "failure.hpp"

#include <ulysses/comm/serial.hpp>
#include <ulysses/train/loss.hpp>
#include <ulysses/train/mesh.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

using namespace train_test;

namespace {

constexpr auto missing = std::numeric_limits<double>::quiet_NaN();
constexpr auto infinity = std::numeric_limits<double>::infinity();

/// The mean loss over ranks with these means and counts of valid tokens; the same on each.
double mean_over(std::vector<double> const& means, std::vector<std::int64_t> const& counts) {
    double result = missing;
    pipeline_test::run_ranks(static_cast<int>(means.size()), [&](ranks_type ranks) {
        auto const r = static_cast<std::size_t>(ranks.rank());
        auto const all = uly::sum_over_ranks(ranks, uly::token_sums::of_mean(means[r], counts[r]));
        std::array bits{all.mean_loss(), -all.mean_loss()};
        ranks.all_reduce(std::span<double>(bits), uly::reduction::max);
        CHECK((bits[0] == -bits[1] || std::isnan(bits[0])));
        if (r == 0) result = all.mean_loss();
    });
    return result;
}

/// y = w x with the loss (y - t)^2; a rank's micro-batch is some of its tokens.
struct token {
    double x, t;
    bool valid;
};
struct model {
    double w = 0.75;
    uly::token_sums loss(std::span<token const> tokens) const {
        uly::token_sums sums;
        for (auto const& each : tokens)
            if (each.valid) sums += {.loss = square(w * each.x - each.t), .tokens = 1};
        return sums;
    }
    /// Of the loss sum.
    double gradient(std::span<token const> tokens) const {
        double sum = 0;
        for (auto const& each : tokens)
            if (each.valid) sum += 2 * (w * each.x - each.t) * each.x;
        return sum;
    }
    static double square(double x) { return x * x; }
};

/// 23 tokens, of which those with i % 3 == 1 and the first six do not count.
std::vector<token> all_tokens() {
    std::vector<token> all;
    for (int i = 0; i < 23; ++i) all.push_back({0.5 * i - 3, 0.25 * (i % 5), i % 3 != 1 && i >= 6});
    return all;
}

/// Contiguous shares of 4 ranks, uneven: the first has no valid token.
constexpr std::array<std::size_t, 5> shares{0, 6, 8, 17, 23};

}  // namespace

TEST_CASE("loss: golden vectors, weighted over ranks; ranks without valid tokens") {
    CHECK(mean_over({1.5, 3.25}, {3, 1}) == (3 * 1.5 + 3.25) / 4);
    CHECK(mean_over({2.0, missing}, {3, 0}) == 2.0);
    CHECK(mean_over({missing, 2.0, missing}, {0, 3, 0}) == 2.0);
    CHECK(mean_over({missing, missing}, {0, 0}) == 0);
    CHECK(std::isnan(mean_over({2.0, missing}, {3, 1})));  // but a NaN that counts is not hidden
}

TEST_CASE("loss: case 22, dp 2 sp 2, ten valid tokens of loss 1") {
    pipeline_test::run_ranks(4, [](ranks_type world) {
        uly::mesh const ranks{world, {.sp = 2, .dp_shard = 2}};
        std::int64_t const counts[] = {4, 1, 0, 5};
        auto const n = counts[world.rank()];
        auto const all =
            uly::sum_over_ranks(ranks.world(), {.loss = static_cast<double>(n),
                                                .entropy = 2.0 * static_cast<double>(n),
                                                .tokens = n,
                                                .correct = n / 2});
        CHECK(all.tokens == 10);
        CHECK(all.mean_loss() == 1);
        CHECK(all.mean_entropy() == 2);
        CHECK(all.accuracy() == 4 / 10.0);
    });
}

TEST_CASE("loss: sums are added by tokens, not averaged over micro-batches") {
    uly::token_sums step;
    step += uly::token_sums::of_mean(4.0, 1);
    step += uly::token_sums::of_mean(1.0, 3);
    step += uly::token_sums{.loss = missing, .entropy = missing, .tokens = 0};
    CHECK(step.tokens == 4);
    CHECK(step.mean_loss() == 7 / 4.0);
    CHECK(uly::token_sums{}.mean_loss() == 0);
    CHECK(uly::token_sums{}.accuracy() == 0);
}

TEST_CASE("gradient contract: case 21, sum and mean reducers equal one process") {
    auto const tokens = all_tokens();
    model const one;
    auto const sums = one.loss(tokens);
    auto const expected = one.gradient(tokens) / static_cast<double>(sums.tokens);
    REQUIRE(std::abs(expected) > 1);  // off by P would show
    pipeline_test::run_ranks(4, [&](ranks_type world) {
        uly::mesh const ranks{world, {.sp = 2, .dp_shard = 2}};
        auto const r = static_cast<std::size_t>(world.rank());
        auto const mine = std::span(tokens).subspan(shares[r], shares[r + 1] - shares[r]);
        // Two micro-batches of other sizes.
        uly::token_sums own;
        double gradient = 0;
        for (auto const part : {mine.first(1), mine.subspan(1)}) {
            own += one.loss(part);
            gradient += one.gradient(part);
        }
        auto const all = uly::sum_over_ranks(world, own);
        CHECK(all.tokens == sums.tokens);
        auto const near = [&](double got) { CHECK(std::abs(got - expected) < 1e-14 * 100); };

        auto summed = gradient;
        uly::reduce_gradients(world, std::span(&summed, 1), uly::gradient_factor(all.tokens));
        near(summed);

        // An engine's own reducer that averages over all ranks, as DistributedDataParallel does.
        auto mean = gradient;
        world.all_reduce(std::span(&mean, 1), uly::reduction::sum);
        near(mean / 4 * uly::gradient_factor(all.tokens, 4));

        // One that averages over data ranks, after a sum over a sequence's.
        auto both = gradient;
        ranks.sp().all_reduce(std::span(&both, 1), uly::reduction::sum);
        ranks.dp().all_reduce(std::span(&both, 1), uly::reduction::sum);
        near(both / 2 * uly::gradient_factor(all.tokens, 2));

        // The factor may be the upstream gradient of backward as well.
        auto before = gradient * uly::gradient_factor(all.tokens);
        uly::reduce_gradients(world, std::span(&before, 1), 1);
        near(before);
    });
}

TEST_CASE("gradient contract: a step without valid tokens changes nothing") {
    pipeline_test::run_ranks(2, [](ranks_type ranks) {
        auto const all = uly::sum_over_ranks(ranks, uly::token_sums::of_mean(missing, 0));
        CHECK(uly::gradient_factor(all.tokens) == 0);
        std::array gradients{missing, 1.0};
        uly::reduce_gradients(ranks, std::span<double>(gradients), uly::gradient_factor(0));
        CHECK(gradients == std::array{0.0, 0.0});
    });
}

TEST_CASE("loss: errors, on all ranks") {
    auto const wrong = failure_on_all(3, [](ranks_type ranks) {
        uly::sum_over_ranks(ranks, {.tokens = 4, .correct = ranks.rank() == 1 ? 5 : 0});
    });
    CHECK(wrong.code == uly::errc::invalid_call);
    CHECK(wrong.text ==
          "ulysses: sum_over_ranks: correct tokens are among the valid ones, which are not "
          "negative: 5 of 4");
    auto const factor = failure_of([] { static_cast<void>(uly::gradient_factor(-1, 0)); });
    CHECK(factor.code == uly::errc::invalid_call);
    CHECK(rule_of(factor.text) ==
          "ulysses: gradient_factor: tokens are not negative, and a reducer averages over at least "
          "1 rank: -1 tokens, averaged over 0");
}

TEST_CASE("gradient clip: the norm over a mesh is that of one process") {
    // Gradients 1 .. 6 are replicated, 7 .. 12 in shards of 1, 2 and 3.
    double squares = 0;
    for (int i = 1; i <= 12; ++i) squares += i * i;
    auto const norm = std::sqrt(squares);  // of integers: exact sums in any order
    constexpr std::array<std::size_t, 4> cut{0, 1, 3, 6};
    pipeline_test::run_ranks(3, [&](ranks_type ranks) {
        auto const r = static_cast<std::size_t>(ranks.rank());
        for (auto const limit : {5.0, 1000.0, infinity}) {
            std::array<float, 6> same{1, 2, 3, 4, 5, 6}, shards{7, 8, 9, 10, 11, 12};
            auto const own = std::span(shards).subspan(cut[r], cut[r + 1] - cut[r]);
            std::array<uly::gradient_part<float>, 2> const parts{
                {{.values = same}, {.values = own, .sharded = true}}};
            uly::gradient_clip const clip{ranks, limit};
            auto const result = clip(std::span<uly::gradient_part<float> const>(parts));
            CHECK(result.norm == norm);
            CHECK(result.finite);
            CHECK(result.factor == (limit < norm ? limit / norm : 1));
            CHECK(same[5] == static_cast<float>(6 * result.factor));
            CHECK(own[0] == static_cast<float>(static_cast<double>(7 + cut[r]) * result.factor));
        }
    });
}

TEST_CASE("gradient clip: a factor that is no normal float loses no digits") {
    std::array values{3e38f, 3e38f};
    uly::gradient_part<float> const part{.values = values};
    auto const result = uly::gradient_clip{uly::serial{}, 1e-3}(std::span(&part, 1));
    CHECK(result.factor < static_cast<double>(std::numeric_limits<float>::min()));
    CHECK(std::hypot(double{values[0]}, double{values[1]}) == doctest::Approx(1e-3).epsilon(1e-7));
}

TEST_CASE("gradient clip: what is not finite is left, on every rank alike") {
    pipeline_test::run_ranks(2, [](ranks_type ranks) {
        std::array values{3.0, ranks.rank() == 1 ? missing : 4.0};
        uly::gradient_part<double> const part{.values = values, .sharded = true};
        auto const result = uly::gradient_clip{ranks, 1.0}(std::span(&part, 1));
        CHECK(!result.finite);
        CHECK(result.factor == 1);
        CHECK(values[0] == 3);
    });
}

TEST_CASE("gradient clip: errors, on all ranks") {
    for (auto const limit : {0.0, -1.0, missing}) {
        auto const wrong = failure_on_all(2, [&](ranks_type ranks) {
            uly::gradient_clip{ranks, ranks.rank() == 0 ? 1.0 : limit};
        });
        CHECK(wrong.code == uly::errc::invalid_config);
        CHECK(wrong.text == uly::concat("ulysses: gradient_clip: the largest norm is positive: ",
                                        std::to_string(limit)));
    }
    auto const wrong = failure_on_all(2, [](ranks_type ranks) {
        uly::gradient_clip{ranks, 1.0 + ranks.rank()};
    });
    CHECK(wrong.code == uly::errc::disagreement);
    CHECK(wrong.text ==
          "ulysses: gradient_clip: every rank must have the same largest norm: rank 0 has "
          "1.000000, rank 1 has 2.000000");
}
