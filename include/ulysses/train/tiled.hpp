#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/gemm.hpp>
#include <ulysses/space/host.hpp>
#include <ulysses/train/rows.hpp>
#include <ulysses/train/tiling.hpp>

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>

/// Token-wise functions over a long sequence, a tile of tokens at a time: what they need inside is
/// kept for one tile, and computed again in backward. Outputs and gradients are those of one tile
/// over all, with the same bits where the function's rows are independent.
namespace ulysses::inline ULYSSES_ABI {

/// A tile of a call.
struct tile_call {
    std::int64_t index = 0, count = 1;
    index_range rows{};  ///< empty where other ranks have more tiles

    constexpr bool last() const { return index + 1 == count; }
};

/// A function of single tokens, y = f(x).
///
/// Requirements:
/// 1. `forward(tile, x, y)` overwrites y [n, Cy] by the rows of x [n, Cx], for any n, 0 included.
/// 2. `backward(tile, x, dy, dx)` computes again what it needs, overwrites dx [n, Cx] and adds to the
///    gradients of its weights.
/// 3. `weights` is how many weights it has.
template <class F, class T>
concept token_wise_for = requires(F& f, tile_call const& tile, row_view<T const> in,
                                  row_view<T> out) {
    f.forward(tile, in, out);
    f.backward(tile, in, in, out);
    { F::weights } -> std::convertible_to<std::size_t>;
};

/// For an engine that does not wait for single gradients.
struct nothing_ready {
    void operator()(std::size_t) const {}
};

/// y = f(x) tile by tile. *Shape*: x [n, Cx] -> y [n, Cy], n = tiles.rows().
/// *Throws* `invalid_tensor` when rows do not fit.
template <class T, class F>
void tiled_forward(tiling const& tiles, F& f, row_view<T const> x, row_view<T> y,
                   where at = where::here()) {
    detail::check_rows("tiled_forward", x, tiles.rows(), x.width, at);
    detail::check_rows("tiled_forward", y, tiles.rows(), y.width, at);
    for (std::int64_t i = 0; i < tiles.count(); ++i)
        f.forward(tile_call{i, tiles.count(), tiles[i]}, x.slice(tiles[i]), y.slice(tiles[i]));
}

/// dx from dy tile by tile, and the gradients of f's weights. `ready(i)` is called once for each
/// weight i, when its gradient of all tiles is there. *Shape*: dy [n, Cy] -> dx [n, Cx].
template <class T, class F, class Ready = nothing_ready>
    requires token_wise_for<F, T>
void tiled_backward(tiling const& tiles, F& f, row_view<T const> x, row_view<T const> dy,
                    row_view<T> dx, Ready const& ready = {}, where at = where::here()) {
    detail::check_rows("tiled_backward", x, tiles.rows(), dx.width, at);
    detail::check_rows("tiled_backward", dy, tiles.rows(), dy.width, at);
    detail::check_rows("tiled_backward", dx, tiles.rows(), dx.width, at);
    for (std::int64_t i = 0; i < tiles.count(); ++i)
        f.backward(tile_call{i, tiles.count(), tiles[i]}, x.slice(tiles[i]), dy.slice(tiles[i]),
                   dx.slice(tiles[i]));
    for (std::size_t i = 0; i < F::weights; ++i) ready(i);
}

/// The gate of an MLP on the host, hidden = silu(gate) * up, row by row.
struct swiglu {
    using space_type = host_space;

    template <class T>
    void forward(row_view<T const> gate, row_view<T const> up, row_view<T> hidden) const {
        for (std::int64_t i = 0; i < hidden.rows; ++i)
            for (std::int64_t f = 0; f < hidden.width; ++f) {
                auto const g = gate.row(i)[f];
                hidden.row(i)[f] = g / (T(1) + std::exp(-g)) * up.row(i)[f];
            }
    }
    /// dgate and dup are written over gate and up.
    template <class T>
    void backward(row_view<T const> dhidden, row_view<T> gate, row_view<T> up) const {
        for (std::int64_t i = 0; i < dhidden.rows; ++i)
            for (std::int64_t f = 0; f < dhidden.width; ++f) {
                auto const d = dhidden.row(i)[f];
                auto& g = gate.row(i)[f];
                auto& u = up.row(i)[f];
                auto const sigmoid = T(1) / (T(1) + std::exp(-g));
                auto const silu = g * sigmoid;
                g = d * u * (sigmoid + silu * (T(1) - sigmoid));
                u = d * silu;
            }
    }
};

/// Weights of a gated MLP; T is const for weights, and not for their gradients, where a null one is
/// skipped.
template <class T>
struct mlp_weights {
    weight_view<T> gate{}, up{}, down{};  // [C, F], [C, F], [F, C]
};

/// A gated MLP, y = (act(x Wg) * (x Wu)) Wd, as a token-wise function: 4 F elements a row of a tile.
///
/// *Thread safety*: one per rank; it has a workspace.
template <class T, class Gemm, class Gate = swiglu>
class tiled_mlp {
    static_assert(gemm_for<Gemm, T> || explain_gemm<Gemm, T>());
    static_assert(runs_in_space<typename Gemm::space_type, typename Gate::space_type>());

   public:
    using space_type = typename Gemm::space_type;
    static constexpr std::size_t weights = 3;  ///< gate, up, down

    tiled_mlp(Gemm gemm, std::int64_t hidden, mlp_weights<T const> const& given,
              mlp_weights<T> const& gradients = {}, Gate gate = {})
        : gemm_(gemm), act_(gate), hidden_(hidden), weights_(given), gradients_(gradients) {}

    void forward(tile_call const&, row_view<T const> x, row_view<T> y) {
        auto const [gate, up, hidden, dhidden] = parts(x.rows);
        project(x, gate, up);
        act_.template forward<T>(gate, up, hidden);
        detail::multiply_rows<Gemm, T>(gemm_, hidden, weights_.down, y);
    }

    void backward(tile_call const&, row_view<T const> x, row_view<T const> dy, row_view<T> dx) {
        auto const [gate, up, hidden, dhidden] = parts(x.rows);
        project(x, gate, up);
        act_.template forward<T>(gate, up, hidden);
        detail::add_weight_gradient<Gemm, T>(gemm_, hidden, dy, gradients_.down);
        detail::multiply_rows_back<Gemm, T>(gemm_, dy, weights_.down, dhidden);
        act_.template backward<T>(dhidden, gate, up);
        detail::add_weight_gradient<Gemm, T>(gemm_, x, gate, gradients_.gate);
        detail::add_weight_gradient<Gemm, T>(gemm_, x, up, gradients_.up);
        detail::multiply_rows_back<Gemm, T>(gemm_, gate, weights_.gate, dx);
        detail::multiply_rows_back<Gemm, T>(gemm_, up, weights_.up, dx, T(1));
    }

    std::size_t workspace_bytes() const { return memory_.bytes(); }

   private:
    struct tile_parts {
        row_view<T> gate, up, hidden, dhidden;  // [n, F]
    };
    tile_parts parts(std::int64_t rows) {
        auto const size = rows * hidden_;
        auto const bytes = 4 * static_cast<std::size_t>(size) * sizeof(T);
        auto* const data = reinterpret_cast<T*>(memory_.reserve(bytes).data());
        auto const part = [&](std::int64_t i) {
            return row_view<T>(data + i * size, rows, hidden_);
        };
        return {part(0), part(1), part(2), part(3)};
    }
    void project(row_view<T const> x, row_view<T> gate, row_view<T> up) const {
        detail::multiply_rows(gemm_, x, weights_.gate, gate);
        detail::multiply_rows(gemm_, x, weights_.up, up);
    }

    [[no_unique_address]] Gemm gemm_;
    [[no_unique_address]] Gate act_;
    std::int64_t hidden_;
    mlp_weights<T const> weights_;
    mlp_weights<T> gradients_;
    buffer<space_type> memory_;
};

}  // namespace ulysses::inline ULYSSES_ABI
