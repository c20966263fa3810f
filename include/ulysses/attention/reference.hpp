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
#include <limits>

/// Attention by its formula, in double whatever the element type: what the others are tested
/// against.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

/// sum_d x[d] * y[d]
template <class X, class Y>
double dot(X const* x, Y const* y, std::int64_t count) {
    double sum = 0;
    for (std::int64_t d = 0; d < count; ++d)
        sum += static_cast<double>(x[d]) * static_cast<double>(y[d]);
    return sum;
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

/// p[j] = softmax over the keys a row sees, 0 for those that are not there; returns the log of its
/// denominator.
template <class T>
double softmax_row(attention_call const& call, T const* q, head_view<T const> const& k,
                   std::int64_t b, std::int64_t kv_head, index_range seen, double* p) {
    auto largest = -std::numeric_limits<double>::infinity();
    auto const there = [&](std::int64_t j) { return call.visible.there(b, call.key_begin + j); };
    for (auto j = seen.begin; j < seen.end; ++j) {
        if (!there(j)) continue;
        p[j] = call.scale * dot(q, k.row(b, j, kv_head), k.dim());
        largest = std::max(largest, p[j]);
    }
    double sum = 0;
    for (auto j = seen.begin; j < seen.end; ++j)
        sum += p[j] = there(j) ? std::exp(p[j] - largest) : 0.0;
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
                                                 .holes = true};

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
                        detail::softmax_row(call, q.row(b, i, h), k, b, g, seen, p));
                    for (std::int64_t d = 0; d < o.dim(); ++d) {
                        double sum = 0;
                        for (auto j = seen.begin; j < seen.end; ++j)
                            sum += p[j] * static_cast<double>(v(b, j, g, d));
                        o(b, i, h, d) = detail::rounded<T>(sum);
                    }
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
        auto const& [q, k, v, o, dout, lse, dq, dk, dv] = views;
        auto const g = h / (q.heads() / k.heads());
        auto* const row_lse = reinterpret_cast<double*>(call.workspace.data());
        auto* const delta = row_lse + q.tokens();
        auto* const p = delta + q.tokens();
        auto* const ds = p + k.tokens();
        for (std::int64_t i = 0; i < q.tokens(); ++i) {
            auto const seen = detail::local_keys(call, b, i);
            row_lse[i] = detail::softmax_row(call, q.row(b, i, h), k, b, g, seen, p);
            delta[i] = 0;
            for (auto j = seen.begin; j < seen.end; ++j) {
                ds[j] = detail::dot(dout.row(b, i, h), v.row(b, j, g), v.dim());
                delta[i] += p[j] * ds[j];
            }
            for (auto j = seen.begin; j < seen.end; ++j) ds[j] = p[j] * (ds[j] - delta[i]);
            for (std::int64_t d = 0; d < q.dim(); ++d) {
                double sum = 0;
                for (auto j = seen.begin; j < seen.end; ++j)
                    sum += ds[j] * static_cast<double>(k(b, j, g, d));
                dq(b, i, h, d) = detail::rounded<T>(call.scale * sum);
            }
        }
    }

    /// dk_j += scale * sum_i ds_ij q_i and dv_j += sum_i p_ij dout_i, each sum rounded once.
    template <element T>
    static void backward_keys(attention_call const& call, attention_backward_views<T> const& views,
                              std::int64_t b, std::int64_t h) {
        auto const& [q, k, v, o, dout, lse, dq, dk, dv] = views;
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
                auto const s = call.scale * detail::dot(q.row(b, i, h), k.row(b, j, g), q.dim());
                auto const p = std::exp(s - row_lse[i]);
                auto const dp = detail::dot(dout.row(b, i, h), v.row(b, j, g), v.dim());
                auto const ds = p * (dp - delta[i]);
                for (std::int64_t d = 0; d < k.dim(); ++d)
                    dk_row[d] += ds * static_cast<double>(q(b, i, h, d));
                for (std::int64_t d = 0; d < v.dim(); ++d)
                    dv_row[d] += p * static_cast<double>(dout(b, i, h, d));
            }
            for (std::int64_t d = 0; d < k.dim(); ++d)
                dk(b, j, g, d) += static_cast<accumulator_t<T>>(call.scale * dk_row[d]);
            for (std::int64_t d = 0; d < v.dim(); ++d)
                dv(b, j, g, d) += static_cast<accumulator_t<T>>(dv_row[d]);
        }
    }
};

}  // namespace ulysses::inline ULYSSES_ABI
