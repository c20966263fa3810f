#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/projection.hpp>
#include <ulysses/core/tensor_view.hpp>
#include <ulysses/projection/dense.hpp>

#include <cmath>
#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

struct qk_norm_options {
    double epsilon = 1e-6;  ///< added to the mean of squares
};

/// An epilogue of `dense` that normalises each head's row of q and of k by its root mean square and
/// multiplies it by learned weights, `dense_weights::q_norm` and `k_norm`, the same for all heads:
/// y = x / sqrt(mean(x^2) + epsilon) * weight. Sums are in `accumulator_t<T>`. Where it is used,
/// backward projects q and k once more.
///
/// *Thread safety*: immutable. *Source*: Zhang and Sennrich, "Root Mean Square Layer Normalization"
/// (2019); Henry et al., "Query-Key Normalization for Transformers" (2020).
class qk_norm {
   public:
    static constexpr bool takes_weights = true;

    /// *Throws* `invalid_shape` when epsilon is not one.
    explicit qk_norm(qk_norm_options const& given = {}, where at = where::here())
        : epsilon_(given.epsilon) {
        if (!std::isfinite(epsilon_) || epsilon_ < 0)
            raise(errc::invalid_shape, at, "qk_norm", "epsilon must be finite and not negative",
                  epsilon_);
    }

    template <element T>
    void forward(projection_call const&, dense_weights<T> const& weights, token_view<T> q,
                 token_view<T> k) const {
        normalise<T>(q, weights.q_norm);
        normalise<T>(k, weights.k_norm);
    }

    /// q and k as they were before forward; dq and dk in place.
    template <element T>
    void backward(projection_call const&, dense_weights<T> const& weights, token_view<T> q,
                  token_view<T> k, token_view<T> dq, token_view<T> dk,
                  dense_gradients<T> const& gradients) const {
        turn_back<T>(q, weights.q_norm, dq, gradients.q_norm);
        turn_back<T>(k, weights.k_norm, dk, gradients.k_norm);
    }

   private:
    template <class T>
    using sum_type = accumulator_t<T>;

    template <class T, class Use>
    static void for_rows(token_view<T> const& x, Use const& use) {
        for (std::int64_t b = 0; b < x.batch(); ++b)
            for (std::int64_t s = 0; s < x.tokens(); ++s)
                for (std::int64_t h = 0; h < x.heads(); ++h) use(b, s, h);
    }

    template <class T>
    sum_type<T> inverse_of(T const* row, std::int64_t dims) const {
        using sum = sum_type<T>;
        sum squares = 0;
        for (std::int64_t d = 0; d < dims; ++d)
            squares += static_cast<sum>(row[d]) * static_cast<sum>(row[d]);
        return sum(1) / std::sqrt(squares / static_cast<sum>(dims) + static_cast<sum>(epsilon_));
    }

    template <class T>
    void normalise(token_view<T> const& x, T const* weight) const {
        using sum = sum_type<T>;
        for_rows(x, [&](std::int64_t b, std::int64_t s, std::int64_t h) {
            auto* const row = x.row(b, s, h);
            auto const inverse = inverse_of(row, x.dim());
            for (std::int64_t d = 0; d < x.dim(); ++d) {
                auto const gain = weight == nullptr ? sum(1) : static_cast<sum>(weight[d]);
                row[d] = static_cast<T>(static_cast<sum>(row[d]) * inverse * gain);
            }
        });
    }

    /// With n = x / rms and g = dy * weight: dweight += dy * n, dx = (g - n * mean(g * n)) / rms.
    template <class T>
    void turn_back(token_view<T> const& x, T const* weight, token_view<T> const& dy,
                   T* gradient) const {
        using sum = sum_type<T>;
        for_rows(x, [&](std::int64_t b, std::int64_t s, std::int64_t h) {
            auto const* const row = x.row(b, s, h);
            auto* const d_row = dy.row(b, s, h);
            auto const inverse = inverse_of(row, x.dim());
            auto const normal = [&](std::int64_t d) { return static_cast<sum>(row[d]) * inverse; };
            auto const weighted = [&](std::int64_t d) {
                auto const gain = weight == nullptr ? sum(1) : static_cast<sum>(weight[d]);
                return static_cast<sum>(d_row[d]) * gain;
            };
            sum mean = 0;
            for (std::int64_t d = 0; d < x.dim(); ++d) mean += weighted(d) * normal(d);
            mean /= static_cast<sum>(x.dim());
            for (std::int64_t d = 0; d < x.dim(); ++d) {
                if (gradient != nullptr)
                    gradient[d] = static_cast<T>(static_cast<sum>(gradient[d]) +
                                                 static_cast<sum>(d_row[d]) * normal(d));
                d_row[d] = static_cast<T>((weighted(d) - normal(d) * mean) * inverse);
            }
        });
    }

    double epsilon_;
};

}  // namespace ulysses::inline ULYSSES_ABI
