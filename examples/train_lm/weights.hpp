#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "layers.hpp"
#include "linear.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace lm {

struct model_shape {
    std::int64_t layers = 0;
    std::int64_t width = 0;     ///< C
    std::int64_t heads = 0;     ///< Hq
    std::int64_t kv_heads = 0;  ///< Hkv

    std::int64_t head_dim() const { return width / heads; }  // D
    /// F, about 8/3 C as usual with three matrices, on a multiple of 16.
    std::int64_t hidden() const { return (width * 8 / 3 + 15) / 16 * 16; }
};

template <class T>
struct layer_weights {
    weight_view<T> q, k, v, o;  // [C, Hq D], [C, Hkv D], [C, Hkv D], [Hq D, C]
    weight_view<T> gate_up;     // [C, 2F]
    weight_view<T> down;        // [F, C]
    T* attention_gain = nullptr;
    T* mlp_gain = nullptr;  // [C]
};

/// All parameters of the model, or all gradients, in one piece of memory: one reduction and one
/// optimizer step serve them all. Every rank holds its own.
template <class T>
class weights {
   public:
    explicit weights(model_shape const& given) : shape_(given) {
        // First the matrices, which decay, then the gains.
        auto const c = given.width, kv = given.kv_heads * given.head_dim(), f = given.hidden();
        matrices_ = vocabulary * c + given.layers * (2 * c * c + 2 * c * kv + 3 * c * f);
        elements_.resize(static_cast<std::size_t>(matrices_ + (2 * given.layers + 1) * c));
        auto* next = elements_.data();
        auto const take = [&](std::int64_t rows, std::int64_t columns) {
            weight_view<T> const view{next, columns};
            next += rows * columns;
            return view;
        };
        embedding = take(vocabulary, c);
        layers.resize(static_cast<std::size_t>(given.layers));
        for (auto& each : layers)
            each = {.q = take(c, c),
                    .k = take(c, kv),
                    .v = take(c, kv),
                    .o = take(c, c),
                    .gate_up = take(c, 2 * f),
                    .down = take(f, c)};
        for (auto& each : layers) {
            each.attention_gain = take(1, c).data;
            each.mlp_gain = take(1, c).data;
        }
        final_gain = take(1, c).data;
    }
    weights(weights const&) = delete;
    weights& operator=(weights const&) = delete;

    /// The same on every rank and, but for rounding, for every element type.
    void initialise(std::uint64_t seed) {
        std::mt19937_64 generator(seed);
        std::normal_distribution<double> normal(0,
                                                0.6 / std::sqrt(static_cast<double>(shape_.width)));
        for (auto& each : matrices()) each = static_cast<T>(normal(generator));
        std::fill(elements_.begin() + matrices_, elements_.end(), T(1));
        // What is added to the residual stream starts small, so that the sum over layers does not.
        auto const factor = static_cast<T>(1 / std::sqrt(2 * static_cast<double>(shape_.layers)));
        auto const shrink = [&](weight_view<T> const& w, std::int64_t rows) {
            for (std::int64_t i = 0; i < rows * w.stride; ++i) w.data[i] *= factor;
        };
        for (auto const& each : layers) {
            shrink(each.o, shape_.width);
            shrink(each.down, shape_.hidden());
        }
    }

    model_shape const& shape() const { return shape_; }
    std::span<T> all() { return elements_; }
    std::span<T> matrices() { return all().first(static_cast<std::size_t>(matrices_)); }
    std::span<T const> all() const { return elements_; }

    weight_view<T> embedding;  // [256, C], and transposed the output's
    std::vector<layer_weights<T>> layers;
    T* final_gain = nullptr;  // [C]

   private:
    model_shape shape_;
    std::vector<T> elements_;
    std::int64_t matrices_ = 0;
};

}  // namespace lm
