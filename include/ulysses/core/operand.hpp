#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/tensor_view.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

/// Run-time checks of operands at the border of a call, before anything moves.
namespace ulysses::inline v0 {

namespace detail {

inline std::string text_of(extents4 const& e) {
    return concat("[", e[0], ", ", e[1], ", ", e[2], ", ", e[3], "]");
}

/// Elements from the first to one past the last of the axes whose stride is below `limit`.
inline std::int64_t footprint(extents4 const& extents, extents4 const& strides,
                              std::int64_t limit) {
    std::int64_t last = 0;
    for (std::size_t axis = 0; axis < 4; ++axis)
        if (extents[axis] > 1 && strides[axis] < limit) last += (extents[axis] - 1) * strides[axis];
    return last + 1;
}

inline constexpr auto no_limit = std::int64_t{1} << 62;

/// True when two elements of the view share an address.
inline bool overlaps_itself(extents4 const& extents, extents4 const& strides) {
    for (std::size_t axis = 0; axis < 4; ++axis)
        if (extents[axis] > 1 && footprint(extents, strides, strides[axis]) > strides[axis])
            return true;
    // Two axes of one stride walk over the same addresses.
    for (std::size_t a = 0; a < 4; ++a)
        for (std::size_t b = a + 1; b < 4; ++b)
            if (extents[a] > 1 && extents[b] > 1 && strides[a] == strides[b]) return true;
    return false;
}

/// True unless the two views are seen to be disjoint: apart as ranges, or interleaved in one period
/// (as q, k and v inside packed rows).
template <class A, class B, class LayoutA, class LayoutB>
bool may_overlap(tensor_view<A, LayoutA> const& a, tensor_view<B, LayoutB> const& b) {
    if (a.size() == 0 || b.size() == 0) return false;
    auto const begin_a = reinterpret_cast<std::uintptr_t>(a.data);
    auto const begin_b = reinterpret_cast<std::uintptr_t>(b.data);
    auto const end_a =
        begin_a +
        static_cast<std::uintptr_t>(footprint(a.extents, a.strides, no_limit)) * sizeof(A);
    auto const end_b =
        begin_b +
        static_cast<std::uintptr_t>(footprint(b.extents, b.strides, no_limit)) * sizeof(B);
    if (end_a <= begin_b || end_b <= begin_a) return false;
    if constexpr (sizeof(A) == sizeof(B)) {
        for (std::size_t axis = 0; axis < 3; ++axis) {
            auto const period = a.strides[axis];
            if (period < 2 || b.strides[axis] != period) continue;
            auto const whole = [&](extents4 const& extents, extents4 const& strides) {
                for (std::size_t other = 0; other < 4; ++other)
                    if (extents[other] > 1 && strides[other] >= period &&
                        strides[other] % period != 0)
                        return false;
                return true;
            };
            if (!whole(a.extents, a.strides) || !whole(b.extents, b.strides)) continue;
            auto const distance =
                static_cast<std::int64_t>(begin_b) - static_cast<std::int64_t>(begin_a);
            auto const bytes = period * static_cast<std::int64_t>(sizeof(A));
            auto const offset = ((distance % bytes) + bytes) % bytes;
            auto const width = static_cast<std::int64_t>(sizeof(A));
            if (offset >= footprint(a.extents, a.strides, period) * width &&
                offset + footprint(b.extents, b.strides, period) * width <= bytes)
                return false;
        }
    }
    return true;
}

}  // namespace detail

/// Checks that a view has exactly `expected` extents, data, and contiguous rows.
/// *Throws* `invalid_tensor` naming `name`, the rule and the values of both sides.
template <class T, class Layout>
void check_operand(std::string_view call, std::string_view name, tensor_view<T, Layout> const& view,
                   extents4 const& expected, where at = where::here()) {
    // Formed only for an error: a check that passes allocates nothing.
    auto const operation = [&] { return concat(call, ": ", name); };
    if (view.extents != expected)
        raise(errc::invalid_tensor, at, operation(),
              "extents [batch, tokens, heads, dim] must fit the step and shape", "got ",
              detail::text_of(view.extents), ", expected ", detail::text_of(expected));
    if (view.size() == 0) return;
    if (view.data == nullptr)
        raise(errc::invalid_tensor, at, operation(), "data must not be null", "extents ",
              detail::text_of(view.extents));
    if (view.dim() > 1 && view.strides[3] != 1)
        raise(errc::invalid_tensor, at, operation(), "the dim axis must be contiguous", "stride ",
              view.strides[3], ", expected 1");
    for (std::size_t axis = 0; axis < 3; ++axis)
        if (view.extents[axis] > 1 && view.strides[axis] < 0)
            raise(errc::invalid_tensor, at, operation(), "strides must not be negative", "strides ",
                  detail::text_of(view.strides));
}

/// As `check_operand`, and that no two elements of the written view share an address.
template <class T, class Layout>
void check_output(std::string_view call, std::string_view name, tensor_view<T, Layout> const& view,
                  extents4 const& expected, where at = where::here()) {
    check_operand(call, name, view, expected, at);
    if (view.size() != 0 && detail::overlaps_itself(view.extents, view.strides))
        raise(errc::invalid_tensor, at, concat(call, ": ", name),
              "elements of an output must not overlap", "extents ", detail::text_of(view.extents),
              ", strides ", detail::text_of(view.strides));
}

/// Checks that an output shares no element with another operand.
template <class A, class LayoutA, class B, class LayoutB>
void check_apart(std::string_view call, std::string_view output, tensor_view<A, LayoutA> const& a,
                 std::string_view other, tensor_view<B, LayoutB> const& b,
                 where at = where::here()) {
    if (detail::may_overlap(a, b))
        raise(errc::invalid_tensor, at, concat(call, ": ", output),
              "an output must not overlap another operand", output, " overlaps ", other);
}

}  // namespace ulysses::inline v0
