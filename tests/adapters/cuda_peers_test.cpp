// SPDX-License-Identifier: Apache-2.0

#include "../conformance/communicator.hpp"
#include "../doubles/cuda_runtime.hpp"
#include "../sanitizers.hpp"
#include "cuda_ranks.hpp"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <thread>

/// cuda_peers over a double of the CUDA runtime.
namespace {

namespace uly = ulysses;
using conformance::check_communicator;
using uly::cuda_peers::fence_way;

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
    check_communicator(ranks_of({.fence = fence_way::flags}), {2});
}

TEST_CASE("cuda_peers is a communicator where ranks reach each other as processes do") {
    auto const before = doubles::allocated_bytes();
    check_communicator(ranks_of({.as_processes = true}), {1, 2});
    CHECK(doubles::allocated_bytes() == before);
}

// Under the thread sanitizer a process that fork has made may have no threads, and so no streams.
TEST_CASE("cuda_peers is a communicator of processes, which open each other's memory" *
          doctest::skip(TEST_UNDER_THREAD_SANITIZER)) {
    auto const before = doubles::allocated_bytes();
    check_communicator(
        [](int ranks, auto const& body) {
            CHECK(cuda_test::run_processes<ulysses_bench::process_ranks>(ranks, body) == "");
        },
        {1, 2, 4});
    CHECK(doubles::allocated_bytes() == before);
}

TEST_CASE("ranks in different collective calls go on with their streams in order") {
    for (auto const way : {fence_way::events, fence_way::flags}) {
        CAPTURE(way == fence_way::flags);
        cuda_test::run(
            2,
            [](cuda_test::ranks_type ranks) {
                auto const me = ranks.rank();
                auto const stream = ranks.queue().stream;
                std::array<std::byte, 4> mine{}, window_bytes{};
                std::array<std::byte, 8> all{};
                auto const window = ranks.make_window(4);
                for (int round = 0; round < 4; ++round) {
                    auto const seen = conformance::detail::outcome_of([&] {
                        if (me == round % 2)
                            ranks.fence({});
                        else
                            ranks.all_gather(mine, all);
                    });
                    conformance::expect(seen.code == uly::errc::disagreement,
                                        "ranks in different calls are a disagreement", seen.text);
                    // Rank 0 is slow to write what rank 1 reads.
                    if (me == 0)
                        doubles::enqueue(stream, [=, to = ranks.address(window, 1)] {
                            std::this_thread::sleep_for(std::chrono::milliseconds(20));
                            std::memset(to, round + 1, 4);
                        });
                    ranks.fence({});
                    cudaMemcpyAsync(window_bytes.data(), ranks.address(window, 1), 4,
                                    cudaMemcpyDefault, stream);
                    cudaStreamSynchronize(stream);
                    conformance::expect(window_bytes[3] == static_cast<std::byte>(round + 1),
                                        "a fence orders the streams of all ranks",
                                        uly::concat("rank ", me, ", round ", round));
                    ranks.fence({});
                }
            },
            {.fence = way});
    }
}

TEST_CASE("a stream does not wait for long for the flags of a rank that has left") {
    std::atomic<bool> released{false};
    cuda_test::run(2,
                   [&](cuda_test::ranks_type ranks) {
                       auto const stream = ranks.queue().stream;
                       auto const released_now = [&] {
                           while (!released) std::this_thread::yield();
                       };
                       if (ranks.rank() == 1) doubles::enqueue(stream, released_now);
                       ranks.fence({});
                       if (ranks.rank() == 1) {
                           ranks.host().leave("gone");
                           return released_now();
                       }
                       auto const begun = std::chrono::steady_clock::now();
                       auto const seen = conformance::detail::outcome_of([&] { ranks.fence({}); });
                       cudaStreamSynchronize(stream);
                       auto const waited = std::chrono::steady_clock::now() - begun;
                       released = true;
                       conformance::expect(seen.code == uly::errc::peer_failed,
                                           "a rank that leaves is told", seen.text);
                       conformance::expect(waited > std::chrono::milliseconds(900) &&
                                               waited < std::chrono::seconds(3),
                                           "flags are waited for a while, less than the deadline",
                                           std::to_string(waited.count()));
                   },
                   {.fence = fence_way::flags, .deadline = std::chrono::seconds(4)});
}

TEST_CASE("what a call that has returned moved is right, also when a rank leaves then") {
    cuda_test::run(2,
                   [&](cuda_test::ranks_type ranks) {
                       auto const stream = ranks.queue().stream;
                       auto const window = ranks.make_window(4);
                       std::array<std::byte, 4> held{};
                       if (ranks.rank() == 1)
                           doubles::enqueue(stream, [to = ranks.address(window, 0)] {
                               std::this_thread::sleep_for(std::chrono::milliseconds(50));
                               std::memset(to, 7, 4);
                           });
                       ranks.fence({});
                       if (ranks.rank() == 1) return ranks.leave("done");
                       cudaMemcpyAsync(held.data(), ranks.address(window, 0), 4, cudaMemcpyDefault,
                                       stream);
                       auto const seen = conformance::detail::outcome_of([&] { ranks.fence({}); });
                       cudaStreamSynchronize(stream);
                       conformance::expect(seen.code == uly::errc::peer_failed,
                                           "a rank that leaves is told", seen.text);
                       conformance::expect(held[3] == std::byte{7},
                                           "what had been told is waited for", "it was not");
                   },
                   {.fence = fence_way::flags});
}

TEST_CASE("a stream that waits too long for a flag is told at the next fence") {
    std::atomic<bool> released{false};
    cuda_test::run(2,
                   [&](cuda_test::ranks_type ranks) {
                       auto const stream = ranks.queue().stream;
                       if (ranks.rank() == 1)
                           doubles::enqueue(stream, [&] {
                               while (!released) std::this_thread::yield();
                           });
                       ranks.fence({});
                       if (ranks.rank() == 0) {
                           cudaStreamSynchronize(stream);
                           released = true;
                       }
                       auto const seen = conformance::detail::outcome_of([&] { ranks.fence({}); });
                       conformance::expect(
                           seen.code == uly::errc::timed_out && seen.rank == 0 &&
                               conformance::detail::contains(
                                   seen.text, "ulysses: fence: a stream must arrive within the "
                                              "deadline: rank 0 waited 30 ms for rank 1"),
                           "a stream's deadline is told on every rank", seen.text);
                   },
                   {.fence = fence_way::flags, .deadline = std::chrono::milliseconds(30)});
}

TEST_CASE("cuda_peers times a silent rank out") {
    std::chrono::milliseconds const deadline(200);
    conformance::check_silence(
        [&](int ranks, auto const& body) {
            cuda_test::run(ranks, body, {}, {.deadline = deadline});
        },
        deadline, {2});
}
