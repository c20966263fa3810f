#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/mpi/calls.hpp>
#include <ulysses/adapters/mpi/mailbox.hpp>
#include <ulysses/adapters/mpi/meeting.hpp>
#include <ulysses/adapters/mpi/resources.hpp>
#include <ulysses/adapters/mpi/watchdog.hpp>
#include <ulysses/adapters/mpi/windows.hpp>
#include <ulysses/comm/collectives.hpp>
#include <ulysses/comm/host_window.hpp>
#include <ulysses/core/communicator.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

/// What one rank of a group of processes holds: the meeting of all ranks, their messages, their windows
/// and the groups split off.
namespace ulysses::inline ULYSSES_ABI::mpi::detail {

class group_state : public resource {
   public:
    using ticket = mailbox::ticket;

    /// Takes over `comm`, which no other may use; see `meeting` and `host_memory`. What blocks in MPI is
    /// watched by `dog`.
    group_state(MPI_Comm comm, std::vector<int> hosts, options const& given, unsigned spins,
                std::shared_ptr<watchdog> dog, group_state* parent = nullptr)
        : ranks_(comm, given, spins, parent == nullptr ? nullptr : &parent->ranks_),
          memory_(std::move(hosts)),
          dog_(std::move(dog)),
          statuses_(static_cast<std::size_t>(ranks_.size())) {}

    int rank() const { return ranks_.rank(); }
    int size() const { return ranks_.size(); }
    std::uint64_t begin_call() { return ranks_.begin_call(); }

    // Meetings.

    /// This rank's offer for the call that begins. *Throws* the error the group failed with.
    offer& next_offer(collective call) {
        auto& next = ranks_.next_offer(call);
        next.dropped = made_.dropped(ranks_.count());
        return next;
    }

    /// Sends the offer and waits for those of all; what no rank uses any more is given back. *Throws*
    /// alike on every rank when their calls differ.
    void meet() {
        made_.synchronise();
        ranks_.meet();
        made_.synchronise();
        if (made_.is_releasable(shown())) watched("close", [&] { made_.release_dropped(shown()); });
        ulysses::detail::expect_same_collective(size(), ranks_.shown_by());
    }

    /// What all ranks offered to the last meeting.
    std::span<offer const> shown() const { return ranks_.shown(); }
    auto shown_by() const { return ranks_.shown_by(); }

    /// The statuses of the last meeting.
    std::span<fence_status const> statuses() {
        for (std::size_t r = 0; r < statuses_.size(); ++r) statuses_[r] = shown()[r].status;
        return statuses_;
    }

    /// Throws, on every rank alike, what the lowest failing rank offered.
    void throw_offered() const { ulysses::detail::throw_offered(size(), shown_by()); }

    /// Tells all ranks that the group has failed, and so have those split from it; never waits. The first
    /// failure stays.
    void fail(errc code, std::string_view text, int rank) { ranks_.fail(code, text, rank); }

    /// Begins a non-blocking collective call of MPI by `begin(comm, request)`, and waits for its end. MPI
    /// cannot take back one that has begun: after an error its memory may be used until the job ends.
    template <class Begin>
    void complete(std::string_view operation, Begin const& begin) {
        MPI_Request request = MPI_REQUEST_NULL;
        ranks_.expect(begin(ranks_.comm(), &request), operation);
        auto const ended = [&] {
            int flag = 0;
            ranks_.expect(MPI_Test(&request, &flag, MPI_STATUS_IGNORE), operation);
            return flag != 0;
        };
        ranks_.await(meeting::always, ended, [&] {
            return concat("ulysses: ", operation,
                          ": every rank must answer within the deadline: rank ", rank(), " waited ",
                          ranks_.settings().deadline.count(), " ms");
        });
    }

    // Messages.

    ticket start(std::span<outgoing const> out, std::span<incoming const> in) {
        return messages_.start(ranks_, out, in);
    }
    void wait(ticket const& which) { messages_.wait(ranks_, which); }
    void progress() const { messages_.progress(); }

    // Windows and groups split off. Collective.

    std::shared_ptr<window_parts const> make_window(std::size_t bytes) {
        fence_status status;
        std::shared_ptr<window_parts> parts;
        guarded(status, [&] {
            ulysses::detail::expect_window_bytes(bytes);
            parts = std::make_shared<window_parts>();
            parts->memory.resize(statuses_.size());
            made_.reserve();
        });
        auto& mine = next_offer(collective::make_window);
        mine.bytes = bytes;
        mine.status = status;
        meet();
        throw_offered();
        ulysses::detail::expect_alike(size(), shown_by());
        watched("make_window", [&] { memory_.make(ranks_, *parts, bytes, status); });
        next_offer(collective::make_window).status = status;
        meet();
        // Only the ranks of one host can give back what they have made together.
        if (status.code == errc::none && memory_.succeeded(ranks_) && !all_succeeded())
            watched("make_window", [&] { parts->release(); });
        throw_offered();
        made_.keep(parts);
        return parts;
    }

    /// The part of this group that this rank belongs to; `wrap(child)` makes what the caller gets, before
    /// any rank goes on.
    template <class Wrap>
    auto split(int color, int key, Wrap const& wrap) {
        fence_status status;
        ulysses::detail::split_members members;
        guarded(status, [&] {
            members.reserve(size());
            made_.reserve();
        });
        auto& mine = next_offer(collective::split);
        mine.argument = color;
        mine.key = key;
        mine.status = status;
        meet();
        throw_offered();
        members.list(size(), color, shown_by());
        // MPI's colors are not negative: the first member's rank is.
        MPI_Comm part = MPI_COMM_NULL;
        watched("split", [&] {
            ranks_.expect(
                MPI_Comm_split(ranks_.comm(), members.old_rank(0), members.new_rank(rank()), &part),
                "split");
        });
        std::shared_ptr<group_state> child;
        decltype(wrap(child)) handle;
        guarded(status, [&] {
            std::vector<int> hosts;
            for (int r = 0; r < members.size(); ++r) {
                // Numbered anew, by the lowest rank of the part.
                int first = 0;
                while (!memory_.reach(members.old_rank(first), members.old_rank(r))) ++first;
                hosts.push_back(first);
            }
            child = std::make_shared<group_state>(part, std::move(hosts), ranks_.settings(),
                                                  ranks_.spins(), dog_, this);
            handle = wrap(child);
        });
        next_offer(collective::split).status = status;
        meet();
        throw_offered();
        made_.keep(std::move(child));
        return handle;
    }

    /// The group's own windows.
    std::shared_ptr<window_parts const>& shared(arena which) {
        return shared_[static_cast<std::size_t>(which)];
    }
    std::shared_ptr<window_parts const> const& shared(arena which) const {
        return shared_[static_cast<std::size_t>(which)];
    }

    /// Gives back windows, groups and the communicator. Collective; nobody uses the group any more. Else
    /// what only all ranks together could give back stays until the job ends.
    void release() override {
        for (auto& each : shared_) each.reset();
        made_.release();
        memory_.release();
        ranks_.release();
    }
    bool is_intact() override { return !ranks_.is_departed(); }

    /// Runs `body`, which blocks in MPI: for at most the deadline.
    template <class Body>
    void watched(std::string_view operation, Body const& body) {
        dog_->during(operation, rank(), ranks_.settings().deadline, body);
    }

   private:
    bool all_succeeded() const {
        for (auto const& each : shown())
            if (each.status.code != errc::none) return false;
        return true;
    }

    meeting ranks_;
    mailbox messages_;
    host_memory memory_;
    resource_list made_;
    std::shared_ptr<watchdog> dog_;
    std::vector<fence_status> statuses_;
    std::shared_ptr<window_parts const> shared_[2];
};

}  // namespace ulysses::inline ULYSSES_ABI::mpi::detail
