// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cblas.hpp>
#include <ulysses/attention/blocked.hpp>

#include "options.hpp"

#include <doctest/doctest.h>

using cblas_attention = ulysses::blocked_attention<ulysses::cblas>;

static_assert(ulysses::differentiable_attention_for<cblas_attention, float>);
static_assert(ulysses::differentiable_attention_for<cblas_attention, double>);
static_assert(cblas_attention::row_multiple() == cblas_attention::tile_rows);

TEST_CASE_TEMPLATE("blocked_attention over cblas is an attention functor", T, float, double,
                   ulysses::bf16, ulysses::half) {
    conformance::check_attention<T>(cblas_attention{}, attention_test::options_for<T>());
}

TEST_CASE("blocked_attention over cblas: a row's bits do not depend on cuts off the grid either") {
    for (auto mask : {ulysses::mask::full, ulysses::mask::causal})
        conformance::attention_detail::compare_cuts<float>(cblas_attention{},
                                                           {0, 1, 100, 256, 259, 530, 600}, mask);
}
