#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>

#include <algorithm>
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
        : options_(given), arrivals_(static_cast<std::size_t>(size)) {
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
        std::unique_lock lock(mutex_);
        auto const until =
            std::chrono::steady_clock::now() +
            std::min<std::chrono::milliseconds>(options_.deadline, std::chrono::hours(24 * 365));
        auto const ready = [&] { return passed(phase) || failed_.load(std::memory_order_acquire); };
        // Still under the lock, so that a barrier that completes just now is not failed.
        if (!released_.wait_until(lock, until, ready))
            record(errc::timed_out, silent_ranks(rank, phase + 1), -1);
        auto const done = passed(phase);
        lock.unlock();
        if (done) return;
        released_.notify_all();
        throw_failure();
    }

    /// Breaks the barrier: every waiting and every later arrival throws. The first failure stays.
    void fail(errc code, std::string const& text, int rank) {
        {
            std::lock_guard lock(mutex_);
            record(code, text, rank);
        }
        released_.notify_all();
    }

    bool failed() const { return failed_; }

    /// *Throws* the error the group failed with, if it has.
    void expect_intact() const {
        if (failed()) throw_failure();
    }

   private:
    /// Under the lock.
    void record(errc code, std::string const& text, int rank) {
        if (failed_.load(std::memory_order_relaxed)) return;
        code_ = code;
        text_ = text;
        rank_ = rank;
        failed_ = true;
    }

    bool passed(std::uint64_t phase) const {
        return phase_.load(std::memory_order_acquire) != phase;
    }

    [[noreturn]] void throw_failure() const { throw_error(code_, text_, rank_); }

    std::string silent_ranks(int rank, std::uint64_t phase) const {
        std::string silent;
        for (std::size_t r = 0; r < arrivals_.size(); ++r)
            if (arrivals_[r].load(std::memory_order_relaxed) < phase) silent += concat(" ", r);
        return concat("ulysses: fence: every rank must arrive within the deadline: rank ", rank,
                      " waited ", options_.deadline.count(), " ms, silent ranks:", silent);
    }

    options options_;
    unsigned spins_ = 0;
    std::vector<std::atomic<std::uint64_t>> arrivals_;
    alignas(64) std::atomic<std::size_t> arrived_{0};
    alignas(64) std::atomic<std::uint64_t> phase_{0};
    std::atomic<bool> failed_{false};
    std::mutex mutex_;
    std::condition_variable released_;
    errc code_ = errc::none;
    std::string text_;
    int rank_ = -1;
};

}  // namespace detail

}  // namespace ulysses::inline ULYSSES_ABI::threads
