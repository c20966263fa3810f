// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cblas.hpp>

#include "blocked_checks.hpp"

using namespace attention_test;
using cblas_attention = ulysses::blocked_attention<ulysses::cblas>;

static_assert(ulysses::differentiable_attention_for<cblas_attention, float>);
static_assert(ulysses::differentiable_attention_for<cblas_attention, double>);
static_assert(cblas_attention::row_multiple() == cblas_attention::tile_rows);

TEST_CASE_TEMPLATE("blocked_attention over cblas: within rounding of the reference", T, float,
                   double, ulysses::bf16, ulysses::half) {
    compare_with_reference<cblas_attention, T>();
}

TEST_CASE_TEMPLATE("blocked_attention over cblas: a row's bits do not depend on cuts on the grid",
                   T, float, double, ulysses::bf16) {
    constexpr auto r = cblas_attention::tile_rows;
    for (auto mask : {ulysses::mask::full, ulysses::mask::causal}) {
        compare_cuts<cblas_attention, T>({0, r, 3 * r - 37}, mask);
        compare_cuts<cblas_attention, T>({0, 2 * r, 2 * r + 1}, mask);
    }
}

TEST_CASE("blocked_attention over cblas: nor on cuts off the grid") {
    for (auto mask : {ulysses::mask::full, ulysses::mask::causal})
        compare_cuts<cblas_attention, float>({0, 1, 100, 256, 259, 530, 600}, mask);
}
