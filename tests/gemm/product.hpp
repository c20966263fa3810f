#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/gemm.hpp>
#include <ulysses/core/number.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

/// One random product with its operands, shared by the tests of every GEMM.
namespace product_test {

using std::int64_t;

inline std::size_t at(int64_t index) { return static_cast<std::size_t>(index); }

/// A number as T, rounded once.
template <class T>
T number(double x) {
    if constexpr (std::is_same_v<T, double>)
        return x;
    else
        return static_cast<T>(static_cast<float>(x));
}
/// Half a unit in the last place of 1.
template <class T>
constexpr double roundoff() {
    if constexpr (std::is_same_v<T, double>) return 0x1p-53;
    if constexpr (std::is_same_v<T, float>) return 0x1p-24;
    if constexpr (std::is_same_v<T, ulysses::half>) return 0x1p-11;
    return 0x1p-8;
}

template <class T>
struct product {
    int64_t m, n, k, batch;
    bool a_transposed, b_transposed;
    T alpha, beta;
    int64_t a_stride, b_stride, c_stride;
    std::vector<T> a, b, c;

    int64_t a_rows() const { return a_transposed ? k : m; }
    int64_t b_rows() const { return b_transposed ? n : k; }

    ulysses::gemm_call<T> call(T* out) const {
        return {.m = m,
                .n = n,
                .k = k,
                .alpha = alpha,
                .a = {.data = a.data(),
                      .stride = a_stride,
                      .transposed = a_transposed,
                      .batch_stride = a_rows() * a_stride},
                .b = {.data = b.data(),
                      .stride = b_stride,
                      .transposed = b_transposed,
                      .batch_stride = b_rows() * b_stride},
                .beta = beta,
                .c = out,
                .c_stride = c_stride,
                .batch = batch,
                .c_batch_stride = m * c_stride};
    }

    T left(int64_t i, int64_t r, int64_t p) const {
        auto const* from = a.data() + i * a_rows() * a_stride;
        return a_transposed ? from[p * a_stride + r] : from[r * a_stride + p];
    }
    T right(int64_t i, int64_t p, int64_t x) const {
        auto const* from = b.data() + i * b_rows() * b_stride;
        return b_transposed ? from[x * b_stride + p] : from[p * b_stride + x];
    }

    std::string text() const {
        return std::to_string(m) + " x " + std::to_string(n) + " x " + std::to_string(k) +
               ", batch " + std::to_string(batch) + (a_transposed ? ", A^T" : "") +
               (b_transposed ? ", B^T" : "");
    }
};

/// Values in [-1, 1]; C is NaN where it must not be read (beta 0) and between its rows.
template <class T>
product<T> random_product(std::mt19937_64& random, int64_t m, int64_t n, int64_t k) {
    auto const below = [&](int64_t limit) {
        return static_cast<int64_t>(random() % static_cast<std::uint64_t>(limit));
    };
    auto const value = [&] { return number<T>(static_cast<double>(below(20001) - 10000) / 10000); };
    product<T> p{};
    p.m = m, p.n = n, p.k = k, p.batch = 1 + below(2);
    p.a_transposed = below(2) == 1, p.b_transposed = below(2) == 1;
    p.alpha = below(3) == 0 ? T(1) : value();
    p.beta = number<T>(static_cast<double>(below(3)) / 2);
    p.a_stride = (p.a_transposed ? m : k) + below(3);
    p.b_stride = (p.b_transposed ? k : n) + below(3);
    p.c_stride = n + below(3);
    p.a.resize(at(p.batch * p.a_rows() * p.a_stride));
    p.b.resize(at(p.batch * p.b_rows() * p.b_stride));
    p.c.resize(at(p.batch * m * p.c_stride), number<T>(std::nan("")));
    for (auto& x : p.a) x = value();
    for (auto& x : p.b) x = value();
    if (p.beta != T(0))
        for (int64_t r = 0; r < p.batch * m; ++r)
            for (int64_t x = 0; x < n; ++x) p.c[at(r * p.c_stride + x)] = value();
    return p;
}

/// Largest |C - formula|, over the bound (k + 3) * unit roundoff of the sums * (sum of magnitudes), and
/// of elements of 16 bits the rounding of the sum; infinite when something outside C changed.
template <class T, class Gemm>
double error_over_bound(product<T> const& p, Gemm const& gemm) {
    auto out = p.c;
    gemm(p.call(out.data()));
    using accumulator = ulysses::accumulator_t<T>;
    auto const unit = roundoff<accumulator>();
    double worst = 0;
    for (int64_t i = 0; i < p.batch; ++i)
        for (int64_t r = 0; r < p.m; ++r)
            for (int64_t x = 0; x < p.c_stride; ++x) {
                auto const place = at((i * p.m + r) * p.c_stride + x);
                if (x >= p.n) {
                    if (!std::isnan(static_cast<accumulator>(out[place])))
                        return std::numeric_limits<double>::infinity();
                    continue;
                }
                long double sum = 0, size = 0;
                for (int64_t q = 0; q < p.k; ++q) {
                    auto const term = static_cast<long double>(p.left(i, r, q)) * p.right(i, q, x);
                    sum += term, size += std::fabs(term);
                }
                auto const alpha = static_cast<long double>(p.alpha);
                sum *= alpha, size *= std::fabs(alpha);
                if (p.beta != T(0)) {
                    auto const before = static_cast<long double>(p.beta) * p.c[place];
                    sum += before, size += std::fabs(before);
                }
                auto const error =
                    static_cast<double>(std::fabs(sum - static_cast<long double>(out[place])));
                auto bound = static_cast<double>(p.k + 3) * unit * static_cast<double>(size);
                if constexpr (sizeof(T) == 2)  // and, of numbers near zero, half their last place
                    bound += roundoff<T>() * static_cast<double>(std::fabs(sum)) + 0x1p-25;
                if (!(error <= bound))
                    worst = std::max(worst, bound > 0 ? error / bound : INFINITY);
                else if (bound > 0)
                    worst = std::max(worst, error / bound);
            }
    return worst;
}

}  // namespace product_test
