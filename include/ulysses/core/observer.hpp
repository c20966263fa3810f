#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ulysses::inline ULYSSES_ABI {

/// The six steps.
enum class step_id : std::uint8_t { shard, project_in, to_heads, attend, to_tokens, project_out };

constexpr std::string_view name(step_id step) {
    constexpr std::string_view names[] = {"shard",  "project_in", "to_heads",
                                          "attend", "to_tokens",  "project_out"};
    return names[static_cast<std::size_t>(step)];
}

/// Sees what a pipeline does on its rank, in order, on the calling thread:
/// `begin(step)` and `end(step)` around each step; `moved(from, to, bytes)` for every block that
/// this rank copied between two ranks' memory (its own share has from == to); `fence()` after each
/// rendezvous. The pipeline holds it by value; it must not throw.
template <class O>
concept observer = std::copyable<O> &&
    requires(O& seen, step_id step, int rank, std::size_t bytes) {
    seen.begin(step);
    seen.end(step);
    seen.moved(rank, rank, bytes);
    seen.fence();
};

/// Sees nothing, costs nothing.
struct no_observer {
    static constexpr void begin(step_id) {}
    static constexpr void end(step_id) {}
    static constexpr void moved(int, int, std::size_t) {}
    static constexpr void fence() {}
};

/// Counts since its construction or `reset`.
struct counting_observer {
    std::size_t bytes_sent = 0;      ///< bytes this rank wrote into other ranks' memory
    std::size_t bytes_received = 0;  ///< bytes this rank read from other ranks' memory
    std::size_t bytes_kept = 0;      ///< bytes of its own share, copied within its memory
    std::size_t fences = 0;
    std::size_t steps[6] = {};  ///< how often each of the six steps ran

    void begin(step_id step) { ++steps[static_cast<std::size_t>(step)]; }
    static void end(step_id) {}
    void moved(int from, int to, std::size_t bytes) {
        (from == to ? bytes_kept : from == rank ? bytes_sent : bytes_received) += bytes;
    }
    void fence() { ++fences; }
    void reset() { *this = counting_observer{rank}; }

    counting_observer() = default;
    explicit counting_observer(int own_rank) : rank(own_rank) {}

    int rank = 0;  ///< the rank it counts for
};

}  // namespace ulysses::inline ULYSSES_ABI
