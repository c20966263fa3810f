// SPDX-License-Identifier: Apache-2.0

#include "failure.hpp"
#include "tiny_model.hpp"

#include <cmath>
#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <vector>

using namespace train_test;

namespace {

/// Of the ranks' first, and the same on all.
curve curve_on(uly::parallel_config const& parallel, int64_t epochs,
               uly::evaluation evaluates = uly::evaluation::sharded, bool balance = false) {
    std::vector<curve> all(static_cast<std::size_t>(parallel.ranks()));
    pipeline_test::run_ranks(static_cast<int>(parallel.ranks()), [&](ranks_type world) {
        all[static_cast<std::size_t>(world.rank())] =
            curve_of(world, parallel, epochs, evaluates, balance);
    });
    for (auto const& each : all) {
        CHECK(each.losses == all[0].losses);
        CHECK(each.norms == all[0].norms);
        CHECK(each.held_out == all[0].held_out);
    }
    return all[0];
}

void check_equal(curve const& a, curve const& b) {
    REQUIRE(a.losses.size() == b.losses.size());
    for (std::size_t i = 0; i < a.losses.size(); ++i) {
        CHECK(std::abs(a.losses[i] - b.losses[i]) <= 1e-9);
        CHECK(std::abs(a.norms[i] - b.norms[i]) <= 1e-9);
    }
    CHECK(a.tokens == b.tokens);
    CHECK(std::abs(a.held_out - b.held_out) <= 1e-9);
    CHECK(a.held_out_tokens == b.held_out_tokens);
}

/// Tokens of a sample that are predicted: those behind the first, but for masked ones.
int64_t predicted(std::vector<text_sample> const& samples) {
    int64_t count = 0;
    for (auto const& each : samples)
        for (std::size_t t = 1; t < each.labels.size(); ++t)
            count += each.labels[t] != uly::ignored_label;
    return count;
}

}  // namespace

TEST_CASE("session: losses are the same however the ranks are divided, at equal tokens") {
    auto const alone = curve_on({}, 2);
    // Two epochs of 59 samples, 8 an update.
    REQUIRE(alone.losses.size() == 16);
    CHECK(alone.losses.back() < 0.8 * alone.losses.front());
    CHECK(std::accumulate(alone.tokens.begin(), alone.tokens.end(), int64_t{0}) ==
          2 * predicted(text_samples(59)));
    CHECK(alone.held_out_tokens == predicted(text_samples(13, 1000)));
    CHECK(*std::ranges::max_element(alone.norms) > 1);  // clipped
    CHECK(*std::ranges::min_element(alone.norms) < 1);  // and not
    for (uly::parallel_config const parallel : {uly::parallel_config{.sp = 2},
                                                {.sp = 4},
                                                {.sp = 2, .dp_shard = 2},
                                                {.dp_replicate = 2, .dp_shard = 2},
                                                {.sp = 4, .dp_replicate = 2}}) {
        CAPTURE(parallel.sp);
        CAPTURE(parallel.data_ranks());
        check_equal(curve_on(parallel, 2), alone);
    }
}
