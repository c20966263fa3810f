#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/collectives.hpp>
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
#include <vector>

/// Messages between rank threads: the sender shows its memory, the receiver copies it.
namespace ulysses::inline ULYSSES_ABI::threads::detail {

/// *Thread safety*: `start(rank, ...)` and `wait(rank, ...)` by the thread of that rank.
class thread_post {
   public:
    /// Names one group of messages of one rank.
    struct ticket {
        thread_post const* post = nullptr;
        std::size_t index = 0;
        std::uint64_t use = 0;  ///< which of the groups that have had this index
    };

    thread_post(int size, breakable_barrier& barrier)
        : barrier_(barrier),
          size_(static_cast<std::size_t>(size)),
          channels_(size_ * size_),
          desks_(size_) {}

    /// *Throws* `invalid_call` for a peer that is no rank, before anything is sent; `out_of_memory`
    /// on every rank; the error the group failed with.
    ticket start(int rank, std::span<outgoing const> out, std::span<incoming const> in) {
        barrier_.expect_unbroken();
        auto const ranks = static_cast<int>(size_);
        for (auto const& each : out) ulysses::detail::expect_peer(each.peer, ranks);
        for (auto const& each : in) ulysses::detail::expect_peer(each.peer, ranks);
        ticket started;
        fence_status status;
        guarded(status, [&] { started = posted(rank, out, in); });
        if (status.code != errc::none) barrier_.fail(status.code, status.text, rank);
        barrier_.expect_unbroken();
        return started;
    }

    /// Returns once all messages of the ticket have been received, at both ends; receives what
    /// arrives for other tickets of the rank meanwhile, so that they may be waited for in any order.
    /// *Throws* `invalid_call` for a ticket that has been waited for or is of another group;
    /// `disagreement` on every rank when the ends of a message differ in size; `peer_failed`,
    /// `timed_out`.
    void wait(int rank, ticket const& which) {
        auto& own = expect_open(rank, which);
        auto const until = barrier_.until();
        for (bool complete = false; !complete;) {
            arrival next;
            barrier_.await(
                [&] {
                    complete = is_complete(rank, own);
                    if (!complete) next = next_arrival(rank);
                    return complete || next.to != nullptr;
                },
                [&] { return loses(rank, own); }, [&] { return silence(rank, own); }, until);
            if (!complete) receive(rank, next);
        }
        barrier_.change([&] {
            for (auto const& each : own.sent) channel(rank, each.peer).erase(each.number);
        });
        own.open = false;
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
        bool received = false;
    };
    struct message_group {
        bool open = false;
        std::uint64_t use = 0;
        std::vector<sent_letter> sent;
        std::vector<awaited_letter> awaited;
    };
    /// One rank's groups of messages in flight.
    struct desk_state {
        std::vector<message_group> groups;
        std::atomic<bool> reading{false};  ///< this rank reads another's data
    };
    /// A letter that is there, and where it is awaited.
    struct arrival {
        awaited_letter* to = nullptr;
        std::span<std::byte const> data{};
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
        ++group.use;
        barrier_.change([&] {
            for (auto const& each : out) {
                auto& way = channel(rank, each.peer);
                way.letters.push_back({way.sent, each.data, false});
                group.sent.push_back({each.peer, way.sent++});
            }
            for (auto const& each : in)
                group.awaited.push_back(
                    {each.peer, channel(each.peer, rank).awaited++, each.data, false});
        });
        return {this, static_cast<std::size_t>(&group - groups.data()), group.use};
    }

    message_group& expect_open(int rank, ticket const& which) {
        auto& groups = desks_[static_cast<std::size_t>(rank)].groups;
        ulysses::detail::expect_open(which.post == this && which.index < groups.size() &&
                                         groups[which.index].open &&
                                         groups[which.index].use == which.use,
                                     which);
        return groups[which.index];
    }

    channel_state& channel(int from, int to) {
        return channels_[static_cast<std::size_t>(from) * size_ + static_cast<std::size_t>(to)];
    }

    // Under the barrier's lock.

    bool is_taken(int rank, sent_letter const& sent) {
        return channel(rank, sent.peer).find(sent.number)->taken;
    }
    bool is_complete(int rank, message_group const& own) {
        return std::all_of(own.awaited.begin(), own.awaited.end(),
                           [](auto const& each) { return each.received; }) &&
               std::all_of(own.sent.begin(), own.sent.end(),
                           [&](auto const& each) { return is_taken(rank, each); });
    }
    arrival next_arrival(int rank) {
        for (auto& group : desks_[static_cast<std::size_t>(rank)].groups)
            for (auto& each : group.awaited)
                if (group.open && !each.received)
                    if (auto const* const there = channel(each.peer, rank).find(each.number))
                        return {&each, there->data};
        return {};
    }
    /// A peer that the group still waits for, -1 for none.
    template <class Wanted>
    int pending_peer(int rank, message_group const& own, Wanted const& wanted) {
        for (auto const& each : own.awaited)
            if (!each.received && wanted(each.peer)) return each.peer;
        for (auto const& each : own.sent)
            if (!is_taken(rank, each) && wanted(each.peer)) return each.peer;
        return -1;
    }
    /// What a peer has finished without will not come.
    bool loses(int rank, message_group const& own) {
        if (barrier_.broken()) return true;
        auto const gone =
            pending_peer(rank, own, [&](int peer) { return barrier_.finished(peer); });
        if (gone >= 0) barrier_.break_by_finished(gone);
        return gone >= 0;
    }
    std::string silence(int rank, message_group const& own) {
        return ulysses::detail::unanswered_text(rank, barrier_.deadline(),
                                                pending_peer(rank, own, [](int) { return true; }));
    }

    void receive(int rank, arrival const& there) {
        auto& to = *there.to;
        if (there.data.size() != to.data.size())
            barrier_.fail(errc::disagreement,
                          ulysses::detail::sizes_text(to.peer, concat(there.data.size(), " bytes"),
                                                      rank, to.data.size()),
                          rank);
        auto& reading = desks_[static_cast<std::size_t>(rank)].reading;
        // Before the look at the failure, as `await_readers` looks the other way round.
        reading = true;
        if (!barrier_.broken() && !there.data.empty())
            std::memcpy(to.data.data(), there.data.data(), there.data.size());
        reading = false;
        barrier_.expect_unbroken();
        barrier_.change([&] {
            to.received = true;
            channel(to.peer, rank).find(to.number)->taken = true;
        });
    }

    breakable_barrier& barrier_;
    std::size_t size_;
    std::vector<channel_state> channels_;
    std::vector<desk_state> desks_;
};

}  // namespace ulysses::inline ULYSSES_ABI::threads::detail
