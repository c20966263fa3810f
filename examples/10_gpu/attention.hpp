#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

/// An engine's attention kernel: causal, by the formula, a query row in each thread.
namespace engine {

/// [batch, row, head, dim] on the device; strides in elements.
template <class T>
struct rows {
    T* data = nullptr;
    std::int64_t batch = 0, count = 0, heads = 0, dim = 0;
    std::int64_t strides[3] = {};

    ULYSSES_HD T* at(std::int64_t b, std::int64_t i, std::int64_t h) const {
        return data + b * strides[0] + i * strides[1] + h * strides[2];
    }
};

struct causal_attention {
    rows<float const> q, k, v;
    rows<float> o, lse;
    std::int64_t row_of_key_0 = 0;  ///< the first key lies on this row of q, counted from q's first
    float scale = 1;

    ULYSSES_HD std::int64_t threads() const { return q.batch * q.count * q.heads; }

    ULYSSES_HD void operator()(std::int64_t thread) const {
        auto const i = thread % q.count, h = thread / q.count % q.heads,
                   b = thread / q.count / q.heads, g = h / (q.heads / k.heads);
        auto const* const x = q.at(b, i, h);
        auto* const y = o.at(b, i, h);
        float largest = -INFINITY, sum = 0;
        for (std::int64_t d = 0; d < o.dim; ++d) y[d] = 0;
        for (std::int64_t j = 0; j < k.count && row_of_key_0 + j <= i; ++j) {
            float score = 0;
            for (std::int64_t d = 0; d < q.dim; ++d) score += x[d] * k.at(b, j, g)[d];
            score *= scale;
            auto const next = largest < score ? score : largest;
            auto const old = std::exp(largest - next), p = std::exp(score - next);
            sum = sum * old + p;
            for (std::int64_t d = 0; d < o.dim; ++d) y[d] = y[d] * old + p * v.at(b, j, g)[d];
            largest = next;
        }
        for (std::int64_t d = 0; d < o.dim; ++d) y[d] /= sum;
        *lse.at(b, i, h) = largest + std::log(sum);
    }
};

/// Enqueues it; defined in kernels.cu.
cudaError_t launch(cudaStream_t stream, causal_attention const& work);

}  // namespace engine
