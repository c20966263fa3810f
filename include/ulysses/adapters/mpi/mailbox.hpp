#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/mpi/calls.hpp>
#include <ulysses/adapters/mpi/meeting.hpp>
#include <ulysses/comm/collectives.hpp>
#include <ulysses/core/communicator.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

/// Messages between the processes of a group, as the non-blocking ones of MPI.
namespace ulysses::inline ULYSSES_ABI::mpi::detail {

class mailbox {
   public:
    /// Names one group of messages.
    struct ticket {
        mailbox const* box = nullptr;
        std::size_t index = 0;
        std::uint64_t use = 0;  ///< which of the groups that have had this index
    };

    mailbox() = default;
    mailbox(mailbox const&) = delete;
    mailbox& operator=(mailbox const&) = delete;
    ~mailbox() {
        if (is_running()) abandon_all();
    }

    ticket start(meeting& ranks, std::span<outgoing const> out, std::span<incoming const> in) {
        failing const unless_started{*this, ranks};
        ranks.expect_intact();
        for (auto const& each : out) ulysses::detail::expect_peer(each.peer, ranks.size());
        for (auto const& each : in) ulysses::detail::expect_peer(each.peer, ranks.size());
        fence_status status;
        ticket started;
        guarded(status, [&] { started = free_group(out, in); });
        if (status.code != errc::none) ranks.fail_and_throw(status.code, status.text, ranks.rank());
        auto& own = groups_[started.index];
        for (auto const& each : in)
            ranks.expect(irecv(each.data.data(), each.data.size(), each.peer, tag, ranks.comm(),
                               &own.requests.emplace_back(MPI_REQUEST_NULL)),
                         "start");
        for (auto const& each : out)
            ranks.expect(isend(each.data.data(), each.data.size(), each.peer, tag, ranks.comm(),
                               &own.requests.emplace_back(MPI_REQUEST_NULL)),
                         "start");
        return started;
    }

    void wait(meeting& ranks, ticket const& which) {
        ulysses::detail::expect_open(which.box == this && which.index < groups_.size() &&
                                         groups_[which.index].open &&
                                         groups_[which.index].use == which.use,
                                     which);
        failing const unless_done{*this, ranks};
        auto& own = groups_[which.index];
        if (own.is_lost()) ranks.expect_intact();
        own.open = false;
        closing const until_done{own};
        ranks.await(
            meeting::always, [&] { return have_arrived(ranks, own); },
            [&] {
                int peer = -1;
                for (std::size_t i = 0; i < own.requests.size() && peer < 0; ++i)
                    if (is_pending(own.requests[i])) peer = own.ends[i].peer;
                return ulysses::detail::unanswered_text(ranks.rank(), ranks.settings().deadline,
                                                        peer);
            });
        // A rank that gave up waiting may have used the memory of what it sent for something else.
        ranks.expect_intact();
    }

    /// Looks whether all that is under way has arrived, for which MPI moves it; for a few microseconds.
    void progress() const {
        constexpr int looks = 64;
        auto const pending = [](auto const& each) {
            return each.open && std::ranges::any_of(each.requests, is_pending);
        };
        for (int i = 0; i < looks && std::ranges::any_of(groups_, pending); ++i) continue;
    }

   private:
    static constexpr int tag = 2;  ///< those of a meeting are less

    struct message_end {
        int peer = 0;
        std::size_t bytes = 0;
    };
    struct message_group {
        bool open = false;
        std::uint64_t use = 0;
        std::size_t receives = 0;  ///< the first so many are awaited
        std::vector<message_end> ends;
        std::vector<MPI_Request> requests;
        std::vector<MPI_Status> statuses;

        /// True where not all were begun, or some were given up: the group of ranks has failed.
        bool is_lost() const { return requests.size() < ends.size(); }
        void abandon() {
            for (std::size_t i = 0; i < requests.size(); ++i)
                detail::abandon(requests[i], i < receives);
            requests.clear();
        }
    };

    /// Lets go of what is still under way when a wait has failed.
    struct closing {
        message_group& own;
        ~closing() { own.abandon(); }
    };
    /// Lets go of all messages when the group of ranks has failed: nobody may wait for them, and their
    /// memory is the caller's again.
    struct failing {
        mailbox& box;
        meeting const& ranks;
        ~failing() {
            if (ranks.has_failed()) box.abandon_all();
        }
    };
    void abandon_all() {
        for (auto& each : groups_) each.abandon();
    }

    ticket free_group(std::span<outgoing const> out, std::span<incoming const> in) {
        auto const free = std::ranges::find(groups_, false, &message_group::open);
        auto& own = free == groups_.end() ? groups_.emplace_back() : *free;
        auto const count = out.size() + in.size();
        own.ends.clear();
        own.requests.reserve(count);
        for (auto const& each : in) own.ends.push_back({each.peer, each.data.size()});
        for (auto const& each : out) own.ends.push_back({each.peer, each.data.size()});
        own.statuses.resize(count);
        own.receives = in.size();
        own.open = true;
        ++own.use;
        return {this, static_cast<std::size_t>(&own - groups_.data()), own.use};
    }

    static bool have_arrived(meeting& ranks, message_group& own) {
        // One by one, so that each has an error of its own.
        bool all = true;
        for (std::size_t i = 0; i < own.requests.size(); ++i) {
            if (own.requests[i] == MPI_REQUEST_NULL) continue;
            int flag = 0, kind = MPI_SUCCESS;
            auto const code = MPI_Test(&own.requests[i], &flag, &own.statuses[i]);
            MPI_Error_class(code, &kind);
            if (kind == MPI_ERR_TRUNCATE) fail_sizes(ranks, own.ends[i], "more");
            ranks.expect(code, "wait");
            all = all && flag != 0;
        }
        if (!all) return false;
        for (std::size_t i = 0; i < own.receives; ++i) {
            MPI_Count bytes = 0;
            ranks.expect(MPI_Get_elements_x(&own.statuses[i], MPI_BYTE, &bytes), "wait");
            if (static_cast<std::size_t>(bytes) != own.ends[i].bytes)
                fail_sizes(ranks, own.ends[i], concat(bytes, " bytes"));
        }
        return true;
    }
    [[noreturn]] static void fail_sizes(meeting& ranks, message_end const& end,
                                        std::string_view sent) {
        ranks.fail_and_throw(errc::disagreement,
                             ulysses::detail::sizes_text(end.peer, sent, ranks.rank(), end.bytes),
                             ranks.rank());
    }

    std::vector<message_group> groups_;
};

}  // namespace ulysses::inline ULYSSES_ABI::mpi::detail
