#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/tensor_view.hpp>
#include <ulysses/projection/dense.hpp>

#include <cstddef>
#include <tuple>
#include <utility>

namespace ulysses::inline ULYSSES_ABI {

/// Several epilogues of `dense` as one, in the order given; backward takes them from the last. One
/// that takes weights comes first:
///
///     dense{builtin_gemm{}, epilogues{qk_norm{}, rope{layer.head_dim}}}
template <class First, class... Rest>
class epilogues {
    static_assert(!(detail::takes_weights<Rest> || ...),
                  "ulysses: an epilogue that takes weights must be the first of `epilogues`: its "
                  "backward is given q and k as the projection made them.");

   public:
    static constexpr bool takes_weights = detail::takes_weights<First>;

    explicit constexpr epilogues(First first, Rest... rest)
        : first_(std::move(first)), rest_(std::move(rest)...) {}

    template <class T, class Call>
    void forward(Call const& call, token_view<T> q, token_view<T> k) const {
        first_.forward(call, q, k);
        forward_rest(call, q, k);
    }
    template <class T, class Call>
    void backward(Call const& call, token_view<T> dq, token_view<T> dk) const {
        backward_rest(call, dq, dk);
        first_.backward(call, dq, dk);
    }

    template <class T, class Call>
    void forward(Call const& call, dense_weights<T> const& weights, token_view<T> q,
                 token_view<T> k) const {
        first_.forward(call, weights, q, k);
        forward_rest(call, q, k);
    }
    template <class T, class Call>
    void backward(Call const& call, dense_weights<T> const& weights, token_view<T> q,
                  token_view<T> k, token_view<T> dq, token_view<T> dk) const {
        backward_rest(call, dq, dk);
        first_.backward(call, weights, q, k, dq, dk);
    }

   private:
    template <class T, class Call>
    void forward_rest(Call const& call, token_view<T> q, token_view<T> k) const {
        std::apply([&](auto const&... each) { (each.forward(call, q, k), ...); }, rest_);
    }
    template <class T, class Call>
    void backward_rest(Call const& call, token_view<T> dq, token_view<T> dk) const {
        auto const from_last = [&]<std::size_t... I>(std::index_sequence<I...>) {
            (std::get<sizeof...(Rest) - 1 - I>(rest_).backward(call, dq, dk), ...);
        };
        from_last(std::index_sequence_for<Rest...>());
    }

    [[no_unique_address]] First first_;
    [[no_unique_address]] std::tuple<Rest...> rest_;
};

}  // namespace ulysses::inline ULYSSES_ABI
