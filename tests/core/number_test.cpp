// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/number.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace uly = ulysses;
using uly::bf16;
using uly::half;

namespace {

/// Fields of the two formats, from their standards.
template <class T>
struct format;
template <>
struct format<half> {
    static constexpr int mantissa_bits = 10, bias = 15, most_exponent = 31;
};
template <>
struct format<bf16> {
    static constexpr int mantissa_bits = 7, bias = 127, most_exponent = 255;
};

/// The value a pattern stands for, by the formula of the format.
template <class T>
double value_of(std::uint16_t bits) {
    using f = format<T>;
    auto const sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
    auto const exponent = (bits & 0x7fffu) >> f::mantissa_bits;
    auto const mantissa = bits & ((1u << f::mantissa_bits) - 1u);
    if (exponent == f::most_exponent)
        return mantissa == 0 ? sign * INFINITY : std::numeric_limits<double>::quiet_NaN();
    auto const fraction = std::ldexp(static_cast<double>(mantissa), -f::mantissa_bits);
    if (exponent == 0) return sign * std::ldexp(fraction, 1 - f::bias);
    return sign * std::ldexp(1.0 + fraction, static_cast<int>(exponent) - f::bias);
}

/// `value` rounded to the format, to nearest, ties to even: in double, where every step is exact
/// but the one that rounds.
template <class T>
double rounded(float value) {
    using f = format<T>;
    auto const wide = static_cast<double>(value);
    if (wide == 0 || !std::isfinite(wide)) return wide;
    auto const least = 1 - f::bias;
    auto const exponent = std::max(std::ilogb(wide), least);
    auto const quantum = std::ldexp(1.0, exponent - f::mantissa_bits);
    auto const result = std::nearbyint(wide / quantum) * quantum;
    auto const limit = std::ldexp(1.0, f::most_exponent - f::bias);
    return std::fabs(result) >= limit ? std::copysign(INFINITY, wide) : result;
}

/// True when T{value} is the pattern that rounding asks for.
template <class T>
bool rounds_well(float value) {
    auto const got = T{value};
    if (std::isnan(value)) {
        // A quiet NaN of the same sign.
        auto const quiet = 1u << (format<T>::mantissa_bits - 1);
        return std::isnan(static_cast<float>(got)) && (got.bits & quiet) != 0 &&
               ((got.bits & 0x8000u) != 0) == std::signbit(value);
    }
    auto const expected = rounded<T>(value);
    return value_of<T>(got.bits) == expected &&
           ((got.bits & 0x8000u) != 0) == std::signbit(expected);
}

}  // namespace

TEST_CASE_TEMPLATE("number: all 65536 patterns have the format's value and come back", T, half,
                   bf16) {
    for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
        T number;
        number.bits = static_cast<std::uint16_t>(pattern);
        auto const value = static_cast<float>(number);
        auto const expected = value_of<T>(number.bits);
        auto const back = T{value};
        auto const same = std::isnan(expected)
                              ? std::isnan(value) && std::isnan(static_cast<float>(back))
                              : static_cast<double>(value) == expected &&
                                    std::signbit(value) == std::signbit(expected) &&
                                    back.bits == number.bits;
        if (!same) FAIL_CHECK("pattern " << pattern << " is " << value << ", not " << expected);
    }
}

TEST_CASE_TEMPLATE("number: rounds to nearest even between any two neighbours", T, half, bf16) {
    // The floats at, just below and just above the middle of each pair of neighbours, and those
    // next to each representable value; subnormals, the step to infinity and both signs are among
    // them.
    for (std::uint32_t pattern = 0; pattern < 65536; ++pattern) {
        T number;
        number.bits = static_cast<std::uint16_t>(pattern);
        auto const next_bits = static_cast<std::uint16_t>(pattern + 1);
        auto const value = static_cast<float>(number);
        if (std::isnan(value) || std::isinf(value)) continue;
        auto const next =
            std::isinf(value_of<T>(next_bits))
                ? std::copysign(std::ldexp(1.0, format<T>::most_exponent - format<T>::bias), value)
                : value_of<T>(next_bits);
        auto const middle = static_cast<float>((static_cast<double>(value) + next) / 2);
        for (auto const from : {value, middle})
            for (auto const each :
                 {std::nextafter(from, -INFINITY), from, std::nextafter(from, INFINITY)})
                if (!rounds_well<T>(each))
                    FAIL_CHECK(each << " becomes pattern " << T{each}.bits << ", not "
                                    << rounded<T>(each));
    }
}

TEST_CASE_TEMPLATE("number: rounds floats from the whole range", T, half, bf16) {
    // Every 4093rd float: a prime, so that all low bits and exponents come by.
    for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 4093) {
        auto const value = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
        if (!rounds_well<T>(value))
            FAIL_CHECK("float pattern " << bits << " becomes pattern " << T{value}.bits);
    }
}

TEST_CASE("number: values that formats are known by") {
    CHECK(half{1.0f}.bits == 0x3c00);
    CHECK(half{65504.0f}.bits == 0x7bff);  // the largest
    CHECK(half{65519.99f}.bits == 0x7bff);
    CHECK(half{65520.0f}.bits == 0x7c00);  // the middle to what would be next: infinity
    CHECK(half{0x1p-14f}.bits == 0x0400);  // the smallest normal one
    CHECK(half{0x1p-24f}.bits == 0x0001);  // the smallest
    CHECK(half{0x1p-25f}.bits == 0x0000);  // a tie, to even
    CHECK(half{0x1.000002p-25f}.bits == 0x0001);
    CHECK(half{-0.0f}.bits == 0x8000);
    CHECK(bf16{1.0f}.bits == 0x3f80);
    CHECK(bf16{std::numeric_limits<float>::max()}.bits == 0x7f80);
    CHECK(bf16{0x1p-133f}.bits == 0x0001);
    CHECK(bf16{-0.0f}.bits == 0x8000);
    // A signalling NaN whose set bits are all cut off must not turn into infinity.
    CHECK(std::isnan(static_cast<float>(bf16{std::bit_cast<float>(0x7f800001u)})));
    CHECK(std::isnan(static_cast<float>(half{std::bit_cast<float>(0x7f800001u)})));
}

// Usable in constant expressions, which also says that nothing depends on the rounding mode.
static_assert(half{1.0f / 3.0f}.bits == 0x3555);
static_assert(bf16{1.0f / 3.0f}.bits == 0x3eab);
static_assert(static_cast<float>(half{2.5f}) == 2.5f);

static_assert(uly::dtype_of<double> == uly::dtype::f64 && uly::dtype_of<float> == uly::dtype::f32);
static_assert(uly::dtype_of<half> == uly::dtype::f16 && uly::dtype_of<bf16> == uly::dtype::bf16);
static_assert(uly::dtype_of<int> == uly::dtype::none);
static_assert(uly::element<float const> && !uly::element<int> && !uly::element<float&>);
static_assert(std::is_same_v<uly::accumulator_t<double const>, double>);
static_assert(std::is_same_v<uly::accumulator_t<float>, float>);
static_assert(std::is_same_v<uly::accumulator_t<half>, float>);
static_assert(std::is_same_v<uly::accumulator_t<bf16>, float>);
static_assert(sizeof(half) == 2 && sizeof(bf16) == 2);
static_assert(std::is_trivially_copyable_v<half> && std::is_trivially_copyable_v<bf16>);
