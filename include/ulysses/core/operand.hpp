#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/tensor_view.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

/// Run-time checks of operands at the border of a call, before anything moves.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

inline std::string text_of(extents4 const& e) {
    return concat("[", e[0], ", ", e[1], ", ", e[2], ", ", e[3], "]");
}

/// False when an element of the view, or their number, lies beyond what 64 bits address. Estimated in
/// floating point, which does not overflow.
template <class T, class Layout>
bool addressable(tensor_view<T, Layout> const& view) {
    constexpr double limit = 0x1p62;
    double elements = 1, last = 0;
    for (std::size_t axis = 0; axis < 4; ++axis) {
        auto const extent = static_cast<double>(view.extents[axis]);
        elements *= extent;
        if (view.extents[axis] > 1)
            last += (extent - 1) * std::fabs(static_cast<double>(view.strides[axis]));
    }
    auto const size = static_cast<double>(sizeof(T));
    return elements == 0 || (elements * size < limit && last * size < limit);
}

/// Elements from the first to one past the last of the axes whose stride is below `limit`.
inline std::int64_t footprint(extents4 const& extents, extents4 const& strides,
                              std::int64_t limit) {
    std::int64_t last = 0;
    for (std::size_t axis = 0; axis < 4; ++axis)
        if (extents[axis] > 1 && strides[axis] < limit) last += (extents[axis] - 1) * strides[axis];
    return last + 1;
}

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

/// Whether two views may share an element, found axis by axis: where both step by one period that
/// holds a part of each, only parts in the same period can meet. Strides are in bytes.
class overlap_search {
   public:
    struct side {
        std::array<std::int64_t, 3> extents, strides;
        std::int64_t row_bytes;

        std::int64_t footprint(std::array<bool, 3> const& peeled) const {
            auto last = row_bytes;
            for (std::size_t axis = 0; axis < 3; ++axis)
                if (!peeled[axis] && extents[axis] > 1) last += (extents[axis] - 1) * strides[axis];
            return last;
        }
    };

    overlap_search(side const& a, side const& b) : a_(a), b_(b) {}

    /// `distance` bytes from the first of `a` to the first of `b`.
    bool may_meet(std::int64_t distance, std::array<bool, 3> peeled = {}) const {
        if (distance >= a_.footprint(peeled) || -distance >= b_.footprint(peeled)) return false;
        auto const axis = widest_shared(peeled);
        if (axis == 3) return true;
        peeled[axis] = true;
        auto const period = stride(axis);
        if (a_.footprint(peeled) > period || b_.footprint(peeled) > period) return true;
        auto const offset = (distance % period + period) % period;
        return may_meet(offset, peeled) || may_meet(offset - period, peeled);
    }

   private:
    std::int64_t stride(std::size_t axis) const {
        return a_.extents[axis] > 1 ? a_.strides[axis] : b_.strides[axis];
    }
    std::size_t widest_shared(std::array<bool, 3> const& peeled) const {
        std::size_t widest = 3;
        for (std::size_t axis = 0; axis < 3; ++axis) {
            if (peeled[axis] || (a_.extents[axis] <= 1 && b_.extents[axis] <= 1)) continue;
            auto const both = a_.extents[axis] > 1 && b_.extents[axis] > 1;
            if (stride(axis) <= 0 || (both && a_.strides[axis] != b_.strides[axis])) continue;
            if (widest == 3 || stride(axis) > stride(widest)) widest = axis;
        }
        return widest;
    }

    side a_, b_;
};

/// False only when the two views are seen to be disjoint: apart as ranges, or interleaved (as q, k
/// and v inside packed rows, or heads of k and v in turn).
template <class A, class B, class LayoutA, class LayoutB>
bool may_overlap(tensor_view<A, LayoutA> const& a, tensor_view<B, LayoutB> const& b) {
    if (a.size() == 0 || b.size() == 0) return false;
    auto const side_of = [](auto const& operand) {
        auto const size = static_cast<std::int64_t>(sizeof(*operand.data));
        auto const& [batch, token, head, dim] = operand.strides;
        return overlap_search::side{{operand.extents[0], operand.extents[1], operand.extents[2]},
                                    {batch * size, token * size, head * size},
                                    ((operand.extents[3] - 1) * dim + 1) * size};
    };
    auto const distance =
        reinterpret_cast<std::uintptr_t>(b.data) - reinterpret_cast<std::uintptr_t>(a.data);
    return overlap_search(side_of(a), side_of(b)).may_meet(static_cast<std::int64_t>(distance));
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
    if (!detail::addressable(view))
        raise(errc::invalid_tensor, at, operation(), "an operand must span less than 2^62 bytes",
              "extents ", detail::text_of(view.extents), ", strides ",
              detail::text_of(view.strides));
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

/// Checks that the operand is memory of the space, where that can be asked.
template <class Space, class T, class Layout>
void check_memory(std::string_view call, std::string_view name, tensor_view<T, Layout> const& view,
                  where at = where::here()) {
    if constexpr (requires { Space::expect_memory(call, name, view.data, view.data, at); }) {
        if (view.size() == 0) return;
        auto const* const bytes = reinterpret_cast<std::byte const*>(view.data);
        auto const elements =
            detail::footprint(view.extents, view.strides, std::numeric_limits<std::int64_t>::max());
        Space::expect_memory(call, name, bytes,
                             bytes + elements * static_cast<std::int64_t>(sizeof(T)) - 1, at);
    }
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

}  // namespace ulysses::inline ULYSSES_ABI
