#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/operands.hpp>
#include <ulysses/attention/softmax.hpp>
#include <ulysses/attention/tile.hpp>
#include <ulysses/attention/transform.hpp>
#include <ulysses/core/attention.hpp>
#include <ulysses/core/explain.hpp>
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
/// *Source*: Dao, "FlashAttention-2" (2023), on a CPU's terms: a tile of queries goes through the
/// keys it sees, every product is a call of the GEMM.
///
/// Which bits a row gets. Tiles lie on a grid from global row 0 and global key 0, and the shape of
/// every product depends on grid coordinates alone, not on the rows or keys that a work item holds:
/// keys that the tile sees and the item does not hold are zero rows with probability 0. A partly
/// owned tile of queries is computed whole as well, its missing rows zero, unless the GEMM's rows
/// are independent. So o, lse and dq have the same bits however rows are dealt out; dk and dv when
/// a head's rows stay together.
namespace ulysses::inline ULYSSES_ABI {

/// Ordinary attention over any host GEMM. For float and double, views whose rows of one head do not
/// overlap are read in place; 16-bit elements are converted tile by tile.
///
/// Operands are taken to be finite: a masked key has probability 0, and 0 times infinity is NaN.
/// *Complexity*: the useful products plus half a tile of keys per causal query row; workspace of a
/// few tiles, whatever the sequence. *Throws* `invalid_tensor` and `invalid_call` before anything
/// is written.
template <class Gemm>
class blocked_attention {
    static_assert(multiplies_some_element<Gemm>());

   public:
    using space_type = typename Gemm::space_type;
    static_assert(
        std::same_as<space_type, host_space>,
        "ulysses: blocked_attention computes on the host; give it a GEMM whose space_type is "
        "host_space");
    static constexpr attention_features features{.causal = true,
                                                 .full = true,
                                                 .grouped = true,
                                                 .value_dim = true,
                                                 .row_range = true,
                                                 .window = true,
                                                 .documents = true,
                                                 .padding = true,
                                                 .holes = true,
                                                 .softcap = true,
                                                 .alibi = true,
                                                 .bias = true,
                                                 .sinks = true,
                                                 .dropout = true};

    static constexpr std::int64_t tile_rows = 256;  ///< query rows of a tile
    static constexpr std::int64_t tile_keys = 256;  ///< keys of a tile
    static constexpr std::int64_t band_rows =
        128;  ///< rows that share a product where the mask's edge is
    static constexpr std::int64_t band_keys = 64;  ///< where such a product's keys may begin

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
                    auto const tile =
                        detail::tile_at(call, grid, b, row, call.query_begin + q.tokens());
                    forward_tile<T>(call, tile, h, q, k, v, o, lse, space);
                    row = tile.own_end;
                }
    }

    /// Refuses views of another layout.
    template <class... Views>
        requires other_layout<Views...>
    void forward(attention_call const&, Views const&...) const {
        static_assert(explain_layout<Views...>());
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
                    auto const tile =
                        detail::tile_at(call, grid, b, row, call.query_begin + extents.rows);
                    backward_tile<T>(call, tile, h, views, space);
                    row = tile.own_end;
                }
    }

   private:
    static constexpr detail::attention_grid grid{tile_rows, tile_keys, band_rows, band_keys};
    static constexpr bool trimmed = Gemm::rows_independent;

    template <class A>
    struct forward_space {
        A *q, *k, *v, *scores, *out, *largest, *sums, *row, *hidden;

        forward_space(detail::workspace_cursor& cursor, attention_extents const& e)
            : q(cursor.take<A>(tile_rows * e.head_dim)),
              k(cursor.take<A>(tile_keys * e.head_dim)),
              v(cursor.take<A>(tile_keys * e.value_dim)),
              scores(cursor.take<A>(tile_rows * tile_keys)),
              out(cursor.take<A>(tile_rows * e.value_dim)),
              largest(cursor.take<A>(tile_rows)),
              sums(cursor.take<A>(tile_rows * lanes<A>)),
              row(cursor.take<A>(tile_keys)),
              hidden(cursor.take<A>(tile_keys)) {}
    };

    template <class A>
    struct backward_space {
        A *q, *k, *v, *dout, *p, *ds, *dq, *lse, *delta, *row, *tanhs, *hidden;

        backward_space(detail::workspace_cursor& cursor, attention_extents const& e)
            : q(cursor.take<A>(tile_rows * e.head_dim)),
              k(cursor.take<A>(tile_keys * e.head_dim)),
              v(cursor.take<A>(tile_keys * e.value_dim)),
              dout(cursor.take<A>(tile_rows * e.value_dim)),
              p(cursor.take<A>(tile_rows * tile_keys)),
              ds(cursor.take<A>(tile_rows * tile_keys)),
              dq(cursor.take<A>(tile_rows * e.head_dim)),
              lse(cursor.take<A>(tile_rows)),
              delta(cursor.take<A>(tile_rows)),
              row(cursor.take<A>(tile_keys)),
              tanhs(cursor.take<A>(tile_keys)),
              hidden(cursor.take<A>(tile_keys)) {}
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

    /// Q [R, D], K [C, D] -> S [R, C] -> P -> O += P V [R, Dv], over the keys that the tile sees.
    template <class T, class A>
    void forward_tile(attention_call const& call, detail::row_tile const& tile, std::int64_t h,
                      head_view<T const> const& q, head_view<T const> const& k,
                      head_view<T const> const& v, head_view<T> const& o, head_view<A> const& lse,
                      forward_space<A> const& space) const {
        auto const b = tile.sample;
        auto const g = h / (q.heads() / k.heads());
        auto const dim = v.dim();
        detail::score_transform<A> const rule(call, h);
        auto const queries =
            detail::tile_operand<A>(q, b, h, call.query_begin, tile.begin, tile.end, space.q);
        std::fill_n(space.out, tile.rows() * dim, A(0));
        std::fill_n(space.sums, tile.rows() * lanes<A>, A(0));
        // A sink is a first key of its own, without a value.
        std::fill_n(space.largest, tile.rows(),
                    rule.sink ? rule.sink_value : -std::numeric_limits<A>::infinity());
        if (rule.sink)
            for (std::int64_t i = 0; i < tile.rows(); ++i) space.sums[i * lanes<A>] = A(1);
        detail::for_each_key_tile(grid, tile, [&](std::int64_t key, std::int64_t end) {
            call.progress();
            auto const from = first_key(tile, key);
            auto const keys = detail::tile_operand<A>(k, b, g, call.key_begin, from, end, space.k);
            auto const values =
                detail::tile_operand<A>(v, b, g, call.key_begin, from, end, space.v);
            auto const* const hidden = detail::hidden_keys(call, b, from, end, space.hidden);
            detail::for_each_band(
                call, grid, tile, key, end, trimmed, [&](detail::row_band const& band) {
                    auto const first = band.begin - tile.begin;
                    auto* const scores = space.scores + first * tile_keys;
                    auto* const out = space.out + first * dim;
                    auto const offset = band.keys.begin - from;
                    multiply<A>(band.rows(), band.keys.size(), q.dim(), rule.factor,
                                detail::rows_from(queries, first),
                                detail::transposed(detail::rows_from(keys, offset)), A(0), scores,
                                tile_keys);
                    softmax_band(call, tile, band, h, rule, space, dim,
                                 hidden != nullptr ? hidden + offset : nullptr);
                    multiply<A>(band.rows(), dim, band.keys.size(), A(1),
                                {.data = scores, .stride = tile_keys},
                                detail::rows_from(values, offset), A(1), out, dim);
                });
        });
        for (auto row = tile.own_begin; row < tile.own_end; ++row) {
            auto const i = row - tile.begin;
            auto* const to = o.row(b, row - call.query_begin, h);
            auto& lse_row = lse(b, row - call.query_begin, h, 0);
            A sum = 0;
            for (std::int64_t l = 0; l < lanes<A>; ++l) sum += space.sums[i * lanes<A> + l];
            detail::scale_row<A>(to, space.out + i * dim, sum == A(0) ? A(0) : A(1) / sum, dim);
            lse_row = (space.largest[i] + std::log2(sum)) * std::numbers::ln2_v<A>;
        }
    }

    /// S -> P for the item's rows of a band; O is brought to the new maximum. `hidden`: of the band's
    /// keys, or null.
    template <class A>
    static void softmax_band(attention_call const& call, detail::row_tile const& tile,
                             detail::row_band const& band, std::int64_t h,
                             detail::score_transform<A> const& rule, forward_space<A> const& space,
                             std::int64_t dim, A const* hidden) {
        constexpr std::int64_t together = 8;  // 8 KiB of scores stay in the first-level cache
        for (auto from = band.own_begin; from < band.own_end; from += together) {
            auto const to = std::min(from + together, band.own_end);
            A now[together];
            for (auto row = from; row < to; ++row) {
                auto const i = row - tile.begin;
                transform<A>(call, tile, band, row, h, rule, space.scores + i * tile_keys, nullptr,
                             space.row);
                if (hidden != nullptr)
                    detail::hide_keys(space.scores + i * tile_keys, hidden, band.keys.size());
                now[row - from] = detail::softmax_row_largest<A>(
                    space.scores + i * tile_keys, detail::keys_in(call, tile, band, row),
                    band.keys.size(), space.largest[i]);
            }
            for (auto row = from; row < to; ++row) {
                auto const i = row - tile.begin;
                auto const next = std::min(row + together, band.own_end - 1) - tile.begin;
                detail::softmax_row_step<A>(
                    space.scores + i * tile_keys, space.scores + next * tile_keys,
                    detail::keys_in(call, tile, band, row), space.largest[i], now[row - from],
                    space.sums + i * lanes<A>, space.out + i * dim, dim);
                space.largest[i] = now[row - from];
                drop(call, tile, band, row, h, space.row, space.scores + i * tile_keys);
            }
        }
    }

    /// Scores of global row `row` from its product; `buffer` is for the row's bias.
    template <class A>
    static void transform(attention_call const& call, detail::row_tile const& tile,
                          detail::row_band const& band, std::int64_t row, std::int64_t h,
                          detail::score_transform<A> const& rule, A* scores, A* tanhs, A* buffer) {
        if (!rule.any()) return;
        auto const seen = detail::keys_in(call, tile, band, row);
        if (rule.bias) call.bias.read(tile.sample, h, row, global(band, seen), buffer + seen.begin);
        auto const position = row + call.visible.sample(tile.sample).position;
        detail::transform_row<A>(scores, tanhs, rule.bias ? buffer : nullptr, seen, rule,
                                 static_cast<A>(band.keys.begin - position));
    }

    /// Drops some of the row's numbers and raises the others; leaves the factors in `buffer`.
    template <class A>
    static void drop(attention_call const& call, detail::row_tile const& tile,
                     detail::row_band const& band, std::int64_t row, std::int64_t h, A* buffer,
                     A* numbers) {
        if (call.dropout.empty()) return;
        auto const seen = detail::keys_in(call, tile, band, row);
        call.dropout.row(tile.sample, call.query_head + h, row, global(band, seen),
                         buffer + seen.begin);
        detail::multiply_row<A>(numbers, buffer, seen);
    }

    static constexpr index_range global(detail::row_band const& band, index_range keys) {
        return {band.keys.begin + keys.begin, band.keys.begin + keys.end};
    }

    /// Where the rows of a tile of keys are read from: what no row sees before is left out.
    static constexpr std::int64_t first_key(detail::row_tile const& tile, std::int64_t key) {
        return std::max(key, tile.keys.begin / band_keys * band_keys);
    }

    /// S and dP [R, C] -> P and dS -> dV += P^T dO, dK += dS^T Q, dQ += dS K, over the keys that
    /// the tile sees.
    template <class T, class A>
    void backward_tile(attention_call const& call, detail::row_tile const& tile, std::int64_t h,
                       attention_backward_views<T> const& views,
                       backward_space<A> const& space) const {
        auto const& [q, k, v, o, dout, lse, dq, dk, dv, dlogits] = views;
        auto const b = tile.sample;
        auto const g = h / (q.heads() / k.heads());
        auto const item = call.query_begin;
        detail::score_transform<A> const rule(call, h);
        auto const queries = detail::tile_operand<A>(q, b, h, item, tile.begin, tile.end, space.q);
        auto const douts =
            detail::tile_operand<A>(dout, b, h, item, tile.begin, tile.end, space.dout);
        for (auto row = tile.own_begin; row < tile.own_end; ++row) {
            auto const i = row - tile.begin;
            auto const lse_row = lse(b, row - item, h, 0);
            space.lse[i] = lse_row == -std::numeric_limits<A>::infinity()
                               ? -lse_row
                               : lse_row * std::numbers::log2e_v<A>;
            space.delta[i] =
                detail::row_dot<A>(dout.row(b, row - item, h), o.row(b, row - item, h), v.dim());
            if (rule.sink && !dlogits.sinks.empty())
                dlogits.sinks[static_cast<std::size_t>(h)] -=
                    std::exp2(rule.sink_value - space.lse[i]) * space.delta[i];
        }
        auto const dk_head = views.dk.slice(0, b, 1).slice_heads(g, 1);
        auto const dv_head = views.dv.slice(0, b, 1).slice_heads(g, 1);
        std::fill_n(space.dq, tile.rows() * q.dim(), A(0));
        detail::for_each_key_tile(grid, tile, [&](std::int64_t key, std::int64_t end) {
            call.progress();
            auto const from = first_key(tile, key);
            auto const keys =
                detail::tile_operand<A>(views.k, b, g, call.key_begin, from, end, space.k);
            auto const values =
                detail::tile_operand<A>(views.v, b, g, call.key_begin, from, end, space.v);
            auto const* const hidden = detail::hidden_keys(call, b, from, end, space.hidden);
            detail::for_each_band(
                call, grid, tile, key, end, trimmed, [&](detail::row_band const& band) {
                    auto const first = band.begin - tile.begin;
                    auto const offset = band.keys.begin - from;
                    backward_band<A>(
                        call, tile, band, h, rule, views.dlogits.bias,
                        detail::rows_from(queries, first), detail::rows_from(keys, offset),
                        detail::rows_from(values, offset), detail::rows_from(douts, first), space,
                        dk_head, dv_head, hidden != nullptr ? hidden + offset : nullptr);
                });
        });
        for (auto row = tile.own_begin; row < tile.own_end; ++row)
            detail::scale_row<A>(dq.row(b, row - item, h), space.dq + (row - tile.begin) * q.dim(),
                                 A(1), q.dim());
    }

    /// The five products of a band; dk and dv are one head's, `hidden` as in `softmax_band`.
    template <class A>
    void backward_band(attention_call const& call, detail::row_tile const& tile,
                       detail::row_band const& band, std::int64_t h,
                       detail::score_transform<A> const& rule, bias_gradient<A> const& dbias,
                       gemm_operand<A> const& q, gemm_operand<A> const& k, gemm_operand<A> const& v,
                       gemm_operand<A> const& dout, backward_space<A> const& space,
                       head_view<A> const& dk, head_view<A> const& dv, A const* hidden) const {
        auto const first = band.begin - tile.begin;
        auto const dim = dk.dim(), value_dim = dv.dim(), keys = band.keys.size();
        auto const scale = static_cast<A>(call.scale);
        gemm_operand<A> const p{.data = space.p + first * tile_keys, .stride = tile_keys};
        gemm_operand<A> const ds{.data = space.ds + first * tile_keys, .stride = tile_keys};
        multiply<A>(band.rows(), keys, dim, rule.factor, q, detail::transposed(k), A(0),
                    space.p + first * tile_keys, tile_keys);
        multiply<A>(band.rows(), keys, value_dim, A(1), dout, detail::transposed(v), A(0),
                    space.ds + first * tile_keys, tile_keys);
        for (auto row = band.begin; row < band.end; ++row) {
            auto const i = row - tile.begin;
            auto* const p_row = space.p + i * tile_keys;
            auto* const ds_row = space.ds + i * tile_keys;
            if (row < band.own_begin || row >= band.own_end) {
                std::fill_n(p_row, keys, A(0));
                std::fill_n(ds_row, keys, A(0));
                continue;
            }
            auto const seen = detail::keys_in(call, tile, band, row);
            transform<A>(call, tile, band, row, h, rule, p_row, space.tanhs, space.row);
            if (hidden != nullptr) detail::hide_keys(p_row, hidden, keys);
            drop(call, tile, band, row, h, space.row, ds_row);
            detail::softmax_row_backward<A>(p_row, ds_row, seen, keys, space.lse[i],
                                            space.delta[i]);
            if (!dbias.empty())
                dbias.add(tile.sample, h, row, global(band, seen), ds_row + seen.begin);
            if (rule.cap != A(0)) detail::uncap_row<A>(ds_row, space.tanhs, seen);
            if (!call.dropout.empty()) detail::multiply_row<A>(p_row, space.row, seen);
        }
        // Of the band's keys those that the item holds; the others have probability 0.
        index_range const held{
            std::clamp(call.key_begin, band.keys.begin, band.keys.end),
            std::clamp(call.key_begin + dk.tokens(), band.keys.begin, band.keys.end)};
        if (held.size() > 0) {
            auto const skipped = held.begin - band.keys.begin, row = held.begin - call.key_begin;
            multiply<A>(held.size(), value_dim, band.rows(), A(1),
                        detail::transposed(columns_from(p, skipped)), dout, A(1), dv.row(0, row, 0),
                        dv.strides[1]);
            multiply<A>(held.size(), dim, band.rows(), scale,
                        detail::transposed(columns_from(ds, skipped)), q, A(1), dk.row(0, row, 0),
                        dk.strides[1]);
        }
        multiply<A>(band.rows(), dim, keys, scale, ds, k, A(1), space.dq + first * dim, dim);
    }

    template <class A>
    static gemm_operand<A> columns_from(gemm_operand<A> operand, std::int64_t first) {
        operand.data += first;
        return operand;
    }

    template <class A>
    static constexpr auto lanes = static_cast<std::int64_t>(detail::lanes<A>);

    [[no_unique_address]] Gemm gemm_{};
};

template <class Gemm>
blocked_attention(Gemm) -> blocked_attention<Gemm>;

}  // namespace ulysses::inline ULYSSES_ABI
