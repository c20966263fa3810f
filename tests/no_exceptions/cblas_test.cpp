// SPDX-License-Identifier: Apache-2.0

#include "../pipeline/harness.hpp"

#include <ulysses/adapters/cblas.hpp>

#include <doctest/doctest.h>

using namespace pipeline_test;
namespace uly = ulysses;

TEST_CASE("no exceptions: attention over a BLAS lies near the reference") {
    using attention = uly::blocked_attention<uly::cblas>;
    auto const p = make_problem<float>(
        1, {.heads = 3, .head_dim = 8, .value_dim = 6, .mask = uly::mask::causal}, 1, 300);
    auto const exact = compute_alone<uly::reference_attention>(converted<double>(p));
    auto const bound = bounds_of(p, 2);
    auto const found = compute(p, equal_shares(300, 2), {}, attention{uly::cblas{}});
    CHECK(largest_difference(found.o, exact.o) <= bound.o);
    CHECK(largest_difference(found.lse, exact.lse) <= bound.lse);
    CHECK(largest_difference(found.dq, exact.dq) <= bound.dq);
    CHECK(largest_difference(found.dk, exact.dk) <= bound.dk);
    CHECK(largest_difference(found.dv, exact.dv) <= bound.dv);
}
