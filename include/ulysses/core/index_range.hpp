#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

/// Half-open range of tokens, rows or keys.
struct index_range {
    std::int64_t begin = 0, end = 0;

    constexpr std::int64_t size() const { return end - begin; }
    friend constexpr bool operator==(index_range const&, index_range const&) = default;
};

}  // namespace ulysses::inline ULYSSES_ABI
