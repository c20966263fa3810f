#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/observer.hpp>

#include <cstddef>

namespace ulysses::inline ULYSSES_ABI {

/// An `observer` that counts since its construction or `reset`.
struct counting_observer {
    std::size_t bytes_sent = 0;      ///< bytes this rank wrote into other ranks' memory
    std::size_t bytes_received = 0;  ///< bytes this rank read from other ranks' memory
    std::size_t bytes_kept = 0;      ///< bytes of its own share, copied within its memory
    std::size_t fences = 0;
    std::size_t steps[6] = {};  ///< how often each of the six steps ran

    void begin(step_id step) noexcept { ++steps[static_cast<std::size_t>(step)]; }
    static void end(step_id) noexcept {}
    void moved(int from, int to, std::size_t bytes) noexcept {
        (from == to ? bytes_kept : from == rank ? bytes_sent : bytes_received) += bytes;
    }
    void fence() noexcept { ++fences; }
    void reset() noexcept { *this = counting_observer{rank}; }

    counting_observer() = default;
    explicit counting_observer(int own_rank) : rank(own_rank) {}

    int rank = 0;  ///< the rank it counts for
};
static_assert(observer<counting_observer>);

}  // namespace ulysses::inline ULYSSES_ABI
