#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/mpi/group_state.hpp>
#include <ulysses/comm/collectives.hpp>
#include <ulysses/core/communicator.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace ulysses::inline ULYSSES_ABI::mpi {

namespace detail {

/// What handles share: while one of a group is there, so is the group that it was split from.
struct lease {
    std::shared_ptr<lease const> parent;
    std::shared_ptr<group_state> group;
};

}  // namespace detail

/// Handle to this process's rank in a group of processes.
///
/// All collective calls must be made by every rank in the same order. Each waits, for at most the
/// group's deadline, until every rank has come to it: only then a collective call of MPI is made.
///
/// *Thread safety*: a handle and its copies belong to the thread that initialised MPI
/// (`MPI_THREAD_FUNNELED`).
class communicator {
   public:
    using space_type = host_space;
    using ticket_type = detail::group_state::ticket;

    /// Memory of all ranks of this host, given back at a call that all ranks make once all have dropped it.
    struct window_type {
        std::shared_ptr<detail::window_parts const> parts;
        std::shared_ptr<detail::lease const> group;
    };

    communicator() = default;
    explicit communicator(std::shared_ptr<detail::lease const> group)
        : lease_(std::move(group)), rank_(lease_->group->rank()), size_(lease_->group->size()) {}

    /// True for handles to the same group.
    friend bool operator==(communicator const&, communicator const&) = default;

    int rank() const noexcept { return rank_; }
    int size() const noexcept { return size_; }
    std::uint64_t begin_call() const { return state().begin_call(); }

    /// *Blocking*: until every rank has arrived. *Throws* the verdict of all statuses; `peer_failed`
    /// when a rank has left the group; `timed_out` after the group's deadline. A rank that comes at the
    /// very moment when others give up on it may pass, and throws at its next call.
    void fence(fence_status const& status) const {
        state().next_offer(detail::collective::fence).status = status;
        state().meet();
        throw_verdict(state().statuses());
    }

    /// Once all ranks have come, MPI makes the memory: should one of them be silent then, the job ends at
    /// the deadline.
    window_type make_window(std::size_t bytes) const {
        return {state().make_window(bytes), lease_};
    }

    window_type shared_window(arena which, std::size_t bytes) const {
        if (shared_window_bytes(which) < bytes || !state().shared(which))
            state().shared(which) = state().make_window(bytes);
        return {state().shared(which), lease_};
    }
    std::size_t shared_window_bytes(arena which) const {
        auto const& window = state().shared(which);
        return window ? window->bytes : 0;
    }

    /// Null for a rank of another host.
    std::byte* address(window_type const& window, int rank) const {
        return window.parts->memory[static_cast<std::size_t>(rank)];
    }

    /// Lets go of the group's shared windows on this rank. On every rank between the same two calls:
    /// while only some have closed, a pipeline's call is a `disagreement` on all that says so.
    void close() const {
        for (auto const which : {arena::inbox, arena::outbox}) state().shared(which).reset();
    }

    /// Begins messages, to ranks of any host. *Throws* `invalid_call` for a peer that is no rank.
    ticket_type start(std::span<outgoing const> out, std::span<incoming const> in) const {
        return state().start(out, in);
    }

    /// Moves messages that are under way, which MPI only does inside its calls. Neither waits nor throws.
    void progress() const { state().progress(); }

    /// *Blocking*: until what was to be received is there and what was sent may be overwritten. *Throws*
    /// as `fence`; `disagreement` when more or fewer bytes come than this rank expects, and then on every
    /// rank at its next call. A message to a rank that has failed may be read until the job ends.
    void wait(ticket_type ticket) const { state().wait(ticket); }

    /// *Shape*: `values` of one size on every rank; in place. Combined in rank order.
    template <class T>
        requires std::is_arithmetic_v<T>
    void all_reduce(std::span<T> values, reduction op) const {
        auto const ranks = static_cast<std::size_t>(size_);
        auto const me = static_cast<std::size_t>(rank_);
        auto const chunk = [&](std::size_t r) {
            auto const begin = values.size() * r / ranks, end = values.size() * (r + 1) / ranks;
            return values.subspan(begin, end - begin);
        };
        auto const mine = chunk(me);
        fence_status status;
        std::vector<T> theirs;
        std::vector<outgoing> out;
        std::vector<incoming> in;
        guarded(status, [&] {
            theirs.resize(mine.size() * ranks);
            out.reserve(ranks);
            in.reserve(ranks);
        });
        publish(detail::collective::all_reduce, values.size_bytes(),
                ulysses::detail::reduction_argument<T>(op), status);
        // Rank r combines the r-th chunk of every rank; then all are sent what the others combined.
        for (std::size_t r = 0; r < ranks; ++r) {
            out.push_back({static_cast<int>(r), std::as_bytes(chunk(r))});
            in.push_back({static_cast<int>(r), std::as_writable_bytes(std::span(theirs).subspan(
                                                   r * mine.size(), mine.size()))});
        }
        wait(start(out, in));
        for (std::size_t i = 0; i < mine.size(); ++i) {
            T result = theirs[i];
            for (std::size_t r = 1; r < ranks; ++r)
                result = ulysses::detail::combined(op, result, theirs[r * mine.size() + i]);
            mine[i] = result;
        }
        out.clear();
        in.clear();
        for (std::size_t r = 0; r < ranks; ++r) {
            if (r == me) continue;
            out.push_back({static_cast<int>(r), std::as_bytes(mine)});
            in.push_back({static_cast<int>(r), std::as_writable_bytes(chunk(r))});
        }
        wait(start(out, in));
    }

    /// A rank that cannot take part brings a `status` that says why: every rank throws it.
    void all_gather(std::span<std::byte const> part, std::span<std::byte> all,
                    fence_status status = {}) const {
        ulysses::detail::check_parts(status, part.size(), all.size(), size_);
        // MPICH 4.0 takes larger counts in its non-blocking collective calls, and fails.
        auto const as_messages = all.size() > detail::most_bytes;
        std::vector<outgoing> out;
        std::vector<incoming> in;
        if (status.code == errc::none && as_messages)
            guarded(status, [&] {
                for (int r = 0; r < size_; ++r) {
                    out.push_back({r, part});
                    in.push_back(
                        {r, all.subspan(static_cast<std::size_t>(r) * part.size(), part.size())});
                }
            });
        publish(detail::collective::all_gather, part.size(), 0, status);
        if (as_messages) return wait(start(out, in));
        auto const count = static_cast<int>(part.size());
        state().complete("all_gather", [&](MPI_Comm comm, MPI_Request* request) {
            return MPI_Iallgather(part.data(), count, MPI_BYTE, all.data(), count, MPI_BYTE, comm,
                                  request);
        });
    }

    void broadcast(std::span<std::byte> data, int root) const {
        fence_status status;
        ulysses::detail::check_root(status, root, size_);
        publish(detail::collective::broadcast, data.size(), root, status);
        for (std::size_t first = 0; first < data.size(); first += detail::most_bytes) {
            auto const part =
                data.subspan(first, std::min(detail::most_bytes, data.size() - first));
            state().complete("broadcast", [&](MPI_Comm comm, MPI_Request* request) {
                return MPI_Ibcast(part.data(), static_cast<int>(part.size()), MPI_BYTE, root, comm,
                                  request);
            });
        }
    }

    /// *Blocking*: as `make_window`.
    communicator split(int color, int key) const {
        return communicator(state().split(color, key, [&](auto const& child) {
            return std::make_shared<detail::lease const>(detail::lease{lease_, child});
        }));
    }

    /// Leaves the group, and those split from it: every other rank's waiting or next collective call
    /// throws `peer_failed` with `text`.
    void leave(std::string_view text) const {
        state().fail(errc::peer_failed, ulysses::detail::left_text(rank_, text), rank_);
    }

   private:
    /// *Throws* `invalid_call` for a handle that names no group.
    detail::group_state& state() const {
        if (!lease_)
            raise(errc::invalid_call, {}, "mpi::communicator", "a handle must name a group",
                  "it was made without one");
        return *lease_->group;
    }

    /// Meets for `call`; every rank throws alike when one of them failed, or when sizes or arguments
    /// differ.
    void publish(detail::collective call, std::size_t bytes, int argument,
                 fence_status const& status) const {
        auto& mine = state().next_offer(call);
        mine.bytes = bytes;
        mine.argument = argument;
        mine.status = status;
        state().meet();
        state().throw_offered();
        ulysses::detail::expect_alike(size_, state().shown_by());
    }

    std::shared_ptr<detail::lease const> lease_;
    int rank_ = 0;
    int size_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI::mpi
