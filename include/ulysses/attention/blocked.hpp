#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/operands.hpp>
#include <ulysses/attention/softmax.hpp>
#include <ulysses/core/attention.hpp>
#include <ulysses/core/gemm.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/space.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>

/// Attention over a matrix product, tile by tile: memory linear in the sequence, a softmax that is
/// never held whole.
///
///     ulysses::blocked_attention attention{ulysses::cblas{}};
///
/// *Source*: Dao, "FlashAttention-2" (2023), on a CPU's terms: a tile of queries goes through the keys it
/// sees, every product is a call of the GEMM.
///
/// Which bits a row gets. Tiles lie on a grid from global row 0 and global key 0, and the shape of every
/// product depends on grid coordinates alone, not on the rows or keys that a work item holds: keys that
/// the tile sees and the item does not hold are zero rows with probability 0. A partly owned tile of
/// queries is computed whole as well, its missing rows zero, unless the GEMM's rows are independent.
/// So o, lse and dq have the same bits however rows are dealt out; dk and dv when a head's rows stay
/// together.
namespace ulysses::inline v0 {

namespace detail {

/// The view's rows of global indices [from, to) as an operand: in place if it can be, else copied to
/// `buffer`. `begin` is the global index of the view's first row; rows outside the view are zero.
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

}  // namespace detail

/// Ordinary attention over any host GEMM. For float and double, views whose rows of one head do not
/// overlap are read in place; 16-bit elements are converted tile by tile.
///
/// *Complexity*: the useful products plus half a tile of keys per causal query row; workspace of a few
/// tiles, whatever the sequence. *Throws* `invalid_tensor` and `invalid_call` before anything is written.
template <class Gemm>
class blocked_attention {
   public:
    using space_type = typename Gemm::space_type;
    static_assert(
        std::same_as<space_type, host_space>,
        "ulysses: blocked_attention computes on the host; give it a GEMM whose space_type is "
        "host_space");
    static constexpr attention_features features{
        .causal = true, .full = true, .grouped = true, .value_dim = true, .row_range = true};

    static constexpr std::int64_t tile_rows = 256;  ///< query rows of a tile
    static constexpr std::int64_t tile_keys = 256;  ///< keys of a tile

    blocked_attention() = default;
    constexpr explicit blocked_attention(Gemm gemm) : gemm_(gemm) {}

    /// Any cut keeps a row's bits; on the grid it also keeps a tile from being computed twice.
    static constexpr std::int64_t row_multiple() { return Gemm::rows_independent ? 1 : tile_rows; }

    template <element T>
    static std::size_t workspace_bytes(attention_extents const& extents) {
        using A = accumulator_t<T>;
        detail::workspace_cursor forward, backward;
        forward_space<A>{forward, extents};
        backward_space<A>{backward, extents};
        return std::max(forward.bytes(), backward.bytes());
    }

    template <element T>
        requires gemm_for<Gemm, accumulator_t<T>>
    void forward(attention_call const& call, head_view<T const> q, head_view<T const> k,
                 head_view<T const> v, head_view<T> o, head_view<accumulator_t<T>> lse) const {
        using A = accumulator_t<T>;
        auto const extents = detail::extents_of(q.extents, k.extents, v.extents);
        detail::check_attention(call, q, k, v, o, lse, workspace_bytes<T>(extents));
        detail::workspace_cursor cursor{call.workspace};
        forward_space<A> const space{cursor, extents};
        for (std::int64_t b = 0; b < q.batch(); ++b)
            for (std::int64_t h = 0; h < q.heads(); ++h)
                for (auto row = call.query_begin; row < call.query_begin + q.tokens();) {
                    auto const tile = tile_at(call, row, q.tokens());
                    forward_tile<T>(call, tile, b, h, q, k, v, o, lse, space);
                    row = tile.own_end;
                }
    }

    template <element T>
        requires gemm_for<Gemm, accumulator_t<T>>
    void backward(attention_call const& call, attention_backward_views<T> const& views) const {
        using A = accumulator_t<T>;
        auto const extents = detail::extents_of(views.q.extents, views.k.extents, views.v.extents);
        detail::check_attention(call, views.q, views.k, views.v, views.o, views.lse,
                                workspace_bytes<T>(extents));
        detail::check_gradients(views);
        detail::workspace_cursor cursor{call.workspace};
        backward_space<A> const space{cursor, extents};
        for (std::int64_t b = 0; b < extents.batch; ++b)
            for (std::int64_t h = 0; h < extents.heads; ++h)
                for (auto row = call.query_begin; row < call.query_begin + extents.rows;) {
                    auto const tile = tile_at(call, row, extents.rows);
                    backward_tile<T>(call, tile, b, h, views, space);
                    row = tile.own_end;
                }
    }

   private:
    /// Global rows of one tile: what the products run over, what the item owns, and the end of the keys
    /// that the whole tile of the grid sees.
    struct row_tile {
        std::int64_t begin, end;
        std::int64_t own_begin, own_end;
        std::int64_t key_end;

        std::int64_t rows() const { return end - begin; }
    };

    static row_tile tile_at(attention_call const& call, std::int64_t row, std::int64_t rows) {
        auto const begin = row / tile_rows * tile_rows;
        auto const end = std::min(begin + tile_rows, call.queries);
        auto const own_end = std::min(end, call.query_begin + rows);
        row_tile tile{begin, end, row, own_end, detail::visible_keys(call, end - 1)};
        if constexpr (Gemm::rows_independent) {
            tile.begin = tile.own_begin;
            tile.end = tile.own_end;
        }
        return tile;
    }

    template <class A>
    struct forward_space {
        A *q, *k, *v, *scores, *out, *largest, *sums;

        forward_space(detail::workspace_cursor& cursor, attention_extents const& e)
            : q(cursor.take<A>(tile_rows * e.head_dim)),
              k(cursor.take<A>(tile_keys * e.head_dim)),
              v(cursor.take<A>(tile_keys * e.value_dim)),
              scores(cursor.take<A>(tile_rows * tile_keys)),
              out(cursor.take<A>(tile_rows * e.value_dim)),
              largest(cursor.take<A>(tile_rows)),
              sums(cursor.take<A>(tile_rows * static_cast<std::int64_t>(detail::lanes<A>))) {}
    };

    template <class A>
    struct backward_space {
        A *q, *k, *v, *dout, *p, *ds, *dq, *lse, *delta;

        backward_space(detail::workspace_cursor& cursor, attention_extents const& e)
            : q(cursor.take<A>(tile_rows * e.head_dim)),
              k(cursor.take<A>(tile_keys * e.head_dim)),
              v(cursor.take<A>(tile_keys * e.value_dim)),
              dout(cursor.take<A>(tile_rows * e.value_dim)),
              p(cursor.take<A>(tile_rows * tile_keys)),
              ds(cursor.take<A>(tile_rows * tile_keys)),
              dq(cursor.take<A>(tile_rows * e.head_dim)),
              lse(cursor.take<A>(tile_rows)),
              delta(cursor.take<A>(tile_rows)) {}
    };

    /// C = alpha * A * B + beta * C, C packed with rows of `c_stride`.
    template <class A>
    void multiply(std::int64_t m, std::int64_t n, std::int64_t k, A alpha, gemm_operand<A> const& a,
                  gemm_operand<A> const& b, A beta, A* c, std::int64_t c_stride) const {
        gemm_(gemm_call<A>{.m = m,
                           .n = n,
                           .k = k,
                           .alpha = alpha,
                           .a = a,
                           .b = b,
                           .beta = beta,
                           .c = c,
                           .c_stride = c_stride});
    }

    template <class A>
    static gemm_operand<A> transposed(gemm_operand<A> operand) {
        operand.transposed = true;
        return operand;
    }

    /// Q [R, D], K [C, D] -> S [R, C] -> P -> O += P V [R, Dv], over the tile's keys.
    template <class T, class A>
    void forward_tile(attention_call const& call, row_tile const& tile, std::int64_t b,
                      std::int64_t h, head_view<T const> const& q, head_view<T const> const& k,
                      head_view<T const> const& v, head_view<T> const& o, head_view<A> const& lse,
                      forward_space<A> const& space) const {
        auto const g = h / (q.heads() / k.heads());
        auto const dim = v.dim();
        auto const exponent = static_cast<A>(call.scale * std::numbers::log2e);
        auto const queries =
            detail::tile_operand<A>(q, b, h, call.query_begin, tile.begin, tile.end, space.q);
        for (std::int64_t key = 0; key < tile.key_end; key += tile_keys) {
            auto const count = std::min(tile_keys, tile.key_end - key);
            auto const keys = detail::tile_operand<A>(k, b, g, 0, key, key + count, space.k);
            multiply<A>(tile.rows(), count, q.dim(), exponent, queries, transposed(keys), A(0),
                        space.scores, tile_keys);
            for (auto row = tile.own_begin; row < tile.own_end; ++row) {
                auto const i = row - tile.begin;
                auto const seen =
                    std::clamp<std::int64_t>(detail::visible_keys(call, row) - key, 0, count);
                detail::softmax_row_step<A>(
                    space.scores + i * tile_keys, seen, count, key == 0,
                    {space.largest + i,
                     space.sums + i * static_cast<std::int64_t>(detail::lanes<A>)},
                    space.out + i * dim, dim);
            }
            auto const values = detail::tile_operand<A>(v, b, g, 0, key, key + count, space.v);
            multiply<A>(tile.rows(), dim, count, A(1), {.data = space.scores, .stride = tile_keys},
                        values, key == 0 ? A(0) : A(1), space.out, dim);
        }
        for (auto row = tile.own_begin; row < tile.own_end; ++row) {
            auto const i = row - tile.begin;
            auto const to = row - call.query_begin;
            if (tile.key_end == 0) {
                std::fill_n(o.row(b, to, h), dim, T(A(0)));
                lse(b, to, h, 0) = -std::numeric_limits<A>::infinity();
                continue;
            }
            auto const* const sums = space.sums + i * static_cast<std::int64_t>(detail::lanes<A>);
            A sum = 0;
            for (std::size_t l = 0; l < detail::lanes<A>; ++l) sum += sums[l];
            detail::scale_row<A>(o.row(b, to, h), space.out + i * dim,
                                 sum == A(0) ? A(0) : A(1) / sum, dim);
            lse(b, to, h, 0) = (space.largest[i] + std::log2(sum)) * std::numbers::ln2_v<A>;
        }
    }

    /// S and dP [R, C] -> P and dS -> dV += P^T dO, dK += dS^T Q, dQ += dS K, over the tile's keys.
    template <class T, class A>
    void backward_tile(attention_call const& call, row_tile const& tile, std::int64_t b,
                       std::int64_t h, attention_backward_views<T> const& views,
                       backward_space<A> const& space) const {
        auto const& [q, k, v, o, dout, lse, dq, dk, dv] = views;
        auto const g = h / (q.heads() / k.heads());
        auto const exponent = static_cast<A>(call.scale * std::numbers::log2e);
        auto const scale = static_cast<A>(call.scale);
        auto const begin = call.query_begin;
        auto const queries = detail::tile_operand<A>(q, b, h, begin, tile.begin, tile.end, space.q);
        auto const douts =
            detail::tile_operand<A>(dout, b, h, begin, tile.begin, tile.end, space.dout);
        for (auto row = tile.own_begin; row < tile.own_end; ++row) {
            auto const i = row - tile.begin;
            auto const at = row - begin;
            auto const lse_row = lse(b, at, h, 0);
            space.lse[i] = lse_row == -std::numeric_limits<A>::infinity()
                               ? -lse_row
                               : lse_row * std::numbers::log2e_v<A>;
            space.delta[i] = detail::row_dot<A>(dout.row(b, at, h), o.row(b, at, h), v.dim());
        }
        for (std::int64_t key = 0; key < tile.key_end; key += tile_keys) {
            auto const count = std::min(tile_keys, tile.key_end - key);
            auto const held = std::clamp<std::int64_t>(k.tokens() - key, 0, count);
            auto const keys = detail::tile_operand<A>(k, b, g, 0, key, key + count, space.k);
            auto const values = detail::tile_operand<A>(v, b, g, 0, key, key + count, space.v);
            multiply<A>(tile.rows(), count, q.dim(), exponent, queries, transposed(keys), A(0),
                        space.p, tile_keys);
            multiply<A>(tile.rows(), count, v.dim(), A(1), douts, transposed(values), A(0),
                        space.ds, tile_keys);
            for (auto row = tile.begin; row < tile.end; ++row) {
                auto const i = row - tile.begin;
                auto* const p = space.p + i * tile_keys;
                auto* const ds = space.ds + i * tile_keys;
                if (row < tile.own_begin || row >= tile.own_end) {
                    std::fill_n(p, count, A(0));
                    std::fill_n(ds, count, A(0));
                    continue;
                }
                auto const seen =
                    std::clamp<std::int64_t>(detail::visible_keys(call, row) - key, 0, count);
                detail::softmax_row_backward<A>(p, ds, seen, count, space.lse[i], space.delta[i]);
            }
            gemm_operand<A> const p{.data = space.p, .stride = tile_keys};
            gemm_operand<A> const ds{.data = space.ds, .stride = tile_keys};
            multiply<A>(held, v.dim(), tile.rows(), A(1), transposed(p), douts, A(1),
                        dv.row(b, key, g), dv.strides[1]);
            multiply<A>(held, q.dim(), tile.rows(), scale, transposed(ds), queries, A(1),
                        dk.row(b, key, g), dk.strides[1]);
            multiply<A>(tile.rows(), q.dim(), count, scale, ds, keys, key == 0 ? A(0) : A(1),
                        space.dq, q.dim());
        }
        for (auto row = tile.own_begin; row < tile.own_end; ++row) {
            auto const i = row - tile.begin;
            auto* const to = dq.row(b, row - begin, h);
            if (tile.key_end == 0)
                std::fill_n(to, q.dim(), T(A(0)));
            else
                detail::scale_row<A>(to, space.dq + i * q.dim(), A(1), q.dim());
        }
    }

    [[no_unique_address]] Gemm gemm_{};
};

template <class Gemm>
blocked_attention(Gemm) -> blocked_attention<Gemm>;

}  // namespace ulysses::inline v0
