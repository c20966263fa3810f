#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/mpi/calls.hpp>
#include <ulysses/comm/collectives.hpp>
#include <ulysses/core/communicator.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

/// The meeting of all ranks of a group of processes that every collective call begins with, and how they
/// learn of each other's failure.
///
/// At a meeting each rank sends every other what it brings, by persistent requests that were made with
/// the group. So each knows who is silent, no rank enters a collective call of MPI before all are
/// known to make the same one, and the meeting of a fence carries its statuses.
///
/// A rank that leaves, or gives up waiting, tells all others by a message of its own, for which each
/// has a receive open.
namespace ulysses::inline ULYSSES_ABI::mpi {

struct options {
    /// How long a rank waits for a silent peer before the group fails with `timed_out`. Where it waits
    /// inside a blocking call of MPI, the job ends then.
    std::chrono::milliseconds deadline = std::chrono::seconds(600);
    /// Ranks of one machine that give different numbers count as ranks of different hosts: they do
    /// not reach each other's memory and send messages. Each rank gives its own.
    int host = 0;
};

namespace detail {

using ulysses::detail::collective;

/// What a rank brings to a meeting. Trivially copyable.
struct offer : ulysses::detail::collective_offer {
    std::uint64_t dropped = 0;  ///< which of the considered resources it no longer uses
};

/// What a rank that leaves tells the others.
struct departure {
    std::uint64_t meetings = 0;  ///< that it has been at
    int rank = -1;               ///< whom the error names
    fence_status status;
};

inline bool is_pending(MPI_Request request) {
    int flag = 1;
    if (request != MPI_REQUEST_NULL) MPI_Request_get_status(request, &flag, MPI_STATUS_IGNORE);
    return flag == 0;
}
/// Ends a request that may never complete. A receive is cancelled, and has ended then, unless its
/// message is just arriving; a message that is being sent cannot be. True where MPI may use its memory
/// until the job ends.
inline bool abandon(MPI_Request& request, bool receive) {
    if (request == MPI_REQUEST_NULL) return false;
    if (receive && is_pending(request)) MPI_Cancel(&request);
    auto const until = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    while (receive && is_pending(request) && std::chrono::steady_clock::now() < until)
        std::this_thread::yield();
    auto const in_use = is_pending(request);
    MPI_Request_free(&request);
    return in_use;
}

class meeting {
   public:
    /// Takes over `comm`, which no other may use. Whoever waits looks `spins` times before it lets others
    /// have its core. When `parent` fails, which outlives this, so does this.
    meeting(MPI_Comm comm, options const& given, unsigned spins, meeting* parent)
        : comm_(comm), options_(given), spins_(spins), parent_(parent) {
        check(MPI_Comm_rank(comm_, &rank_), "mpi::group");
        check(MPI_Comm_size(comm_, &size_), "mpi::group");
        check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "mpi::group");
        for (auto& each : own_->seen) each.resize(static_cast<std::size_t>(size_));
        for (int r = 0; r < size_; ++r) {
            if (r == rank_) continue;
            check(MPI_Send_init(&own_->mine, sizeof own_->mine, MPI_BYTE, r, offers, comm_,
                                &sends_.emplace_back(MPI_REQUEST_NULL)),
                  "mpi::group");
            for (std::size_t turn = 0; turn < 2; ++turn)
                check(MPI_Recv_init(&own_->seen[turn][static_cast<std::size_t>(r)], sizeof(offer),
                                    MPI_BYTE, r, offers, comm_,
                                    &receives_[turn].emplace_back(MPI_REQUEST_NULL)),
                      "mpi::group");
        }
        start(receives_[turn_]);
        if (size_ > 1)
            check(MPI_Irecv(&own_->told, sizeof own_->told, MPI_BYTE, MPI_ANY_SOURCE, departures,
                            comm_, &told_request_),
                  "mpi::group");
    }
    meeting(meeting const&) = delete;
    meeting& operator=(meeting const&) = delete;

    ~meeting() {
        if (is_running()) cancel_requests();
    }
    /// Gives back the communicator. Collective; nobody uses the group any more.
    void release() {
        cancel_requests();
        MPI_Comm_free(&comm_);
    }

    int rank() const { return rank_; }
    int size() const { return size_; }
    MPI_Comm comm() const { return comm_; }
    options const& settings() const { return options_; }
    unsigned spins() const { return spins_; }
    std::uint64_t begin_call() { return ++calls_; }
    std::uint64_t count() const { return meetings_; }

    /// This rank's offer for the call that begins. *Throws* the error the group failed with.
    offer& next_offer(collective call) {
        expect_intact();
        own_->mine = {};
        own_->mine.call = call;
        own_->mine.calls = calls_;
        return own_->mine;
    }

    /// Sends the offer and waits for those of all. Counts of calls become one.
    void meet() {
        auto const turn = turn_;
        start(sends_);
        own_->seen[turn][static_cast<std::size_t>(rank_)] = own_->mine;
        await(
            meetings_ + 1, [&] { return done(receives_[turn]) && done(sends_); },
            [&] {
                std::string silent;
                for (std::size_t i = 0; i < receives_[turn].size(); ++i)
                    if (is_pending(receives_[turn][i])) silent += concat(" ", peer_of(i));
                auto text = ulysses::detail::silent_text(rank_, options_.deadline, silent);
                // What it came to tell may be why they are: in a call of MPI that failed here alone.
                if (own_->mine.status.code != errc::none)
                    text += concat("; it had failed: ", own_->mine.status.text);
                return text;
            });
        // All have come; but those who gave up on one that was late are gone.
        if (is_departed() && own_->first.meetings <= meetings_) throw_departure();
        ++meetings_;
        turn_ ^= 1u;
        start(receives_[turn_]);
        for (auto const& each : shown()) calls_ = std::max(calls_, each.calls);
    }

    /// What all ranks offered to the last meeting.
    std::span<offer const> shown() const { return own_->seen[turn_ ^ 1u]; }
    auto shown_by() const {
        return [all = shown()](int rank) -> offer const& {
            return all[static_cast<std::size_t>(rank)];
        };
    }

    // Failures.

    /// *Throws* the error the group failed with.
    void expect_intact() {
        if (is_departed()) throw_departure();
    }

    /// Looks whether a rank has told that the group has failed, or the one that it was split from; what
    /// is under way moves meanwhile.
    bool is_departed() {
        if (departed_) return true;
        int flag = 0;
        if (told_request_ != MPI_REQUEST_NULL &&
            MPI_Test(&told_request_, &flag, MPI_STATUS_IGNORE) == MPI_SUCCESS && flag != 0) {
            own_->first = own_->told;
            departed_ = true;
        } else if (parent_ != nullptr && parent_->is_departed()) {
            auto const& why = parent_->own_->first;
            depart(why.status.code, why.status.text, why.rank);
        }
        return departed_;
    }

    /// The same, of what this rank knows already.
    bool has_failed() const { return departed_; }

    /// Tells all ranks that the group has failed; never waits. The first failure stays.
    void fail(errc code, std::string_view text, int rank) {
        if (!is_departed()) depart(code, text, rank);
    }
    [[noreturn]] void fail_and_throw(errc code, std::string_view text, int rank) {
        fail(code, text, rank);
        throw_departure();
    }

    /// Fails the group for this rank's error of MPI, and throws it.
    void expect(int code, std::string_view operation) {
        if (code != MPI_SUCCESS)
            fail_and_throw(errc::transport,
                           concat("ulysses: ", operation, ": MPI reported an error: rank ", rank_,
                                  ": ", text_of(code)),
                           rank_);
    }

    /// Instead of a meeting: whoever leaves, it is over.
    static constexpr auto always = std::numeric_limits<std::uint64_t>::max();

    /// Waits until `ready()`. *Throws* the failure of a rank that has not been at meeting `number`;
    /// `timed_out` with `silence()` after the deadline.
    template <class Ready, class Silence>
    void await(std::uint64_t number, Ready const& ready, Silence const& silence) {
        auto const until = ulysses::detail::end_of(options_.deadline);
        for (unsigned tries = 0; !ready(); ++tries) {
            if (is_departed() && own_->first.meetings < number) throw_departure();
            if (tries < spins_) continue;
            if (std::chrono::steady_clock::now() > until)
                fail_and_throw(errc::timed_out, silence(), -1);
            std::this_thread::yield();
        }
    }

   private:
    static constexpr int offers = 0, departures = 1;  ///< tags

    /// The rank of the i-th of the other ranks.
    int peer_of(std::size_t i) const {
        auto const peer = static_cast<int>(i);
        return peer < rank_ ? peer : peer + 1;
    }

    void start(std::vector<MPI_Request>& requests) {
        if (!requests.empty())
            expect(MPI_Startall(static_cast<int>(requests.size()), requests.data()), "fence");
    }
    bool done(std::vector<MPI_Request>& requests) {
        int flag = 0;
        expect(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &flag,
                           MPI_STATUSES_IGNORE),
               "fence");
        return flag != 0;
    }

    void depart(errc code, std::string_view text, int rank) {
        departed_ = true;
        own_->first.meetings = meetings_;
        own_->first.rank = rank;
        own_->first.status.fail(code, text);
        for (int r = 0; r < size_; ++r) {
            if (r == rank_) continue;
            // One that cannot be told finds out at its deadline.
            if (MPI_Isend(&own_->first, sizeof own_->first, MPI_BYTE, r, departures, comm_,
                          &telling_.emplace_back(MPI_REQUEST_NULL)) != MPI_SUCCESS)
                telling_.pop_back();
        }
        int flag = 0;
        MPI_Testall(static_cast<int>(telling_.size()), telling_.data(), &flag, MPI_STATUSES_IGNORE);
    }
    [[noreturn]] void throw_departure() const {
        throw_error(own_->first.status.code, own_->first.status.text, own_->first.rank);
    }

    void cancel_requests() {
        bool in_use = false;
        auto const end = [&](std::vector<MPI_Request>& requests, bool receive) {
            for (auto& each : requests) in_use = abandon(each, receive) || in_use;
            requests.clear();
        };
        end(sends_, false);
        for (auto& turn : receives_) end(turn, true);
        in_use = abandon(told_request_, true) || in_use;
        end(telling_, false);
        // What this rank leaves with is still to be read by the others.
        if (in_use) static_cast<void>(own_.release());
    }

    /// What MPI reads and writes.
    struct letters {
        offer mine;
        /// Two in turn: those of the last meeting are read while the next ones may already come.
        std::vector<offer> seen[2];
        departure first, told;
    };

    MPI_Comm comm_;
    options options_;
    int rank_ = 0, size_ = 0;
    unsigned spins_ = 0;
    meeting* parent_;
    std::uint64_t calls_ = 0, meetings_ = 0;

    std::unique_ptr<letters> own_ = std::make_unique<letters>();
    std::vector<MPI_Request> sends_, receives_[2];
    unsigned turn_ = 0;

    bool departed_ = false;
    MPI_Request told_request_ = MPI_REQUEST_NULL;
    std::vector<MPI_Request> telling_;
};

}  // namespace detail

}  // namespace ulysses::inline ULYSSES_ABI::mpi
