#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/tensor_view.hpp>
#include <ulysses/core/view_copy.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

/// Sums over all rows of a view, by the sums that every space has: the bits are those of `add`,
/// whatever the space, and depend on nothing but the extents.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

/// Rows that one sum takes at most: two lists of them, and one row, are few enough for a launch of a
/// GPU whose parameters fit 4 KiB.
inline constexpr std::int64_t rows_per_sum = 31;

constexpr std::int64_t parts_of(std::int64_t rows) {
    return (rows + rows_per_sum - 1) / rows_per_sum;
}

/// out[b, p, h, :] = the sum of in[b, p + i * parts, h, :] over i, for `parts` of each sample's
/// tokens, and the row at `first`, where there is one, before them.
/// *Shape*: in [B, s, H, D], out [1 or 0 + B * parts * H, D], packed.
template <class Space, class To, class From, class Layout>
void add_parts(typename Space::queue queue, To* out, std::int64_t parts, From const* first,
               tensor_view<From const, Layout> const& in) {
    constexpr auto to_size = static_cast<std::int64_t>(sizeof(To));
    auto const whole = in.tokens() / parts;   // rows of every part
    auto const longer = in.tokens() % parts;  // parts of one row more
    auto const strides = byte_strides(in);
    std::array<sum_source, 2 * rows_per_sum + 1> sources;
    std::array<block_sum, 3> sums;
    std::size_t used = 0, listed = 0;
    auto* to = reinterpret_cast<std::byte*>(out);
    auto const list = [&](sum_source const& source) { sources[used++] = source; };
    if (first != nullptr) {
        list({reinterpret_cast<std::byte const*>(first), {}});
        sums[listed++] = {to, std::span(sources).first(1), {1, 1, 1}, {}, in.dim()};
        to += in.dim() * to_size;
    }
    auto const row = in.heads() * in.dim() * to_size;
    auto const part = [&](std::int64_t begin, std::int64_t end, std::int64_t rows) {
        if (begin == end) return;
        auto const from = used;
        for (std::int64_t i = 0; i < rows; ++i)
            list({reinterpret_cast<std::byte const*>(in.row(0, i * parts + begin, 0)), strides});
        sums[listed++] = {to + begin * row,
                          std::span(sources).subspan(from, used - from),
                          {in.batch(), end - begin, in.heads()},
                          {parts * row, row, in.dim() * to_size},
                          in.dim()};
    };
    part(0, longer, whole + 1);
    part(longer, parts, whole);
    Space::template add<To, From>(queue, std::span(sums).first(listed));
}

}  // namespace detail

/// to += the sum of the rows, kept in `accumulator_t<T>` and rounded once to T. `scratch` is memory on
/// the same queue that nothing else needs.
///
/// *Shape*: rows [B, s, H, D] -> to [D]. *Complexity*: reads rows once, in about log31(B s H) passes.
template <class Space, class T, class Layout>
void add_rows(typename Space::queue queue, buffer<Space>& scratch, T* to,
              tensor_view<T const, Layout> const& rows) {
    using sum = accumulator_t<T>;
    if (rows.size() == 0) return;
    auto const dim = rows.dim();
    auto const parts = detail::parts_of(rows.tokens());
    auto count = 1 + rows.batch() * parts * rows.heads();
    auto const bytes = [&](std::int64_t n) {
        return static_cast<std::size_t>(n * dim) * sizeof(sum);
    };
    // Each pass leaves a part of the rows, behind those it reads.
    std::int64_t room = count;
    for (auto left = count; left > detail::rows_per_sum;) room += left = detail::parts_of(left);
    auto* memory = reinterpret_cast<sum*>(scratch.reserve(bytes(room), queue).data());
    detail::add_parts<Space>(queue, memory, parts, static_cast<T const*>(to), rows);
    auto const all = [&] { return tensor_view<sum const, Layout>(memory, {1, count, 1, dim}); };
    constexpr sum const* none = nullptr;
    while (count > detail::rows_per_sum) {
        auto const left = detail::parts_of(count);
        detail::add_parts<Space>(queue, memory + count * dim, left, none, all());
        memory += count * dim;
        count = left;
    }
    detail::add_parts<Space>(queue, to, 1, none, all());
}

}  // namespace ulysses::inline ULYSSES_ABI
