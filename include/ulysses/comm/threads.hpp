#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/thread_communicator.hpp>
#include <ulysses/comm/thread_group.hpp>

#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

/// Ranks as threads of one process.
///
///     ulysses::threads::run(4, [&](ulysses::threads::communicator ranks) { ... });
///
/// or, in an engine that has its own threads, a `group` made once and one `handle(rank)` a thread.
namespace ulysses::inline ULYSSES_ABI::threads {

/// Owner of a group of `ranks` ranks.
class group {
   public:
    /// *Throws* `invalid_call` for less than one rank, `out_of_memory`.
    explicit group(int ranks, options const& given = {}) {
        if (ranks < 1)
            raise(errc::invalid_call, {}, "threads::group", "a group has at least one rank", ranks);
        if (!given.hosts.empty() && given.hosts.size() != static_cast<std::size_t>(ranks))
            raise(errc::invalid_call, {}, "threads::group",
                  "hosts must name one host for each rank", given.hosts.size(), " hosts, ", ranks,
                  " ranks");
        fence_status status;
        guarded(status, [&] { state_ = std::make_shared<detail::group_state>(ranks, given); });
        if (status.code != errc::none) throw_error(status.code, status.text);
    }

    int size() const noexcept { return static_cast<int>(state_->slots.size()); }
    communicator handle(int rank) const {
        if (rank < 0 || rank >= size())
            raise(errc::invalid_call, {}, "threads::group", "rank must lie in the group", "rank ",
                  rank, " of ", size());
        return {state_, rank};
    }

   private:
    std::shared_ptr<detail::group_state> state_;
};

namespace detail {

/// Starts the threads of ranks 1 .. ranks - 1; the status fails with `transport` where the system
/// has none.
template <class Work>
void start_threads(std::vector<std::jthread>& others, int ranks, Work const& work,
                   fence_status& status) {
    int rank = 1;
#if ULYSSES_EXCEPTIONS
    try {
        for (; rank < ranks; ++rank) others.emplace_back(work, rank);
    } catch (std::system_error const& e) {
        status.fail(errc::transport, concat("ulysses: run: every rank must get a thread: rank ",
                                            rank, " of ", ranks, ": ", e.what()));
    }
#else
    static_cast<void>(status);
    for (; rank < ranks; ++rank) others.emplace_back(work, rank);
#endif
}

}  // namespace detail

/// Runs `body(communicator)` on `ranks` threads, rank 0 on the caller's, and waits for all.
///
/// A rank that throws releases the others at once. *Throws* the first error: an `ulysses::error` as
/// it is, anything else as `peer_failed` naming the rank, with the original nested in it;
/// `transport_error` when the system has no thread for a rank, once those that run have ended.
template <class Body>
void run(int ranks, Body&& body, options const& given = {}) {
    group const owner(ranks, given);
    fence_status started;
#if ULYSSES_EXCEPTIONS
    std::mutex mutex;
    std::exception_ptr first;
    int first_rank = -1;
#endif
    auto const work = [&](int rank) {
        auto const handle = owner.handle(rank);
#if ULYSSES_EXCEPTIONS
        auto const failed = [&](char const* text) {
            {
                std::lock_guard lock(mutex);
                if (!first) {
                    first = std::current_exception();
                    first_rank = rank;
                }
            }
            handle.leave(text);
        };
        try {
            body(handle);
            handle.finish();
        } catch (std::exception const& e) {
            failed(e.what());
        } catch (...) {
            failed("unknown exception");
        }
#else
        body(handle);
        handle.finish();
#endif
    };
    {
        std::vector<std::jthread> others;
        guarded(started, [&] {
            others.reserve(static_cast<std::size_t>(ranks - 1));
            detail::start_threads(others, ranks, work, started);
        });
        if (started.code == errc::none)
            work(0);
        else
            owner.handle(0).leave(started.text);
    }
    if (started.code != errc::none) throw_error(started.code, started.text, 0);
#if ULYSSES_EXCEPTIONS
    if (!first) return;
    try {
        std::rethrow_exception(first);
    } catch (error const&) {
        throw;
    } catch (std::exception const& e) {
        std::throw_with_nested(peer_failed(
            concat("ulysses: run: a rank threw: rank ", first_rank, ": ", e.what()), first_rank));
    } catch (...) {
        std::throw_with_nested(peer_failed(
            concat("ulysses: run: a rank threw: rank ", first_rank, ": unknown exception"),
            first_rank));
    }
#endif
}

}  // namespace ulysses::inline ULYSSES_ABI::threads
