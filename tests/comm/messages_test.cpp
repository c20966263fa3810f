// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/threads.hpp>

#include <doctest/doctest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

/// What the conformance kit leaves to the messages of rank threads: tickets in any order, ranks that
/// finish early, memory that must not be read once its owner has left.
namespace uly = ulysses;
using group = uly::threads::communicator;
using uly::errc;

namespace {

using bytes = std::vector<std::byte>;

uly::threads::options with_deadline(int milliseconds) {
    uly::threads::options settings;
    settings.deadline = std::chrono::milliseconds(milliseconds);
    return settings;
}

group::ticket_type send(group const& g, int peer, bytes const& data) {
    uly::outgoing const out{peer, data};
    return g.start({&out, 1}, {});
}
group::ticket_type receive(group const& g, int peer, bytes& data) {
    uly::incoming const in{peer, data};
    return g.start({}, {&in, 1});
}

struct report {
    errc code = errc::none;
    int rank = -2;
    std::string text;
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

double seconds_since(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

TEST_CASE("messages: tickets are waited for in any order") {
    for (int const order : {0, 1, 2})
        uly::threads::run(
            2,
            [&](group g) {
                auto const peer = 1 - g.rank();
                bytes const first(100, std::byte{1}), second(70000, std::byte{2});
                bytes got_first(100), got_second(70000);
                if (order == 2) {  // what is sent is waited for before what comes
                    auto const out = send(g, peer, second);
                    auto const in = receive(g, peer, got_second);
                    g.wait(out);
                    g.wait(in);
                } else {
                    uly::outgoing const out[] = {{peer, first}, {peer, second}};
                    uly::incoming const in[] = {{peer, got_first}, {peer, got_second}};
                    auto const a = g.start({out, 1}, {in, 1});
                    auto const b = g.start({out + 1, 1}, {in + 1, 1});
                    auto const turned = order == 1 && g.rank() == 0;
                    g.wait(turned ? b : a);
                    g.wait(turned ? a : b);
                    if (got_first != first) throw std::runtime_error("the first is wrong");
                }
                if (got_second != second) throw std::runtime_error("the second is wrong");
            },
            with_deadline(20000));
}

TEST_CASE("messages: a ticket is good once, and in its own group") {
    std::array<report, 3> seen;
    uly::threads::run(1, [&](group g) {
        bytes const data(8);
        bytes got(8);
        auto const once = [&] {
            uly::outgoing const out{0, data};
            uly::incoming const in{0, got};
            return g.start({&out, 1}, {&in, 1});
        };
        auto const used = once();
        g.wait(used);
        auto const open = once();
        seen[0] = report_of([&] { g.wait(used); });
        auto const other = g.split(0, 0);
        seen[1] = report_of([&] { other.wait(open); });
        g.wait(open);
        seen[2] = report_of([&] { g.wait({}); });
    });
    for (auto const& each : seen) {
        CHECK(each.code == errc::invalid_call);
        CHECK(each.text.find("a ticket is waited for once, in its group") != std::string::npos);
    }
}

TEST_CASE("messages: sizes that differ and peers that are no ranks") {
    std::vector<report> seen(2);
    uly::threads::run(2, [&](group g) {
        for (int const peer : {-1, 2}) {
            auto const refused = report_of([&] { send(g, peer, {}); });
            if (refused.code != errc::invalid_call) throw std::runtime_error("no rank, accepted");
        }
        bytes const data(16);
        bytes got(15);
        seen[static_cast<std::size_t>(g.rank())] = report_of([&] {
            if (g.rank() == 0)
                g.wait(send(g, 1, data));
            else
                g.wait(receive(g, 0, got));
        });
    });
    for (auto const& each : seen) {
        CHECK(each.code == errc::disagreement);
        CHECK(each.text ==
              "ulysses: start: both ends of a message must name its size: rank 0 sends 16 bytes, "
              "rank 1 expects 15");
    }
}

TEST_CASE("messages: others go on when a rank has finished; who waits for it is told at once") {
    auto const start = std::chrono::steady_clock::now();
    report seen;
    CHECK_THROWS_AS(uly::threads::run(
                        4,
                        [&](group g) {
                            if (g.rank() >= 2) return;
                            bytes const data(64, std::byte{7});
                            bytes got(64);
                            std::this_thread::sleep_for(std::chrono::milliseconds(50));
                            g.wait(g.rank() == 0 ? send(g, 1, data) : receive(g, 0, got));
                            if (g.rank() == 1 && got != data)
                                throw std::runtime_error("wrong bytes");
                            if (g.rank() != 0) return;
                            seen = report_of([&] { g.wait(receive(g, 3, got)); });
                            throw uly::peer_failed("done");
                        },
                        with_deadline(20000)),
                    uly::peer_failed);
    CHECK(seen.code == errc::peer_failed);
    CHECK(seen.rank == 3);
    CHECK(seen.text == "ulysses: fence: a rank left the group: rank 3: it has finished");
    CHECK(seconds_since(start) < 10);
}

TEST_CASE("messages: the deadline is one for all that a ticket waits for") {
    std::vector<report> seen(4);
    auto const body = [&](group g) {
        bytes const data(4);
        bytes got(12);
        if (g.rank() > 0) {
            std::this_thread::sleep_for(std::chrono::milliseconds(150 * g.rank()));
            seen[static_cast<std::size_t>(g.rank())] = report_of([&] { g.wait(send(g, 0, data)); });
            return;
        }
        auto const part = [&](std::size_t at) { return std::span(got).subspan(4 * at, 4); };
        uly::incoming const in[] = {{1, part(0)}, {2, part(1)}, {3, part(2)}};
        seen[0] = report_of([&] { g.wait(g.start({}, in)); });
    };
    uly::threads::run(4, body, with_deadline(220));
    CHECK(seen[0].code == errc::timed_out);
    CHECK(seen[0].text.find("waited 220 ms for rank ") != std::string::npos);
}

TEST_CASE("messages: what a rank has shown is not read once it has left") {
    // Ranks leave at random moments, their memory freed as they go: for the sanitizers.
    for (std::uint64_t seed = 1; seed <= 30; ++seed) {
        auto const body = [&](group g) {
            std::mt19937_64 random{seed * 8 + static_cast<std::uint64_t>(g.rank())};
            for (int round = 0; round < 20; ++round) {
                auto data = std::make_unique<bytes>(1 + random() % 50000);
                std::vector<std::unique_ptr<bytes>> got;
                std::vector<uly::outgoing> out;
                std::vector<uly::incoming> in;
                for (int peer = 0; peer < g.size(); ++peer) {
                    out.push_back({peer, std::span(*data).first(1)});
                    got.push_back(std::make_unique<bytes>(1));
                    in.push_back({peer, *got.back()});
                }
                auto const ticket = g.start(out, in);
                if (random() % 40 == 0) {
                    g.leave("at random");
                    throw std::runtime_error("left");
                }
                auto const more = random() % 40 != 1;
                g.wait(ticket);
                if (!more) return;
            }
        };
        CHECK_NOTHROW([&] {
            try {
                uly::threads::run(4, body, with_deadline(20000));
            } catch (uly::error const&) {}
        }());
    }
}

TEST_CASE("threads: a rank that has finished releases its peers in groups split off, too") {
    auto const start = std::chrono::steady_clock::now();
    std::vector<report> seen(3);
    uly::threads::run(
        3,
        [&](group g) {
            auto const part = g.split(g.rank() == 2, 0);  // 0 and 1, 2 alone
            auto const nested = part.split(0, -part.rank());
            if (g.rank() == 1) return;
            if (g.rank() == 0) seen[0] = report_of([&] { nested.fence({}); });
            if (g.rank() == 2) seen[2] = report_of([&] { nested.fence({}); });
        },
        with_deadline(20000));
    CHECK(seen[0].code == errc::peer_failed);
    CHECK(seen[2].code == errc::none);
    CHECK(seconds_since(start) < 10);
}

TEST_CASE("threads: after ranks met in different calls the next right one succeeds") {
    uly::threads::run(2, [&](group g) {
        uly::fence_status status;
        if (g.rank() == 0) status.call = g.begin_call();
        auto const apart = report_of([&] {
            std::int64_t value = 0;
            if (g.rank() == 0)
                g.fence(status);
            else
                g.all_reduce(std::span(&value, 1), uly::reduction::sum);
        });
        if (apart.code != errc::disagreement) throw std::runtime_error("no disagreement");
        status.call = g.begin_call();
        g.fence(status);
    });
}

TEST_CASE("threads: all_reduce of other operations names them") {
    std::vector<report> seen(2);
    uly::threads::run(2, [&](group g) {
        float value = 0;
        seen[static_cast<std::size_t>(g.rank())] = report_of([&] {
            g.all_reduce(std::span(&value, 1),
                         g.rank() == 0 ? uly::reduction::sum : uly::reduction::max);
        });
    });
    for (auto const& each : seen)
        CHECK(
            each.text ==
            "ulysses: all_reduce: every rank must pass the same operation and type: rank 0 passes "
            "sum of 4-byte floating-point numbers, rank 1 max of 4-byte floating-point numbers");
}

TEST_CASE("threads: a window that was refused keeps no memory") {
    std::weak_ptr<std::byte> made;
    uly::threads::run(2, [&](group g) {
        g.set_window_maker([&made, rank = g.rank()](std::size_t) {
            std::shared_ptr<std::byte> part;
            if (rank == 0) {
                part = {static_cast<std::byte*>(::operator new(64, std::align_val_t{64})),
                        [](std::byte* each) { ::operator delete(each, std::align_val_t{64}); }};
                made = part;
            }
            return part;
        });
        auto const refused = report_of([&] { g.make_window(64); });
        if (refused.code != errc::out_of_memory) throw std::runtime_error("not refused");
        if (g.rank() == 0 && !made.expired()) throw std::runtime_error("memory is kept");
    });
}

TEST_CASE(
    "threads: the largest deadline there is does not overflow, and silence names who is silent") {
    uly::threads::options forever;
    forever.deadline = std::chrono::milliseconds::max();
    CHECK_NOTHROW(uly::threads::run(
        3, [](group g) { g.fence({}); }, forever));
    std::vector<report> seen(3);
    uly::threads::run(
        3,
        [&](group g) {
            if (g.rank() == 2) {
                std::this_thread::sleep_for(std::chrono::milliseconds(200));
                seen[2] = report_of([&] { g.fence({}); });
                return;
            }
            seen[static_cast<std::size_t>(g.rank())] = report_of([&] { g.fence({}); });
        },
        with_deadline(60));
    for (auto const& each : seen) {
        CHECK(each.code == errc::timed_out);
        CHECK(each.text.ends_with("silent ranks: 2"));
    }
}
