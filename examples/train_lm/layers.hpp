#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "tensor.hpp"

#include <ulysses/train/loss.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>

/// What a decoder does token by token, forward and backward. A rank needs nothing of the others for
/// it.
namespace lm {

inline constexpr std::int64_t vocabulary = 256;  // bytes

/// In sixteen partial sums, which the compiler keeps in vectors.
template <class T>
T dot(T const* x, T const* y, std::int64_t count) {
    constexpr std::int64_t width = 16;
    T part[width] = {};
    std::int64_t i = 0;
    for (; i + width <= count; i += width)
        for (std::int64_t j = 0; j < width; ++j) part[j] += x[i + j] * y[i + j];
    T sum = 0;
    for (; i < count; ++i) sum += x[i] * y[i];
    for (auto const each : part) sum += each;
    return sum;
}

/// z = x + y
template <class T>
void add(tensor<T> const& x, tensor<T> const& y, tensor<T> const& z) {
    for (std::int64_t i = 0; i < x.size(); ++i) z.data()[i] = x.data()[i] + y.data()[i];
}

/// x = rows of the table, one for each byte;  table [256, C] -> x [B, s, C]
template <class T>
void embed(std::span<std::uint8_t const> bytes, T const* table, tensor<T> const& x) {
    for (std::int64_t i = 0; i < x.rows(); ++i)
        std::copy_n(table + bytes[static_cast<std::size_t>(i)] * x.width(), x.width(), x.row(i));
}
template <class T>
void embed_backward(std::span<std::uint8_t const> bytes, tensor<T> const& dx, T* dtable) {
    for (std::int64_t i = 0; i < dx.rows(); ++i) {
        auto* const to = dtable + bytes[static_cast<std::size_t>(i)] * dx.width();
        for (std::int64_t c = 0; c < dx.width(); ++c) to[c] += dx.row(i)[c];
    }
}

/// y = x / rms(x) * gain;  x [B, s, C], gain [C] -> y [B, s, C], and 1 / rms in `inverse` [B, s, 1]
template <class T>
void rms_norm(tensor<T> const& x, T const* gain, tensor<T> const& inverse, tensor<T> const& y) {
    constexpr T epsilon = T(1e-5);
    auto const width = x.width();
    for (std::int64_t i = 0; i < x.rows(); ++i) {
        auto const* const from = x.row(i);
        auto* const to = y.row(i);
        auto const r = T(1) / std::sqrt(dot(from, from, width) / static_cast<T>(width) + epsilon);
        inverse.row(i)[0] = r;
        for (std::int64_t c = 0; c < width; ++c) to[c] = from[c] * r * gain[c];
    }
}
/// Adds to dx, the gradient that came past the norm, and to dgain; dy is used up.
template <class T>
void rms_norm_backward(tensor<T> const& x, T const* gain, tensor<T> const& inverse,
                       tensor<T> const& dy, tensor<T> const& dx, T* dgain) {
    auto const width = x.width();
    for (std::int64_t i = 0; i < x.rows(); ++i) {
        auto const* const from = x.row(i);
        auto* const g = dy.row(i);
        auto* const to = dx.row(i);
        auto const r = inverse.row(i)[0];
        for (std::int64_t c = 0; c < width; ++c) {
            dgain[c] += g[c] * from[c] * r;
            g[c] *= gain[c];
        }
        auto const mean = dot(g, from, width) / static_cast<T>(width) * r * r;
        for (std::int64_t c = 0; c < width; ++c) to[c] += r * (g[c] - from[c] * mean);
    }
}

/// hidden = silu(gate) * up;  [gate | up] [B, s, 2F] -> hidden [B, s, F]
template <class T>
void swiglu(tensor<T> const& gate_up, tensor<T> const& hidden) {
    auto const width = hidden.width();
    for (std::int64_t i = 0; i < hidden.rows(); ++i) {
        auto const* const gate = gate_up.row(i);
        auto const* const up = gate + width;
        auto* const to = hidden.row(i);
        for (std::int64_t f = 0; f < width; ++f)
            to[f] = gate[f] / (T(1) + std::exp(-gate[f])) * up[f];
    }
}
/// dhidden [B, s, F] -> [dgate | dup] [B, s, 2F], written over [gate | up]
template <class T>
void swiglu_backward(tensor<T> const& gate_up, tensor<T> const& dhidden) {
    auto const width = dhidden.width();
    for (std::int64_t i = 0; i < dhidden.rows(); ++i) {
        auto* const gate = gate_up.row(i);
        auto* const up = gate + width;
        auto const* const d = dhidden.row(i);
        for (std::int64_t f = 0; f < width; ++f) {
            auto const sigmoid = T(1) / (T(1) + std::exp(-gate[f]));
            auto const silu = gate[f] * sigmoid;
            gate[f] = d[f] * up[f] * (sigmoid + silu * (T(1) - sigmoid));
            up[f] = d[f] * silu;
        }
    }
}

/// Sum over the tokens of -log softmax(logits)[target], in nats; leaves its gradient, softmax minus
/// the target's one, in the logits.  logits [B, s, 256]
template <class T>
ulysses::token_sums cross_entropy(tensor<T> const& logits, std::span<std::int64_t const> targets) {
    double sum = 0;
    for (std::int64_t i = 0; i < logits.rows(); ++i) {
        auto* const row = logits.row(i);
        auto const target = targets[static_cast<std::size_t>(i)];
        auto const largest = *std::max_element(row, row + vocabulary);
        sum += static_cast<double>(largest - row[target]);
        T total = 0;
        for (std::int64_t v = 0; v < vocabulary; ++v) total += row[v] = std::exp(row[v] - largest);
        sum += std::log(static_cast<double>(total));
        for (std::int64_t v = 0; v < vocabulary; ++v) row[v] /= total;
        row[target] -= T(1);
    }
    return {.loss = sum, .tokens = logits.rows()};
}

}  // namespace lm
