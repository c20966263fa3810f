#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <bit>
#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

/// A double that may be part of a template argument: held as its bits, which not every compiler takes
/// itself.
struct real {
    std::uint64_t bits = 0;

    real() = default;
    constexpr real(double value) : bits(std::bit_cast<std::uint64_t>(value)) {}
    constexpr double value() const { return std::bit_cast<double>(bits); }
    friend constexpr bool operator==(real, real) = default;
};

}  // namespace ulysses::inline ULYSSES_ABI
