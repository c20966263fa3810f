#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "arena.hpp"
#include "tensor.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace engine {

/// Rows of one head: row i begins at first + i * stride.
struct Rows {
    float const* first;
    std::int64_t stride;
    float const* operator[](std::int64_t i) const { return first + i * stride; }
};

/// weights = exp(q k^T / sqrt(dim) - largest) over the first `seen` keys.
struct Softmax {
    float largest, sum;
};
inline Softmax softmax_weights(float const* q, Rows k, std::int64_t seen, std::int64_t dim,
                               float* weights) {
    auto const scale = 1.0f / std::sqrt(static_cast<float>(dim));
    auto largest = -std::numeric_limits<float>::infinity();
    for (std::int64_t j = 0; j < seen; ++j) {
        float dot = 0;
        for (std::int64_t d = 0; d < dim; ++d) dot += q[d] * k[j][d];
        weights[j] = dot * scale;
        largest = std::max(largest, weights[j]);
    }
    float sum = 0;
    for (std::int64_t j = 0; j < seen; ++j) sum += weights[j] = std::exp(weights[j] - largest);
    return {largest, sum};
}

/// out [dim] = softmax(q k^T / sqrt(dim)) v over the first `seen` keys. `weights` holds that many
/// floats. Returns the logarithm of the softmax's denominator, for merging parts of a cache.
inline float attend_row(float const* q, Rows k, Rows v, std::int64_t seen, std::int64_t dim,
                        float* weights, float* out) {
    auto const [largest, sum] = softmax_weights(q, k, seen, dim, weights);
    std::fill(out, out + dim, 0.0f);
    for (std::int64_t j = 0; j < seen; ++j)
        for (std::int64_t d = 0; d < dim; ++d) out[d] += weights[j] / sum * v[j][d];
    return largest + std::log(sum);
}

/// Rows of one head's gradient, added to.
struct GradientRows {
    float* first;
    std::int64_t stride;
    float* operator[](std::int64_t i) const { return first + i * stride; }
};

/// Backward of `attend_row`, which ran with the same q, k and v and gave `out`: dq is written, dk
/// and dv are added to. `weights` holds `seen` floats.
inline void attend_row_backward(float const* q, Rows k, Rows v, std::int64_t seen, std::int64_t dim,
                                float const* out, float const* dout, float* weights, float* dq,
                                GradientRows dk, GradientRows dv) {
    auto const scale = 1.0f / std::sqrt(static_cast<float>(dim));
    auto const denominator = softmax_weights(q, k, seen, dim, weights).sum;
    float mean = 0;
    for (std::int64_t d = 0; d < dim; ++d) mean += dout[d] * out[d];
    std::fill(dq, dq + dim, 0.0f);
    for (std::int64_t j = 0; j < seen; ++j) {
        auto const p = weights[j] / denominator;
        float dot = 0;
        for (std::int64_t d = 0; d < dim; ++d) dot += dout[d] * v[j][d];
        auto const slope = p * (dot - mean) * scale;
        for (std::int64_t d = 0; d < dim; ++d) {
            dq[d] += slope * k[j][d];
            dk[j][d] += slope * q[d];
            dv[j][d] += p * dout[d];
        }
    }
}

/// How the layers of a model attend. Query head h reads key-value head h / (heads / kv_heads).
class AttentionBackend {
   public:
    virtual ~AttentionBackend() = default;
    virtual void attend(std::size_t layer, Heads q, Heads k, Heads v, Heads o) = 0;
    /// With what `attend` read and wrote; dq, dk and dv are written.
    virtual void backward(std::size_t layer, Heads q, Heads k, Heads v, Heads o, Heads dout,
                          Heads dq, Heads dk, Heads dv) = 0;
};

/// Over the rows at hand, which are the whole prompt.
class LocalAttention : public AttentionBackend {
   public:
    explicit LocalAttention(Arena& arena) : arena_(arena) {}

    // [snippet before]
    void attend(std::size_t, Heads q, Heads k, Heads v, Heads o) override {
        Tensor weights(arena_, 1, k.rows);
        for (std::int64_t h = 0; h < q.heads; ++h)
            for (std::int64_t i = 0; i < q.rows; ++i) {
                auto const g = h / (q.heads / k.heads);
                attend_row(q.at(i, h), {k.at(0, g), k.stride}, {v.at(0, g), v.stride}, i + 1, q.dim,
                           weights.row(0), o.at(i, h));
            }
    }
    // [/snippet]

    void backward(std::size_t, Heads q, Heads k, Heads v, Heads o, Heads dout, Heads dq, Heads dk,
                  Heads dv) override {
        clear(dk);
        clear(dv);
        Tensor weights(arena_, 1, k.rows);
        for (std::int64_t h = 0; h < q.heads; ++h)
            for (std::int64_t i = 0; i < q.rows; ++i) {
                auto const g = h / (q.heads / k.heads);
                attend_row_backward(q.at(i, h), {k.at(0, g), k.stride}, {v.at(0, g), v.stride},
                                    i + 1, q.dim, o.at(i, h), dout.at(i, h), weights.row(0),
                                    dq.at(i, h), {dk.at(0, g), dk.stride},
                                    {dv.at(0, g), dv.stride});
            }
    }

   private:
    static void clear(Heads x) {
        for (std::int64_t i = 0; i < x.rows; ++i) std::fill(x.at(i, 0), x.at(i, x.heads), 0.0f);
    }

    Arena& arena_;
};

}  // namespace engine
