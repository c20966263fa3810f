#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/softmax.hpp>
#include <ulysses/core/attention.hpp>
#include <ulysses/core/index_range.hpp>
#include <ulysses/core/pack.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>

/// What blocked attention does to a row of scores before its softmax, and the way back; as in
/// softmax.hpp one code path for every row, in whole steps.
namespace ulysses::inline ULYSSES_ABI::detail {

/// tanh(x): the odd Taylor polynomial below 1/4, else 1 - 2 / (e^2|x| + 1). Absolute error under 2e-7 and
/// 5e-16; near 0 that is also the relative one.
template <class T>
[[gnu::always_inline]] inline pack<T> tanh_pack(pack<T> const& x) {
    constexpr T coefficients[] = {T(18888466084.0 / 194896477400625.0),
                                  T(-443861162.0 / 1856156927625.0),
                                  T(6404582.0 / 10854718875.0),
                                  T(-929569.0 / 638512875.0),
                                  T(21844.0 / 6081075.0),
                                  T(-1382.0 / 155925.0),
                                  T(62.0 / 2835.0),
                                  T(-17.0 / 315.0),
                                  T(2.0 / 15.0),
                                  T(-1.0 / 3.0)};
    constexpr std::size_t first = std::same_as<T, float> ? 5 : 0;
    auto const square = x * x;
    auto small = fill_pack(coefficients[first]);
    for (std::size_t i = first + 1; i < 10; ++i) small = small * square + coefficients[i];
    small = small * square * x + x;
    auto const size = x < T(0) ? -x : x;
    auto const shrunk = exp2_pack<T>(size * T(-2 * std::numbers::log2e));
    auto const large = (T(1) - shrunk) / (T(1) + shrunk);
    auto const with_sign = x < T(0) ? -large : large;
    return size < T(0.25) ? small : with_sign;
}

/// A head's transforms of its scores; what it asks for in powers of 2.
template <class A>
struct score_transform {
    A factor;     ///< of Q K^T
    A cap = 0;    ///< 0: none; else the product is tanh's argument
    A slope = 0;  ///< ALiBi; 0: none
    bool bias = false;
    bool sink = false;
    A sink_value = 0;

    score_transform(attention_call const& call, std::int64_t h)
        : factor(static_cast<A>(call.scale * std::numbers::log2e)), bias(!call.bias.empty()) {
        if (call.softcap > 0) {
            factor = static_cast<A>(call.scale / call.softcap);
            cap = static_cast<A>(call.softcap * std::numbers::log2e);
        }
        if (!call.slopes.empty()) slope = static_cast<A>(call.slopes[h] * std::numbers::log2e);
        if (!call.sinks.empty()) {
            sink_value = static_cast<A>(call.sinks[h] * std::numbers::log2e);
            sink = sink_value != -std::numeric_limits<A>::infinity();
        }
    }
    /// True when scores are more than the product.
    bool any() const { return cap != A(0) || slope != A(0) || bias; }
};

/// A row's scores from its product, for the keys it sees; those beside them in the same steps become
/// any finite number. `bias` holds the row's, or is null; `first` is the position of the row's key 0 less the row's own.
/// Where scores are capped and `tanhs` is not null it gets tanh of the arguments, for the way back.
template <class T>
[[gnu::noinline]] ULYSSES_WIDE_VECTORS void transform_row(T* scores, T* tanhs, T* bias,
                                                          index_range seen,
                                                          score_transform<T> const& rule, T first) {
    constexpr auto width = static_cast<std::int64_t>(lanes<T>);
    auto const steps = whole_steps<T>(seen);
    for (auto* const row : {scores, bias}) {
        if (row == nullptr || seen.size() == 0) continue;
        std::fill(row + steps.begin, row + seen.begin, T(0));
        std::fill(row + seen.end, row + steps.end, T(0));
    }
    T counted[lanes<T>];
    for (std::int64_t l = 0; l < width; ++l) counted[l] = static_cast<T>(l);
    auto const ones = load_pack(counted);
    for (auto j = steps.begin; j < steps.end; j += width) {
        auto s = load_pack(scores + j);
        if (rule.cap != T(0)) {
            s = tanh_pack<T>(s);
            if (tanhs != nullptr) store_pack<T>(tanhs + j, s);
            s *= rule.cap;
        }
        if (bias != nullptr) s += load_pack(bias + j) * std::numbers::log2e_v<T>;
        if (rule.slope != T(0)) {
            auto const distance = ones + (first + static_cast<T>(j));
            s -= (distance < T(0) ? -distance : distance) * rule.slope;
        }
        store_pack<T>(scores + j, s);
    }
}

/// row[j] *= factors[j] for the keys that a row sees.
template <class T>
[[gnu::noinline]] void multiply_row(T* row, T const* factors, index_range seen) {
    for (auto j = seen.begin; j < seen.end; ++j) row[j] *= factors[j];
}

/// ds[j] *= 1 - tanhs[j]^2: the derivative of the cap.
template <class T>
[[gnu::noinline]] ULYSSES_WIDE_VECTORS void uncap_row(T* ds, T const* tanhs, index_range seen) {
    constexpr auto width = static_cast<std::int64_t>(lanes<T>);
    auto const steps = whole_steps<T>(seen);
    for (auto j = steps.begin; j < steps.end; j += width) {
        auto const t = load_pack(tanhs + j);
        store_pack<T>(ds + j, load_pack(ds + j) * (T(1) - t * t));
    }
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
