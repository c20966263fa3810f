#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/block.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/tensor_view.hpp>
#include <ulysses/core/view_copy.hpp>
#include <ulysses/exchange/regions.hpp>
#include <ulysses/plan/blocks.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

/// Where the rows of a plan's block lie: in a local operand, in a region, in a message.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

using strides3 = std::array<std::int64_t, 3>;

/// One side of a copy.
struct block_rows {
    std::byte* first;
    strides3 strides;
};

constexpr strides3 pitched_strides(strides3 const& in_rows, std::int64_t pitch) {
    return {in_rows[0] * pitch, in_rows[1] * pitch, in_rows[2] * pitch};
}

template <class T>
block_rows local_rows(plan_block const& block, token_view<T> const& local) {
    auto* const first =
        const_cast<std::remove_const_t<T>*>(local.row(block.sample, block.token, block.head));
    return {reinterpret_cast<std::byte*>(first), byte_strides(local)};
}

/// `begin` is where the region begins on the rank that holds it.
inline block_rows region_rows(plan_block const& block, std::byte* begin, region const& place) {
    return {begin + block.row * place.pitch, pitched_strides(block.row_strides, place.pitch)};
}

/// Strides of rows in a message, which hold no padding.
template <class Block>
strides3 message_strides(Block const& block, region const& place) {
    return pitched_strides(block.message_strides, place.row_bytes);
}

/// A copy of a block, both sides of which are to be said.
inline block_copy copy_of(plan_block const& block, std::int64_t batch, region const& place) {
    block_copy copy;
    copy.extents = {block.samples_of(batch), block.tokens, block.heads};
    copy.row_bytes = place.row_bytes;
    return copy;
}
inline void set_to(block_copy& copy, block_rows const& side) {
    copy.to = side.first;
    copy.to_strides = side.strides;
}
inline void set_from(block_copy& copy, block_rows const& side) {
    copy.from = side.first;
    copy.from_strides = side.strides;
}

/// A sum of so many rows of `elements` each, [batch, token, head].
inline block_sum sum_of(block_rows const& to, strides3 const& extents, std::int64_t elements) {
    block_sum sum;
    sum.to = to.first;
    sum.to_strides = to.strides;
    sum.extents = extents;
    sum.elements = elements;
    return sum;
}

}  // namespace detail

}  // namespace ulysses::inline ULYSSES_ABI
