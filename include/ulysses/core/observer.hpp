#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/fence.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <string_view>

namespace ulysses::inline ULYSSES_ABI {

/// The six steps.
enum class step_id : std::uint8_t { shard, project_in, to_heads, attend, to_tokens, project_out };

constexpr std::string_view name(step_id step) {
    constexpr std::string_view names[] = {"shard",  "project_in", "to_heads",
                                          "attend", "to_tokens",  "project_out"};
    return names[static_cast<std::size_t>(step)];
}

/// An observer that is told of whole calls as well: `begin(kind)` and `end(kind)` around each call
/// of a pipeline, also around one that fails.
template <class O>
concept observes_calls = requires(O& seen, pass_kind kind) {
    { seen.begin(kind) }
    noexcept;
    { seen.end(kind) }
    noexcept;
};

namespace detail {

/// Members for whole calls may be left out, but not half of them, nor may they throw.
template <class O>
concept observes_calls_or_not = observes_calls<O> || !(
    requires(O & seen, pass_kind kind) { seen.begin(kind); } ||
    requires(O & seen, pass_kind kind) { seen.end(kind); });

}  // namespace detail

/// Sees what a pipeline does on its rank, in order, on the calling thread:
/// `begin(step)` and `end(step)` around each step; `moved(from, to, bytes)` for every block that
/// this rank copied between two ranks' memory (its own share has from == to); `fence()` after each
/// rendezvous. The pipeline holds it by value; no member may throw, as one rank's error must not
/// part it from the others. A step that fails begins and does not end.
template <class O>
concept observer = std::copyable<O> && detail::observes_calls_or_not<O> &&
    requires(O& seen, step_id step, int rank, std::size_t bytes) {
    { seen.begin(step) }
    noexcept;
    { seen.end(step) }
    noexcept;
    { seen.moved(rank, rank, bytes) }
    noexcept;
    { seen.fence() }
    noexcept;
};

/// Sees nothing, costs nothing.
struct no_observer {
    static constexpr void begin(step_id) noexcept {}
    static constexpr void end(step_id) noexcept {}
    static constexpr void moved(int, int, std::size_t) noexcept {}
    static constexpr void fence() noexcept {}
};

/// Tells an observer that wants to know of a call, from here to the end of the scope. A call that fails
/// begins and does not end.
template <class Observer>
class observed_call {
   public:
    observed_call(Observer& seen, pass_kind kind) : seen_(seen), kind_(kind) {
        if constexpr (observes_calls<Observer>) seen_.begin(kind_);
    }
    observed_call(observed_call const&) = delete;
    observed_call& operator=(observed_call const&) = delete;
    ~observed_call() {
        if constexpr (observes_calls<Observer>)
            if (std::uncaught_exceptions() == exceptions_) seen_.end(kind_);
    }

   private:
    Observer& seen_;
    pass_kind kind_;
    int exceptions_ = std::uncaught_exceptions();
};

}  // namespace ulysses::inline ULYSSES_ABI
