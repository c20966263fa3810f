#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>

/// Attention on the device by its formula, in double, one row a thread: slow, and the same bits whichever
/// rank computes a row. It shows what a pipeline moves, not how fast attention is.
namespace ulysses_bench {

/// [batch, row, head, dim] in device memory; strides in elements.
template <class T>
struct device_rows {
    T* data = nullptr;
    std::int64_t batch = 0, rows = 0, heads = 0, dim = 0;
    std::int64_t strides[3] = {};

    ULYSSES_HD T* row(std::int64_t b, std::int64_t i, std::int64_t h) const {
        return data + b * strides[0] + i * strides[1] + h * strides[2];
    }
};

struct attention_rows {
    device_rows<float const> q, k, v;
    std::int64_t query_begin = 0, key_begin = 0;
    bool causal = false;
    double scale = 1;

    ULYSSES_HD bool sees(std::int64_t i, std::int64_t j) const {
        return !causal || key_begin + j <= query_begin + i;
    }
    ULYSSES_HD static double dot(float const* x, float const* y, std::int64_t count) {
        double sum = 0;
        for (std::int64_t d = 0; d < count; ++d)
            sum += static_cast<double>(x[d]) * static_cast<double>(y[d]);
        return sum;
    }
    ULYSSES_HD double score(std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t j) const {
        return scale * dot(q.row(b, i, h), k.row(b, j, h / (q.heads / k.heads)), q.dim);
    }
    /// Calls use(b, i, h) for the row of the thread's own.
    template <class Use>
    ULYSSES_HD static void at(std::int64_t index, std::int64_t batch, std::int64_t rows,
                              std::int64_t heads, Use const& use) {
        if (index < batch * rows * heads)
            use(index / (rows * heads), index / heads % rows, index % heads);
    }
};

inline constexpr int attention_threads = 128;

struct forward_rows : attention_rows {
    device_rows<float> o, lse;

    std::int64_t threads() const { return q.batch * q.rows * q.heads; }
    ULYSSES_HD void operator()(std::int64_t index) const {
        at(index, q.batch, q.rows, q.heads, [this](auto b, auto i, auto h) { forward(b, i, h); });
    }

   private:
    ULYSSES_HD void forward(std::int64_t b, std::int64_t i, std::int64_t h) const {
        auto const g = h / (q.heads / k.heads);
        double largest = -HUGE_VAL, sum = 0;
        for (std::int64_t j = 0; j < k.rows; ++j)
            if (sees(i, j)) largest = fmax(largest, score(b, i, h, j));
        for (std::int64_t j = 0; j < k.rows; ++j)
            if (sees(i, j)) sum += exp(score(b, i, h, j) - largest);
        *lse.row(b, i, h) = static_cast<float>(largest + log(sum));
        // A few columns at a time, which registers hold.
        constexpr std::int64_t columns = 8;
        for (std::int64_t first = 0; first < v.dim; first += columns) {
            double total[columns] = {};
            for (std::int64_t j = 0; j < k.rows; ++j) {
                if (!sees(i, j)) continue;
                auto const p = exp(score(b, i, h, j) - largest) / sum;
                for (std::int64_t d = 0; d < columns && first + d < v.dim; ++d)
                    total[d] += p * static_cast<double>(v.row(b, j, g)[first + d]);
            }
            for (std::int64_t d = 0; d < columns && first + d < v.dim; ++d)
                o.row(b, i, h)[first + d] = static_cast<float>(total[d]);
        }
    }
};

struct backward_rows : attention_rows {
    device_rows<float const> o, dout, lse;
    device_rows<float> dq, dk, dv;
    bool keys = false;  ///< dk and dv, a thread for each key, rather than dq

    std::int64_t threads() const {
        return keys ? k.batch * k.rows * k.heads : q.batch * q.rows * q.heads;
    }
    ULYSSES_HD void operator()(std::int64_t index) const {
        if (keys)
            at(index, k.batch, k.rows, k.heads,
               [this](auto b, auto j, auto g) { add_keys(b, j, g); });
        else
            at(index, q.batch, q.rows, q.heads,
               [this](auto b, auto i, auto h) { set_query(b, i, h); });
    }

   private:
    ULYSSES_HD double probability(std::int64_t b, std::int64_t i, std::int64_t h,
                                  std::int64_t j) const {
        return exp(score(b, i, h, j) - static_cast<double>(*lse.row(b, i, h)));
    }
    /// What the score's gradient is, given the probability.
    ULYSSES_HD double slope(std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t j,
                            double p) const {
        auto const g = h / (q.heads / k.heads);
        return p * (dot(dout.row(b, i, h), v.row(b, j, g), v.dim) -
                    dot(dout.row(b, i, h), o.row(b, i, h), v.dim));
    }
    ULYSSES_HD void set_query(std::int64_t b, std::int64_t i, std::int64_t h) const {
        auto const g = h / (q.heads / k.heads);
        for (std::int64_t d = 0; d < q.dim; ++d) dq.row(b, i, h)[d] = 0;
        for (std::int64_t j = 0; j < k.rows; ++j) {
            if (!sees(i, j)) continue;
            auto const ds = scale * slope(b, i, h, j, probability(b, i, h, j));
            for (std::int64_t d = 0; d < q.dim; ++d)
                dq.row(b, i, h)[d] +=
                    static_cast<float>(ds * static_cast<double>(k.row(b, j, g)[d]));
        }
    }
    ULYSSES_HD void add_keys(std::int64_t b, std::int64_t j, std::int64_t g) const {
        auto const group = q.heads / k.heads;
        for (auto h = g * group; h < (g + 1) * group; ++h)
            for (std::int64_t i = 0; i < q.rows; ++i) {
                if (!sees(i, j)) continue;
                auto const p = probability(b, i, h, j);
                auto const ds = scale * slope(b, i, h, j, p);
                for (std::int64_t d = 0; d < k.dim; ++d)
                    dk.row(b, j, g)[d] +=
                        static_cast<float>(ds * static_cast<double>(q.row(b, i, h)[d]));
                for (std::int64_t d = 0; d < v.dim; ++d)
                    dv.row(b, j, g)[d] +=
                        static_cast<float>(p * static_cast<double>(dout.row(b, i, h)[d]));
            }
    }
};

/// Defined in kernels.cu, and for the double of the runtime beside its kernels.
cudaError_t launch(cudaStream_t stream, forward_rows const& rows);
cudaError_t launch(cudaStream_t stream, backward_rows const& rows);

}  // namespace ulysses_bench
