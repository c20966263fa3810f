#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/projection.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/tensor_view.hpp>
#include <ulysses/projection/dense.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

struct qk_norm_options {
    double epsilon = 1e-6;  ///< added to the mean of squares
};

namespace detail {

/// `Wide` elements that lie on a multiple of their size, read and written together.
template <class T, int Wide>
struct alignas(sizeof(T) * Wide) elements_at_once {
    T at[std::size_t{Wide}];
};

/// 1 / sqrt(mean(x^2) + epsilon)
template <int Wide, class T>
ULYSSES_HD accumulator_t<T> inverse_rms(T const* row, std::int64_t dim, double epsilon) {
    using sum = accumulator_t<T>;
    sum squares = 0;
    for (std::int64_t d = 0; d < dim; d += Wide) {
        auto const x = *reinterpret_cast<elements_at_once<T, Wide> const*>(row + d);
        for (int i = 0; i < Wide; ++i)
            squares += static_cast<sum>(x.at[i]) * static_cast<sum>(x.at[i]);
    }
    return sum(1) / std::sqrt(squares / static_cast<sum>(dim) + static_cast<sum>(epsilon));
}

template <class T>
ULYSSES_HD accumulator_t<T> gain_of(T const* weight, std::int64_t d) {
    return weight == nullptr ? accumulator_t<T>(1) : static_cast<accumulator_t<T>>(weight[d]);
}

/// row = row / rms * weight
template <int Wide, class T>
ULYSSES_HD void normalise_row(T* row, T const* weight, std::int64_t dim, double epsilon) {
    using sum = accumulator_t<T>;
    auto const inverse = inverse_rms<Wide>(row, dim, epsilon);
    for (std::int64_t d = 0; d < dim; d += Wide) {
        auto& x = *reinterpret_cast<elements_at_once<T, Wide>*>(row + d);
        auto y = x;
        for (int i = 0; i < Wide; ++i)
            y.at[i] = static_cast<T>(static_cast<sum>(y.at[i]) * inverse * gain_of(weight, d + i));
        x = y;
    }
}

/// With n = x / rms and g = dy * weight: dx = (g - n * mean(g * n)) / rms, in place of dy, and
/// dy * n, what the row adds to the weight's gradient, in place of x.
template <int Wide, class T>
ULYSSES_HD void normalise_row_backward(T* row, T* d_row, T const* weight, std::int64_t dim,
                                       double epsilon) {
    using sum = accumulator_t<T>;
    using elements = elements_at_once<T, Wide>;
    auto const inverse = inverse_rms<Wide>(static_cast<T const*>(row), dim, epsilon);
    sum mean = 0;
    for (std::int64_t d = 0; d < dim; d += Wide) {
        auto const x = *reinterpret_cast<elements const*>(row + d);
        auto const dy = *reinterpret_cast<elements const*>(d_row + d);
        for (int i = 0; i < Wide; ++i)
            mean += static_cast<sum>(dy.at[i]) * gain_of(weight, d + i) *
                    (static_cast<sum>(x.at[i]) * inverse);
    }
    mean /= static_cast<sum>(dim);
    for (std::int64_t d = 0; d < dim; d += Wide) {
        auto x = *reinterpret_cast<elements const*>(row + d);
        auto dy = *reinterpret_cast<elements const*>(d_row + d);
        for (int i = 0; i < Wide; ++i) {
            auto const normal = static_cast<sum>(x.at[i]) * inverse;
            auto const gradient = static_cast<sum>(dy.at[i]);
            x.at[i] = static_cast<T>(gradient * normal);
            dy.at[i] =
                static_cast<T>((gradient * gain_of(weight, d + i) - normal * mean) * inverse);
        }
        *reinterpret_cast<elements*>(row + d) = x;
        *reinterpret_cast<elements*>(d_row + d) = dy;
    }
}

/// All rows of a view, for a space that runs them; of elements T, strides in elements.
struct norm_rows {
    void* rows;
    void* gradients;  ///< dy; null: forward
    void const* weight;
    std::int64_t extents[3], strides[3], gradient_strides[3];  ///< batch, token, head
    std::int64_t dim;
    double epsilon;

    std::int64_t count() const { return extents[0] * extents[1] * extents[2]; }

    /// Whether rows begin on a multiple of so many bytes, and end on one.
    bool aligned(std::int64_t bytes, std::int64_t element) const {
        auto bits = reinterpret_cast<std::uintptr_t>(rows) |
                    reinterpret_cast<std::uintptr_t>(gradients) |
                    static_cast<std::uintptr_t>(dim * element);
        for (int axis = 0; axis < 3; ++axis) {
            if (extents[axis] <= 1) continue;
            bits |= static_cast<std::uintptr_t>(strides[axis] * element);
            if (gradients != nullptr)
                bits |= static_cast<std::uintptr_t>(gradient_strides[axis] * element);
        }
        return bits % static_cast<std::uintptr_t>(bytes) == 0;
    }

    template <int Wide, class T>
    ULYSSES_HD void row(std::int64_t b, std::int64_t token, std::int64_t head) const {
        auto const place = [&](std::int64_t const(&s)[3]) {
            return b * s[0] + token * s[1] + head * s[2];
        };
        auto* const x = static_cast<T*>(rows) + place(strides);
        auto const* const gain = static_cast<T const*>(weight);
        if (gradients == nullptr)
            normalise_row<Wide>(x, gain, dim, epsilon);
        else
            normalise_row_backward<Wide>(x, static_cast<T*>(gradients) + place(gradient_strides),
                                         gain, dim, epsilon);
    }
};

}  // namespace detail

/// An epilogue of `dense` that normalises each head's row of q and of k by its root mean square and
/// multiplies it by learned weights, `dense_weights::q_norm` and `k_norm`, the same for all heads:
/// y = x / sqrt(mean(x^2) + epsilon) * weight. Sums are in `accumulator_t<T>`; what each row
/// adds to the weights' gradients is rounded to T. Where it is used, backward projects q and k once more.
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

    template <element T, class Call>
    void forward(Call const& call, dense_weights<T> const& weights, token_view<T> q,
                 token_view<T> k) const {
        run<T>(call, q, nullptr, weights.q_norm);
        run<T>(call, k, nullptr, weights.k_norm);
    }

    /// q and k as they were before forward, and what their rows add to the weights' gradients after;
    /// dq and dk in place.
    template <element T, class Call>
    void backward(Call const& call, dense_weights<T> const& weights, token_view<T> q,
                  token_view<T> k, token_view<T> dq, token_view<T> dk) const {
        run<T>(call, q, &dq, weights.q_norm);
        run<T>(call, k, &dk, weights.k_norm);
    }

   private:
    template <class T, class Call>
    void run(Call const& call, token_view<T> const& x, token_view<T> const* dy,
             T const* weight) const {
        detail::norm_rows work{};
        work.rows = x.data;
        work.weight = weight;
        for (std::size_t axis = 0; axis < 3; ++axis) {
            work.extents[axis] = x.extents[axis];
            work.strides[axis] = x.strides[axis];
            if (dy != nullptr) work.gradient_strides[axis] = dy->strides[axis];
        }
        if (dy != nullptr) work.gradients = dy->data;
        work.dim = x.dim();
        work.epsilon = epsilon_;
        using space = space_of_call_t<Call>;
        if constexpr (runs_work<space, detail::norm_rows>) {
            space::run(call.queue, dtype_of<T>, work);
        } else {
            for (std::int64_t b = 0; b < x.batch(); ++b)
                for (std::int64_t s = 0; s < x.tokens(); ++s)
                    for (std::int64_t h = 0; h < x.heads(); ++h) work.row<1, T>(b, s, h);
        }
    }

    double epsilon_;
};

}  // namespace ulysses::inline ULYSSES_ABI
