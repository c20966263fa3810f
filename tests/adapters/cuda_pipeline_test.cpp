// SPDX-License-Identifier: Apache-2.0

#include "cuda_pipeline.hpp"
#include "cuda_ranks.hpp"

#include <doctest/doctest.h>

/// Pipelines over cuda_peers and the double of the CUDA runtime: what threads on the CPU compute.
namespace {

namespace uly = ulysses;
using namespace pipeline_test;
using uly::cuda_peers::fence_way;

struct way {
    std::string_view name;
    uly::cuda_peers::options given;
};
way const ways[] = {
    {"kernel, events", {}},
    {"engine, flags", {.fence = fence_way::flags, .way = uly::copy_way::engine}},
    {"engine, events", {.way = uly::copy_way::engine, .in_flight = 2}},
    {"kernel, flags, as processes", {.as_processes = true}},
};

}  // namespace

TEST_CASE("property: pipelines over cuda_peers have the bits of threads") {
    auto const before = doubles::allocated_bytes();
    constexpr std::uint64_t seeds = TEST_UNDER_SANITIZER ? 24 : 60;
    MESSAGE("seeds 1 .. " << seeds);
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        CAPTURE(seed);
        // Each number of ranks meets each way.
        constexpr int sizes[] = {4, 2, 1, 2, 4};
        auto const ranks = sizes[seed % 5];
        CAPTURE(ranks);
        auto const& [name, given] = ways[seed % 4];
        CAPTURE(name);
        auto const drawn = draw_problem(seed, ranks);
        INFO(drawn.text());
        auto const expected = results_of_threads(ranks, drawn);
        std::vector<bytes> seen(static_cast<std::size_t>(ranks));
        cuda_test::run(
            ranks,
            [&](cuda_test::ranks_type of) {
                seen[static_cast<std::size_t>(of.rank())] =
                    cuda_test::results_on_device(of, drawn);
            },
            given);
        CHECK(seen == expected);
    }
    CHECK(doubles::allocated_bytes() == before);
}
