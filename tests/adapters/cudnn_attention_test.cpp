// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/sdpa_attention.hpp>

#include <doctest/doctest.h>

#include "../conformance/attention.hpp"
#include "../doubles/sdpa.hpp"

namespace uly = ulysses;

using planned = uly::sdpa_attention<sdpa_double>;
static_assert(uly::differentiable_attention_for<planned, uly::bf16>);
static_assert(uly::prepared_attention_for<planned, uly::half>);
static_assert(!uly::attention_for<planned, double>);  // its engine takes none
static_assert(!uly::prepared_attention_for<uly::reference_attention, float>);

TEST_CASE("cudnn: the functor over a double of its plans is attention") {
    sdpa_double engine;
    uly::sdpa_attention const attention(engine);
    conformance::check_attention<float>(attention, {.problems = 30, .longest_cut = 200});
    // All ways of saying what rows see have been gone.
    CHECK(engine.has_planned("from the first"));
    CHECK(engine.has_planned("from the last"));
    CHECK(engine.has_planned("of varied lengths"));
}
