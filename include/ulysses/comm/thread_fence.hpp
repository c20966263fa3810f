#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/collectives.hpp>
#include <ulysses/core/communicator.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

/// The rendezvous of rank threads: a barrier with a deadline that a failing rank breaks at once.
namespace ulysses::inline ULYSSES_ABI::threads {

struct options {
    /// How long a rank waits for a silent peer before the group fails with `timed_out`.
    std::chrono::milliseconds deadline = std::chrono::seconds(600);
    /// The host of each rank, as of a group that spans several: ranks of different hosts do not
    /// reach each other's memory and send messages. Empty: all on one.
    std::vector<int> hosts{};
};

namespace detail {

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/// A reusable barrier over `size` threads.
///
/// *Thread safety*: `arrive_and_wait(rank)` by the thread of each rank, `fail` by any.
class breakable_barrier {
   public:
    breakable_barrier(int size, options const& given)
        : options_(given),
          arrivals_(static_cast<std::size_t>(size)),
          finished_(static_cast<std::size_t>(size)) {
        // Spinning only pays while every rank has a core to spin on.
        auto const cores = std::thread::hardware_concurrency();
        spins_ = static_cast<unsigned>(size) <= cores ? 2000 : 0;
    }

    /// Returns once every rank has arrived. *Throws* the error the group failed with.
    void arrive_and_wait(int rank) {
        auto const size = arrivals_.size();
        auto const phase = phase_.load(std::memory_order_acquire);
        expect_intact();
        if (size == 1) return;
        arrivals_[static_cast<std::size_t>(rank)].store(phase + 1, std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived_.store(0, std::memory_order_relaxed);
            {
                std::lock_guard lock(mutex_);
                phase_.store(phase + 1, std::memory_order_release);
            }
            released_.notify_all();
            return;
        }
        for (unsigned i = 0; i < spins_; ++i) {
            if (phase_.load(std::memory_order_acquire) != phase) return;
            relax();
        }
        await([&] { return passed(phase); }, [&] { return failed(); },
              [&] { return silent_ranks(rank, phase + 1); }, until());
    }

    using time_point = std::chrono::steady_clock::time_point;

    /// When the deadline of what begins now is over.
    time_point until() const { return ulysses::detail::end_of(options_.deadline); }

    /// Waits until `ready()`; like `lost()` and every `change` it runs under the barrier's lock.
    /// *Throws* the error the group failed with, once lost; `timed_out` with `text()` after the
    /// deadline.
    template <class Ready, class Lost, class Text>
    void await(Ready const& ready, Lost const& lost, Text const& text, time_point until) {
        std::unique_lock lock(mutex_);
        auto const over = [&] { return ready() || lost(); };
        // Still under the lock, so that what becomes ready just now is not failed.
        if (!released_.wait_until(lock, until, over)) record_break(errc::timed_out, text(), -1);
        auto const done = ready();
        // This rank is about to leave: nobody may go on to read what it has shown.
        if (!done) broken_ = true;
        lock.unlock();
        if (done) return;
        released_.notify_all();
        throw_failure();
    }

    /// Changes what others may `await`.
    template <class Change>
    void change(Change const& body) {
        {
            std::lock_guard lock(mutex_);
            body();
        }
        released_.notify_all();
    }

    std::chrono::milliseconds deadline() const { return options_.deadline; }

    /// Breaks the barrier: every waiting and every later arrival throws. The first failure stays.
    void fail(errc code, std::string const& text, int rank) {
        change([&] { record_break(code, text, rank); });
    }

    /// A rank that arrives no more: others that arrive throw `peer_failed`, unless the barrier breaks
    /// first.
    void finish(int rank) {
        change([&] {
            finished_[static_cast<std::size_t>(rank)] = true;
            if (!failed()) record(errc::peer_failed, finished_text(rank), rank);
        });
    }

    /// Breaks the barrier as what waits for a finished rank does. Under the lock.
    void break_by_finished(int rank) { record_break(errc::peer_failed, finished_text(rank), rank); }

    /// True once an arrival cannot succeed.
    bool failed() const { return failed_; }
    /// True once the group has failed for a reason other than that a rank has finished.
    bool broken() const { return broken_; }
    bool finished(int rank) const { return finished_[static_cast<std::size_t>(rank)]; }

    /// *Throws* the error the group failed with, if it has.
    void expect_intact() const {
        if (failed()) throw_failure();
    }
    void expect_unbroken() const {
        if (broken()) throw_failure();
    }

   private:
    /// Under the lock.
    void record_break(errc code, std::string const& text, int rank) {
        if (broken_.load(std::memory_order_relaxed)) return;
        record(code, text, rank);
        broken_ = true;
    }
    void record(errc code, std::string const& text, int rank) {
        code_ = code;
        text_ = text;
        rank_ = rank;
        failed_ = true;
    }

    static std::string finished_text(int rank) {
        return ulysses::detail::left_text(rank, "it has finished");
    }

    bool passed(std::uint64_t phase) const {
        return phase_.load(std::memory_order_acquire) != phase;
    }

    [[noreturn]] void throw_failure() const {
        std::unique_lock lock(mutex_);
        auto const code = code_;
        auto const text = text_;
        auto const rank = rank_;
        lock.unlock();
        throw_error(code, text, rank);
    }

    std::string silent_ranks(int rank, std::uint64_t phase) const {
        std::string silent;
        for (std::size_t r = 0; r < arrivals_.size(); ++r)
            if (arrivals_[r].load(std::memory_order_relaxed) < phase) silent += concat(" ", r);
        return ulysses::detail::silent_text(rank, options_.deadline, silent);
    }

    options options_;
    unsigned spins_ = 0;
    std::vector<std::atomic<std::uint64_t>> arrivals_;
    std::vector<std::atomic<bool>> finished_;
    alignas(64) std::atomic<std::size_t> arrived_{0};
    alignas(64) std::atomic<std::uint64_t> phase_{0};
    std::atomic<bool> failed_{false}, broken_{false};
    mutable std::mutex mutex_;
    std::condition_variable released_;
    errc code_ = errc::none;
    std::string text_;
    int rank_ = -1;
};

}  // namespace detail

}  // namespace ulysses::inline ULYSSES_ABI::threads
