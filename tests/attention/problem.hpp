#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/core/tensor_view.hpp>

#include "../visibility.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

/// One attention problem with its operands in any memory layout, shared by the attention tests.
namespace attention_test {

using std::int64_t;
using ulysses::accumulator_t;
using ulysses::head_view;

inline std::size_t at(int64_t index) { return static_cast<std::size_t>(index); }

/// Memory of a [B, S, H, D] operand in one of several layouts.
enum class order { heads_first, tokens_first, padded, batch_inner };

template <class T>
struct operand {
    std::vector<T> memory;
    ulysses::extents4 extents{}, strides{};

    operand() = default;
    operand(order layout, ulysses::extents4 const& e, T value) : extents(e) {
        auto const [b, s, h, d] = e;
        switch (layout) {
            case order::heads_first: strides = {h * s * d, d, s * d, 1}; break;
            case order::tokens_first: strides = {s * h * d, h * d, d, 1}; break;
            case order::padded: strides = {h * s * (d + 3) + 5, d + 3, s * (d + 3), 1}; break;
            case order::batch_inner: strides = {h * d, b * h * d, d, 1}; break;
        }
        int64_t last = 1;
        for (std::size_t axis = 0; axis < 4; ++axis) last += (e[axis] - 1) * strides[axis];
        memory.assign(b * s * h * d == 0 ? 0 : at(last), value);
    }

    head_view<T> view() { return {memory.data(), extents, strides}; }
    head_view<T const> view() const { return {memory.data(), extents, strides}; }
};

template <class T, class F>
void for_each(head_view<T> const& view, F&& body) {
    for (int64_t b = 0; b < view.batch(); ++b)
        for (int64_t s = 0; s < view.tokens(); ++s)
            for (int64_t h = 0; h < view.heads(); ++h)
                for (int64_t d = 0; d < view.dim(); ++d) body(b, s, h, d);
}

/// Sizes of a problem: the whole, of which an item holds query rows [begin, begin + rows) and keys
/// [held_begin, held_begin + held).
struct sizes {
    int64_t batch = 1, tokens = 1, keys = 1, kv_heads = 1, group = 1, dim = 1, value_dim = 1;
    ulysses::mask mask = ulysses::mask::full;
    ulysses::window window = {};
    int64_t begin = 0, rows = 1, held = 1, held_begin = 0;
    double scale = 1;
    order layout = order::heads_first;
    std::vector<ulysses::sample_keys> samples = {};
    std::vector<int64_t> documents = {};
    std::vector<std::uint8_t> present = {};

    ulysses::visibility rule() const {
        return {mask, window, tokens, keys, samples, documents, present};
    }
    int64_t heads() const { return kv_heads * group; }
    std::string text() const {
        std::string t = "B " + std::to_string(batch) + ", S " + std::to_string(tokens) + ", keys " +
                        std::to_string(keys) + ", heads " + std::to_string(heads()) + " / " +
                        std::to_string(kv_heads) + ", D " + std::to_string(dim) + ", Dv " +
                        std::to_string(value_dim) + ", rows " + std::to_string(begin) + " + " +
                        std::to_string(rows) + ", held " + std::to_string(held) + ", layout " +
                        std::to_string(static_cast<int>(layout));
        t += mask == ulysses::mask::causal ? ", causal" : ", full";
        if (window != ulysses::window{})
            t += ", window " + std::to_string(window.left) + " " + std::to_string(window.right);
        for (auto const& own : samples)
            t += ", sample of keys " + std::to_string(own.begin) + "-" + std::to_string(own.end) +
                 " at " + std::to_string(own.position);
        for (auto const first : documents) t += ", document at " + std::to_string(first);
        if (!present.empty()) t += ", holes";
        return t;
    }
};

template <class T>
struct problem {
    using A = accumulator_t<T>;
    sizes size;
    operand<T> q, k, v, o, dout, dq;
    operand<A> lse, dk, dv;
    std::vector<std::byte> memory;
    // What happens to scores, of the item's heads; empty: nothing.
    int64_t query_head = 0;
    double softcap = 0;
    std::vector<float> slopes, sinks, bias;
    ulysses::extents4 bias_extents{};
    ulysses::dropout_mask dropout{};
    std::vector<A> dsinks, dbias;

    ulysses::logit_gradients<A> dlogits() {
        if (dbias.empty()) return {.sinks = dsinks};
        return {.sinks = dsinks, .bias = {dbias.data(), bias_extents}};
    }

    ulysses::attention_call call() {
        auto const misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
        auto const skip = misaligned == 0 ? 0 : 64 - misaligned;
        return {.query_head = query_head,
                .kv_head = query_head / size.group,
                .query_begin = size.begin,
                .key_begin = size.held_begin,
                .visible = size.rule(),
                .scale = size.scale,
                .softcap = softcap,
                .slopes = slopes,
                .sinks = sinks,
                .bias = bias.empty() ? ulysses::logit_bias{}
                                     : ulysses::logit_bias(bias.data(), bias_extents),
                .dropout = dropout,
                .workspace = std::span{memory}.subspan(skip)};
    }

    std::string text() const {
        return ulysses::concat(size.text(), ", first head ", query_head, ", softcap ", softcap,
                               ", ", slopes.size(), " slopes, ", sinks.size(), " sinks, bias of ",
                               bias.size(), dropout.empty() ? "" : ", dropout");
    }

    template <class Attention>
    void prepare(Attention const& attention) {
        auto const bytes = attention.template workspace_bytes<T>({.batch = size.batch,
                                                                  .rows = size.rows,
                                                                  .heads = size.heads(),
                                                                  .keys = size.held,
                                                                  .kv_heads = size.kv_heads,
                                                                  .head_dim = size.dim,
                                                                  .value_dim = size.value_dim});
        memory.assign(bytes + 64, std::byte{0xff});  // NaN
    }

    template <class Attention>
    void forward(Attention const& attention) {
        prepare(attention);
        attention.template forward<T>(call(), q.view(), k.view(), v.view(), o.view(), lse.view());
    }

    template <class Attention>
    void backward(Attention const& attention) {
        prepare(attention);
        ulysses::attention_backward_views<T> views{q.view(),    k.view(),   v.view(),  o.view(),
                                                   dout.view(), lse.view(), dq.view(), dk.view(),
                                                   dv.view(),   dlogits()};
        attention.template backward<T>(call(), views);
    }
};

/// Values in [-1, 1] that T holds exactly; o, lse and dq poisoned, dk and dv zero.
template <class T>
problem<T> random_problem(std::mt19937_64& random, sizes const& size) {
    using A = accumulator_t<T>;
    auto const nan = std::numeric_limits<float>::quiet_NaN();
    auto const heads = size.heads();
    problem<T> p{};
    p.size = size;
    p.q = {size.layout, {size.batch, size.rows, heads, size.dim}, T(0.0f)};
    p.k = {size.layout, {size.batch, size.held, size.kv_heads, size.dim}, T(0.0f)};
    p.v = {size.layout, {size.batch, size.held, size.kv_heads, size.value_dim}, T(0.0f)};
    p.o = {size.layout, {size.batch, size.rows, heads, size.value_dim}, T(nan)};
    p.dout = {size.layout, {size.batch, size.rows, heads, size.value_dim}, T(0.0f)};
    p.dq = {size.layout, {size.batch, size.rows, heads, size.dim}, T(nan)};
    p.lse = {size.layout, {size.batch, size.rows, heads, 1}, A(nan)};
    p.dk = {size.layout, {size.batch, size.held, size.kv_heads, size.dim}, A(0)};
    p.dv = {size.layout, {size.batch, size.held, size.kv_heads, size.value_dim}, A(0)};
    for (auto* x : {&p.q, &p.k, &p.v, &p.dout})
        for (auto& value : x->memory)
            value = T(static_cast<float>(static_cast<int64_t>(random() % 257) - 128) / 128.0f);
    return p;
}

/// What happens to the scores of `from` happens to those of `to`.
template <class To, class From>
void copy_scores(problem<To>& to, problem<From> const& from) {
    to.query_head = from.query_head, to.softcap = from.softcap;
    to.slopes = from.slopes, to.sinks = from.sinks, to.bias = from.bias;
    to.bias_extents = from.bias_extents, to.dropout = from.dropout;
    to.dsinks.assign(to.sinks.size(), 0), to.dbias.assign(to.bias.size(), 0);
}

/// The same problem in another element type.
template <class To, class From>
problem<To> converted(problem<From> const& from) {
    std::mt19937_64 unused;
    auto to = random_problem<To>(unused, from.size);
    auto const copy = [](auto& x, auto const& y) {
        for (std::size_t i = 0; i < y.memory.size(); ++i)
            x.memory[i] = To(static_cast<accumulator_t<To>>(y.memory[i]));
    };
    copy(to.q, from.q), copy(to.k, from.k), copy(to.v, from.v), copy(to.dout, from.dout);
    copy_scores(to, from);
    return to;
}

/// Rows [begin, begin + rows) and some keys of a whole problem as an item of their own, in another
/// layout.
template <class T>
problem<T> item_of(problem<T> const& whole, int64_t begin, int64_t rows, ulysses::index_range keys,
                   order layout) {
    auto size = whole.size;
    size.begin = begin, size.rows = rows, size.layout = layout;
    size.held_begin = keys.begin, size.held = keys.size();
    std::mt19937_64 unused;
    auto part = random_problem<T>(unused, size);
    auto const copy = [](auto& x, auto const& y, int64_t first) {
        auto const to = x.view();
        auto const from = y.view();
        for_each(
            to, [&](auto b, auto s, auto h, auto d) { to(b, s, h, d) = from(b, s + first, h, d); });
    };
    auto const first = begin - whole.size.begin;
    copy(part.q, whole.q, first), copy(part.dout, whole.dout, first);
    copy(part.k, whole.k, keys.begin), copy(part.v, whole.v, keys.begin);
    copy_scores(part, whole);
    return part;
}

/// True when the rows of `part` from global row `begin` have the bits of those of `whole`.
template <class T>
bool same_rows(operand<T> const& part, operand<T> const& whole, int64_t first) {
    bool same = true;
    auto const x = part.view();
    auto const y = whole.view();
    for (int64_t b = 0; b < x.batch(); ++b)
        for (int64_t s = 0; s < x.tokens(); ++s)
            for (int64_t h = 0; h < x.heads(); ++h)
                same = same && std::memcmp(x.row(b, s, h), y.row(b, s + first, h),
                                           at(x.dim()) * sizeof(T)) == 0;
    return same;
}

/// Largest |x - y|; infinite when x is NaN somewhere.
template <class X, class Y>
double largest_difference(operand<X> const& x, operand<Y> const& y) {
    double worst = 0;
    auto const left = x.view();
    auto const right = y.view();
    for_each(left, [&](auto b, auto s, auto h, auto d) {
        auto const one = static_cast<double>(left(b, s, h, d));
        auto const other = static_cast<double>(right(b, s, h, d));
        auto const difference = one == other ? 0.0 : std::fabs(one - other);  // both may be -inf
        worst = std::isnan(difference) ? INFINITY : std::max(worst, difference);
    });
    return worst;
}

inline bool sees(sizes const& size, int64_t b, int64_t local_row, int64_t key) {
    return ::sees(size.rule(), b, size.begin + local_row, key);
}
inline ulysses::index_range seen_by_rows(sizes const& size, int64_t begin, int64_t end) {
    return ::seen_by_rows(size.rule(), size.batch, begin, end);
}

/// p_ij from its definition, in double, for the keys that are held.
template <class T>
std::vector<double> probabilities(problem<T> const& p, int64_t b, int64_t row, int64_t head) {
    std::vector<double> e(at(p.size.held));
    double sum = 0;
    for (std::size_t j = 0; j < e.size(); ++j) {
        if (!sees(p.size, b, row, p.size.held_begin + static_cast<int64_t>(j))) continue;
        double s = 0;
        for (int64_t d = 0; d < p.size.dim; ++d)
            s +=
                static_cast<double>(p.q.view()(b, row, head, d)) *
                static_cast<double>(p.k.view()(b, static_cast<int64_t>(j), head / p.size.group, d));
        sum += e[j] = std::exp(p.size.scale * s);
    }
    for (auto& x : e) x = sum == 0 ? 0 : x / sum;
    return e;
}

/// What rounding may do to a result, from the element type and the lengths of the sums; operands
/// lie in
/// [-1, 1]. u is the unit roundoff of the accumulator, w that of the element.
struct bounds {
    double o, lse, dq, dk, dv, dsinks, dbias;
};

template <class T>
bounds bounds_of(problem<T> const& p) {
    auto const u = static_cast<double>(std::numeric_limits<accumulator_t<T>>::epsilon()) / 2;
    auto const w = sizeof(T) > 2 ? u : std::is_same_v<T, ulysses::bf16> ? 0x1p-8 : 0x1p-11;
    auto const d = static_cast<double>(p.size.dim), dv = static_cast<double>(p.size.value_dim);
    auto const keys = static_cast<double>(p.size.held);
    auto const scale = std::fabs(p.size.scale);
    auto const largest = [](std::vector<float> const& x) {
        return x.empty() ? 0.0 : static_cast<double>(*std::max_element(x.begin(), x.end()));
    };
    // What is done to a score rounds in the magnitude of what is added.
    auto const added = p.softcap + largest(p.bias) + largest(p.sinks) +
                       largest(p.slopes) * static_cast<double>(p.size.keys + p.size.tokens);
    auto const raised = p.dropout.scale();
    auto const terms = static_cast<double>(p.size.rows * p.size.group);
    std::vector<double> weight(
        at(p.size.batch * p.size.kv_heads * p.size.held));  // sum_i p_ij of a column
    for (int64_t b = 0; b < p.size.batch; ++b)
        for (int64_t h = 0; h < p.size.heads(); ++h)
            for (int64_t i = 0; i < p.size.rows; ++i) {
                auto const row = probabilities(p, b, i, h);
                for (std::size_t j = 0; j < row.size(); ++j)
                    weight[at((b * p.size.kv_heads + h / p.size.group) * p.size.held) + j] +=
                        row[j];
            }
    auto const heaviest = weight.empty() ? 0
                          : added > 0    ? terms  // each at most 1
                                         : *std::max_element(weight.begin(), weight.end());
    auto const score = u * ((d + 6) * scale * d + 8 * added);
    auto const lse = score + u * (keys + std::log(keys + 1) + scale * d + 8);
    auto const probability = 2 * score + lse + 8 * u;  // relative, of a probability
    auto const o = raised * (probability + u * (keys + 6) + w);
    auto const capped = p.softcap > 0 ? 2 * score / p.softcap + 8 * u : 0;  // 1 - tanh^2
    // relative to p_ij
    auto const ds = raised * dv * (u * (2 * dv + 4) + 2 * probability + 2 * capped) + dv * o;
    auto const product = 2 * dv * raised;  // |dp - delta|
    // Sums over all rows, and over what a bias's extents of 1 stand for.
    auto const rows = static_cast<double>(p.size.batch * p.size.rows);
    auto const summed = rows * keys * static_cast<double>(p.size.heads()) /
                        std::max(1.0, static_cast<double>(p.bias.size()));
    auto const most = std::max(summed, 1.0);
    return {.o = o,
            .lse = lse,
            .dq = scale * (ds + product * (u * (keys + 4) + w)),
            .dk = scale * heaviest * (ds + product * u * (terms + 4)),
            .dv = raised * heaviest * (probability + u * (terms + 4)),
            .dsinks = rows * (ds + product * u * (rows + 4)),
            .dbias = most * (ds + product * u * (most + 4))};
}

}  // namespace attention_test
