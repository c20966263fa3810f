// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/reference.hpp>
#include <ulysses/comm/threads.hpp>
#include <ulysses/exchange/messages.hpp>
#include <ulysses/pipeline.hpp>
#include <ulysses/space/host.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

namespace uly = ulysses;

namespace {

/// Rank threads that cannot send messages.
struct mute_ranks {
    using space_type = uly::host_space;
    using window_type = uly::threads::communicator::window_type;
    uly::threads::communicator ranks;

    int rank() const noexcept { return ranks.rank(); }
    int size() const noexcept { return ranks.size(); }
    std::uint64_t begin_call() const { return ranks.begin_call(); }
    void fence(uly::fence_status const& status) const { ranks.fence(status); }
    window_type make_window(std::size_t bytes) const { return ranks.make_window(bytes); }
    window_type shared_window(uly::arena which, std::size_t bytes) const {
        return ranks.shared_window(which, bytes);
    }
    std::size_t shared_window_bytes(uly::arena which) const {
        return ranks.shared_window_bytes(which);
    }
    std::byte* address(window_type const& window, int rank) const {
        return ranks.address(window, rank);
    }
};
static_assert(uly::reaches_memory<mute_ranks> && !uly::sends_messages<mute_ranks>);

}  // namespace

TEST_CASE("reach: ranks that neither reach each other nor send messages say so, on every rank") {
    std::vector<std::string> texts(3);
    uly::threads::options settings;
    settings.hosts = {0, 0, 1};
    uly::threads::run(
        3,
        [&](uly::threads::communicator c) {
            uly::pipeline layer{mute_ranks{c}, uly::sequence_local{}, uly::reference_attention{},
                                uly::shape{.heads = 3, .head_dim = 2}};
            std::vector<float> memory(3 * 2, 1.0f);
            uly::token_view<float> const x(memory.data(), {1, 1, 3, 2});
            std::vector<float> out(3 * 2);
            uly::token_view<float> const o(out.data(), {1, 1, 3, 2});
            try {
                layer.attend(uly::sequence::split(3, 1, 3), x, x, x, o);
            } catch (uly::unsupported const& e) {
                texts[static_cast<std::size_t>(c.rank())] = e.what();
            }
        },
        settings);
    for (auto const& text : texts) {
        CHECK(text == texts[0]);
        CHECK(text.find("ranks must reach each other's memory or send messages: rank 0 does not "
                        "reach rank 2") != std::string::npos);
    }
}

TEST_CASE("reach: a message's operands lie one behind the other, messages on lines of their own") {
    uly::message_buffer<uly::host_space> all(3);
    CHECK(all.empty());
    CHECK(all.next(1).offset == 0);
    all.extend(1, 12);
    CHECK(all.next(1).offset == 12);
    all.extend(1, 8);
    all.extend(2, 70);
    all.reserve({});
    CHECK(all.held_bytes() >= 64 + 128);
    std::vector<int> peers;
    all.for_each([&](int peer, std::span<std::byte> bytes) {
        peers.push_back(peer);
        CHECK(reinterpret_cast<std::uintptr_t>(bytes.data()) % 64 == 0);
        CHECK(bytes.size() == (peer == 1 ? 20u : 70u));
        CHECK(bytes.data() == all.at({peer, 0}));
    });
    CHECK(peers == std::vector<int>{1, 2});
    all.clear();
    CHECK(all.empty());
}

TEST_CASE("reach: memory for messages is counted as scratch, and only where messages are sent") {
    for (bool const apart : {false, true}) {
        std::vector<std::size_t> bytes(2);
        uly::threads::options settings;
        if (apart) settings.hosts = {0, 1};
        uly::threads::run(
            2,
            [&](uly::threads::communicator c) {
                uly::pipeline layer{c, uly::sequence_local{}, uly::reference_attention{},
                                    uly::shape{.heads = 2, .head_dim = 64}};
                std::vector<float> memory(16 * 2 * 64, 1.0f), out(memory.size());
                uly::extents4 const extents{1, 16, 2, 64};
                uly::token_view<float> const x(memory.data(), extents), o(out.data(), extents);
                layer.attend(uly::sequence::split(2, 1, 32), x, x, x, o);
                bytes[static_cast<std::size_t>(c.rank())] = layer.scratch_bytes();
            },
            settings);
        // q, k and v of one head of 16 tokens go, and as many come.
        constexpr std::size_t messages = 2 * 3 * 16 * 64 * sizeof(float);
        for (auto const each : bytes) CHECK((each >= messages) == apart);
    }
}
