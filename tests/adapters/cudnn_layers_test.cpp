// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/sdpa_attention.hpp>

#include "../doubles/sdpa.hpp"
#include "../pipeline/features.hpp"

/// A functor that plans, as the one over cuDNN does, over a double of its plans.

using namespace pipeline_test;

namespace {

using planned_attention = ulysses::sdpa_attention<sdpa_double>;

/// Whether cuDNN's functor has it, of what can be compared.
bool has(feature what) { return what != feature::dropout && what != feature::holes; }

/// Layers that ask for one and the other.
template <class Attention>
void check_pair(Attention const& attention, int one, int other, std::vector<int> const& sizes) {
    if (!has(static_cast<feature>(one)) || !has(static_cast<feature>(other))) return;
    constexpr std::uint64_t seed = 1;
    auto const p =
        problem_with<float>(seed, static_cast<feature>(one), static_cast<feature>(other));
    INFO(p.text());
    auto const exact = compute_alone<ulysses::reference_attention>(converted<double>(p));
    std::mt19937_64 random{seed};
    for (auto const ranks : sizes) {
        CAPTURE(ranks);
        check_bounds(compute(p, random_orders(random, p.tokens, ranks), {}, attention), exact,
                     bounds_of(p, ranks));
    }
}

}  // namespace

TEST_CASE("a functor that plans computes what a layer asks for, on any number of ranks") {
    sdpa_double engine;
    planned_attention const attention(engine);
    for (int one = 0; one < feature_count; ++one)
        for (int other = one; other < feature_count; ++other)
            check_pair(attention, one, other, {1, 3});
}

TEST_CASE("a functor that plans shares plans between steps of lengths close by") {
    sdpa_double engine;
    planned_attention const rounding(engine, {.round_lengths = true});
    for (int one = 0; one < feature_count; ++one)
        for (int other = one; other < feature_count; ++other) check_pair(rounding, one, other, {2});
    auto const made = [](bool rounds) {
        sdpa_double counted;
        planned_attention const attention(counted, {.round_lengths = rounds});
        for (int64_t tokens = 65; tokens <= 128; tokens += 7)
            compute(make_problem<float>(1, {.heads = 1, .head_dim = 4}, 1, tokens),
                    equal_shares(tokens, 1), {}, attention);
        return counted.plans();
    };
    CHECK(made(false) == 30);  // forward, backward, and the sum beside it, for each length
    CHECK(made(true) < 14);    // sums are of exact lengths
}

TEST_CASE(
    "a functor that plans refuses before anything moves, and asks for its workspace exactly") {
    sdpa_double engine;
    planned_attention const attention(engine);
    auto p = make_problem<float>(1, {.heads = 2, .head_dim = 4}, 1, 9);
    p.layer.logits.sinks = true;
    p.sinks = {1, 2};
    ulysses::threads::run(2, [&](ulysses::threads::communicator ranks) {
        ulysses::pipeline layer{ranks, ulysses::sequence_local{}, attention, p.layer};
        auto const step = p.step(equal_shares(p.tokens, 2));
        local_problem<float> local(p, step, ranks.rank());
        std::vector<double> const doubles{1, 2};
        local.logits.sinks = doubles;
        auto const before = local.o;
        auto const refused = outcome_of(
            [&] { layer.attend(step, local.q, local.k, local.v, local.o, local.logits); });
        CHECK(refused.code == ulysses::errc::unsupported);
        CHECK(refused.text.find("sinks and slopes are float32: float64") != std::string::npos);
        CHECK(same_bits(local.o, before));
        local.logits.sinks = p.sinks;
        CHECK_NOTHROW(layer.attend(step, local.q, local.k, local.v, local.o, local.logits));
    });
}
