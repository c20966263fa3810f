#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/thread_fence.hpp>
#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

/// Messages between rank threads: the sender shows its memory, the receiver copies it.
namespace ulysses::inline ULYSSES_ABI::threads::detail {

/// *Thread safety*: `start(rank, ...)` and `wait(rank, ...)` by the thread of that rank.
class thread_post {
   public:
    using ticket = std::size_t;

    thread_post(int size, breakable_barrier& barrier)
        : barrier_(barrier),
          size_(static_cast<std::size_t>(size)),
          channels_(size_ * size_),
          desks_(size_) {}

    /// *Throws* `invalid_call` for a peer that is no rank; `out_of_memory`, on every rank, when there is
    /// none for the lists; the error the group has failed with.
    ticket start(int rank, std::span<outgoing const> out, std::span<incoming const> in) {
        barrier_.expect_unbroken();
        for (auto const& each : out) expect_rank(each.peer);
        for (auto const& each : in) expect_rank(each.peer);
        ticket started = 0;
        fence_status status;
        guarded(status, [&] { started = posted(rank, out, in); });
        if (status.code != errc::none) barrier_.fail(status.code, status.text, rank);
        barrier_.expect_unbroken();
        return started;
    }

    /// Receives, then waits until what was sent has been received. *Throws* `invalid_call` for a ticket
    /// that is not open; `disagreement`, on every rank, when sizes differ; `timed_out`, on every rank,
    /// when a peer is silent; the error the group has failed with.
    void wait(int rank, ticket which) {
        auto& groups = desks_[static_cast<std::size_t>(rank)].groups;
        if (which >= groups.size() || !groups[which].open)
            raise(errc::invalid_call, {}, "wait", "a ticket is waited for once", "ticket ", which);
        auto& group = groups[which];
        for (auto const& each : group.awaited) {
            auto& way = channel(each.peer, rank);
            std::span<std::byte const> data;
            barrier_.await(
                [&] {
                    auto const* const sent = way.find(each.number);
                    if (sent != nullptr) data = sent->data;
                    return sent != nullptr;
                },
                [&] { return lost(each.peer); },
                [&] { return silence(rank, "a message of rank ", each.peer); });
            receive(rank, each, data);
            barrier_.change([&] { way.find(each.number)->taken = true; });
        }
        for (auto const& each : group.sent) {
            auto& way = channel(rank, each.peer);
            barrier_.await(
                [&] { return way.find(each.number)->taken; }, [&] { return lost(each.peer); },
                [&] { return silence(rank, "its message being read by rank ", each.peer); });
            barrier_.change([&] { way.erase(each.number); });
        }
        group.open = false;
    }

    /// Waits in a failed group until nobody reads what a rank has shown.
    void await_readers() const {
        for (auto const& desk : desks_)
            while (desk.reading) std::this_thread::yield();
    }

   private:
    struct letter {
        std::uint64_t number = 0;
        std::span<std::byte const> data{};
        bool taken = false;
    };
    /// From one rank to another; under the barrier's lock.
    struct channel_state {
        std::uint64_t sent = 0, awaited = 0;
        std::vector<letter> letters;

        letter* find(std::uint64_t number) {
            for (auto& each : letters)
                if (each.number == number) return &each;
            return nullptr;
        }
        void erase(std::uint64_t number) {
            std::erase_if(letters, [&](letter const& each) { return each.number == number; });
        }
    };
    struct sent_letter {
        int peer = 0;
        std::uint64_t number = 0;
    };
    struct awaited_letter {
        int peer = 0;
        std::uint64_t number = 0;
        std::span<std::byte> data{};
    };
    struct message_group {
        bool open = false;
        std::vector<sent_letter> sent;
        std::vector<awaited_letter> awaited;
    };
    /// One rank's groups of messages in flight.
    struct desk_state {
        std::vector<message_group> groups;
        std::atomic<bool> reading{false};  ///< this rank reads another's data
    };

    ticket posted(int rank, std::span<outgoing const> out, std::span<incoming const> in) {
        auto& groups = desks_[static_cast<std::size_t>(rank)].groups;
        auto const free =
            std::find_if(groups.begin(), groups.end(), [](auto const& g) { return !g.open; });
        auto& group = free == groups.end() ? groups.emplace_back() : *free;
        group.sent.clear();
        group.awaited.clear();
        group.sent.reserve(out.size());
        group.awaited.reserve(in.size());
        group.open = true;
        barrier_.change([&] {
            for (auto const& each : out) {
                auto& way = channel(rank, each.peer);
                way.letters.push_back({way.sent, each.data, false});
                group.sent.push_back({each.peer, way.sent++});
            }
            for (auto const& each : in)
                group.awaited.push_back({each.peer, channel(each.peer, rank).awaited++, each.data});
        });
        return static_cast<ticket>(&group - groups.data());
    }

    channel_state& channel(int from, int to) {
        return channels_[static_cast<std::size_t>(from) * size_ + static_cast<std::size_t>(to)];
    }

    void expect_rank(int peer) const {
        if (peer < 0 || static_cast<std::size_t>(peer) >= size_)
            raise(errc::invalid_call, {}, "start", "a message is for a rank and from one", "peer ",
                  peer, " of ", size_, " ranks");
    }

    /// What a peer has finished without will not come.
    bool lost(int peer) const { return barrier_.broken() || barrier_.finished(peer); }

    std::string silence(int rank, std::string_view what, int peer) const {
        return concat("ulysses: wait: every rank must answer within the deadline: rank ", rank,
                      " waited ", barrier_.deadline().count(), " ms for ", what, peer);
    }

    void receive(int rank, awaited_letter const& to, std::span<std::byte const> from) {
        if (from.size() != to.data.size()) {
            barrier_.fail(errc::disagreement,
                          concat("ulysses: start: both ends of a message must name its size: rank ",
                                 to.peer, " sends ", from.size(), " bytes, rank ", rank,
                                 " expects ", to.data.size()),
                          rank);
            barrier_.expect_unbroken();
        }
        auto& reading = desks_[static_cast<std::size_t>(rank)].reading;
        // Before the look at the failure, as `await_readers` looks the other way round.
        reading = true;
        if (!barrier_.broken() && !from.empty())
            std::memcpy(to.data.data(), from.data(), from.size());
        reading = false;
        barrier_.expect_unbroken();
    }

    breakable_barrier& barrier_;
    std::size_t size_;
    std::vector<channel_state> channels_;
    std::vector<desk_state> desks_;
};

}  // namespace ulysses::inline ULYSSES_ABI::threads::detail
