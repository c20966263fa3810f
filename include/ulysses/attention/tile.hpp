#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/operands.hpp>
#include <ulysses/core/attention.hpp>
#include <ulysses/core/gemm.hpp>
#include <ulysses/core/number.hpp>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <limits>

/// The grid of blocked attention, and reading and writing the rows of its tiles.
///
/// Queries lie in tiles from global row 0, keys in tiles from global key 0. Where an edge of what rows
/// see runs through a tile of keys, the tile of queries falls into bands, each with the keys that its
/// rows see together. All of it follows from global coordinates, nothing from what an item holds.
namespace ulysses::inline ULYSSES_ABI::detail {

/// Sizes of the grid.
struct attention_grid {
    std::int64_t rows;       ///< query rows of a tile
    std::int64_t keys;       ///< keys of a tile
    std::int64_t band_rows;  ///< rows of a band; divides `rows`
    std::int64_t band_keys;  ///< a band's keys begin on a multiple of it; divides `keys`
};

/// Global query rows of one tile of one sample: on the grid, and those of them that the item owns.
struct row_tile {
    std::int64_t sample;
    std::int64_t begin, end;
    std::int64_t own_begin, own_end;
    index_range keys;  ///< that the tile sees

    std::int64_t rows() const { return end - begin; }
    std::int64_t own_rows() const { return own_end - own_begin; }
};

/// Rows [begin, end) of a tile, computed over a range of global keys within a tile of keys. Rows
/// outside [own_begin, own_end) are computed for the shape of the products only.
struct row_band {
    std::int64_t begin, end;
    std::int64_t own_begin, own_end;
    index_range keys;

    std::int64_t rows() const { return end - begin; }
};

/// The tile of global query row `row`, of which the item owns the rows from there to `item_end`.
constexpr row_tile tile_at(attention_call const& call, attention_grid const& grid, std::int64_t b,
                           std::int64_t row, std::int64_t item_end) {
    auto const begin = row / grid.rows * grid.rows;
    auto const end = std::min(begin + grid.rows, call.visible.queries);
    return {b, begin, end, row, std::min(end, item_end), call.visible.keys_of_rows(b, begin, end)};
}

/// Calls `body(first, last)` for the tiles of keys that `tile` sees, on the grid; the last ends where
/// its keys do.
template <class Body>
void for_each_key_tile(attention_grid const& grid, row_tile const& tile, Body&& body) {
    for (auto key = tile.keys.begin / grid.keys * grid.keys;
         key < tile.keys.end && tile.keys.size() > 0; key += grid.keys)
        body(key, std::min(key + grid.keys, tile.keys.end));
}

/// Calls `body(band)` for the bands of `tile` that see keys of [key, key_end), a tile of keys, and
/// hold rows of the item. `trimmed`: bands are cut to the item's rows.
template <class Body>
void for_each_band(attention_call const& call, attention_grid const& grid, row_tile const& tile,
                   std::int64_t key, std::int64_t key_end, bool trimmed, Body&& body) {
    auto const all_seen = call.visible.keys_of(tile.sample, tile.begin).end >= key_end &&
                          call.visible.keys_of(tile.sample, tile.end - 1).begin <= key;
    auto const step = all_seen ? grid.rows : grid.band_rows;
    for (auto begin = tile.begin; begin < tile.end; begin += step) {
        auto const end = std::min(begin + step, tile.end);
        auto const own_begin = std::max(begin, tile.own_begin);
        auto const own_end = std::min(end, tile.own_end);
        if (own_begin >= own_end) continue;
        auto const seen = call.visible.keys_of_rows(tile.sample, begin, end);
        index_range const keys{std::max(seen.begin, key) / grid.band_keys * grid.band_keys,
                               std::min(seen.end, key_end)};
        if (seen.size() == 0 || keys.size() <= 0) continue;
        if (trimmed)
            body(row_band{own_begin, own_end, own_begin, own_end, keys});
        else
            body(row_band{begin, end, own_begin, own_end, keys});
    }
}

/// The keys of `band` that global row `row` sees, counted from the band's first.
constexpr index_range keys_in(attention_call const& call, row_tile const& tile,
                              row_band const& band, std::int64_t row) {
    auto const seen = call.visible.keys_of(tile.sample, row);
    auto const begin = std::clamp(seen.begin, band.keys.begin, band.keys.end);
    return {begin - band.keys.begin, std::clamp(seen.end, begin, band.keys.end) - band.keys.begin};
}

/// For each of a sample's global keys [from, to) 0, or -inf where it is not there, in `buffer`; null
/// when all are.
template <class A>
A const* hidden_keys(attention_call const& call, std::int64_t b, std::int64_t from, std::int64_t to,
                     A* buffer) {
    if (call.visible.present.empty()) return nullptr;
    auto all = true;
    for (auto key = from; key < to; ++key) {
        auto const there = call.visible.there(b, key);
        buffer[key - from] = there ? A(0) : -std::numeric_limits<A>::infinity();
        all = all && there;
    }
    return all ? nullptr : buffer;
}

/// The view's rows of global indices [from, to) as an operand: in place if it can be, else copied
/// to `buffer`. `begin` is the global index of the view's first row; rows outside the view are
/// zero.
template <class A, class T>
gemm_operand<A> tile_operand(head_view<T const> const& view, std::int64_t b, std::int64_t head,
                             std::int64_t begin, std::int64_t from, std::int64_t to, A* buffer) {
    auto const dim = view.dim();
    if constexpr (std::same_as<T, A>) {
        if (from >= begin && to <= begin + view.tokens() && view.strides[1] >= dim)
            return {.data = view.row(b, from - begin, head), .stride = view.strides[1]};
    }
    for (auto row = from; row < to; ++row) {
        auto* const line = buffer + (row - from) * dim;
        if (row < begin || row >= begin + view.tokens()) {
            std::fill(line, line + dim, A(0));
            continue;
        }
        auto const* const values = view.row(b, row - begin, head);
        for (std::int64_t d = 0; d < dim; ++d) line[d] = static_cast<A>(values[d]);
    }
    return {.data = buffer, .stride = dim};
}

/// Rows from `first` on of an operand that is not transposed.
template <class A>
gemm_operand<A> rows_from(gemm_operand<A> operand, std::int64_t first) {
    operand.data += first * operand.stride;
    return operand;
}

template <class A>
gemm_operand<A> transposed(gemm_operand<A> operand) {
    operand.transposed = true;
    return operand;
}

/// sum_d x[d] * y[d] in A, one code path for every row.
template <class A, class T>
[[gnu::noinline]] A row_dot(T const* x, T const* y, std::int64_t count) {
    constexpr std::int64_t width = 16;
    A part[width] = {};
    std::int64_t d = 0;
    for (; d + width <= count; d += width)
        for (std::int64_t l = 0; l < width; ++l)
            part[l] += static_cast<A>(x[d + l]) * static_cast<A>(y[d + l]);
    for (; d < count; ++d) part[d % width] += static_cast<A>(x[d]) * static_cast<A>(y[d]);
    for (auto half = width / 2; half > 0; half /= 2)
        for (std::int64_t l = 0; l < half; ++l) part[l] += part[l + half];
    return part[0];
}

/// to[d] = from[d] * factor, rounded to an element; one code path for every row.
template <class A, class T>
[[gnu::noinline]] void scale_row(T* to, A const* from, A factor, std::int64_t count) {
    for (std::int64_t d = 0; d < count; ++d) to[d] = static_cast<T>(from[d] * factor);
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
