// SPDX-License-Identifier: Apache-2.0

#include "six_steps.hpp"

#include <doctest/doctest.h>

using namespace pipeline_test;

namespace {

double loss_of(six_problem<double> const& p, orders const& order) {
    auto const y = six_steps(p, order, false).y;
    double sum = 0;
    for (std::size_t i = 0; i < y.memory.size(); ++i) sum += y.memory[i] * p.dy.memory[i];
    return sum;
}

/// Central differences of step h: off by h^2 times a third derivative, and by the loss's rounding
/// over h.
void check_gradient(six_problem<double>& p, orders const& order, std::vector<double>& values,
                    std::vector<double> const& gradient) {
    REQUIRE(values.size() == gradient.size());
    constexpr double h = 1e-5;
    for (std::size_t i = 0; i < values.size(); ++i) {
        CAPTURE(i);
        auto const kept = values[i];
        values[i] = kept + h;
        auto const above = loss_of(p, order);
        values[i] = kept - h;
        auto const below = loss_of(p, order);
        values[i] = kept;
        CHECK(std::fabs(gradient[i] - (above - below) / (2 * h)) <
              1e-7 * (1 + std::fabs(gradient[i])));
    }
}

}  // namespace

TEST_CASE(
    "gradients: dx and every weight and bias are those of finite differences, at 1 and 3 ranks") {
    for (auto const keep : {ulysses::keep::exchanged, ulysses::keep::local, ulysses::keep::nothing})
        for (int ranks : {1, 3}) {
            CAPTURE(ranks);
            CAPTURE(static_cast<int>(keep));
            // Heads 4/2 on three ranks: cut heads, shared key-value heads.
            six_problem<double> p(7,
                                  {.heads = 4,
                                   .kv_heads = 2,
                                   .head_dim = 3,
                                   .value_dim = 2,
                                   .mask = ulysses::mask::causal,
                                   .keep = keep},
                                  2, 7, 5);
            auto const order = zigzag(7, ranks);
            auto const result = six_steps(p, order);
            check_gradient(p, order, p.x.memory, result.dx.memory);
            check_gradient(p, order, p.parameters, result.gradients);
        }
}
