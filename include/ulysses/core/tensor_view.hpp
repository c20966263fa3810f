#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/layout.hpp>

#include <array>
#include <concepts>
#include <cstdint>
#include <type_traits>

namespace ulysses::inline ULYSSES_ABI {

/// Extents or strides over the four canonical axes: batch, token, head, dim.
using extents4 = std::array<std::int64_t, 4>;

namespace detail {

/// The product modulo 2^64: foreign extents are multiplied before they are checked.
constexpr std::int64_t wrapping_product(std::int64_t a, std::int64_t b) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
}

}  // namespace detail

/// Row-major strides of `extents`, in elements.
constexpr extents4 packed_strides(extents4 const& extents) {
    auto const token = detail::wrapping_product(extents[2], extents[3]);
    return {detail::wrapping_product(extents[1], token), token, extents[3], 1};
}

/// A non-owning strided view of an operand: pointer, extents [batch, token, head, dim], strides in
/// elements, and the layout policy as a type. Every memory layout (BSHD, SBHD, BHSD, packed QKV,
/// padded rows) is the same view with other strides. `T` may be const.
template <class T, layout_policy Layout>
struct tensor_view {
    using element_type = T;
    using layout = Layout;

    T* data = nullptr;
    extents4 extents{};
    extents4 strides{};

    tensor_view() = default;
    constexpr tensor_view(T* first, extents4 const& shape, extents4 const& steps)
        : data(first), extents(shape), strides(steps) {}

    /// A packed row-major view.
    constexpr tensor_view(T* first, extents4 const& shape)
        : tensor_view(first, shape, packed_strides(shape)) {}

    /// A view of mutable elements is a view of const ones.
    template <class U>
        requires(std::same_as<U const, T> && !std::same_as<U, T>)
    constexpr tensor_view(tensor_view<U, Layout> const& other)
        : tensor_view(other.data, other.extents, other.strides) {}

    constexpr std::int64_t batch() const { return extents[0]; }
    constexpr std::int64_t tokens() const { return extents[1]; }
    constexpr std::int64_t heads() const { return extents[2]; }
    constexpr std::int64_t dim() const { return extents[3]; }
    constexpr std::int64_t size() const {
        return detail::wrapping_product(detail::wrapping_product(extents[0], extents[1]),
                                        detail::wrapping_product(extents[2], extents[3]));
    }

    /// Address of the contiguous row of `dim()` elements of one token and head.
    constexpr T* row(std::int64_t b, std::int64_t token, std::int64_t head) const {
        return data + b * strides[0] + token * strides[1] + head * strides[2];
    }
    constexpr T& operator()(std::int64_t b, std::int64_t token, std::int64_t head,
                            std::int64_t d) const {
        return row(b, token, head)[d * strides[3]];
    }

    /// The part of `axis` in [begin, begin + count).
    constexpr tensor_view slice(std::size_t axis, std::int64_t begin, std::int64_t count) const {
        auto part = *this;
        part.data = data + begin * strides[axis];
        part.extents[axis] = count;
        return part;
    }
    constexpr tensor_view slice_tokens(std::int64_t begin, std::int64_t count) const {
        return slice(1, begin, count);
    }
    constexpr tensor_view slice_heads(std::int64_t begin, std::int64_t count) const {
        return slice(2, begin, count);
    }

    /// True when the elements lie packed in row-major [batch, token, head, dim] order.
    constexpr bool packed() const { return strides == packed_strides(extents); }
};

template <class T>
using token_view = tensor_view<T, sequence_local>;  // [B, s, H, D]
template <class T>
using head_view = tensor_view<T, head_local>;  // [B, S, h, D]

}  // namespace ulysses::inline ULYSSES_ABI
