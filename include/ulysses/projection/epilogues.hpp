#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/projection.hpp>
#include <ulysses/core/tensor_view.hpp>

#include <cstddef>
#include <tuple>
#include <utility>

namespace ulysses::inline ULYSSES_ABI {

/// Several epilogues of `dense` as one, in the order given; backward takes them from the last.
template <class... Each>
class epilogues {
   public:
    explicit constexpr epilogues(Each... each) : each_(std::move(each)...) {}

    template <class T>
    void forward(projection_call const& call, token_view<T> q, token_view<T> k) const {
        std::apply([&](auto const&... each) { (each.forward(call, q, k), ...); }, each_);
    }
    template <class T>
    void backward(projection_call const& call, token_view<T> dq, token_view<T> dk) const {
        [&]<std::size_t... I>(std::index_sequence<I...>) {
            (std::get<sizeof...(Each) - 1 - I>(each_).backward(call, dq, dk), ...);
        }
        (std::index_sequence_for<Each...>());
    }

   private:
    [[no_unique_address]] std::tuple<Each...> each_;
};

}  // namespace ulysses::inline ULYSSES_ABI
