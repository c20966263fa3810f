#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/space/host_copy.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <span>

/// Host memory: calls run on the calling thread and have finished when they return.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

inline std::int64_t row_offset(std::array<std::int64_t, 3> const& strides,
                               std::array<std::int64_t, 3> const& row) {
    return row[0] * strides[0] + row[1] * strides[1] + row[2] * strides[2];
}

/// One `row` [batch, token, head] of a sum.
template <element To, element From>
void add_row(block_sum const& sum, std::array<std::int64_t, 3> const& row) {
    constexpr std::int64_t at_once = 256;
    using wide = accumulator_t<From>;
    wide sums[at_once];
    auto* const to = reinterpret_cast<To*>(sum.to + row_offset(sum.to_strides, row));
    auto const row_of = [&](sum_source const& source) {
        return reinterpret_cast<From const*>(source.rows + row_offset(source.strides, row));
    };
    for (std::int64_t first = 0; first < sum.elements; first += at_once) {
        auto const count = std::min(at_once, sum.elements - first);
        auto const* const begin = row_of(sum.from[0]) + first;
        for (std::int64_t i = 0; i < count; ++i) sums[i] = static_cast<wide>(begin[i]);
        for (auto const& source : sum.from.subspan(1)) {
            auto const* const from = row_of(source) + first;
            for (std::int64_t i = 0; i < count; ++i) sums[i] += static_cast<wide>(from[i]);
        }
        for (std::int64_t i = 0; i < count; ++i) to[first + i] = rounded<To>(sums[i]);
    }
}

}  // namespace detail

struct host_space {
    struct queue {};

    /// *Throws* `out_of_memory`.
    static void* allocate(queue, std::size_t bytes, where at = where::here()) {
        void* const memory = ::operator new(bytes, alignment, std::nothrow);
        if (memory == nullptr)
            raise(errc::out_of_memory, at, "host_space::allocate", "memory must be available",
                  bytes, " bytes");
        return memory;
    }

    static void deallocate(queue, void* memory, std::size_t) noexcept {
        ::operator delete(memory, alignment);
    }

    /// Stores past the caches when `group_bytes` would not stay in them.
    static void copy(queue, std::span<block_copy const> blocks, std::size_t group_bytes) {
        auto const streamed = group_bytes > detail::streamed_from_bytes();
        detail::copy_blocks(blocks, streamed ? detail::store::streamed : detail::store::plain);
    }

    /// Rows start on multiples of their element's size.
    template <element To, element From>
    static void add(queue, std::span<block_sum const> sums) {
        for (auto const& sum : sums)
            for (std::int64_t sample = 0; sample < sum.extents[0]; ++sample)
                for (std::int64_t token = 0; token < sum.extents[1]; ++token)
                    for (std::int64_t head = 0; head < sum.extents[2]; ++head) {
                        std::array const row{sample, token, head};
                        if (!sum.from.empty())
                            detail::add_row<To, From>(sum, row);
                        else if (sum.elements > 0)
                            std::memset(sum.to + detail::row_offset(sum.to_strides, row), 0,
                                        static_cast<std::size_t>(sum.elements) * sizeof(To));
                    }
    }

   private:
    static constexpr std::align_val_t alignment{64};
};

static_assert(space<host_space>);

}  // namespace ulysses::inline ULYSSES_ABI
