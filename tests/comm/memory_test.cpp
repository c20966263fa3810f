// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/serial.hpp>
#include <ulysses/comm/threads.hpp>
#include <ulysses/plan/sequence.hpp>

#include "../sanitizers.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

// A sanitizer has allocation functions of its own, and address space without end.

#if !TEST_UNDER_SANITIZER

namespace uly = ulysses;

namespace {

constexpr auto unlimited = std::numeric_limits<std::int64_t>::max();

/// How many more allocations this thread is given before one fails; one that fails is the last to.
thread_local std::int64_t allowed = unlimited;
thread_local bool refused = false;

void* given(std::size_t bytes) noexcept {
    if (allowed != unlimited && allowed-- == 0) {
        allowed = unlimited;
        refused = true;
        return nullptr;
    }
    return std::malloc(bytes == 0 ? 1 : bytes);
}

}  // namespace

// Windows are allocated aligned, and are not counted.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
    if (auto* memory = given(bytes)) return memory;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace {

struct report {
    uly::errc code = uly::errc::none;
    int rank = -2;
    std::string text;
};

/// Runs `body` with every allocation of rank 1 failing in turn, until none is left that could:
/// every rank must end with `out_of_memory` of rank 1, and the group must go on.
template <class Body>
int allocations_survived(Body const& body) {
    constexpr int ranks = 3;
    for (std::int64_t nth = 0;; ++nth) {
        CAPTURE(nth);
        report reports[ranks];
        bool struck = false;
        uly::threads::run(ranks,
                          [&](uly::threads::communicator const& group) {
                              auto& mine = reports[group.rank()];
                              if (group.rank() == 1) {
                                  refused = false;
                                  allowed = nth;
                              }
                              try {
                                  body(group);
                              } catch (uly::error const& e) {
                                  allowed = unlimited;
                                  mine = {e.code(), e.rank(), e.what()};
                              }
                              allowed = unlimited;
                              if (group.rank() == 1) struck = refused;
                              group.fence({});
                              std::int64_t one = 1;
                              group.all_reduce(std::span<std::int64_t>(&one, 1),
                                               uly::reduction::sum);
                              if (one != ranks)
                                  uly::raise(uly::errc::invalid_call, {}, "test", "sum", one);
                          },
                          {.deadline = std::chrono::seconds(20)});
        for (auto const& each : reports) {
            INFO(each.text);
            CHECK(each.code == (struck ? uly::errc::out_of_memory : uly::errc::none));
            CHECK(each.rank == (struck ? 1 : -2));
            CHECK(each.text == reports[0].text);
        }
        if (!struck) return static_cast<int>(nth);
    }
}

}  // namespace

TEST_CASE("memory: a window that one rank has no room for is out_of_memory on every rank") {
    CHECK(allocations_survived([](auto const& group) { group.make_window(64); }) > 0);
    CHECK(allocations_survived(
              [](auto const& group) { group.shared_window(uly::arena::outbox, 64); }) > 0);
}

TEST_CASE("memory: a group that one rank has no room for is out_of_memory on every rank") {
    // Rank 1 leads one of the groups, so that it makes it.
    CHECK(allocations_survived([](auto const& group) {
              auto const part = group.split(group.rank() % 2, 0);
              // Nothing more is allocated than by the split itself.
              auto const left = std::exchange(allowed, unlimited);
              part.fence({});
              allowed = left;
          }) > 3);
}

TEST_CASE("memory: a step that one rank has no room for is out_of_memory on every rank") {
    using uly::token_run;
    auto const agreed = [](auto const& group, std::vector<token_run> const& runs) {
        std::int64_t tokens = 0;
        for (auto const& run : runs) tokens += run.count;
        uly::sequence::agree(group, {.batch = 1, .tokens = tokens, .order = runs});
    };
    // Contiguous shares; orders of many runs; a stride.
    std::vector<std::vector<token_run>> few, many, striped;
    for (int r = 0; r < 3; ++r) {
        few.push_back({{4 * r, 4}});
        many.emplace_back();
        for (int i = 0; i < 6; ++i) many.back().push_back({6 * i + 2 * r, 2});
        striped.push_back({{r, 4, 3}});
    }
    for (auto const* runs : {&few, &many, &striped})
        CHECK(allocations_survived([&](auto const& group) {
                  agreed(group, (*runs)[static_cast<std::size_t>(group.rank())]);
              }) > 3);
}

TEST_CASE("memory: serial and threads::group throw what a handler of errors knows") {
    for (std::int64_t nth = 0; nth < 40; ++nth) {
        CAPTURE(nth);
        auto const code_of = [&](auto const& body) {
            refused = false;
            allowed = nth;
            auto code = uly::errc::none;
            try {
                body();
            } catch (uly::error const& e) {
                code = e.code();
            }
            allowed = unlimited;
            // Right when the error is there exactly where an allocation has failed.
            return (code == uly::errc::out_of_memory) == refused ? uly::errc::none : code;
        };
        uly::serial const alone;
        for (auto const code :
             {code_of([&] { alone.split(0, 0); }), code_of([&] { alone.make_window(64); }),
              code_of([] { uly::threads::group const two(2); })})
            CHECK(code == uly::errc::none);
    }
}

TEST_CASE(
    "memory: threads::run releases and joins the ranks it has started when one has no thread") {
    rlimit before{};
    REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
    // Address space for the program as it is and the stacks of a few threads more.
    long pages = 0;
    auto* const file = std::fopen("/proc/self/statm", "r");
    REQUIRE(file != nullptr);
    REQUIRE(std::fscanf(file, "%ld", &pages) == 1);
    std::fclose(file);
    auto limited = before;
    limited.rlim_cur = static_cast<rlim_t>(pages) * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) +
                       rlim_t{40} * 1024 * 1024;
    REQUIRE(setrlimit(RLIMIT_AS, &limited) == 0);
    uly::errc code = uly::errc::none;
    std::string text;
    auto const start = std::chrono::steady_clock::now();
    std::atomic<int> came{0}, released{0};
    try {
        uly::threads::run(64, [&](uly::threads::communicator const& ranks) {
            ++came;
            try {
                ranks.fence({});
            } catch (uly::peer_failed const&) {
                ++released;
                throw;
            }
        });
    } catch (uly::error const& e) {
        code = e.code();
        text = e.what();
    }
    REQUIRE(setrlimit(RLIMIT_AS, &before) == 0);
    INFO(text);
    CHECK(code == uly::errc::transport);
    CHECK(text.starts_with("ulysses: run: every rank must get a thread: rank "));
    CHECK(came < 64);
    CHECK(released == came);
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(60));
}

#endif
