#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/block.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/tensor_view.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

/// Copies, conversions and zeros between views of one rank, ordered on a queue of their space.
namespace ulysses::inline ULYSSES_ABI {

/// Strides of batch, token and head in bytes.
template <class T, class Layout>
constexpr std::array<std::int64_t, 3> byte_strides(tensor_view<T, Layout> const& view) {
    constexpr auto size = static_cast<std::int64_t>(sizeof(T));
    return {view.strides[0] * size, view.strides[1] * size, view.strides[2] * size};
}

/// *Shape*: equal extents.
template <class Space, class T, class Layout>
void copy_view(typename Space::queue queue, tensor_view<T, Layout> const& to,
               tensor_view<T const, Layout> const& from) {
    block_copy copy;
    copy.to = reinterpret_cast<std::byte*>(to.data);
    copy.from = reinterpret_cast<std::byte const*>(from.data);
    copy.extents = {from.batch(), from.tokens(), from.heads()};
    copy.to_strides = byte_strides(to);
    copy.from_strides = byte_strides(from);
    copy.row_bytes = from.dim() * static_cast<std::int64_t>(sizeof(T));
    copy = merged(copy);
    Space::copy(queue, {&copy, 1}, static_cast<std::size_t>(copy.bytes()));
}

/// Each element rounded to `To`. *Shape*: equal extents.
template <class Space, class To, class From, class Layout>
void round_view(typename Space::queue queue, tensor_view<To, Layout> const& to,
                tensor_view<From, Layout> const& from) {
    sum_source const source{reinterpret_cast<std::byte const*>(from.data), byte_strides(from)};
    block_sum sum;
    sum.to = reinterpret_cast<std::byte*>(to.data);
    sum.from = {&source, 1};
    sum.extents = {to.batch(), to.tokens(), to.heads()};
    sum.to_strides = byte_strides(to);
    sum.elements = to.dim();
    Space::template add<To, From>(queue, {&sum, 1});
}

/// `row` in place of every row of `to`, whose heads lie back to back. *Shape*: row [H D], to [B, s, H, D].
template <class Space, class T, class Layout>
void repeat_row(typename Space::queue queue, tensor_view<T, Layout> const& to, T const* row) {
    sum_source const source{reinterpret_cast<std::byte const*>(row), {}};
    block_sum sum;
    sum.to = reinterpret_cast<std::byte*>(to.data);
    sum.from = {&source, 1};
    sum.extents = {to.batch(), to.tokens(), 1};
    sum.to_strides = byte_strides(to);
    sum.elements = to.heads() * to.dim();
    Space::template add<T, T>(queue, {&sum, 1});
}

template <class Space, class T, class Layout>
void zero_view(typename Space::queue queue, tensor_view<T, Layout> const& to) {
    block_sum sum;
    sum.to = reinterpret_cast<std::byte*>(to.data);
    sum.extents = {to.batch(), to.tokens(), to.heads()};
    sum.to_strides = byte_strides(to);
    sum.elements = to.dim();
    Space::template add<T, accumulator_t<T>>(queue, {&sum, 1});
}

}  // namespace ulysses::inline ULYSSES_ABI
