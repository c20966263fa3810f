#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/projection.hpp>
#include <ulysses/core/tensor_view.hpp>

#include <cmath>
#include <cstdint>
#include <vector>

namespace lm {

/// Rotary position embedding as the epilogue of a dense projection: turns the pair (d, d + D/2) of
/// q and k by an angle that grows with the token's position. The position is the one in the whole
/// sequence, whichever rank holds the token. *Source*: Su et al., "RoFormer" (2021).
class rope {
   public:
    explicit rope(std::int64_t head_dim, double base = 10000) {
        for (std::int64_t d = 0; d < head_dim / 2; ++d)
            frequencies_.push_back(
                std::pow(base, -2 * static_cast<double>(d) / static_cast<double>(head_dim)));
    }

    template <class T>
    void forward(ulysses::projection_call const& call, ulysses::token_view<T> q,
                 ulysses::token_view<T> k) const {
        turn(q, call.query_positions, 1);
        turn(k, call.key_positions, 1);
    }

    /// A rotation's gradient is turned back by it.
    template <class T>
    void backward(ulysses::projection_call const& call, ulysses::token_view<T> dq,
                  ulysses::token_view<T> dk) const {
        turn(dq, call.query_positions, -1);
        turn(dk, call.key_positions, -1);
    }

   private:
    template <class T>
    void turn(ulysses::token_view<T> const& x, ulysses::token_positions const& position,
              double direction) const {
        auto const half = x.dim() / 2;
        for (std::int64_t token = 0; token < x.tokens(); ++token)
            for (std::int64_t d = 0; d < half; ++d) {
                auto const angle = static_cast<double>(position(token)) * frequencies_[d];
                auto const cosine = static_cast<T>(std::cos(angle));
                auto const sine = static_cast<T>(direction * std::sin(angle));
                for (std::int64_t b = 0; b < x.batch(); ++b)
                    for (std::int64_t h = 0; h < x.heads(); ++h) {
                        auto& first = x(b, token, h, d);
                        auto& second = x(b, token, h, d + half);
                        auto const kept = first;
                        first = kept * cosine - second * sine;
                        second = kept * sine + second * cosine;
                    }
            }
    }

    std::vector<double> frequencies_;  // radians a token, [D/2]
};

}  // namespace lm
