#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/index_range.hpp>
#include <ulysses/core/shape.hpp>

#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

/// A part of a layer's heads that is exchanged and computed by itself: key-value heads and the
/// query heads that read them.
struct head_chunk {
    index_range kv_heads;
    std::int64_t first_query_row = 0;  ///< query rows that the rank computes in earlier chunks

    /// Chunk `index` of a completed shape's; their sizes differ by one key-value head at most, the
    /// first is as small as any and the last as large.
    static constexpr head_chunk of(shape const& layer, std::int64_t index) {
        return {
            {index * layer.kv_heads / layer.chunks, (index + 1) * layer.kv_heads / layer.chunks}};
    }

    /// The chunk as a layer of its own.
    constexpr shape alone(shape const& layer) const {
        auto part = layer;
        part.kv_heads = kv_heads.size();
        auto const group = layer.heads / layer.kv_heads;
        part.heads = part.kv_heads * group;
        if (!layer.head_windows.empty())
            part.head_windows = layer.head_windows.part(kv_heads.begin * group, part.heads);
        return part;
    }
};

}  // namespace ulysses::inline ULYSSES_ABI
