// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/serial.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

namespace uly = ulysses;

namespace {

template <class Error, class Body>
std::string message_of(Body const& body) {
    try {
        body();
    } catch (Error const& e) {
        return e.what();
    }
    return "nothing was thrown";
}

}  // namespace

TEST_CASE("serial: one rank") {
    uly::serial const ranks;
    CHECK(ranks.rank() == 0);
    CHECK(ranks.size() == 1);
    CHECK(ranks.begin_call() == 1);
    CHECK(uly::serial(ranks).begin_call() == 2);  // a copy is the same rank of the same group
    CHECK(uly::serial{}.begin_call() == 1);       // another group is another
}

TEST_CASE("serial: a fence gives the status back") {
    uly::serial const ranks;
    uly::fence_status status;
    CHECK_NOTHROW(ranks.fence(status));
    status.fail(uly::errc::invalid_tensor, "ulysses: a: b: c");
    CHECK(message_of<uly::invalid_tensor>([&] { ranks.fence(status); }) ==
          "ulysses: a: b: c (rank 0)");
    CHECK_NOTHROW(ranks.fence({}));
}

TEST_CASE("serial: collectives on one rank") {
    uly::serial const ranks;
    std::array<double, 2> values{1.5, -2.0};
    ranks.all_reduce(std::span<double>(values), uly::reduction::sum);
    CHECK(values == std::array{1.5, -2.0});
    std::array<double, 2> all{};
    ranks.all_gather(std::as_bytes(std::span(values)), std::as_writable_bytes(std::span(all)));
    CHECK(all == values);
    ranks.all_gather({}, {});
    ranks.broadcast(std::as_writable_bytes(std::span(values)), 0);
    CHECK(values == std::array{1.5, -2.0});
    auto const half = ranks.split(3, 4);
    CHECK(half.size() == 1);
    CHECK(half.begin_call() == 1);

    CHECK(message_of<uly::invalid_call>([&] {
              ranks.all_gather(std::as_bytes(std::span(values)),
                               std::as_writable_bytes(std::span(all).first(1)));
          }) ==
          "ulysses: all_gather: all must hold one part for each rank: 8 bytes for 1 part of 16");
    CHECK(message_of<uly::invalid_call>([&] { ranks.broadcast({}, 1); }) ==
          "ulysses: broadcast: root must be a rank: root 1 of 1 rank");
}

TEST_CASE("serial: windows") {
    uly::serial const ranks;
    for (std::size_t const bytes : {0u, 1u, 64u, 1000u}) {
        auto const window = ranks.make_window(bytes);
        auto* const memory = ranks.address(window, 0);
        CHECK(reinterpret_cast<std::uintptr_t>(memory) % 64 == 0);
        if (bytes > 0) std::memset(memory, 1, bytes);
    }
    // Freed with the last copy of the handle.
    auto window = ranks.make_window(100);
    std::weak_ptr<std::byte> const memory = window.memory;
    auto copy = window;
    window = {};
    CHECK(!memory.expired());
    copy = {};
    CHECK(memory.expired());

    // Shared ones grow, and inbox and outbox never are one.
    auto const small = ranks.shared_window(uly::arena::inbox, 100);
    auto* const first = ranks.address(small, 0);
    CHECK(ranks.address(ranks.shared_window(uly::arena::inbox, 60), 0) == first);
    CHECK(ranks.address(ranks.shared_window(uly::arena::outbox, 60), 0) != first);
    auto const large = ranks.shared_window(uly::arena::inbox, 200);
    std::memset(ranks.address(large, 0), 1, 200);
    std::memset(ranks.address(small, 0), 1, 100);  // whoever holds the smaller one keeps it
    CHECK(ranks.address(ranks.shared_window(uly::arena::inbox, 100), 0) == ranks.address(large, 0));
}
