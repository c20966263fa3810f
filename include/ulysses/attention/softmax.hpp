#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/index_range.hpp>
#include <ulysses/core/pack.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <limits>

/// The arithmetic between the products of blocked attention, one row of a tile at a time.
///
/// Scores arrive as base-2 exponents (log2(e) is folded into the product's factor). A row's
/// instructions depend on nothing but its own values and on how many keys it sees: rows are padded
/// with -inf to a whole number of steps, whose probability is exactly 0, and functions over rows
/// are never inlined, so that no two rows can be compiled differently.
namespace ulysses::inline ULYSSES_ABI::detail {

/// Rows are worked on in steps of this many elements; a row's buffer is a multiple of it.
template <class T>
inline constexpr std::int64_t softmax_step = 4 * static_cast<std::int64_t>(lanes<T>);

/// 2^t for t <= 0: a polynomial on [-1/2, 1/2], scaled by adding to the exponent's bits. 2^0 is
/// exactly 1; below the smallest normal number, and for -inf, exactly 0. NaN stays NaN.
///
/// float: minimax polynomial of degree 5, relative error under 2e-7. double: Taylor's of degree 13,
/// under 4e-16.
template <class T>
[[gnu::always_inline]] inline pack<T> exp2_pack(pack<T> const& t) {
    using bits = pack_bits<T>;
    constexpr bool single = std::same_as<T, float>;
    constexpr T magic = single ? T(0x1.8p23) : T(0x1.8p52);  // adding it rounds to an integer
    constexpr T smallest = single ? T(-125) : T(-1021);
    auto const shifted = t + magic;
    auto const f = t - (shifted - magic);
    pack<T> p;
    if constexpr (single) {
        p = f * 0.001326472731307149f + 0.009671512991189957f;
        p = p * f + 0.05550733581185341f;
        p = p * f + 0.24022242426872253f;
        p = p * f + 0.6931470036506653f;
    } else {
        p = f * 1.3691488853904124e-12 + 2.5678435993488196e-11;
        p = p * f + 4.44553827187081e-10;
        p = p * f + 7.054911620801121e-09;
        p = p * f + 1.0178086009239696e-07;
        p = p * f + 1.3215486790144305e-06;
        p = p * f + 1.5252733804059838e-05;
        p = p * f + 0.00015403530393381606;
        p = p * f + 0.0013333558146428441;
        p = p * f + 0.009618129107628477;
        p = p * f + 0.055504108664821576;
        p = p * f + 0.2402265069591007;
        p = p * f + 0.6931471805599453;
    }
    p = p * f + T(1);
    bits exponent, value;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    std::memcpy(&value, &p, sizeof value);
    value = t < smallest ? bits{} : value + (exponent << (single ? 23 : 52));
    std::memcpy(&p, &value, sizeof p);
    return p;
}

/// The largest lane.
template <class T>
[[gnu::always_inline]] inline T largest_lane(pack<T> const& value) {
    T lane[lanes<T>];
    store_pack(lane, value);
    for (auto half = lanes<T> / 2; half > 0; half /= 2)
        for (std::size_t i = 0; i < half; ++i) lane[i] = std::max(lane[i], lane[i + half]);
    return lane[0];
}

/// The part of a row's keys that is worked on: the keys it sees, [begin, end), widened to whole steps.
template <class T>
constexpr index_range whole_steps(index_range seen) {
    constexpr auto step = softmax_step<T>;
    if (seen.size() == 0) return {0, 0};
    return {seen.begin / step * step, (seen.end + step - 1) / step * step};
}

/// Masks the keys a row does not see: in the steps that it has a part in with -inf, all others of
/// `count` with 0. Returns the whole steps.
template <class T>
index_range mask_row(T* scores, index_range seen, std::int64_t count) {
    auto const steps = whole_steps<T>(seen);
    std::fill(scores, scores + steps.begin, T(0));
    if (seen.size() > 0) {
        constexpr auto hidden = -std::numeric_limits<T>::infinity();
        std::fill(scores + steps.begin, scores + seen.begin, hidden);
        std::fill(scores + seen.end, scores + steps.end, hidden);
    }
    if (steps.end < count) std::fill(scores + steps.end, scores + count, T(0));
    return steps;
}

/// Hides keys of a row of exponents: each where `hidden` is -inf, not 0, becomes -inf, whatever it
/// was; the others keep their bits.
template <class T>
[[gnu::noinline]] ULYSSES_WIDE_VECTORS void hide_keys(T* scores, T const* hidden,
                                                      std::int64_t count) {
    for (std::int64_t j = 0; j < count; ++j) scores[j] = hidden[j] < T(0) ? hidden[j] : scores[j];
}

/// Masks a row of exponents and returns the largest of them and `before`. Rows are passed through
/// this a few at a time, ahead of `softmax_row_step`, so that one row's reduction overlaps with
/// another's work.
template <class T>
[[gnu::noinline]] ULYSSES_WIDE_VECTORS T softmax_row_largest(T* scores, index_range seen,
                                                             std::int64_t count, T before) {
    constexpr auto width = static_cast<std::int64_t>(lanes<T>);
    auto const steps = mask_row(scores, seen, count);
    auto const none = fill_pack(-std::numeric_limits<T>::infinity());
    pack<T> high[4] = {none, none, none, none};
    for (auto j = steps.begin; j < steps.end; j += 4 * width)
        for (int u = 0; u < 4; ++u) {
            auto const s = load_pack(scores + j + u * width);
            high[u] = s > high[u] ? s : high[u];
        }
    high[0] = high[0] > high[1] ? high[0] : high[1];
    high[2] = high[2] > high[3] ? high[2] : high[3];
    return std::max(before, largest_lane<T>(high[0] > high[2] ? high[0] : high[2]));
}

/// Turns a masked row of exponents into probabilities relative to `now`, the largest so far, and
/// adds them to `sums`, [lanes] parts of the denominator. What was summed relative to `before`, the
/// parts and the `dim` elements of `out`, is brought to `now`; where `before` is -inf both are zero.
/// `next` is a row to have in cache soon. *Source*: Milakov and Gimelshein, "Online normalizer calculation for
/// softmax" (2018).
template <class T>
[[gnu::noinline]] ULYSSES_WIDE_VECTORS void softmax_row_step(T* scores, T const* next,
                                                             index_range seen, T before, T now,
                                                             T* sums, T* out, std::int64_t dim) {
    constexpr auto width = static_cast<std::int64_t>(lanes<T>);
    auto const steps = whole_steps<T>(seen);
    auto const base = fill_pack(now == -std::numeric_limits<T>::infinity() ? T(0) : now);
    auto sum = load_pack(sums);
    if (now > before && before != -std::numeric_limits<T>::infinity()) {
        auto const factor = exp2_pack<T>(fill_pack(before) - base);
        sum *= factor;
        for (std::int64_t d = 0; d < dim; ++d) out[d] *= factor[0];
    }
    pack<T> part[4] = {};
    for (auto j = steps.begin; j < steps.end; j += 4 * width)
        for (int u = 0; u < 4; ++u) {
            auto const p = exp2_pack<T>(load_pack(scores + j + u * width) - base);
            part[u] += p;
            __builtin_prefetch(next + j + u * width);
            store_pack<T>(scores + j + u * width, p);
        }
    sum += (part[0] + part[1]) + (part[2] + part[3]);
    store_pack(sums, sum);
}

/// Backward of a row: scores become p = 2^(score - lse), `dp` becomes ds = p * (dp - delta). `lse`
/// is base 2.
template <class T>
[[gnu::noinline]] ULYSSES_WIDE_VECTORS void
softmax_row_backward(T* scores, T* dp, index_range seen, std::int64_t count, T lse, T delta) {
    constexpr auto width = static_cast<std::int64_t>(lanes<T>);
    auto const steps = mask_row(scores, seen, count);
    auto const base = fill_pack(lse);
    auto const mean = fill_pack(delta);
    std::fill(dp, dp + steps.begin, T(0));
    for (auto j = steps.begin; j < steps.end; j += width) {
        auto const p = exp2_pack<T>(load_pack(scores + j) - base);
        store_pack<T>(scores + j, p);
        store_pack<T>(dp + j, p * (load_pack(dp + j) - mean));
    }
    if (steps.end < count) std::fill(dp + steps.end, dp + count, T(0));
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
