#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/operands.hpp>
#include <ulysses/core/attention.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/space.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>

/// Attention by its formula, in double whatever the element type: what the others are tested
/// against.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

/// sum_d x[d] * y[d]. Neither this nor `add_scaled` is inlined, so that a row is computed by the same
/// instructions wherever it lies: a compiler that knows a stride may fuse other products and sums.
template <class X, class Y>
[[gnu::noinline]] double dot(X const* x, Y const* y, std::int64_t count) {
    double sum = 0;
    for (std::int64_t d = 0; d < count; ++d)
        sum += static_cast<double>(x[d]) * static_cast<double>(y[d]);
    return sum;
}

/// sum[d] += weight * x[d]
template <class X>
[[gnu::noinline]] void add_scaled(double* sum, double weight, X const* x, std::int64_t count) {
    for (std::int64_t d = 0; d < count; ++d) sum[d] += weight * static_cast<double>(x[d]);
}

/// `value` rounded to an element; 16-bit types round by way of float.
template <class T>
T rounded(double value) {
    return static_cast<T>(static_cast<accumulator_t<T>>(value));
}

/// The keys that a row of the view sees, counted from the view's first.
inline index_range local_keys(attention_call const& call, std::int64_t b, std::int64_t i) {
    auto const seen = call.visible.keys_of(b, call.query_begin + i);
    return {seen.begin - call.key_begin, seen.end - call.key_begin};
}

/// A score, and its derivative with respect to the scaled product.
struct score {
    double value;
    double slope;
};

/// The score of local query row i of local head h and local key j.
inline score score_of(attention_call const& call, std::int64_t b, std::int64_t h, std::int64_t i,
                      std::int64_t j, double product) {
    score result{call.scale * product, 1.0};
    if (call.softcap > 0) {
        auto const t = std::tanh(result.value / call.softcap);
        result = {call.softcap * t, 1 - t * t};
    }
    auto const row = call.query_begin + i, key = call.key_begin + j;
    if (!call.bias.empty()) {
        double bias = 0;
        call.bias.read(b, h, row, {key, key + 1}, &bias);
        result.value += bias;
    }
    if (!call.slopes.empty()) {
        auto const distance = row + call.visible.sample(b).position - key;
        result.value -= call.slopes[h] * static_cast<double>(std::abs(distance));
    }
    return result;
}

/// What dropout multiplies a probability by.
inline double dropout_factor(attention_call const& call, std::int64_t b, std::int64_t h,
                             std::int64_t i, std::int64_t j) {
    if (call.dropout.empty()) return 1.0;
    double factor = 1.0;
    auto const key = call.key_begin + j;
    call.dropout.row(b, call.query_head + h, call.query_begin + i, {key, key + 1}, &factor);
    return factor;
}

/// p[j] = softmax over the keys a row sees, and the sink, 0 for keys that are not there; returns the log
/// of its denominator.
template <class T>
double softmax_row(attention_call const& call, T const* q, head_view<T const> const& k,
                   std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t kv_head,
                   index_range seen, double* p) {
    auto const sink = call.sinks.empty() ? -std::numeric_limits<double>::infinity() : call.sinks[h];
    auto const there = [&](std::int64_t j) { return call.visible.there(b, call.key_begin + j); };
    auto largest = sink;
    for (auto j = seen.begin; j < seen.end; ++j) {
        if (!there(j)) continue;
        p[j] = score_of(call, b, h, i, j, dot(q, k.row(b, j, kv_head), k.dim())).value;
        largest = std::max(largest, p[j]);
    }
    auto const base = largest == -std::numeric_limits<double>::infinity() ? 0.0 : largest;
    double sum = std::exp(sink - base);
    for (auto j = seen.begin; j < seen.end; ++j)
        sum += p[j] = there(j) ? std::exp(p[j] - base) : 0.0;
    for (auto j = seen.begin; j < seen.end && sum > 0; ++j) p[j] /= sum;
    return largest + std::log(sum);
}

}  // namespace detail

/// Plain attention; every loop is the formula's. Backward forms the softmax again in double and
/// uses neither o nor lse.
///
/// *Complexity*: the formula's operations, about one at a time; workspace of O(rows + keys)
/// doubles.
struct reference_attention {
    using space_type = host_space;
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

    static constexpr std::int64_t row_multiple() { return 1; }

    template <element T>
    static std::size_t workspace_bytes(attention_extents const& extents) {
        return static_cast<std::size_t>(2 * (extents.rows + extents.keys) + extents.head_dim +
                                        extents.value_dim) *
               sizeof(double);
    }

    template <element T>
    void forward(attention_call const& call, head_view<T const> q, head_view<T const> k,
                 head_view<T const> v, head_view<T> o, head_view<accumulator_t<T>> lse) const {
        auto const extents = detail::extents_of(q.extents, k.extents, v.extents);
        detail::check_attention(call, q, k, v, o, lse, workspace_bytes<T>(extents));
        auto* const p = reinterpret_cast<double*>(call.workspace.data());
        for (std::int64_t b = 0; b < q.batch(); ++b)
            for (std::int64_t h = 0; h < q.heads(); ++h)
                for (std::int64_t i = 0; i < q.tokens(); ++i) {
                    auto const g = h / (q.heads() / k.heads());
                    auto const seen = detail::local_keys(call, b, i);
                    lse(b, i, h, 0) = static_cast<accumulator_t<T>>(
                        detail::softmax_row(call, q.row(b, i, h), k, b, h, i, g, seen, p));
                    for (auto j = seen.begin; j < seen.end; ++j)
                        p[j] *= detail::dropout_factor(call, b, h, i, j);
                    auto* const sum = p + k.tokens();
                    std::fill_n(sum, o.dim(), 0.0);
                    for (auto j = seen.begin; j < seen.end; ++j)
                        detail::add_scaled(sum, p[j], v.row(b, j, g), v.dim());
                    for (std::int64_t d = 0; d < o.dim(); ++d)
                        o(b, i, h, d) = detail::rounded<T>(sum[d]);
                }
    }

    /// Refuses views of another layout.
    template <class... Views>
        requires other_layout<Views...>
    void forward(attention_call const&, Views const&...) const {
        static_assert(explain_layout<Views...>());
    }

    template <element T>
    void backward(attention_call const& call, attention_backward_views<T> const& views) const {
        auto const extents = detail::extents_of(views.q.extents, views.k.extents, views.v.extents);
        detail::check_attention(call, views.q, views.k, views.v, views.o, views.lse,
                                workspace_bytes<T>(extents));
        detail::check_gradients(views);
        for (std::int64_t b = 0; b < extents.batch; ++b)
            for (std::int64_t h = 0; h < extents.heads; ++h) {
                backward_queries(call, views, b, h);
                backward_keys(call, views, b, h);
            }
    }

   private:
    /// dq_i = scale * sum_j ds_ij k_j with ds_ij = p_ij (dp_ij - delta_i), dp_ij = dout_i . v_j and
    /// delta_i = sum_j p_ij dp_ij. Leaves lse_i and delta_i in the first 2 * rows doubles.
    template <element T>
    static void backward_queries(attention_call const& call,
                                 attention_backward_views<T> const& views, std::int64_t b,
                                 std::int64_t h) {
        auto const& [q, k, v, o, dout, lse, dq, dk, dv, dlogits] = views;
        auto const g = h / (q.heads() / k.heads());
        auto* const row_lse = reinterpret_cast<double*>(call.workspace.data());
        auto* const delta = row_lse + q.tokens();
        auto* const p = delta + q.tokens();
        auto* const ds = p + k.tokens();
        for (std::int64_t i = 0; i < q.tokens(); ++i) {
            auto const seen = detail::local_keys(call, b, i);
            row_lse[i] = detail::softmax_row(call, q.row(b, i, h), k, b, h, i, g, seen, p);
            // Of a row that sees nothing every probability is 0.
            if (row_lse[i] == -std::numeric_limits<double>::infinity()) row_lse[i] = -row_lse[i];
            delta[i] = 0;
            for (auto j = seen.begin; j < seen.end; ++j) {
                ds[j] = detail::dropout_factor(call, b, h, i, j) *
                        detail::dot(dout.row(b, i, h), v.row(b, j, g), v.dim());
                delta[i] += p[j] * ds[j];
            }
            for (auto j = seen.begin; j < seen.end; ++j) ds[j] = p[j] * (ds[j] - delta[i]);
            backward_logits(call, views, b, h, i, seen, ds, row_lse[i], delta[i]);
            if (call.softcap > 0)
                for (auto j = seen.begin; j < seen.end; ++j)
                    ds[j] *= detail::score_of(call, b, h, i, j,
                                              detail::dot(q.row(b, i, h), k.row(b, j, g), q.dim()))
                                 .slope;
            auto* const sum = ds + k.tokens();
            std::fill_n(sum, q.dim(), 0.0);
            for (auto j = seen.begin; j < seen.end; ++j)
                detail::add_scaled(sum, ds[j], k.row(b, j, g), k.dim());
            for (std::int64_t d = 0; d < q.dim(); ++d)
                dq(b, i, h, d) = detail::rounded<T>(call.scale * sum[d]);
        }
    }

    /// dbias_ij += ds_ij, and of a sink, a key whose dp is 0: -p_sink delta_i.
    template <element T>
    static void backward_logits(attention_call const& call,
                                attention_backward_views<T> const& views, std::int64_t b,
                                std::int64_t h, std::int64_t i, index_range seen, double const* ds,
                                double lse, double delta) {
        auto const& [sinks, bias] = views.dlogits;
        if (!bias.empty())
            bias.add(b, h, call.query_begin + i,
                     {call.key_begin + seen.begin, call.key_begin + seen.end}, ds + seen.begin);
        if (!sinks.empty() && !call.sinks.empty())
            sinks[static_cast<std::size_t>(h)] -=
                static_cast<accumulator_t<T>>(std::exp(call.sinks[h] - lse) * delta);
    }

    /// dk_j += scale * sum_i ds_ij q_i and dv_j += sum_i p_ij dout_i, each sum rounded once.
    template <element T>
    static void backward_keys(attention_call const& call, attention_backward_views<T> const& views,
                              std::int64_t b, std::int64_t h) {
        auto const& [q, k, v, o, dout, lse, dq, dk, dv, dlogits] = views;
        auto const g = h / (q.heads() / k.heads());
        auto* const row_lse = reinterpret_cast<double*>(call.workspace.data());
        auto* const delta = row_lse + q.tokens();
        auto* const dk_row = delta + q.tokens() + 2 * k.tokens();
        auto* const dv_row = dk_row + k.dim();
        for (std::int64_t j = 0; j < k.tokens(); ++j) {
            std::fill(dk_row, dv_row + v.dim(), 0.0);
            for (std::int64_t i = 0; i < q.tokens(); ++i) {
                auto const seen = detail::local_keys(call, b, i);
                if (j < seen.begin || j >= seen.end || !call.visible.there(b, call.key_begin + j))
                    continue;
                auto const s = detail::score_of(
                    call, b, h, i, j, detail::dot(q.row(b, i, h), k.row(b, j, g), q.dim()));
                auto const factor = detail::dropout_factor(call, b, h, i, j);
                auto const p = std::exp(s.value - row_lse[i]);
                auto const dp = factor * detail::dot(dout.row(b, i, h), v.row(b, j, g), v.dim());
                auto const ds = p * (dp - delta[i]) * s.slope;
                detail::add_scaled(dk_row, ds, q.row(b, i, h), k.dim());
                detail::add_scaled(dv_row, factor * p, dout.row(b, i, h), v.dim());
            }
            for (std::int64_t d = 0; d < k.dim(); ++d)
                dk(b, j, g, d) += static_cast<accumulator_t<T>>(call.scale * dk_row[d]);
            for (std::int64_t d = 0; d < v.dim(); ++d)
                dv(b, j, g, d) += static_cast<accumulator_t<T>>(dv_row[d]);
        }
    }
};

}  // namespace ulysses::inline ULYSSES_ABI
