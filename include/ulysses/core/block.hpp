#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <array>
#include <cstddef>
#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

/// One strided copy between two places: `extents` [batch, token, head] rows of `row_bytes`
/// contiguous bytes each; strides in bytes, per side. What a plan lists and a space executes.
struct block_copy {
    std::byte* to = nullptr;
    std::byte const* from = nullptr;
    std::array<std::int64_t, 3> extents{};
    std::array<std::int64_t, 3> to_strides{};
    std::array<std::int64_t, 3> from_strides{};
    std::int64_t row_bytes = 0;
    std::int64_t to_padding = 0;  ///< bytes after each destination row that may be overwritten
    int peer = -1;  ///< the rank in whose memory one side lies; -1, or the own rank: none

    constexpr std::int64_t bytes() const {
        return extents[0] * extents[1] * extents[2] * row_bytes;
    }
};

/// `block` with its head axis folded into the row when both sides hold heads back to back.
constexpr block_copy merged(block_copy block) {
    if (block.to_strides[2] == block.row_bytes && block.from_strides[2] == block.row_bytes) {
        block.row_bytes *= block.extents[2];
        block.extents[2] = 1;
    }
    return block;
}

}  // namespace ulysses::inline ULYSSES_ABI
