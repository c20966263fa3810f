#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/block.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/space.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

/// What one launch of the block kernels is given, and what each of its threads does: plain functors
/// for host and device, so that the index maths is tested without a GPU. Lists travel by value as
/// the kernel's parameter: nothing is copied to the device beforehand and nothing has to stay alive,
/// also in a graph that is launched again.
namespace ulysses::inline ULYSSES_ABI::detail {

inline constexpr int block_threads = 256;
/// Vectors of a copy, or elements of a sum, that one thread takes.
inline constexpr std::int64_t units_per_thread = 4;
inline constexpr std::int64_t units_per_tile = block_threads * units_per_thread;

/// Quotient and remainder; in 32 bits where both fit, which a GPU divides several times as fast.
struct quotient {
    std::int64_t value, rest;
};
ULYSSES_HD constexpr quotient divided(std::int64_t a, std::int64_t b) {
    if (((a | b) >> 32) == 0) {
        auto const x = static_cast<std::uint32_t>(a), y = static_cast<std::uint32_t>(b);
        return {static_cast<std::int64_t>(x / y), static_cast<std::int64_t>(x % y)};
    }
    return {a / b, a % b};
}

/// Where the row of a number lies among rows [batch, token, head].
ULYSSES_HD constexpr std::int64_t row_place(std::int64_t row, std::int64_t const (&extents)[3],
                                            std::int64_t const (&strides)[3]) {
    auto const head = divided(row, extents[2]);
    auto const token = divided(head.value, extents[1]);
    return token.value * strides[0] + token.rest * strides[1] + head.rest * strides[2];
}

/// A `block_copy` for the device. Thread blocks [first_tile, next copy's first_tile) execute it.
struct device_copy {
    std::byte* to;
    std::byte const* from;
    std::int64_t extents[3], to_strides[3], from_strides[3];
    std::int64_t row_units;   ///< vectors in a row
    std::int64_t first_tile;  ///< tiles of the copies before
    int unit_bytes;           ///< 16, 8, 4, 2 or 1: what all addresses and the row are multiples of
};

template <std::size_t Bytes>
struct alignas(Bytes) vector_unit {
    unsigned char bytes[Bytes];
};

/// The number of the last entry that begins at or before `tile`.
template <class Entry>
ULYSSES_HD constexpr int entry_of_tile(Entry const* entries, int count, std::int64_t tile) {
    int first = 0;
    for (int after = count; after - first > 1;) {
        auto const middle = (first + after) / 2;
        if (entries[middle].first_tile <= tile)
            first = middle;
        else
            after = middle;
    }
    return first;
}

/// The tiles of up to `Capacity` copies; thread (tile, thread) moves `units_per_thread` vectors.
template <std::size_t Capacity>
struct copy_tiles {
    static constexpr int capacity{Capacity};
    int count = 0;
    device_copy copies[Capacity];

    ULYSSES_HD void operator()(std::int64_t tile, int thread) const {
        auto const& copy = copies[entry_of_tile(copies, count, tile)];
        auto const first = (tile - copy.first_tile) * units_per_tile + thread;
        switch (copy.unit_bytes) {
            case 16: return move<16>(copy, first);
            case 8: return move<8>(copy, first);
            case 4: return move<4>(copy, first);
            case 2: return move<2>(copy, first);
            default: return move<1>(copy, first);
        }
    }

   private:
    /// Loads all before it stores any, so that several are on their way.
    template <std::size_t Bytes>
    ULYSSES_HD static void move(device_copy const& copy, std::int64_t first) {
        using unit = vector_unit<Bytes>;
        auto const units = copy.extents[0] * copy.extents[1] * copy.extents[2] * copy.row_units;
        unit held[units_per_thread];
        unit* places[units_per_thread];
        for (std::int64_t i = 0; i < units_per_thread; ++i) {
            auto const which = first + i * block_threads;
            places[i] = nullptr;
            if (which >= units) continue;
            auto const row = divided(which, copy.row_units);
            auto const* const from =
                copy.from + row_place(row.value, copy.extents, copy.from_strides);
            auto* const to = copy.to + row_place(row.value, copy.extents, copy.to_strides);
            held[i] = reinterpret_cast<unit const*>(from)[row.rest];
            places[i] = reinterpret_cast<unit*>(to) + row.rest;
        }
        for (std::int64_t i = 0; i < units_per_thread; ++i)
            if (places[i] != nullptr) *places[i] = held[i];
    }
};

/// A `block_sum` for the device; its sources are [first_source, first_source + sources).
struct device_sum {
    std::byte* to;
    std::int64_t extents[3], to_strides[3];
    std::int64_t elements;  ///< in a row
    std::int64_t first_tile;
    int first_source, sources;
};
struct device_source {
    std::byte const* rows;
    std::int64_t strides[3];
};

/// The tiles of up to `Capacity` sums of `Sources` sources in all. Added in the order of the list, in
/// the accumulator of `From`, and rounded once: the bits of `host_space::add`.
template <class To, class From, std::size_t Capacity, std::size_t Sources>
struct sum_tiles {
    static constexpr int capacity{Capacity}, source_capacity{Sources};
    int count = 0;
    device_sum sums[Capacity];
    device_source sources[Sources];

    ULYSSES_HD void operator()(std::int64_t tile, int thread) const {
        auto const& sum = sums[entry_of_tile(sums, count, tile)];
        auto const elements = sum.extents[0] * sum.extents[1] * sum.extents[2] * sum.elements;
        auto const first = (tile - sum.first_tile) * units_per_tile + thread;
        for (std::int64_t i = 0; i < units_per_thread; ++i)
            if (auto const which = first + i * block_threads; which < elements) add(sum, which);
    }

   private:
    ULYSSES_HD void add(device_sum const& sum, std::int64_t which) const {
        using wide = accumulator_t<From>;
        auto const row = divided(which, sum.elements);
        wide total = 0;
        for (int i = 0; i < sum.sources; ++i) {
            auto const& source = sources[sum.first_source + i];
            auto const* const from = reinterpret_cast<From const*>(
                source.rows + row_place(row.value, sum.extents, source.strides));
            auto const value = static_cast<wide>(from[row.rest]);
            total = i == 0 ? value : total + value;
        }
        auto* const to =
            reinterpret_cast<To*>(sum.to + row_place(row.value, sum.extents, sum.to_strides));
        to[row.rest] = rounded<To>(total);
    }
};

/// Bytes of the host, up to `Capacity`; a thread writes `bytes_per_thread` of them.
template <std::size_t Capacity>
struct byte_tiles {
    static constexpr std::int64_t capacity{Capacity}, bytes_per_thread{4};
    std::byte* to = nullptr;
    std::int64_t count = 0;
    std::byte bytes[Capacity];

    std::int64_t threads() const { return (count + bytes_per_thread - 1) / bytes_per_thread; }
    ULYSSES_HD void operator()(std::int64_t tile, int thread) const {
        auto const first = (tile * block_threads + thread) * bytes_per_thread;
        for (auto i = first; i < first + bytes_per_thread && i < count; ++i) to[i] = bytes[i];
    }
};

/// As many lists as fit the 4 KiB that every CUDA gives a kernel's parameters, and more in the 32764
/// bytes that CUDA 12.1 does.
using few_copies = copy_tiles<32>;
using many_copies = copy_tiles<256>;
using few_bytes = byte_tiles<4000>;
using many_bytes = byte_tiles<32000>;
template <class To, class From>
using few_sums = sum_tiles<To, From, 16, 64>;
template <class To, class From>
using many_sums = sum_tiles<To, From, 64, 768>;

static_assert(sizeof(few_copies) <= 4096 && sizeof(many_copies) <= 32764);
static_assert(sizeof(few_sums<float, float>) <= 4096 && sizeof(many_sums<float, float>) <= 32764);

inline std::int64_t tiles_of(std::int64_t units) {
    return (units + units_per_tile - 1) / units_per_tile;
}

/// The widest vector that all of `bits`' addresses and lengths are multiples of.
inline int unit_bytes_of(std::uint64_t bits) {
    int bytes = 16;
    while (bits % static_cast<unsigned>(bytes) != 0) bytes /= 2;
    return bytes;
}

inline device_copy device_copy_of(block_copy const& block, std::int64_t first_tile) {
    device_copy copy{};
    copy.to = block.to;
    copy.from = block.from;
    auto bits = reinterpret_cast<std::uintptr_t>(block.to) |
                reinterpret_cast<std::uintptr_t>(block.from) |
                static_cast<std::uint64_t>(block.row_bytes);
    for (std::size_t axis = 0; axis < 3; ++axis) {
        copy.extents[axis] = block.extents[axis];
        copy.to_strides[axis] = block.to_strides[axis];
        copy.from_strides[axis] = block.from_strides[axis];
        if (block.extents[axis] > 1)
            bits |= static_cast<std::uint64_t>(block.to_strides[axis] | block.from_strides[axis]);
    }
    copy.unit_bytes = unit_bytes_of(bits);
    copy.row_units = block.row_bytes / copy.unit_bytes;
    copy.first_tile = first_tile;
    return copy;
}

/// Fills `list` with copies from `blocks`, as many as fit, and drops them there. Returns the tiles of
/// the list, 0 where nothing is left to be moved.
template <class List>
std::int64_t take_copies(List& list, std::span<block_copy const>& blocks) {
    list.count = 0;
    std::int64_t tiles = 0;
    while (!blocks.empty() && list.count < List::capacity) {
        auto const& block = blocks.front();
        blocks = blocks.subspan(1);
        if (block.bytes() == 0) continue;
        auto const copy = device_copy_of(block, tiles);
        list.copies[list.count++] = copy;
        tiles += tiles_of(block.bytes() / copy.unit_bytes);
    }
    return tiles;
}

/// As `take_copies`. *Shape*: no sum has more than `List::source_capacity` sources.
template <class List>
std::int64_t take_sums(List& list, std::span<block_sum const>& sums) {
    list.count = 0;
    std::int64_t tiles = 0;
    int sources = 0;
    while (!sums.empty() && list.count < List::capacity) {
        auto const& sum = sums.front();
        if (sources + static_cast<int>(sum.from.size()) > List::source_capacity) break;
        sums = sums.subspan(1);
        auto const elements = sum.extents[0] * sum.extents[1] * sum.extents[2] * sum.elements;
        if (elements == 0) continue;
        auto& added = list.sums[list.count++];
        added.to = sum.to;
        added.elements = sum.elements;
        added.first_tile = tiles;
        added.first_source = sources;
        added.sources = static_cast<int>(sum.from.size());
        for (std::size_t axis = 0; axis < 3; ++axis) {
            added.extents[axis] = sum.extents[axis];
            added.to_strides[axis] = sum.to_strides[axis];
        }
        for (auto const& each : sum.from) {
            auto& source = list.sources[sources++];
            source.rows = each.rows;
            for (std::size_t axis = 0; axis < 3; ++axis) source.strides[axis] = each.strides[axis];
        }
        tiles += tiles_of(elements);
    }
    return tiles;
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
