#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

/// A fence by flags in device memory: no host takes part, so it works between processes and in a
/// graph that is launched again. Functors for host and device, as in cuda_blocks.hpp.
namespace ulysses::inline ULYSSES_ABI::detail {

ULYSSES_HD inline void store_release(std::uint64_t* to, std::uint64_t value) {
#if defined(__CUDA_ARCH__)
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
#else
    std::atomic_ref<std::uint64_t>(*to).store(value, std::memory_order_release);
#endif
}
ULYSSES_HD inline std::uint64_t load_acquire(std::uint64_t* from) {
#if defined(__CUDA_ARCH__)
    std::uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
#else
    return std::atomic_ref<std::uint64_t>(*from).load(std::memory_order_acquire);
#endif
}
/// *Unit* nanoseconds since some moment.
ULYSSES_HD inline std::uint64_t clock_now() {
#if defined(__CUDA_ARCH__)
    std::uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
#else
    return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                                      std::chrono::nanoseconds(1));
#endif
}
ULYSSES_HD inline void let_others_run() {
#if defined(__CUDA_ARCH__)
    __nanosleep(64);
#else
    std::this_thread::yield();
#endif
}

inline constexpr int most_flag_ranks = 256;
/// Flags of different ranks do not share a line.
inline constexpr std::int64_t flag_words = 8;

/// What a launch does of a fence.
enum class fence_part : std::uint8_t {
    tell,       ///< the first half
    wait,       ///< the second: for what the first half of others tells
    take_back,  ///< undoes the first half of a fence that no rank passes
};

/// What a rank's fences need. Each rank has a board: a flag for every rank, and counts of its own.
/// Thread p deals with rank p: it tells its board, or waits for its flag on the own one.
///
/// Every rank's host enqueues what tells before any enqueues what waits: also a device that runs one
/// kernel at a time gets on.
struct flag_fence {
    int rank = 0, ranks = 0;
    fence_part part = fence_part::tell;
    /// Host memory: 0, 1 + a rank that was silent too long, or `gave_up`, by which the host ends all
    /// waiting.
    std::uint64_t* silent = nullptr;
    std::uint64_t deadline = 0;  ///< nanoseconds
    std::uint64_t* boards[most_flag_ranks] = {};

    static constexpr std::uint64_t gave_up{~std::uint64_t{0}};
    static constexpr std::int64_t words(int ranks) { return 3 * ranks * flag_words; }

    ULYSSES_HD void operator()(std::int64_t, int thread) const {
        if (thread >= ranks) return;
        auto* const own = boards[rank];
        auto const waits = part == fence_part::wait;
        auto& count = own[(ranks * (waits ? 2 : 1) + thread) * flag_words];
        auto const fences = part == fence_part::take_back ? --count : ++count;
        if (!waits) return store_release(boards[thread] + rank * flag_words, fences);
        auto const begun = clock_now();
        // The host's memory is far, and looked at now and then.
        for (unsigned round = 1; load_acquire(own + thread * flag_words) < fences; ++round) {
            if (round % 64 == 0 && load_acquire(silent) != 0) return;
            if (clock_now() - begun > deadline)
                return store_release(silent, static_cast<std::uint64_t>(thread) + 1);
            let_others_run();
        }
    }
};

}  // namespace ulysses::inline ULYSSES_ABI::detail
