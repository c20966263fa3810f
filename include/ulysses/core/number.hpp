#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <concepts>
#include <cstdint>
#include <string_view>
#include <type_traits>

/// Element types: double, float, and two 16-bit storage types of our own.
///
/// Storage types convert to and from float, rounding to nearest even; arithmetic happens in
/// `accumulator_t<T>`.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

/// binary32 to the upper 16 bits of binary32, round to nearest even, NaN stays a quiet NaN.
ULYSSES_HD constexpr std::uint16_t float_to_bf16(float value) {
    auto const bits = __builtin_bit_cast(std::uint32_t, value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return static_cast<std::uint16_t>((bits >> 16) | 0x0040u);
    return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

ULYSSES_HD constexpr float bf16_to_float(std::uint16_t bits) {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
}

/// binary32 to binary16, round to nearest even, subnormals kept, overflow to infinity.
ULYSSES_HD constexpr std::uint16_t float_to_half(float value) {
    auto const bits = __builtin_bit_cast(std::uint32_t, value);
    auto const sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000u);
    auto const magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
    if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
    if (magnitude >= 0x38800000u) {
        auto const rebased = magnitude - 0x38000000u;
        auto const rounded = rebased + 0x0fffu + ((rebased >> 13) & 1u);
        return static_cast<std::uint16_t>(sign | (rounded >> 13));
    }
    if (magnitude < 0x33000000u) return sign;
    auto const exponent = magnitude >> 23;
    auto const mantissa = (magnitude & 0x007fffffu) | 0x00800000u;
    auto const shift = 126u - exponent;  // 14 for the largest subnormal, 24 for the smallest
    auto const kept = mantissa >> shift;
    auto const rest = mantissa & ((1u << shift) - 1u);
    auto const tie = 1u << (shift - 1u);
    auto const up = rest > tie || (rest == tie && (kept & 1u) != 0u);
    return static_cast<std::uint16_t>(sign | (kept + (up ? 1u : 0u)));
}

ULYSSES_HD constexpr float half_to_float(std::uint16_t bits) {
    auto const sign = (bits & 0x8000u) << 16;
    auto const exponent = static_cast<std::uint32_t>(bits >> 10) & 0x1fu;
    auto const mantissa = static_cast<std::uint32_t>(bits) & 0x3ffu;
    if (exponent == 0x1fu) return __builtin_bit_cast(float, sign | 0x7f800000u | (mantissa << 13));
    if (exponent != 0u)
        return __builtin_bit_cast(float, sign | ((exponent + 112u) << 23) | (mantissa << 13));
    auto const magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return __builtin_bit_cast(float, __builtin_bit_cast(std::uint32_t, magnitude) | sign);
}

}  // namespace detail

/// bfloat16: the upper half of an IEEE binary32. Storage only.
struct bf16 {
    std::uint16_t bits = 0;

    bf16() = default;
    ULYSSES_HD constexpr explicit bf16(float value) : bits(detail::float_to_bf16(value)) {}
    ULYSSES_HD constexpr operator float() const { return detail::bf16_to_float(bits); }
};

/// IEEE binary16. Storage only.
struct half {
    std::uint16_t bits = 0;

    half() = default;
    ULYSSES_HD constexpr explicit half(float value) : bits(detail::float_to_half(value)) {}
    ULYSSES_HD constexpr operator float() const { return detail::half_to_float(bits); }
};

/// The element types an operand may have, as a value.
enum class dtype : std::uint8_t { none, f64, f32, f16, bf16 };

constexpr std::string_view name(dtype type) {
    switch (type) {
        case dtype::none: return "none";
        case dtype::f64: return "float64";
        case dtype::f32: return "float32";
        case dtype::f16: return "float16";
        case dtype::bf16: return "bfloat16";
    }
    return "unknown";
}

/// `dtype` of a C++ type; specialise for an engine's own 16-bit types of the same representation.
template <class T>
inline constexpr dtype dtype_of = dtype::none;
template <>
inline constexpr dtype dtype_of<double> = dtype::f64;
template <>
inline constexpr dtype dtype_of<float> = dtype::f32;
template <>
inline constexpr dtype dtype_of<half> = dtype::f16;
template <>
inline constexpr dtype dtype_of<bf16> = dtype::bf16;

/// A type that may be the element of an operand.
template <class T>
concept element = dtype_of<std::remove_cv_t<T>>
!= dtype::none;

/// The type sums are kept in: double for double, float for everything else.
template <element T>
using accumulator_t = std::conditional_t<std::same_as<std::remove_cv_t<T>, double>, double, float>;

namespace detail {

/// `value` rounded toward zero with the last bit set when inexact: rounding that once more to at
/// most 22 bits gives what rounding `value` itself would.
ULYSSES_HD constexpr float narrowed_to_odd(double value) {
    auto const nearest = static_cast<float>(value);
    auto const back = static_cast<double>(nearest);
    if (back == value || value != value) return nearest;
    auto bits = __builtin_bit_cast(std::uint32_t, nearest);
    auto const away = value < 0 ? back < value : back > value;
    if (away) --bits;
    return __builtin_bit_cast(float, bits | 1u);
}

/// A sum in its final type, rounded once.
template <element To, std::floating_point From>
ULYSSES_HD constexpr To rounded(From value) {
    if constexpr (std::floating_point<To>)
        return static_cast<To>(value);
    else if constexpr (std::same_as<From, float>)
        return static_cast<To>(value);
    else
        return static_cast<To>(narrowed_to_odd(value));
}

}  // namespace detail

}  // namespace ulysses::inline ULYSSES_ABI
