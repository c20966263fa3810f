#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "attention.hpp"
#include "tensor.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace engine {

struct AttentionConfig {
    std::int64_t heads, kv_heads, dim;
};

/// Deals out initial weights, and places in the list of all gradients.
struct Initializer {
    std::mt19937 random;
    std::size_t parameters = 0;
};

/// y = x W, W [in, out].
class Linear {
   public:
    Linear(std::int64_t in, std::int64_t out, Initializer& start)
        : in_(in),
          out_(out),
          place_(start.parameters),
          weights_(static_cast<std::size_t>(in * out)) {
        start.parameters += weights_.size();
        // Engines of the standard library differ in their distributions, not in their bits.
        auto const width = 2.0f * std::sqrt(3.0f / static_cast<float>(in));
        for (auto& w : weights_)
            w = (static_cast<float>(start.random() >> 8) / static_cast<float>(1 << 24) - 0.5f) *
                width;
    }

    Tensor operator()(Tensor const& x, Arena& arena) const {
        Tensor y(arena, x.rows(), out_);
        for (std::int64_t i = 0; i < x.rows(); ++i) {
            auto* const to = y.row(i);
            std::fill(to, to + out_, 0.0f);
            for (std::int64_t c = 0; c < in_; ++c) {
                auto const* const w = row(c);
                for (std::int64_t n = 0; n < out_; ++n) to[n] += x.row(i)[c] * w[n];
            }
        }
        return y;
    }

    /// Row of W.
    float const* row(std::int64_t i) const { return weights_.data() + i * out_; }

    /// dx of dy; adds dW to the list of all gradients.
    Tensor backward(Tensor const& x, Tensor const& dy, std::span<float> gradients,
                    Arena& arena) const {
        Tensor dx(arena, x.rows(), in_);
        for (std::int64_t i = 0; i < x.rows(); ++i)
            for (std::int64_t c = 0; c < in_; ++c) {
                auto const* const w = row(c);
                auto* const dw = gradient_row(gradients, c);
                float sum = 0;
                for (std::int64_t n = 0; n < out_; ++n) {
                    sum += dy.row(i)[n] * w[n];
                    dw[n] += x.row(i)[c] * dy.row(i)[n];
                }
                dx.row(i)[c] = sum;
            }
        return dx;
    }
    float* gradient_row(std::span<float> gradients, std::int64_t i) const {
        return gradients.data() + place_ + i * out_;
    }

    void descend(std::span<float const> gradients, float rate) {
        for (std::size_t i = 0; i < weights_.size(); ++i)
            weights_[i] -= rate * gradients[place_ + i];
    }

   private:
    std::int64_t in_, out_;
    std::size_t place_;
    std::vector<float> weights_;
};

/// Rows divided by their root mean square, times a learned gain (here 1 everywhere).
inline Tensor rms_norm(Tensor const& x, Arena& arena) {
    Tensor y(arena, x.rows(), x.columns());
    for (std::int64_t i = 0; i < x.rows(); ++i) {
        float squares = 0;
        for (std::int64_t c = 0; c < x.columns(); ++c) squares += x.row(i)[c] * x.row(i)[c];
        auto const scale = 1.0f / std::sqrt(squares / static_cast<float>(x.columns()) + 1e-6f);
        for (std::int64_t c = 0; c < x.columns(); ++c) y.row(i)[c] = x.row(i)[c] * scale;
    }
    return y;
}

inline Tensor rms_norm_backward(Tensor const& x, Tensor const& dy, Arena& arena) {
    Tensor dx(arena, x.rows(), x.columns());
    auto const width = static_cast<float>(x.columns());
    for (std::int64_t i = 0; i < x.rows(); ++i) {
        float squares = 0, dot = 0;
        for (std::int64_t c = 0; c < x.columns(); ++c) {
            squares += x.row(i)[c] * x.row(i)[c];
            dot += x.row(i)[c] * dy.row(i)[c];
        }
        auto const scale = 1.0f / std::sqrt(squares / width + 1e-6f);
        auto const along = dot * scale * scale * scale / width;
        for (std::int64_t c = 0; c < x.columns(); ++c)
            dx.row(i)[c] = dy.row(i)[c] * scale - x.row(i)[c] * along;
    }
    return dx;
}

inline void add(Tensor& x, Tensor const& y) {
    for (std::int64_t i = 0; i < x.rows(); ++i)
        for (std::int64_t c = 0; c < x.columns(); ++c) x.row(i)[c] += y.row(i)[c];
}

/// Rotary embedding; the first row stands at position `first` of the prompt. Its backward turns
/// gradients the other way.
inline void rotate(Heads x, std::int64_t first, double direction = 1.0) {
    for (std::int64_t pair = 0; pair < x.dim / 2; ++pair) {
        auto const rate =
            std::pow(10000.0, -2.0 * static_cast<double>(pair) / static_cast<double>(x.dim));
        for (std::int64_t i = 0; i < x.rows; ++i) {
            auto const angle = direction * static_cast<double>(first + i) * rate;
            auto const c = static_cast<float>(std::cos(angle)),
                       s = static_cast<float>(std::sin(angle));
            for (std::int64_t h = 0; h < x.heads; ++h) {
                auto& a = x.at(i, h)[2 * pair];
                auto& b = x.at(i, h)[2 * pair + 1];
                auto const turned = a * c - b * s;
                b = a * s + b * c;
                a = turned;
            }
        }
    }
}

/// Grouped-query attention with rotary embedding; one product gives the rows [q | k | v].
class AttentionLayer {
   public:
    /// What backward needs of forward.
    struct Kept {
        Tensor x, qkv, merged;
    };

    AttentionLayer(std::int64_t width, AttentionConfig const& config, Initializer& start)
        : config_(config),
          in_(width, (config.heads + 2 * config.kv_heads) * config.dim, start),
          out_(config.heads * config.dim, width, start) {}

    // [snippet layer]
    Tensor operator()(std::size_t layer, Tensor x, std::int64_t first, AttentionBackend& backend,
                      Arena& arena, std::optional<Kept>* kept = nullptr) const {
        auto qkv = in_(x, arena);
        Tensor merged(arena, x.rows(), config_.heads * config_.dim);
        auto const [q, k, v] = parts_of(qkv);
        rotate(q, first);
        rotate(k, first);
        backend.attend(layer, q, k, v, heads_of(merged));
        auto y = out_(merged, arena);
        if (kept != nullptr) kept->emplace(Kept{std::move(x), std::move(qkv), std::move(merged)});
        return y;
    }
    // [/snippet]

    Tensor backward(std::size_t layer, Kept& kept, Tensor const& dy, std::int64_t first,
                    AttentionBackend& backend, std::span<float> gradients, Arena& arena) const {
        auto dmerged = out_.backward(kept.merged, dy, gradients, arena);
        Tensor dqkv(arena, kept.qkv.rows(), kept.qkv.columns());
        auto const [q, k, v] = parts_of(kept.qkv);
        auto const [dq, dk, dv] = parts_of(dqkv);
        backend.backward(layer, q, k, v, heads_of(kept.merged), heads_of(dmerged), dq, dk, dv);
        rotate(dq, first, -1.0);
        rotate(dk, first, -1.0);
        return in_.backward(kept.x, dqkv, gradients, arena);
    }

    void descend(std::span<float const> gradients, float rate) {
        in_.descend(gradients, rate);
        out_.descend(gradients, rate);
    }

   private:
    Heads heads_of(Tensor& x) const { return heads_of(x, 0, config_.heads); }
    Heads heads_of(Tensor& x, std::int64_t begin, std::int64_t count) const {
        return {x.row(0) + begin * config_.dim, x.rows(), count, config_.dim, x.columns()};
    }
    std::array<Heads, 3> parts_of(Tensor& qkv) const {
        auto const [heads, kv_heads, dim] = config_;
        return {heads_of(qkv, 0, heads), heads_of(qkv, heads, kv_heads),
                heads_of(qkv, heads + kv_heads, kv_heads)};
    }

    AttentionConfig config_;
    Linear in_, out_;
};

/// SwiGLU: (silu(x Wg) * x Wu) Wd.
class Mlp {
   public:
    struct Kept {
        Tensor x, gate, up, hidden;
    };

    Mlp(std::int64_t width, std::int64_t hidden, Initializer& start)
        : gate_(width, hidden, start), up_(width, hidden, start), down_(hidden, width, start) {}

    Tensor operator()(Tensor x, Arena& arena, std::optional<Kept>* kept = nullptr) const {
        auto gate = gate_(x, arena), up = up_(x, arena);
        Tensor hidden(arena, gate.rows(), gate.columns());
        for (std::int64_t i = 0; i < gate.rows(); ++i)
            for (std::int64_t c = 0; c < gate.columns(); ++c)
                hidden.row(i)[c] = gate.row(i)[c] * sigmoid(gate.row(i)[c]) * up.row(i)[c];
        auto y = down_(hidden, arena);
        if (kept != nullptr)
            kept->emplace(Kept{std::move(x), std::move(gate), std::move(up), std::move(hidden)});
        return y;
    }

    Tensor backward(Kept const& kept, Tensor const& dy, std::span<float> gradients,
                    Arena& arena) const {
        auto dgate = down_.backward(kept.hidden, dy, gradients, arena);
        Tensor dup(arena, dgate.rows(), dgate.columns());
        for (std::int64_t i = 0; i < dgate.rows(); ++i)
            for (std::int64_t c = 0; c < dgate.columns(); ++c) {
                auto const g = kept.gate.row(i)[c], s = sigmoid(g), d = dgate.row(i)[c];
                dup.row(i)[c] = d * g * s;
                dgate.row(i)[c] = d * kept.up.row(i)[c] * s * (1.0f + g * (1.0f - s));
            }
        auto dx = gate_.backward(kept.x, dgate, gradients, arena);
        add(dx, up_.backward(kept.x, dup, gradients, arena));
        return dx;
    }

    void descend(std::span<float const> gradients, float rate) {
        gate_.descend(gradients, rate);
        up_.descend(gradients, rate);
        down_.descend(gradients, rate);
    }

   private:
    static float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

    Linear gate_, up_, down_;
};

}  // namespace engine
