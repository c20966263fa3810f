// SPDX-License-Identifier: Apache-2.0

#include "../conformance/communicator.hpp"
#include "../doubles/cuda_runtime.hpp"
#include "cuda_ranks.hpp"

#include <doctest/doctest.h>

#include <chrono>
#include <string>

/// cuda_peers over a double of the CUDA runtime.
namespace {

namespace uly = ulysses;
using conformance::check_communicator;
using uly::cuda_peers::fence_way;

// What a stream waits for a rank that was in another collective call, and so has told nothing.
constexpr std::chrono::milliseconds a_second(1000);

auto ranks_of(uly::cuda_peers::options const& given) {
    return [=](int ranks, auto const& body) { cuda_test::run(ranks, body, given); };
}

}  // namespace

TEST_CASE("cuda_peers is a communicator, with fences by events") {
    auto const before = doubles::allocated_bytes();
    check_communicator(ranks_of({}), {1, 2, 4});
    CHECK(doubles::allocated_bytes() == before);
}

TEST_CASE("cuda_peers is a communicator, with fences by flags") {
    check_communicator(ranks_of({.fence = fence_way::flags, .deadline = a_second}), {2});
}

TEST_CASE("cuda_peers is a communicator where ranks reach each other as processes do") {
    auto const before = doubles::allocated_bytes();
    check_communicator(ranks_of({.as_processes = true, .deadline = a_second}), {1, 2});
    CHECK(doubles::allocated_bytes() == before);
}

TEST_CASE("cuda_peers times a silent rank out") {
    std::chrono::milliseconds const deadline(200);
    conformance::check_silence(
        [&](int ranks, auto const& body) {
            cuda_test::run(ranks, body, {}, {.deadline = deadline});
        },
        deadline, {2});
}
