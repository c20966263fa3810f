// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/blocked.hpp>
#include <ulysses/attention/reference.hpp>
#include <ulysses/gemm/builtin.hpp>

#include "problem.hpp"

#include <doctest/doctest.h>

using namespace attention_test;
using builtin_attention = ulysses::blocked_attention<ulysses::builtin_gemm>;

static_assert(ulysses::differentiable_attention_for<builtin_attention, float>);
static_assert(ulysses::differentiable_attention_for<builtin_attention, double>);
static_assert(ulysses::differentiable_attention_for<builtin_attention, ulysses::bf16>);
static_assert(ulysses::differentiable_attention_for<builtin_attention, ulysses::half>);
static_assert(builtin_attention::row_multiple() == 1);

TEST_CASE("blocked_attention: dk and dv are added to, and items of one head add up") {
    std::mt19937_64 random{3};
    sizes const size{.tokens = 300,
                     .keys = 300,
                     .kv_heads = 2,
                     .group = 2,
                     .dim = 8,
                     .value_dim = 8,
                     .mask = ulysses::mask::causal,
                     .rows = 300,
                     .held = 300};
    auto whole = random_problem<float>(random, size);
    builtin_attention const attention;
    whole.forward(attention);
    whole.backward(attention);
    auto const once = whole.dk.memory;
    whole.backward(attention);
    for (std::size_t i = 0; i < once.size(); ++i)
        CHECK(std::fabs(whole.dk.memory[i] - 2 * once[i]) <= 1e-4f * (1 + std::fabs(once[i])));

    auto exact = converted<double>(whole);
    exact.forward(ulysses::reference_attention{});
    exact.backward(ulysses::reference_attention{});
    auto low = item_of(whole, 0, 131, {0, 131}, order::padded);
    auto high = item_of(whole, 131, 169, {0, 300}, order::padded);
    low.forward(attention), high.forward(attention);
    low.backward(attention), high.backward(attention);
    auto const bound = bounds_of(whole);
    auto const sum = high.dk.view();
    for_each(low.dk.view(),
             [&](auto b, auto s, auto h, auto d) { sum(b, s, h, d) += low.dk.view()(b, s, h, d); });
    CHECK(largest_difference(high.dk, exact.dk) <= bound.dk);
}

TEST_CASE("blocked_attention: gradients are those of finite differences") {
    std::mt19937_64 random{5};
    auto p = random_problem<double>(random, {.tokens = 70,
                                             .keys = 70,
                                             .kv_heads = 1,
                                             .group = 2,
                                             .dim = 6,
                                             .value_dim = 4,
                                             .mask = ulysses::mask::causal,
                                             .begin = 3,
                                             .rows = 66,
                                             .held = 69,
                                             .scale = 0.5});
    builtin_attention const attention;
    auto const loss = [&] {
        p.forward(attention);
        double sum = 0;
        auto const o = p.o.view();
        for_each(o, [&](auto b, auto i, auto h, auto d) {
            sum += o(b, i, h, d) * p.dout.view()(b, i, h, d);
        });
        return sum;
    };
    p.forward(attention);
    p.backward(attention);
    auto const compare = [&](operand<double>& x, operand<double> const& gradient) {
        for (int trial = 0; trial < 40; ++trial) {
            auto const step = 1e-5;
            auto& value = x.memory[random() % x.memory.size()];
            auto const index = &value - x.memory.data();
            auto const kept = value;
            value = kept + step;
            auto const above = loss();
            value = kept - step;
            auto const below = loss();
            value = kept;
            CHECK(std::fabs(gradient.memory[at(index)] - (above - below) / (2 * step)) < 1e-8);
        }
    };
    compare(p.q, p.dq);
    compare(p.k, p.dk);
    compare(p.v, p.dv);
}

TEST_CASE_TEMPLATE("blocked_attention: large scores neither overflow nor leave the softmax", T,
                   float, double) {
    std::mt19937_64 random{9};
    auto p = random_problem<T>(random, {.tokens = 520,
                                        .keys = 520,
                                        .dim = 32,
                                        .value_dim = 8,
                                        .mask = ulysses::mask::causal,
                                        .rows = 520,
                                        .held = 520,
                                        .scale = 1000});
    for (auto& x : p.v.memory) x = T(1);
    p.forward(builtin_attention{});
    for (auto x : p.o.memory) CHECK(x == doctest::Approx(1).epsilon(1e-5));
    p.backward(builtin_attention{});
    for (auto x : p.dq.memory) CHECK(std::isfinite(x));
}

TEST_CASE("blocked_attention: a row without keys is zero with lse -inf; NaN is not hidden") {
    std::mt19937_64 random{1};
    auto p = random_problem<float>(random, {.keys = 0, .held = 0});
    p.forward(builtin_attention{});
    p.backward(builtin_attention{});
    CHECK(p.o.memory[0] == 0.0f);
    CHECK(p.lse.memory[0] == -INFINITY);
    CHECK(p.dq.memory[0] == 0.0f);
    auto nan = random_problem<float>(random, {.tokens = 2, .keys = 2, .rows = 2, .held = 2});
    nan.q.memory[1] = NAN;
    nan.forward(builtin_attention{});
    CHECK(std::isfinite(nan.o.memory[0]));
    CHECK(std::isnan(nan.o.memory[1]));
    CHECK(std::isnan(nan.lse.memory[1]));
}
