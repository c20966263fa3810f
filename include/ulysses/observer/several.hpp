#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/observer.hpp>

#include <cstddef>
#include <tuple>
#include <utility>

namespace ulysses::inline ULYSSES_ABI {

/// Several observers as one; each is told everything, in the order of the template parameters.
///
///     ulysses::observers both{ulysses::counting_observer{rank}, recorder.observer("layer 0")};
///     both.get<ulysses::counting_observer>().fences
template <observer... Each>
class observers {
   public:
    observers() = default;
    explicit observers(Each... each) requires(sizeof...(Each) > 0) : each_(std::move(each)...) {}

    /// The one of that type.
    template <class One>
    One& get() noexcept {
        return std::get<One>(each_);
    }
    template <class One>
    One const& get() const noexcept {
        return std::get<One>(each_);
    }

    void begin(step_id step) noexcept {
        tell([&](auto& seen) { seen.begin(step); });
    }
    void end(step_id step) noexcept {
        tell([&](auto& seen) { seen.end(step); });
    }
    void moved(int from, int to, std::size_t bytes) noexcept {
        tell([&](auto& seen) { seen.moved(from, to, bytes); });
    }
    void fence() noexcept {
        tell([](auto& seen) { seen.fence(); });
    }
    void begin(pass_kind kind) noexcept {
        tell([&](auto& seen) {
            if constexpr (observes_calls<decltype(seen)>) seen.begin(kind);
        });
    }
    void end(pass_kind kind) noexcept {
        tell([&](auto& seen) {
            if constexpr (observes_calls<decltype(seen)>) seen.end(kind);
        });
    }

   private:
    template <class Tell>
    void tell(Tell const& one) noexcept {
        std::apply([&](auto&... seen) { (one(seen), ...); }, each_);
    }

    [[no_unique_address]] std::tuple<Each...> each_;
};

}  // namespace ulysses::inline ULYSSES_ABI
