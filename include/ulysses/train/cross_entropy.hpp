#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/gemm.hpp>
#include <ulysses/space/host.hpp>
#include <ulysses/train/loss.hpp>
#include <ulysses/train/rows.hpp>
#include <ulysses/train/tiled.hpp>
#include <ulysses/train/tiling.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace ulysses::inline ULYSSES_ABI {

/// Cross-entropy of rows of logits on the host, in double, added up row by row; rows whose label is
/// ignored count for nothing and get gradients of zero.
struct softmax_rows {
    using space_type = host_space;

    template <class T>
    void forward(row_view<T const> logits, std::span<std::int64_t const> labels,
                 std::int64_t ignored, token_sums& sums) const {
        for (std::int64_t i = 0; i < logits.rows; ++i)
            if (auto const label = labels[static_cast<std::size_t>(i)]; label != ignored)
                add(of_row(logits.row(i), logits.width), logits.row(i), label, sums);
    }
    /// The gradient of `upstream` times the sum is written over the logits.
    template <class T>
    void backward(double upstream, row_view<T> logits, std::span<std::int64_t const> labels,
                  std::int64_t ignored, token_sums& sums) const {
        for (std::int64_t i = 0; i < logits.rows; ++i) {
            auto* const x = logits.row(i);
            auto const label = labels[static_cast<std::size_t>(i)];
            if (label == ignored) {
                std::fill_n(x, logits.width, T(0));
                continue;
            }
            auto const row = of_row(x, logits.width);
            add(row, x, label, sums);
            for (std::int64_t v = 0; v < logits.width; ++v) {
                auto const p = std::exp(static_cast<double>(x[v]) - row.largest) / row.total;
                x[v] = static_cast<T>(upstream * (v == label ? p - 1 : p));
            }
        }
    }

   private:
    struct row_sums {
        double largest, total, weighted;  ///< of exp(x - largest), and of (x - largest) times it
        std::int64_t first_largest;
    };
    template <class T>
    static row_sums of_row(T const* x, std::int64_t width) {
        auto const at = std::max_element(x, x + width) - x;
        row_sums row{static_cast<double>(x[at]), 0, 0, at};
        for (std::int64_t v = 0; v < width; ++v) {
            auto const distance = static_cast<double>(x[v]) - row.largest;
            auto const e = std::exp(distance);
            row.total += e;
            if (e > 0) row.weighted += e * distance;  // a logit of -inf has no share
        }
        return row;
    }
    template <class T>
    static void add(row_sums const& row, T const* x, std::int64_t label, token_sums& sums) {
        auto const log_total = std::log(row.total);
        sums += {.loss = log_total + row.largest - static_cast<double>(x[label]),
                 .entropy = log_total - row.weighted / row.total,
                 .tokens = 1,
                 .correct = row.first_largest == label ? 1 : 0};
    }
};

/// Output projection and cross-entropy, sum over tokens of -log softmax(x W)[label], that never forms
/// the logits: a tile of them at a time. The sums and all gradients are those of the formula over all
/// tokens, with the same bits for every number of tiles where the GEMM's rows are independent.
///
///     ulysses::fused_cross_entropy loss{gemm, weights, vocabulary};
///     auto const sums = loss.backward(tiles, gradient_factor(n), x, labels, dx, dw);
///
/// Rows before the first and after the last label of a tile that counts are not computed, nor is a
/// tile without any. *Thread safety*: one per rank; it has a workspace.
template <class T, class Gemm, class Kernel = softmax_rows>
class fused_cross_entropy {
    static_assert(gemm_for<Gemm, T> || explain_gemm<Gemm, T>());
    static_assert(runs_in_space<typename Gemm::space_type, typename Kernel::space_type>());

   public:
    using space_type = typename Gemm::space_type;
    static_assert(std::is_base_of_v<host_space, space_type> ||
                      !std::is_same_v<Kernel, softmax_rows>,
                  "ulysses: softmax_rows reads host memory; give a kernel of the GEMM's space.");

    fused_cross_entropy(Gemm gemm, weight_view<T const> const& weights, std::int64_t vocabulary,
                        std::int64_t ignored = ignored_label, Kernel kernel = {})
        : gemm_(gemm),
          kernel_(kernel),
          weights_(weights),
          vocabulary_(vocabulary),
          ignored_(ignored) {}

    /// *Shape*: x [n, C], W [C, V], labels [n] in host memory. *Throws* `invalid_tensor` when they do
    /// not fit, or a label is neither ignored nor in 0 .. V - 1.
    token_sums forward(tiling const& tiles, row_view<T const> x,
                       std::span<std::int64_t const> labels, where at = where::here()) {
        check(tiles, x, labels, at);
        token_sums sums;
        for (std::int64_t i = 0; i < tiles.count(); ++i)
            if (auto const rows = counted(tiles[i], labels); rows.size() > 0)
                kernel_.template forward<T>(logits_of(tiles, x.slice(rows)), part(labels, rows),
                                            ignored_, sums);
        return sums;
    }

    /// The gradients of `upstream` times the sum, computed from x: dx [n, C] is overwritten, dW [C, V]
    /// added to, which a null one is not. `ready(0)` is called once, when dW of all tiles is there.
    /// *Returns* what `forward` does, which need not have run.
    template <class Ready = nothing_ready>
    token_sums backward(tiling const& tiles, double upstream, row_view<T const> x,
                        std::span<std::int64_t const> labels, row_view<T> dx,
                        weight_view<T> const& dw, Ready const& ready = {},
                        where at = where::here()) {
        check(tiles, x, labels, at);
        detail::check_rows("cross_entropy", dx, x.rows, x.width, at);
        token_sums sums;
        for (std::int64_t i = 0; i < tiles.count(); ++i) {
            auto const rows = counted(tiles[i], labels);
            set_zero(dx.slice({tiles[i].begin, rows.begin}));
            if (rows.size() > 0) {
                auto const logits = logits_of(tiles, x.slice(rows));
                kernel_.template backward<T>(upstream, logits, part(labels, rows), ignored_, sums);
                detail::add_weight_gradient<Gemm, T>(gemm_, x.slice(rows), logits, dw);
                detail::multiply_rows_back<Gemm, T>(gemm_, logits, weights_, dx.slice(rows));
            }
            set_zero(dx.slice({rows.end, tiles[i].end}));
        }
        ready(std::size_t{0});
        return sums;
    }

    /// One tile's logits.
    std::size_t workspace_bytes() const { return memory_.bytes(); }

   private:
    void check(tiling const& tiles, row_view<T const> x, std::span<std::int64_t const> labels,
               where at) const {
        detail::check_rows("cross_entropy", x, tiles.rows(), x.width, at);
        if (static_cast<std::int64_t>(labels.size()) != x.rows)
            raise(errc::invalid_tensor, at, "cross_entropy", "every row has a label", labels.size(),
                  " labels, ", x.rows, " rows");
        for (std::size_t i = 0; i < labels.size(); ++i)
            if (labels[i] != ignored_ && (labels[i] < 0 || labels[i] >= vocabulary_))
                raise(errc::invalid_tensor, at, "cross_entropy",
                      "a label is ignored or in the vocabulary", "label ", labels[i], " of row ", i,
                      ", ignored ", ignored_, ", vocabulary ", vocabulary_);
    }

    static std::span<std::int64_t const> part(std::span<std::int64_t const> labels,
                                              index_range rows) {
        return labels.subspan(static_cast<std::size_t>(rows.begin),
                              static_cast<std::size_t>(rows.size()));
    }
    /// From the first to the last row of a tile that counts.
    index_range counted(index_range tile, std::span<std::int64_t const> labels) const {
        auto const ignored = [&](std::int64_t row) {
            return labels[static_cast<std::size_t>(row)] == ignored_;
        };
        while (tile.begin < tile.end && ignored(tile.begin)) ++tile.begin;
        while (tile.begin < tile.end && ignored(tile.end - 1)) --tile.end;
        return tile;
    }

    row_view<T> logits_of(tiling const& tiles, row_view<T const> x) {
        auto const bytes = static_cast<std::size_t>(tiles.tile_rows() * vocabulary_) * sizeof(T);
        row_view<T> const logits(reinterpret_cast<T*>(memory_.reserve(bytes).data()), x.rows,
                                 vocabulary_);
        detail::multiply_rows(gemm_, x, weights_, logits);
        return logits;
    }
    /// By the GEMM, which knows the memory: 0 of k = 0.
    void set_zero(row_view<T> rows) const {
        gemm_(gemm_call<T>{.m = rows.rows,
                           .n = rows.width,
                           .k = 0,
                           .beta = T(0),
                           .c = rows.data,
                           .c_stride = rows.stride});
    }

    [[no_unique_address]] Gemm gemm_;
    [[no_unique_address]] Kernel kernel_;
    weight_view<T const> weights_;
    std::int64_t vocabulary_, ignored_;
    buffer<space_type> memory_;
};

}  // namespace ulysses::inline ULYSSES_ABI
