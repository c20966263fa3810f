#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/collectives.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>

/// A deadline for calls of MPI that block: making a window, splitting a group, giving either back.
///
/// Nothing can make such a call return, and no other thread may call MPI (`MPI_THREAD_FUNNELED`). So a
/// thread that sleeps otherwise ends the process, for which MPI ends the job.
namespace ulysses::inline ULYSSES_ABI::mpi::detail {

class watchdog {
   public:
    /// *Throws* `transport_error` where the system has no thread for it.
    watchdog() {
#if ULYSSES_EXCEPTIONS
        try {
            thread_ = std::thread([this] { watch(); });
        } catch (std::system_error const& e) {
            raise(errc::transport, {}, "mpi::group", "the deadline of MPI's calls needs a thread",
                  e.what());
        }
#else
        thread_ = std::thread([this] { watch(); });
#endif
    }
    watchdog(watchdog const&) = delete;
    watchdog& operator=(watchdog const&) = delete;
    ~watchdog() {
        set({}, {}, true);
        thread_.join();
    }

    /// Calls `body`. When that has not returned after `deadline`, the reason goes to stderr and the
    /// process ends. `operation` is a literal.
    template <class Body>
    void during(std::string_view operation, int rank, std::chrono::milliseconds deadline,
                Body const& body) {
        rank_ = rank;
        set(operation, deadline, false);
        struct until_end {
            watchdog& dog;
            ~until_end() { dog.set({}, {}, false); }
        } const watching{*this};
        body();
    }

   private:
    void set(std::string_view operation, std::chrono::milliseconds deadline, bool over) {
        {
            std::lock_guard const lock(mutex_);
            operation_ = operation;
            deadline_ = deadline;
            over_ = over;
            ++changes_;
        }
        changed_.notify_one();
    }

    void watch() {
        std::unique_lock lock(mutex_);
        while (!over_) {
            auto const seen = changes_;
            auto const changed = [&] { return changes_ != seen; };
            if (operation_.empty())
                changed_.wait(lock, changed);
            else if (!changed_.wait_until(lock, ulysses::detail::end_of(deadline_), changed))
                end_process();
        }
    }
    [[noreturn]] void end_process() const {
        fence_status why;
        why.fail(errc::timed_out,
                 concat("ulysses: ", operation_,
                        ": every rank must take part within the deadline: rank ", rank_, " waited ",
                        deadline_.count(), " ms in a call of MPI, which ends the job"));
        std::fprintf(stderr, "%s\n", why.text);
        std::fflush(stderr);
        std::_Exit(EXIT_FAILURE);
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::string_view operation_;  ///< that is watched, empty: none
    std::chrono::milliseconds deadline_{};
    int rank_ = 0;
    unsigned changes_ = 0;
    bool over_ = false;
    std::thread thread_;
};

}  // namespace ulysses::inline ULYSSES_ABI::mpi::detail
