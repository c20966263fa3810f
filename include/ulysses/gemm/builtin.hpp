#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/gemm.hpp>
#include <ulysses/core/pack.hpp>
#include <ulysses/core/space.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <utility>

/// A matrix product in plain C++: no library, no allocation, one code path for every shape.
///
///     ulysses::builtin_gemm{}(ulysses::gemm_call<float>{.m = m, .n = n, .k = k, ...});
///
/// An element of C is one chain of multiply-adds over k in ascending order, starting from beta * C.
/// Its bits depend on nothing else: not on m or n, nor on where k is cut into blocks, and products
/// of zeros at the end of k leave them as they are. Operands are read in the loop order of Goto and
/// van de Geijn (2008), with A read in place because the blocks are small.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

/// Sizes of the blocks, in elements of T: `rows` x `columns` of C live in registers.
template <class T>
struct gemm_tile {
    static constexpr std::size_t packs = 2;
    static constexpr std::size_t rows = pack_bytes == 64 ? 8 : pack_bytes == 32 ? 6 : 4;
    static constexpr std::size_t columns = packs * lanes<T>;
    static constexpr std::int64_t depth = 256;              // block of k
    static constexpr std::int64_t width = 512 / sizeof(T);  // block of n
    static_assert(width % static_cast<std::int64_t>(columns) == 0);
};

/// The rows of op(A) that one register tile reads: element (i, p) is row[i][p * step].
template <class T>
struct gemm_rows {
    T const* row[gemm_tile<T>::rows];
    std::int64_t step;
};

/// C tile = beta * C tile + A rows * B panel over `depth`; `fresh`: C is not read. Never inlined:
/// all tiles must run the same instructions.
template <class T>
[[gnu::noinline]] ULYSSES_WIDE_VECTORS void multiply_tile(std::int64_t depth, gemm_rows<T> const& a,
                                                          T const* b, T* c, std::int64_t c_stride,
                                                          bool fresh, T beta) {
    using tile = gemm_tile<T>;
    using vector = pack<T>;
    [&]<std::size_t... I>(std::index_sequence<I...>) {
        T const* const row[] = {a.row[I]...};
        auto const step = a.step;
        vector left[] = {(static_cast<void>(I), vector{})...};
        vector right[] = {(static_cast<void>(I), vector{})...};
        if (!fresh) {
            ((left[I] = load_pack(c + static_cast<std::int64_t>(I) * c_stride) * beta), ...);
            ((right[I] = load_pack(c + static_cast<std::int64_t>(I) * c_stride + lanes<T>) * beta),
             ...);
        }
        for (std::int64_t p = 0, at = 0; p < depth; ++p, at += step) {
            auto const b0 = load_pack(b);
            auto const b1 = load_pack(b + lanes<T>);
            b += tile::columns;
            ((left[I] += b0 * row[I][at], right[I] += b1 * row[I][at]), ...);
        }
        (store_pack(c + static_cast<std::int64_t>(I) * c_stride, left[I]), ...);
        (store_pack(c + static_cast<std::int64_t>(I) * c_stride + lanes<T>, right[I]), ...);
    }
    (std::make_index_sequence<tile::rows>{});
}

/// Lays rows [k0, k0 + depth) and columns [n0, n0 + width) of alpha * op(B) out as panels
/// [width / columns][depth][columns], zeros past the last column.
template <class T>
void pack_panels(gemm_operand<T> const& b, T const* data, std::int64_t k0, std::int64_t depth,
                 std::int64_t n0, std::int64_t width, T alpha, T* to) {
    constexpr auto columns = static_cast<std::int64_t>(gemm_tile<T>::columns);
    for (std::int64_t j = 0; j < width; j += columns, to += depth * columns) {
        auto const count = std::min(columns, width - j);
        if (b.transposed) {
            for (std::int64_t c = 0; c < count; ++c) {
                auto const* from = data + (n0 + j + c) * b.stride + k0;
                for (std::int64_t p = 0; p < depth; ++p) to[p * columns + c] = alpha * from[p];
            }
            for (std::int64_t p = 0; count < columns && p < depth; ++p)
                std::fill(to + p * columns + count, to + (p + 1) * columns, T(0));
        } else {
            for (std::int64_t p = 0; p < depth; ++p) {
                auto const* from = data + (k0 + p) * b.stride + n0 + j;
                auto* const line = to + p * columns;
                for (std::int64_t c = 0; c < count; ++c) line[c] = alpha * from[c];
                std::fill(line + count, line + columns, T(0));
            }
        }
    }
}

/// The `count` rows of op(A) from `m0` on, over [k0, k0 + depth). Rows past the last repeat it;
/// their products are computed and dropped. A transposed A is copied to `buffer` as [depth][rows].
template <class T>
gemm_rows<T> rows_of(gemm_operand<T> const& a, T const* data, std::int64_t m0, std::int64_t count,
                     std::int64_t k0, std::int64_t depth, T* buffer) {
    constexpr auto rows = static_cast<std::int64_t>(gemm_tile<T>::rows);
    gemm_rows<T> view{};
    view.step = a.transposed ? rows : 1;
    for (std::int64_t i = 0; i < rows; ++i)
        view.row[i] =
            a.transposed ? buffer + i : data + (m0 + std::min(i, count - 1)) * a.stride + k0;
    for (std::int64_t p = 0; a.transposed && p < depth; ++p) {
        auto const* from = data + (k0 + p) * a.stride + m0;
        for (std::int64_t i = 0; i < rows; ++i) buffer[p * rows + i] = from[std::min(i, count - 1)];
    }
    return view;
}

/// One product of a call, on its own operands.
template <class T>
void multiply(gemm_call<T> const& call, T const* a, T const* b, T* c) {
    using tile = gemm_tile<T>;
    constexpr auto rows = static_cast<std::int64_t>(tile::rows);
    constexpr auto columns = static_cast<std::int64_t>(tile::columns);
    alignas(64) T panels[static_cast<std::size_t>(tile::depth * tile::width)];
    alignas(64) T left[static_cast<std::size_t>(tile::depth * rows)];
    alignas(64) T edge[static_cast<std::size_t>(rows * columns)];
    auto const k = call.alpha == T(0) ? 0 : call.k;
    for (std::int64_t n0 = 0; n0 < call.n; n0 += tile::width) {
        auto const width = std::min(tile::width, call.n - n0);
        std::int64_t k0 = 0;
        do {  // once for k = 0: C = beta * C
            auto const depth = std::min(tile::depth, k - k0);
            auto const fresh = k0 == 0 && call.beta == T(0);
            auto const beta = k0 == 0 ? call.beta : T(1);
            pack_panels(call.b, b, k0, depth, n0, width, call.alpha, panels);
            for (std::int64_t m0 = 0; m0 < call.m; m0 += rows) {
                auto const height = std::min(rows, call.m - m0);
                auto const lines = rows_of(call.a, a, m0, height, k0, depth, left);
                for (std::int64_t j = 0; j < width; j += columns) {
                    auto const* const panel = panels + j * depth;
                    auto* const out = c + m0 * call.c_stride + n0 + j;
                    if (height == rows && width - j >= columns) {
                        multiply_tile(depth, lines, panel, out, call.c_stride, fresh, beta);
                        continue;
                    }
                    auto const wide = std::min(columns, width - j);
                    for (std::int64_t i = 0; !fresh && i < rows; ++i)
                        for (std::int64_t x = 0; x < columns; ++x)
                            edge[i * columns + x] =
                                i < height && x < wide ? out[i * call.c_stride + x] : T(0);
                    multiply_tile(depth, lines, panel, edge, columns, fresh, beta);
                    for (std::int64_t i = 0; i < height; ++i)
                        std::copy_n(edge + i * columns, wide, out + i * call.c_stride);
                }
            }
            k0 += depth;
        } while (k0 < k);
    }
}

}  // namespace detail

/// The built-in product, a `gemm_for` float and double on the host.
///
/// *Thread safety*: stateless; 160 KiB of the calling thread's stack. *Complexity*: 2 m n k
/// operations.
struct builtin_gemm {
    using space_type = host_space;
    static constexpr bool rows_independent =
        true;  ///< nor do bits depend on n, or on zeros ending k

    template <std::floating_point T>
    void operator()(gemm_call<T> const& call) const {
        if (call.m <= 0 || call.n <= 0) return;
        for (std::int64_t i = 0; i < call.batch; ++i)
            detail::multiply(call, call.a.data + i * call.a.batch_stride,
                             call.b.data + i * call.b.batch_stride,
                             call.c + i * call.c_batch_stride);
    }
};

}  // namespace ulysses::inline ULYSSES_ABI
