// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/serial.hpp>
#include <ulysses/comm/threads.hpp>

#include "../sanitizers.hpp"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace uly = ulysses;
using group = uly::threads::communicator;
using uly::errc;
using uly::fence_status;
using uly::reduction;
using uly::threads::run;

namespace {

constexpr int group_sizes[] = {1, 2, 3, 4, 8};

std::size_t at(int index) { return static_cast<std::size_t>(index); }

/// Ends a rank's test; `run` passes the text on.
void require(bool right, std::string const& text) {
    if (!right) throw std::runtime_error(text);
}

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

/// What one rank saw of an error.
struct report {
    errc code = errc::none;
    int rank = -2;
    std::string text = "nothing was thrown";
};

template <class Body>
report report_of(Body const& body) {
    try {
        body();
    } catch (uly::error const& e) {
        return {e.code(), e.rank(), e.what()};
    }
    return {};
}

/// Runs `body` on every rank, which must all throw alike, and then checks that the group still
/// works.
template <class Body>
report same_error(int ranks, Body const& body) {
    std::vector<report> reports(at(ranks));
    run(ranks, [&](group g) {
        reports[at(g.rank())] = report_of([&] { body(g); });
        g.fence({});
        std::int64_t one = 1;
        g.all_reduce(std::span(&one, 1), reduction::sum);
        require(one == g.size(), "the group does not work after an error");
    });
    for (auto const& each : reports) {
        CHECK(each.code == reports[0].code);
        CHECK(each.rank == reports[0].rank);
        CHECK(each.text == reports[0].text);
    }
    return reports[0];
}

template <class T>
bool same_bits(std::vector<T> const& a, std::vector<T> const& b) {
    return a.size() == b.size() &&
           (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

}  // namespace

// fence -------------------------------------------------------------------------------------------

TEST_CASE("threads: ranks in different collective calls are told so, whatever the two are") {
    using call = std::function<void(group)>;
    struct {
        char const* name;
        call make;
    } const calls[] = {
        {"fence", [](group g) { g.fence({}); }},
        {"make_window", [](group g) { g.make_window(8); }},
        {"all_reduce",
         [](group g) {
             double x = 1;
             g.all_reduce(std::span(&x, 1), reduction::sum);
         }},
        {"all_gather",
         [](group g) {
             std::vector<std::byte> part(8), all(8 * at(g.size()));
             g.all_gather(part, all);
         }},
        {"broadcast",
         [](group g) {
             std::vector<std::byte> data(8);
             g.broadcast(data, 0);
         }},
        {"split", [](group g) { g.split(0, 0); }},
    };
    for (auto const& most : calls)
        for (auto const& other : calls) {
            if (&most == &other) continue;
            auto const seen =
                same_error(3, [&](group g) { g.rank() == 1 ? other.make(g) : most.make(g); });
            CHECK(seen.code == errc::disagreement);
            CHECK(seen.rank == 1);
            CHECK(contains(seen.text,
                           uly::concat("rank 0 is in ", most.name, ", rank 1 in ", other.name)));
        }
}

// failures ----------------------------------------------------------------------------------------

TEST_CASE("threads: a rank that throws releases the others at once") {
    for (int const ranks : {2, 3, 4, 8})
        for (int const culprit : {0, ranks - 1}) {
            CAPTURE(ranks);
            CAPTURE(culprit);
            std::vector<report> reports(at(ranks));
            auto const start = std::chrono::steady_clock::now();
            auto const thrown = report_of([&] {
                run(ranks, [&](group g) {
                    g.fence({});
                    if (g.rank() == culprit)
                        uly::raise(errc::invalid_shape, {}, "engine", "mine", 5);
                    reports[at(g.rank())] = report_of([&] { g.fence({}); });
                    // The group is gone for good, whatever is called.
                    double x = 1;
                    for (auto const& again :
                         {report_of([&] { g.fence({}); }), report_of([&] { g.make_window(8); }),
                          report_of([&] { g.split(0, 0); }),
                          report_of([&] { g.all_reduce(std::span(&x, 1), reduction::sum); }),
                          report_of([&] { g.broadcast({}, 0); }),
                          report_of([&] { g.all_gather({}, {}); })})
                        if (again.code != errc::peer_failed || again.rank != culprit)
                            reports[at(g.rank())].text = "a later call: " + again.text;
                });
            });
            // Far below the deadline of 600 s, far above what a loaded machine takes.
            CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(60));
            CHECK(thrown.code == errc::invalid_shape);  // the cause, not what followed from it
            CHECK(thrown.text == "ulysses: engine: mine: 5");
            for (int r = 0; r < ranks; ++r) {
                if (r == culprit) continue;
                CHECK(reports[at(r)].code == errc::peer_failed);
                CHECK(reports[at(r)].rank == culprit);
                CHECK(reports[at(r)].text ==
                      uly::concat("ulysses: fence: a rank left the group: rank ", culprit,
                                  ": ulysses: engine: mine: 5"));
            }
        }
}

TEST_CASE("threads: run nests what is not ours in peer_failed, naming the rank") {
    auto const check = [](auto const& body, std::string const& what, auto const& is_original) {
        bool nested = false;
        try {
            run(3, body);
            FAIL("nothing was thrown");
        } catch (uly::peer_failed const& e) {
            CHECK(e.rank() == 1);
            CHECK(std::string(e.what()) == "ulysses: run: a rank threw: rank 1: " + what);
            try {
                std::rethrow_if_nested(e);
            } catch (...) {
                nested = is_original();
            }
        }
        CHECK(nested);
    };
    check(
        [](group g) {
            if (g.rank() == 1) throw std::out_of_range("mine");
            g.fence({});
        },
        "mine",
        [] {
            try {
                throw;
            } catch (std::out_of_range const& e) {
                return std::string(e.what()) == "mine";
            } catch (...) {
                return false;
            }
        });
    check(
        [](group g) {
            if (g.rank() == 1) throw 17;
            g.fence({});
        },
        "unknown exception",
        [] {
            try {
                throw;
            } catch (int value) {
                return value == 17;
            } catch (...) {
                return false;
            }
        });
    CHECK_THROWS_AS(run(1, [](group) { throw std::runtime_error("alone"); }), uly::peer_failed);
}

TEST_CASE(
    "threads: silence ends in timed_out, which names the silent ranks, and the group with it") {
    uly::threads::group const owner(4, {.deadline = std::chrono::milliseconds(200)});
    std::vector<report> reports(4);
    std::atomic<int> done{0};
    {
        std::vector<std::jthread> threads;
        for (int r = 0; r < 4; ++r)
            threads.emplace_back([&, r] {
                auto const g = owner.handle(r);
                if (r == 2)
                    while (done < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                reports[at(r)] = report_of([&] { g.fence({}); });
                ++done;
            });
    }
    for (auto const& each : reports) {
        INFO(each.text);
        CHECK(each.code == errc::timed_out);
        CHECK(each.text == reports[0].text);
        CHECK(contains(each.text,
                       "ulysses: fence: every rank must arrive within the deadline: rank "));
        CHECK(contains(each.text, " waited 200 ms, silent ranks:"));
        // On a loaded machine another one may also have been late.
        auto const silent = each.text.substr(each.text.find("silent ranks:") + 13) + " ";
        CHECK(contains(silent, " 2 "));
    }
}

TEST_CASE("threads: a rank of an engine's own threads leaves by a call") {
    uly::threads::group const owner(3);
    std::vector<report> reports(3);
    {
        std::vector<std::jthread> threads;
        for (int r = 0; r < 3; ++r)
            threads.emplace_back([&, r] {
                auto const g = owner.handle(r);
                reports[at(r)] = report_of([&] { g.fence({}); });
                if (r == 1)
                    g.leave("no more work");
                else
                    reports[at(r)] = report_of([&] { g.fence({}); });
            });
    }
    CHECK(reports[1].code == errc::none);
    for (int r : {0, 2}) {
        CHECK(reports[at(r)].code == errc::peer_failed);
        CHECK(reports[at(r)].text == "ulysses: fence: a rank left the group: rank 1: no more work");
    }
}

TEST_CASE("threads: groups and handles that cannot be") {
    CHECK_THROWS_AS(uly::threads::group(0), uly::invalid_call);
    CHECK_THROWS_AS(run(-1, [](group) {}), uly::invalid_call);
    uly::threads::group const two(2);
    CHECK(two.size() == 2);
    CHECK_THROWS_AS(two.handle(2), uly::invalid_call);
    CHECK_THROWS_AS(two.handle(-1), uly::invalid_call);
}

TEST_CASE("threads: a handle that names no group says so, whatever is called") {
    group const nobody;
    CHECK(nobody.size() == 0);
    std::array<std::byte, 4> data{};
    double x = 1;
    std::vector<std::function<void()>> const calls{
        [&] { nobody.begin_call(); },
        [&] { nobody.fence({}); },
        [&] { nobody.make_window(8); },
        [&] { nobody.shared_window(uly::arena::inbox, 8); },
        [&] { nobody.shared_window_bytes(uly::arena::inbox); },
        [&] { nobody.close(); },
        [&] { nobody.all_reduce(std::span(&x, 1), reduction::sum); },
        [&] { nobody.all_gather(data, data); },
        [&] { nobody.broadcast(data, 0); },
        [&] { nobody.split(0, 0); },
        [&] { nobody.wait(nobody.start({}, {})); },
        [&] { nobody.leave("x"); },
        [&] { nobody.finish(); },
    };
    for (std::size_t i = 0; i < calls.size(); ++i) {
        CAPTURE(i);
        auto const seen = report_of(calls[i]);
        CHECK(seen.code == errc::invalid_call);
        CHECK(seen.text ==
              "ulysses: threads::communicator: a handle must name a group: it was made "
              "without one");
    }
}

TEST_CASE(
    "threads: what a rank shows stays while it is read, even when the group fails meanwhile") {
    // A rank that leaves a call by an error frees its operand at once; the address sanitizer sees a
    // slower rank that still reads it.
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
        CAPTURE(seed);
        uly::threads::group const owner(3);
        std::vector<report> reports(3);
        {
            std::vector<std::jthread> threads;
            for (int r = 0; r < 3; ++r)
                threads.emplace_back([&, r] {
                    auto const g = owner.handle(r);
                    reports[at(r)] = report_of([&] {
                        for (;;) {
                            std::vector<std::int64_t> values(20000, r);
                            g.all_reduce(std::span(values), reduction::sum);
                            require(values[7] == 3, "a wrong sum");
                            std::vector<std::int64_t> all(60000);
                            g.all_gather(std::as_bytes(std::span(values)),
                                         std::as_writable_bytes(std::span(all)));
                            g.broadcast(std::as_writable_bytes(std::span(values)), 1);
                        }
                    });
                });
            std::this_thread::sleep_for(std::chrono::microseconds(500 + 37 * (seed % 20)));
            owner.handle(2).leave("from outside");
        }
        for (auto const& each : reports) CHECK(each.code == errc::peer_failed);
    }
}

// reductions --------------------------------------------------------------------------------------

// What the concept asks for, conformance_test.cpp checks; these numbers are more than that.
TEST_CASE("threads: all_reduce combines small integers too") {
    using T = std::int8_t;
    for (int const ranks : group_sizes)
        for (int const count : {0, 1, 2, 3, 7, 100, 1025})  // also fewer than ranks
            for (auto const op : {reduction::sum, reduction::min, reduction::max}) {
                CAPTURE(ranks);
                CAPTURE(count);
                std::vector<std::vector<T>> values(at(ranks), std::vector<T>(at(count)));
                std::uint64_t const seed = at(1000 * ranks + count);
                CAPTURE(seed);
                std::mt19937_64 random{seed};
                for (auto& each : values)
                    for (auto& x : each) x = static_cast<T>(static_cast<int>(random() % 25) - 12);
                auto expected = values[0];
                for (std::size_t i = 0; i < expected.size(); ++i)
                    for (std::size_t r = 1; r < values.size(); ++r) {
                        auto const x = values[r][i];
                        if (op == reduction::sum) expected[i] = static_cast<T>(expected[i] + x);
                        if (op == reduction::min) expected[i] = std::min(expected[i], x);
                        if (op == reduction::max) expected[i] = std::max(expected[i], x);
                    }
                run(ranks, [&](group g) { g.all_reduce(std::span(values[at(g.rank())]), op); });
                for (auto const& each : values) CHECK(same_bits(each, expected));
            }
}

TEST_CASE("threads: sizes and arguments that differ are the same error on every rank") {
    auto const reduce = same_error(4, [](group g) {
        std::vector<float> values(g.rank() == 2 ? 4 : 3);
        g.all_reduce(std::span(values), reduction::sum);
    });
    CHECK(reduce.code == errc::disagreement);
    CHECK(reduce.rank == 2);
    CHECK(reduce.text ==
          "ulysses: all_reduce: every rank must pass as many bytes: rank 0 passes 12, rank 2 16");
    auto const gather = same_error(4, [](group g) {
        std::vector<std::byte> part(g.rank() == 3 ? 5 : 4), all(4 * part.size());
        g.all_gather(part, all);
    });
    CHECK(gather.code == errc::disagreement);
    CHECK(gather.text ==
          "ulysses: all_gather: every rank must pass as many bytes: rank 0 passes 4, rank 3 5");
    auto const room = same_error(4, [](group g) {  // on one rank only
        std::vector<std::byte> part(4), all(g.rank() == 1 ? 12 : 16);
        g.all_gather(part, all);
    });
    CHECK(room.code == errc::invalid_call);
    CHECK(room.rank == 1);
    CHECK(room.text == "ulysses: all_gather: all must hold one part for each rank: 12 bytes for 4 "
                       "parts of 4 (rank 1)");
    auto const broadcast = same_error(3, [](group g) {
        std::vector<std::byte> data(g.rank() == 0 ? 4 : 8);
        g.broadcast(data, 1);
    });
    CHECK(broadcast.code == errc::disagreement);
    CHECK(broadcast.rank == 1);
    for (int const root : {-1, 3}) {
        auto const outside = same_error(3, [&](group g) {
            std::vector<std::byte> data(4);
            g.broadcast(data, g.rank() == 2 ? root : 0);
        });
        CHECK(outside.code == errc::invalid_call);
        CHECK(outside.text == uly::concat("ulysses: broadcast: root must be a rank: root ", root,
                                          " of 3 ranks (rank 2)"));
    }
    auto const roots = same_error(3, [](group g) {
        std::vector<std::byte> data(4);
        g.broadcast(data, g.rank() == 2 ? 1 : 0);
    });
    CHECK(roots.code == errc::disagreement);
    CHECK(roots.text ==
          "ulysses: broadcast: every rank must pass the same root: rank 0 passes 0, rank 2 1");
}

// split -------------------------------------------------------------------------------------------

TEST_CASE("threads: a failure reaches the groups that were split, and those split from them") {
    for (bool const nested : {false, true}) {
        CAPTURE(nested);
        std::vector<report> reports(4);
        auto const start = std::chrono::steady_clock::now();
        auto const thrown = report_of([&] {
            run(4, [&](group g) {
                // Ranks 0, 1, 2 are one group and rank 3 another, of one.
                auto part = g.split(g.rank() / 3, 0);
                if (nested) part = part.split(0, 0);
                g.fence({});  // nobody is on the way any more
                if (g.rank() == 0) uly::raise(errc::invalid_call, {}, "engine", "mine", 1);
                reports[at(g.rank())] = report_of([&] {
                    do part.fence({});
                    while (std::chrono::steady_clock::now() - start < std::chrono::seconds(60));
                });
            });
        });
        CHECK(thrown.code == errc::invalid_call);
        CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(60));
        for (int r = 1; r < 4; ++r) {
            CHECK(reports[at(r)].code == errc::peer_failed);
            CHECK(reports[at(r)].rank == 0);
        }
    }
}

// windows -----------------------------------------------------------------------------------------

TEST_CASE("threads: a window lives until the last rank lets go") {
    run(3, [](group g) {
        auto window = g.make_window(64);
        std::weak_ptr<std::byte> const mine = window->memory[at(g.rank())];
        g.address(window, g.rank())[0] = static_cast<std::byte>(g.rank());
        g.fence({});
        // Rank 0 lets go first; the others still reach its part.
        if (g.rank() == 0) window.reset();
        g.fence({});
        if (g.rank() == 0) require(!mine.expired(), "freed under the others");
        if (g.rank() != 0)
            require(g.address(window, 0)[0] == std::byte{0}, "rank 0's bytes are gone");
        g.fence({});
        window.reset();
        g.fence({});
        require(mine.expired(), "kept after the last one let go");
    });
}

TEST_CASE("threads: shared windows grow, are two, and are let go by close") {
    run(3, [](group g) {
        auto const inbox = g.shared_window(uly::arena::inbox, 100);
        auto const outbox = g.shared_window(uly::arena::outbox, 50);
        for (int r = 0; r < 3; ++r)
            require(g.address(inbox, r) != g.address(outbox, r), "one arena for both");
        std::memset(g.address(inbox, (g.rank() + 1) % 3), g.rank(), 100);
        g.fence({});
        require(g.shared_window(uly::arena::inbox, 64) == inbox, "a smaller one is another");
        require(g.shared_window(uly::arena::inbox, 100) == inbox, "an equal one is another");
        auto large = g.shared_window(uly::arena::inbox, 1000);
        require(large != inbox, "it has not grown");
        require(g.shared_window(uly::arena::inbox, 100) == large, "it has shrunk");
        require(g.shared_window(uly::arena::outbox, 10) == outbox, "the other one has changed");
        std::memset(g.address(large, (g.rank() + 2) % 3), 1, 1000);
        // Whoever holds the old one may still use it.
        require(g.address(inbox, g.rank())[99] == static_cast<std::byte>((g.rank() + 2) % 3),
                "the old one is gone");
        std::weak_ptr<std::byte> const memory = large->memory[at(g.rank())];
        large.reset();
        g.fence({});
        require(!memory.expired(), "the group has let go by itself");
        g.fence({});
        g.close();
        g.fence({});
        require(memory.expired(), "close has not let go");
        require(g.shared_window(uly::arena::inbox, 8) != nullptr, "none after close");
    });
}

TEST_CASE("threads: two groups side by side keep their windows and counts apart") {
    uly::threads::group const a(2), b(2);
    auto const fault = [&](int rank) -> std::string {
        auto const x = a.handle(rank), y = b.handle(1 - rank);
        auto const in_a = x.shared_window(uly::arena::inbox, 64),
                   in_b = y.shared_window(uly::arena::inbox, 64);
        for (int round = 0; round < 50; ++round) {
            x.address(in_a, 1 - x.rank())[0] = std::byte{1};
            y.address(in_b, 1 - y.rank())[0] = std::byte{2};
            x.fence({});
            if (x.address(in_a, x.rank())[0] != std::byte{1}) return "another group's bytes in a";
            y.fence({});
            if (y.address(in_b, y.rank())[0] != std::byte{2}) return "another group's bytes in b";
            x.fence({});  // b is read before it is written again
        }
        return y.begin_call() == 1 && x.begin_call() == 1 ? "" : "call counts are shared";
    };
    std::string faults[2];
    {
        std::jthread const other([&] { faults[1] = fault(1); });
        faults[0] = fault(0);
    }
    CHECK(faults[0] == "");
    CHECK(faults[1] == "");
}

TEST_CASE("threads: windows of different sizes are the same error on every rank") {
    auto const seen = same_error(3, [](group g) { g.make_window(g.rank() == 1 ? 128 : 64); });
    CHECK(seen.code == errc::disagreement);
    CHECK(seen.rank == 1);
    CHECK(seen.text ==
          "ulysses: make_window: every rank must pass as many bytes: rank 0 passes 64, rank 1 128");
    // One rank's shared window has to grow, the other's not: that rank is in another call.
    auto const growing = same_error(2, [](group g) {
        g.shared_window(uly::arena::inbox, 64);
        if (g.rank() == 0) g.shared_window(uly::arena::inbox, 128);
        g.fence({});
    });
    CHECK(growing.code == errc::disagreement);
    CHECK(contains(growing.text, "rank 0 is in make_window, rank 1 in fence"));
}

TEST_CASE("threads: an engine's own memory for windows, also in groups that are split off") {
    std::atomic<int> made{0}, given_back{0};
    auto const counting = [&](std::size_t bytes) {
        ++made;
        return std::shared_ptr<std::byte>(
            static_cast<std::byte*>(::operator new (bytes, std::align_val_t{64})),
            [&](std::byte* part) {
                ++given_back;
                ::operator delete (part, std::align_val_t{64});
            });
    };
    run(2, [&](group g) {
        if (g.rank() == 0) g.set_window_maker(counting);
        auto window = g.make_window(256);
        require(made == 1 && given_back == 0, "rank 0 alone makes its part so");
        auto const child = g.split(0, -g.rank());
        child.make_window(64);
        child.fence({});
        require(made == 2, "a group split off makes windows otherwise");
        window.reset();
        g.fence({});
    });
    CHECK(given_back == 2);
}

TEST_CASE("threads: memory for windows that cannot be used is the same error on every rank") {
    auto const none = same_error(3, [](group g) {
        if (g.rank() == 1)
            g.set_window_maker([](std::size_t) { return std::shared_ptr<std::byte>(); });
        g.make_window(128);
    });
    CHECK(none.code == errc::out_of_memory);
    CHECK(none.rank == 1);
    static std::array<std::byte, 256> memory;
    auto const crooked = same_error(2, [](group g) {
        if (g.rank() == 0)
            g.set_window_maker([](std::size_t) {
                auto const begin = reinterpret_cast<std::uintptr_t>(memory.data());
                return std::shared_ptr<std::byte>(memory.data() + (65 - begin % 64), [](auto*) {});
            });
        g.make_window(64);
    });
    CHECK(crooked.code == errc::invalid_call);
    CHECK(contains(crooked.text,
                   "make_window: a part must be aligned to 64: address modulo 64 is 1"));
}

#if !TEST_UNDER_SANITIZER
TEST_CASE("threads: a window that one rank has no memory for is out_of_memory on every rank") {
    auto const seen = same_error(3, [](group g) { g.make_window(std::size_t{1} << 47); });
    CHECK(seen.code == errc::out_of_memory);
    CHECK(seen.rank == 0);
    CHECK(seen.text.starts_with("ulysses: "));
    CHECK(contains(seen.text, "140737488355328"));  // what was asked for
}
#endif

TEST_CASE("threads: a window that no memory holds is out_of_memory, also where sizes overflow") {
    for (auto const bytes : {std::size_t{1} << 60, std::numeric_limits<std::size_t>::max()}) {
        auto const seen = same_error(3, [=](group g) { g.make_window(bytes); });
        CHECK(seen.code == errc::out_of_memory);
        CHECK(contains(seen.text, uly::concat(bytes, " bytes")));
        CHECK_THROWS_AS(uly::serial{}.make_window(bytes), uly::out_of_memory);
    }
}

TEST_CASE("threads: a deadline of any number is over at some time, and not before it began") {
    using std::chrono::milliseconds;
    auto const now = std::chrono::steady_clock::now();
    CHECK(uly::detail::end_of(milliseconds(-1)) >= now);
    CHECK(uly::detail::end_of(milliseconds::min()) >= now);
    CHECK(uly::detail::end_of(milliseconds::max()) > now + std::chrono::hours(24));
}

TEST_CASE("threads: a rank whose body returns releases those that still wait for it") {
    CHECK_THROWS_WITH_AS(uly::threads::run(3,
                                           [](group g) {
                                               g.fence({});
                                               if (g.rank() != 1) g.fence({});
                                           }),
                         "ulysses: fence: a rank left the group: rank 1: it has finished",
                         uly::peer_failed);
}

TEST_CASE("threads: ranks that return at different times after their last call are well") {
    for (int round = 0; round < 100; ++round)
        uly::threads::run(3, [&](group g) {
            double x[] = {1.0};
            g.all_reduce(std::span<double>(x), uly::reduction::sum);
            auto const half = g.split(g.rank() % 2, 0);
            if (g.rank() == 1) return;
            half.fence({});
            half.fence({});
        });
}

TEST_CASE("threads: all_reduce compares operation and type") {
    auto const seen = same_error(2, [](group g) {
        double x[] = {1.0};
        g.all_reduce(std::span<double>(x),
                     g.rank() == 0 ? uly::reduction::sum : uly::reduction::max);
    });
    CHECK(seen.code == errc::disagreement);
}
