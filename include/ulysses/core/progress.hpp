#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>

namespace ulysses::inline ULYSSES_ABI {

/// A communicator whose messages only move inside its calls.
///
/// Requirements:
/// 1. `progress()` moves messages that have been started on this rank, for a few microseconds. It is not
///    collective, neither waits nor throws, and allocates nothing: what fails is told by `wait`.
///
/// While a pipeline computes a chunk of heads and the next one is on its way (`shape::overlap`), it calls
/// this between work items, and wherever the attention functor calls `attention_call::progress`.
template <class C>
concept progresses = sends_messages<C> && requires(C const& ranks) {
    ranks.progress();
};

/// What a functor calls now and then, on the thread that it was called on, so that messages move while
/// it computes; about every millisecond, or not at all. Does nothing where nothing is to be moved.
class progress_hook {
   public:
    /// Calls `ranks.progress()`; `ranks` outlives the hook.
    template <progresses C>
    static constexpr progress_hook of(C const& ranks) {
        progress_hook hook;
        hook.ranks_ = &ranks;
        hook.call_ = [](void const* own) { static_cast<C const*>(own)->progress(); };
        return hook;
    }

    void operator()() const {
        if (call_ != nullptr) call_(ranks_);
    }

   private:
    void const* ranks_ = nullptr;
    void (*call_)(void const* ranks) = nullptr;
};

}  // namespace ulysses::inline ULYSSES_ABI
