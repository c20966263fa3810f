// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/reference.hpp>

#include "problem.hpp"

#include <doctest/doctest.h>

using namespace attention_test;

static_assert(ulysses::differentiable_attention_for<ulysses::reference_attention, float>);
static_assert(ulysses::differentiable_attention_for<ulysses::reference_attention, double>);
static_assert(ulysses::differentiable_attention_for<ulysses::reference_attention, ulysses::bf16>);
static_assert(ulysses::differentiable_attention_for<ulysses::reference_attention, ulysses::half>);

namespace {

sizes small(ulysses::mask mask, order layout) {
    return {.batch = 2,
            .tokens = 9,
            .keys = 9,
            .kv_heads = 2,
            .group = 3,
            .dim = 5,
            .value_dim = 3,
            .mask = mask,
            .begin = 2,
            .rows = 6,
            .held = mask == ulysses::mask::full ? 9 : 8,
            .scale = -0.7,
            .layout = layout};
}

}  // namespace

TEST_CASE("reference_attention: forward is the formula") {
    for (auto mask : {ulysses::mask::full, ulysses::mask::causal})
        for (auto layout :
             {order::heads_first, order::tokens_first, order::padded, order::batch_inner}) {
            std::mt19937_64 random{7};
            auto p = random_problem<double>(random, small(mask, layout));
            INFO(p.size.text());
            p.forward(ulysses::reference_attention{});
            auto const o = p.o.view();
            for_each(o, [&](auto b, auto i, auto h, auto d) {
                auto const row = probabilities(p, b, i, h);
                double expected = 0;
                for (std::size_t j = 0; j < row.size(); ++j)
                    expected +=
                        row[j] * p.v.view()(b, static_cast<int64_t>(j), h / p.size.group, d);
                CHECK(o(b, i, h, d) == doctest::Approx(expected).epsilon(1e-13));
                double first = 0;  // p_i0 = exp(s_i0 - lse_i)
                for (int64_t x = 0; x < p.size.dim; ++x)
                    first += p.q.view()(b, i, h, x) * p.k.view()(b, 0, h / p.size.group, x);
                auto const lse = p.lse.view()(b, i, h, 0);
                CHECK(std::exp(p.size.scale * first - lse) ==
                      doctest::Approx(row[0]).epsilon(1e-13));
            });
        }
}

TEST_CASE("reference_attention: gradients are those of finite differences") {
    for (auto mask : {ulysses::mask::full, ulysses::mask::causal}) {
        std::mt19937_64 random{11};
        auto p = random_problem<double>(random, small(mask, order::tokens_first));
        ulysses::reference_attention const attention;
        auto const loss = [&] {
            p.forward(attention);
            double sum = 0;
            auto const o = p.o.view();
            for_each(o, [&](auto b, auto i, auto h, auto d) {
                sum += o(b, i, h, d) * p.dout.view()(b, i, h, d);
            });
            return sum;
        };
        p.backward(attention);
        auto const compare = [&](operand<double>& x, operand<double> const& gradient) {
            auto const view = x.view();
            for_each(view, [&](auto b, auto s, auto h, auto d) {
                auto const step = 1e-5;
                auto const kept = view(b, s, h, d);
                view(b, s, h, d) = kept + step;
                auto const above = loss();
                view(b, s, h, d) = kept - step;
                auto const below = loss();
                view(b, s, h, d) = kept;
                auto const measured = (above - below) / (2 * step);
                CHECK(std::fabs(gradient.view()(b, s, h, d) - measured) < 1e-8);
            });
        };
        compare(p.q, p.dq);
        compare(p.k, p.dk);
        compare(p.v, p.dv);
    }
}

TEST_CASE("reference_attention: a row without keys is zero with lse -inf") {
    std::mt19937_64 random{1};
    auto p = random_problem<float>(random, {.keys = 0, .held = 0});
    p.forward(ulysses::reference_attention{});
    CHECK(p.o.memory[0] == 0.0f);
    CHECK(p.lse.memory[0] == -INFINITY);
}

TEST_CASE("reference_attention: wrong operands are refused before anything is written") {
    std::mt19937_64 random{1};
    ulysses::reference_attention const attention;
    auto const fresh = [&] {
        return random_problem<float>(random, small(ulysses::mask::causal, order::padded));
    };
    auto few_keys = fresh();
    few_keys.k.extents[1] = few_keys.v.extents[1] = 7;  // rows 2-7 see keys 0-7
    CHECK_THROWS_AS(few_keys.forward(attention), ulysses::invalid_tensor);
    auto heads = fresh();
    heads.k.extents[2] = heads.v.extents[2] = 4;  // 6 query heads
    CHECK_THROWS_AS(heads.forward(attention), ulysses::invalid_tensor);
    auto strided = fresh();
    strided.v.strides[3] = 2;
    CHECK_THROWS_AS(strided.forward(attention), ulysses::invalid_tensor);
    auto gradient = fresh();
    gradient.dk.extents[3] = 4;
    CHECK_THROWS_AS(gradient.backward(attention), ulysses::invalid_tensor);
    auto unsaid = fresh();
    unsaid.size.present.assign(3, 1);
    CHECK_THROWS_AS(unsaid.forward(attention), ulysses::invalid_tensor);
    auto cramped = fresh();
    cramped.prepare(attention);
    auto call = cramped.call();
    call.workspace = call.workspace.first(64);
    CHECK_THROWS_AS(attention.forward<float>(call, cramped.q.view(), cramped.k.view(),
                                             cramped.v.view(), cramped.o.view(),
                                             cramped.lse.view()),
                    ulysses::invalid_call);
    CHECK(std::isnan(cramped.o.memory[0]));
}
