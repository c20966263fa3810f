#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "weights.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <vector>

namespace lm {

/// A linear rise over the first twentieth of the steps, then half a cosine down to a tenth.
inline double learning_rate_at(std::int64_t step, std::int64_t steps, double peak) {
    auto const rise = std::max<std::int64_t>(1, steps / 20);
    if (step < rise) return peak * static_cast<double>(step + 1) / static_cast<double>(rise);
    auto const way = static_cast<double>(step - rise) / static_cast<double>(steps - rise);
    return peak * (0.1 + 0.45 * (1 + std::cos(std::numbers::pi * way)));
}

/// AdamW on all parameters at once; only matrices decay. *Source*: Loshchilov and Hutter (2019).
template <class T>
class adamw {
   public:
    explicit adamw(std::size_t parameters) : mean_(parameters), square_(parameters) {}

    /// `gradients` are the same on every rank.
    void step(weights<T>& w, weights<T> const& gradients, double rate) {
        ++steps_;
        auto const mean_factor = static_cast<T>(1 / (1 - std::pow(beta_mean, steps_)));
        auto const square_factor = static_cast<T>(1 / (1 - std::pow(beta_square, steps_)));
        auto const decayed = w.matrices().size();
        auto const all = w.all().size();
        update(w, gradients, 0, decayed, mean_factor, square_factor, rate, decay);
        update(w, gradients, decayed, all, mean_factor, square_factor, rate, 0);
    }

   private:
    static constexpr double beta_mean = 0.9, beta_square = 0.98, decay = 0.1;

    void update(weights<T>& w, weights<T> const& gradients, std::size_t begin, std::size_t end,
                T mean_factor, T square_factor, double rate, double decay_rate) {
        constexpr auto b1 = static_cast<T>(beta_mean), b2 = static_cast<T>(beta_square);
        auto const keep = static_cast<T>(1 - rate * decay_rate);
        auto const r = static_cast<T>(rate);
        auto* const x = w.all().data();
        auto const* const gradient = gradients.all().data();
        auto* const mean = mean_.data();
        auto* const square = square_.data();
        for (auto i = begin; i < end; ++i) {
            auto const g = gradient[i];
            mean[i] = b1 * mean[i] + (1 - b1) * g;
            square[i] = b2 * square[i] + (1 - b2) * g * g;
            x[i] = keep * x[i] -
                   r * (mean[i] * mean_factor) / (std::sqrt(square[i] * square_factor) + T(1e-8));
        }
    }

    std::vector<T> mean_, square_;
    int steps_ = 0;
};

}  // namespace lm
