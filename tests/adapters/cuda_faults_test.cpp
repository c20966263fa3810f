// SPDX-License-Identifier: Apache-2.0

#include "../doubles/cuda_runtime.hpp"
#include "cuda_ranks.hpp"

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <thread>

/// What becomes of a group over the double of the CUDA runtime when calls of CUDA fail.
namespace {

namespace uly = ulysses;
using uly::cuda_peers::fence_way;

struct outcome {
    uly::errc code = uly::errc::none;
    std::string text{};
};

template <class Body>
outcome outcome_of(Body const& body) {
    try {
        body();
    } catch (uly::error const& e) {
        return {e.code(), e.what()};
    }
    return {};
}

bool contains(std::string const& text, std::string_view part) {
    return text.find(part) != std::string::npos;
}

bool ends_group(uly::errc code) {
    return code == uly::errc::peer_failed || code == uly::errc::timed_out ||
           code == uly::errc::transport;
}

uly::cuda_peers::options const ways[] = {
    {.way = uly::copy_way::engine, .in_flight = 2},
    {.fence = fence_way::flags},
    {.as_processes = true, .way = uly::copy_way::engine},
};

/// A group from its making to its end: windows, copies into the other rank's and fences.
void use_group(uly::threads::communicator host, cudaStream_t stream,
               uly::cuda_peers::options const& given, outcome& first, outcome& then) {
    cuda_test::ranks_type ranks;
    auto const exchange = [&](std::size_t bytes) {
        auto const window = ranks.shared_window(uly::arena::inbox, bytes);
        std::array<uly::block_copy, 2> blocks;
        for (std::size_t i = 0; i < 2; ++i) {
            blocks[i].to = ranks.address(window, 1 - ranks.rank()) + 32 * i;
            blocks[i].from = ranks.address(window, ranks.rank()) + 64 + 32 * i;
            blocks[i].extents = {1, 1, 1};
            blocks[i].row_bytes = 32;
            blocks[i].peer = 1 - ranks.rank();
        }
        uly::fence_status status;
        uly::guarded(status, [&] { uly::cuda_space::copy(ranks.queue(), blocks, 0); });
        ranks.fence(status);
    };
    first = outcome_of([&] {
        ranks = cuda_test::ranks_type(host, stream, given);
        exchange(128);
        exchange(256);
    });
    if (first.code == uly::errc::none || ends_group(first.code) || ranks == cuda_test::ranks_type{})
        return;
    // Of an error that every rank has.
    then = outcome_of([&] {
        exchange(128);
        exchange(512);
    });
}

}  // namespace

TEST_CASE("a call of CUDA that fails, whichever, is an error on every rank, and a group that has "
          "not ended goes on") {
    for (auto const& given : ways)
        for (auto const count : {1, 1000000}) {  // once, or from then on, as after a fault
            auto const before = doubles::allocated_bytes();
            auto failed = true;
            int after = 0;
            for (; failed; ++after) {
                CAPTURE(&given - ways);
                CAPTURE(count);
                CAPTURE(after);
                std::array<outcome, 2> first, then;
                cuda_test::streams const on(2);
                uly::threads::run(2,
                                  [&](uly::threads::communicator host) {
                                      auto const rank = static_cast<std::size_t>(host.rank());
                                      cuda_test::set_device(host.rank());
                                      if (rank == 1) doubles::fail_calls(after, count);
                                      use_group(host, on[host.rank()], given, first[rank],
                                                then[rank]);
                                      if (rank == 1) {
                                          failed = doubles::calls_have_failed();
                                          doubles::fail_calls(-1);
                                      }
                                      CHECK(cudaGetLastError() == cudaSuccess);
                                  },
                                  {.deadline = std::chrono::seconds(10)});
                for (std::size_t r = 0; r < 2; ++r) {
                    CAPTURE(r);
                    INFO(first[r].text);
                    INFO(then[r].text);
                    if (!failed) CHECK(first[r].code == uly::errc::none);
                    CHECK(first[r].code != uly::errc::timed_out);
                    CHECK(then[r].code != uly::errc::timed_out);
                    if (count == 1) CHECK(then[r].code == uly::errc::none);
                }
                doubles::finish();
                CHECK(doubles::allocated_bytes() == before);
                if (after > 200) break;
            }
            CHECK(after > 10);
        }
}

TEST_CASE("windows that all ranks have let go of are freed, whichever others they hold") {
    constexpr std::size_t bytes = std::size_t{1} << 20;
    for (auto const processes : {false, true}) {
        CAPTURE(processes);
        cuda_test::run(2,
                       [&](cuda_test::ranks_type ranks) {
                           auto const held = ranks.make_window(bytes);
                           auto const before = doubles::allocated_bytes();
                           for (int i = 0; i < 20; ++i) ranks.make_window(bytes);
                           ranks.host().fence({});
                           // Of two ranks; what was let go of last is told at the next window.
                           CHECK(doubles::allocated_bytes() < before + 16 * bytes);
                           ranks.host().fence({});
                       },
                       {.as_processes = processes});
    }
}

TEST_CASE("a window that there is no memory for leaves none behind") {
    for (auto const& given : ways)
        cuda_test::run(
            2,
            [](cuda_test::ranks_type ranks) {
                ranks.make_window(64);
                ranks.host().fence({});
                auto const before = doubles::allocated_bytes();
                ranks.host().fence({});
                if (ranks.rank() == 0) doubles::fail_allocation(1);
                ranks.host().fence({});
                auto const seen = outcome_of([&] { ranks.make_window(std::size_t{1} << 22); });
                CHECK(seen.code == uly::errc::out_of_memory);
                ranks.host().fence({});
                CHECK(doubles::allocated_bytes() == before);
                ranks.host().fence({});
                ranks.make_window(64);
            },
            given);
}

TEST_CASE("a stream of another device is refused on every rank") {
    cuda_test::streams const on(2);
    uly::threads::run(2, [&](uly::threads::communicator host) {
        cuda_test::set_device(0);
        auto const seen = outcome_of([&] { cuda_test::ranks_type(host, on[host.rank()]); });
        CHECK(seen.code == uly::errc::invalid_call);
        CHECK(contains(seen.text,
                       "ulysses: cuda_peers: the stream must be one of the rank's current device: "
                       "device 0 (rank 1)"));
    });
}

TEST_CASE("devices that do not reach each other are refused on every rank") {
    for (auto const processes : {false, true}) {
        CAPTURE(processes);
        doubles::set_apart(true);
        cuda_test::streams const on(2);
        uly::threads::run(2, [&](uly::threads::communicator host) {
            cuda_test::set_device(host.rank());
            auto const seen = outcome_of(
                [&] { cuda_test::ranks_type(host, on[host.rank()], {.as_processes = processes}); });
            CHECK(seen.code == uly::errc::unsupported);
            CHECK(contains(seen.text, "ulysses: cuda_peers: devices must reach each other's "
                                      "memory: "));
            CHECK(contains(seen.text, processes
                                          ? "of another process, cudaErrorPeerAccessUnsupported"
                                          : "rank 0 on device 0, rank 1 on device 1"));
            CHECK(cudaGetLastError() == cudaSuccess);
        });
        doubles::set_apart(false);
    }
}

TEST_CASE("a window is not made on another device than the rank's") {
    cuda_test::run(2, [](cuda_test::ranks_type ranks) {
        if (ranks.rank() == 0) cudaSetDevice(1);
        auto const seen = outcome_of([&] { ranks.make_window(64); });
        CHECK(seen.code == uly::errc::invalid_call);
        CHECK(contains(seen.text, "ulysses: make_window: the rank's device must be the thread's "
                                  "current one: device 1, the rank is on device 0 (rank 0)"));
        cuda_test::set_device(ranks.rank());
        ranks.make_window(64);
    });
}

TEST_CASE("a fence that one rank alone captures is an error on every rank, and the group goes on") {
    cuda_test::run(2,
                   [](cuda_test::ranks_type ranks) {
                       auto const stream = ranks.queue().stream;
                       auto const window = ranks.make_window(4);
                       for (int round = 0; round < 3; ++round) {
                           cudaGraph_t graph = nullptr;
                           if (ranks.rank() == 1)
                               cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
                           auto const seen = outcome_of([&] { ranks.fence({}); });
                           if (ranks.rank() == 1) {
                               CHECK(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
                               cudaGraphDestroy(graph);
                           }
                           CHECK(seen.code == uly::errc::disagreement);
                           CHECK(
                               contains(seen.text,
                                        "every rank must pass the same recording (1: the stream is "
                                        "captured): rank 0 has 0, rank 1 has 1"));
                           // The streams of both wait for each other as before.
                           std::array<std::byte, 4> held{};
                           if (ranks.rank() == 1)
                               doubles::enqueue(stream, [=, to = ranks.address(window, 0)] {
                                   std::this_thread::sleep_for(std::chrono::milliseconds(20));
                                   std::memset(to, round + 1, 4);
                               });
                           ranks.fence({});
                           cudaMemcpyAsync(held.data(), ranks.address(window, 0), 4,
                                           cudaMemcpyDefault, stream);
                           cudaStreamSynchronize(stream);
                           CHECK(held[3] == static_cast<std::byte>(round + 1));
                           ranks.fence({});
                       }
                   },
                   {.fence = fence_way::flags, .deadline = std::chrono::seconds(20)});
}
