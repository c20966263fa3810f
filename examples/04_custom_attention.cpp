// SPDX-License-Identifier: Apache-2.0
// Your own kernel as step 4: one written for it, forward and backward, and one that knows a single
// mask, wrapped. Both are held to the contract by the kit in tests/conformance.

#include <ulysses/ulysses.hpp>

#include "../tests/conformance/attention.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

namespace uly = ulysses;

// [snippet functor]
/// Attention a query row at a time: any mask, softcap, sinks. What it adds up, it adds up in A.
struct row_attention {
    using space_type = uly::host_space;
    static constexpr uly::attention_features features{.causal = true,
                                                      .full = true,
                                                      .grouped = true,
                                                      .value_dim = true,
                                                      .row_range = true,
                                                      .window = true,
                                                      .documents = true,
                                                      .padding = true,
                                                      .softcap = true,
                                                      .sinks = true};
    static constexpr std::int64_t row_multiple() { return 1; }  // rows know nothing of each other
    template <class T>
    static std::size_t workspace_bytes(uly::attention_extents const& e) {
        return static_cast<std::size_t>(2 * e.keys) * sizeof(uly::accumulator_t<T>);
    }
    // [/snippet]

    // [snippet forward]
    template <class T>
    void forward(uly::attention_call const& call, uly::head_view<T const> q,
                 uly::head_view<T const> k, uly::head_view<T const> v, uly::head_view<T> o,
                 uly::head_view<uly::accumulator_t<T>> lse) const {
        using A = uly::accumulator_t<T>;
        auto* const p = reinterpret_cast<A*>(call.workspace.data());  // a row of probabilities
        for (std::int64_t b = 0; b < q.batch(); ++b)
            for (std::int64_t h = 0; h < q.heads(); ++h)
                for (std::int64_t i = 0; i < q.tokens(); ++i) {
                    auto const g = h / (q.heads() / k.heads());
                    auto const seen = local_keys(call, b, i);
                    // A sink is a key of its own, without a value.
                    auto const sink = call.sinks.empty() ? -std::numeric_limits<A>::infinity()
                                                         : static_cast<A>(call.sinks[h]);
                    auto largest = sink;
                    for (auto j = seen.begin; j < seen.end; ++j) {
                        p[j] = score(call, q.row(b, i, h), k.row(b, j, g), q.dim()).value;
                        largest = std::max(largest, p[j]);
                    }
                    A sum = call.sinks.empty() ? A(0) : std::exp(sink - largest);
                    for (auto j = seen.begin; j < seen.end; ++j)
                        sum += p[j] = std::exp(p[j] - largest);
                    for (std::int64_t d = 0; d < v.dim(); ++d) {
                        A value = 0;
                        for (auto j = seen.begin; j < seen.end; ++j)
                            value += p[j] * static_cast<A>(v(b, j, g, d));
                        o(b, i, h, d) = static_cast<T>(sum == 0 ? A(0) : value / sum);
                    }
                    lse(b, i, h, 0) = largest + std::log(sum);  // of no key: -inf
                }
    }
    // [/snippet]

    // [snippet backward]
    template <class T>
    void backward(uly::attention_call const& call,
                  uly::attention_backward_views<T> const& views) const {
        using A = uly::accumulator_t<T>;
        auto const& [q, k, v, o, dout, lse, dq, dk, dv, dlogits] = views;
        auto* const ds = reinterpret_cast<A*>(call.workspace.data());
        for (std::int64_t b = 0; b < q.batch(); ++b)
            for (std::int64_t h = 0; h < q.heads(); ++h)
                for (std::int64_t i = 0; i < q.tokens(); ++i) {
                    auto const g = h / (q.heads() / k.heads());
                    auto const seen = local_keys(call, b, i);
                    auto const delta = dot<A>(dout.row(b, i, h), o.row(b, i, h), o.dim());
                    for (auto j = seen.begin; j < seen.end; ++j) {
                        auto const s = score(call, q.row(b, i, h), k.row(b, j, g), q.dim());
                        auto const p = std::exp(s.value - lse(b, i, h, 0));
                        auto const dp = dot<A>(dout.row(b, i, h), v.row(b, j, g), v.dim());
                        ds[j] = static_cast<A>(call.scale) * p * (dp - delta) * s.slope;
                        for (std::int64_t d = 0; d < k.dim(); ++d)
                            dk(b, j, g, d) += ds[j] * static_cast<A>(q(b, i, h, d));
                        for (std::int64_t d = 0; d < v.dim(); ++d)
                            dv(b, j, g, d) += p * static_cast<A>(dout(b, i, h, d));
                    }
                    for (std::int64_t d = 0; d < q.dim(); ++d) {
                        A sum = 0;
                        for (auto j = seen.begin; j < seen.end; ++j)
                            sum += ds[j] * static_cast<A>(k(b, j, g, d));
                        dq(b, i, h, d) = static_cast<T>(sum);
                    }
                    if (!call.sinks.empty() && !dlogits.sinks.empty())  // its dp is 0
                        dlogits.sinks[static_cast<std::size_t>(h)] -=
                            std::exp(static_cast<A>(call.sinks[h]) - lse(b, i, h, 0)) * delta;
                }
    }
    // [/snippet]

    // [snippet rows]
    /// The keys that row i of the view sees, counted from the view's first.
    static uly::index_range local_keys(uly::attention_call const& call, std::int64_t b,
                                       std::int64_t i) {
        auto const seen = call.visible.keys_of(b, call.query_begin + i);
        return {seen.begin - call.key_begin, seen.end - call.key_begin};
    }

    template <class A, class T>
    static A dot(T const* x, T const* y, std::int64_t dim) {
        A sum = 0;
        for (std::int64_t d = 0; d < dim; ++d) sum += static_cast<A>(x[d]) * static_cast<A>(y[d]);
        return sum;
    }

    /// A score, and its derivative by scale q . k.
    template <class T, class A = uly::accumulator_t<T>>
    static auto score(uly::attention_call const& call, T const* q, T const* k, std::int64_t dim) {
        struct {
            A value, slope = 1;
        } s{static_cast<A>(call.scale) * dot<A>(q, k, dim)};
        if (auto const cap = static_cast<A>(call.softcap); cap > 0) {
            auto const t = std::tanh(s.value / cap);
            s.value = cap * t, s.slope = 1 - t * t;
        }
        return s;
    }
};
static_assert(uly::differentiable_attention_for<row_attention, float>);
// [/snippet]

namespace elsewhere {

/// A kernel as they are: addresses and strides of one head, one mask. Query row i of `rows` is at
/// key i + keys - rows and sees up to there, from `left` before it; a `left` of -1 is no limit.
void causal_kernel(float const* q, float const* k, float const* v, float* o, float* lse,
                   std::int64_t q_stride, std::int64_t k_stride, std::int64_t v_stride,
                   std::int64_t o_stride, std::int64_t lse_stride, std::int64_t rows,
                   std::int64_t keys, std::int64_t dim, std::int64_t value_dim, float scale,
                   std::int64_t left, float* p) {
    for (std::int64_t i = 0; i < rows; ++i) {
        auto const at = i + keys - rows;
        auto const first = left < 0 ? 0 : std::max<std::int64_t>(at - left, 0);
        auto largest = -std::numeric_limits<float>::infinity();
        for (auto j = first; j <= at; ++j) {
            p[j] = 0;
            for (std::int64_t d = 0; d < dim; ++d)
                p[j] += scale * q[i * q_stride + d] * k[j * k_stride + d];
            largest = std::max(largest, p[j]);
        }
        float sum = 0;
        for (auto j = first; j <= at; ++j) sum += p[j] = std::exp(p[j] - largest);
        for (std::int64_t d = 0; d < value_dim; ++d) {
            float value = 0;
            for (auto j = first; j <= at; ++j) value += p[j] * v[j * v_stride + d];
            o[i * o_stride + d] = value / sum;
        }
        lse[i * lse_stride] = largest + std::log(sum);
    }
}

}  // namespace elsewhere

// [snippet wrapped]
/// A kernel that knows one mask: causal, the last row at the last key, maybe a window.
struct wrapped_attention {
    using space_type = uly::host_space;
    static constexpr uly::attention_features features{
        .causal = true, .grouped = true, .value_dim = true, .row_range = true, .window = true};
    static constexpr std::int64_t row_multiple() { return 1; }
    template <class T>
    static std::size_t workspace_bytes(uly::attention_extents const& e) {
        return static_cast<std::size_t>(e.keys) * sizeof(float);
    }

    void forward(uly::attention_call const& call, uly::head_view<float const> q,
                 uly::head_view<float const> k, uly::head_view<float const> v,
                 uly::head_view<float> o, uly::head_view<float> lse) const {
        // Just the keys that the rows see: the last row is at the last of them.
        auto const seen =
            call.visible.keys_of_rows(0, call.query_begin, call.query_begin + q.tokens());
        k = k.slice_tokens(seen.begin - call.key_begin, seen.size());
        v = v.slice_tokens(seen.begin - call.key_begin, seen.size());
        for (std::int64_t b = 0; b < q.batch(); ++b)
            for (std::int64_t h = 0; h < q.heads(); ++h) {
                auto const g = h / (q.heads() / k.heads());
                elsewhere::causal_kernel(q.row(b, 0, h), k.row(b, 0, g), v.row(b, 0, g),
                                         o.row(b, 0, h), lse.row(b, 0, h), q.strides[1],
                                         k.strides[1], v.strides[1], o.strides[1], lse.strides[1],
                                         q.tokens(), k.tokens(), q.dim(), v.dim(),
                                         static_cast<float>(call.scale), call.visible.window.left,
                                         reinterpret_cast<float*>(call.workspace.data()));
            }
    }
};
static_assert(uly::attention_for<wrapped_attention, float>);
// [/snippet]

namespace {

constexpr uly::shape layer_shape{.heads = 6,
                                 .kv_heads = 2,
                                 .head_dim = 8,
                                 .mask = uly::mask::causal,
                                 .window = {.left = 20},
                                 .logits = {.softcap = 2.0, .sinks = true}};
constexpr std::int64_t tokens = 61;

struct results {
    std::vector<float> o, dq, dk, dv, dsinks;
};

/// A layer forward and backward over `ranks` ranks; q [S, Hq, D], k and v [S, Hkv, D].
template <class Attention>
results compute(int ranks) {
    auto const filled = [](std::int64_t heads, unsigned factor) {
        std::vector<float> x(static_cast<std::size_t>(tokens * heads * layer_shape.head_dim));
        for (std::size_t i = 0; i < x.size(); ++i)
            x[i] = static_cast<float>(i * factor % 201) / 100 - 1;
        return x;
    };
    auto q = filled(layer_shape.heads, 7919), dout = filled(layer_shape.heads, 6007);
    auto k = filled(layer_shape.kv_heads, 4513), v = filled(layer_shape.kv_heads, 3571);
    std::vector<float> const sinks{0.5f, -1, 2, 0, 1, -0.5f};
    results all{q, q, k, v, std::vector<float>(sinks.size())};
    std::vector<std::vector<float>> parts(static_cast<std::size_t>(ranks), all.dsinks);
    uly::threads::run(ranks, [&](uly::threads::communicator group) {
        uly::pipeline layer{group, uly::sequence_local{}, Attention{}, layer_shape};
        auto const step = uly::sequence::split(group.size(), 1, tokens);
        auto const begin = step.queries().position(group.rank(), 0);
        auto const own = step.queries().count(group.rank());
        auto const mine = [&](std::vector<float>& x) {  // [B, s, H, D]
            auto const row = static_cast<std::int64_t>(x.size()) / tokens;
            return uly::token_view<float>(
                x.data() + begin * row, {1, own, row / layer_shape.head_dim, layer_shape.head_dim});
        };
        uly::logit_inputs const logits{.sinks = sinks};
        auto saved = layer.make_context();
        layer.attend(step, saved, mine(q), mine(k), mine(v), mine(all.o), logits);
        layer.attend_backward(step, saved, mine(dout), mine(all.dq), mine(all.dk), mine(all.dv),
                              logits, {.sinks = parts[static_cast<std::size_t>(group.rank())]});
    });
    for (auto const& part : parts)
        for (std::size_t h = 0; h < part.size(); ++h) all.dsinks[h] += part[h];
    return all;
}

bool same_bits(std::vector<float> const& a, std::vector<float> const& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool near(std::vector<float> const& a, std::vector<float> const& b, float tolerance) {
    for (std::size_t i = 0; i < a.size(); ++i)
        if (!(std::fabs(a[i] - b[i]) <= tolerance)) return false;
    return true;
}

}  // namespace

int main() {
    try {
        // [snippet check]
        conformance::check_attention<float>(row_attention{});
        conformance::check_attention<uly::bf16>(row_attention{}, {.problems = 8, .longest_cut = 0});
        conformance::check_attention<float>(wrapped_attention{});
        // [/snippet]
    } catch (conformance::broken_attention_rule const& e) {
        std::printf("%s\n", e.what());
        return 1;
    }
    auto const formula = compute<uly::reference_attention>(1);
    auto const one = compute<row_attention>(1);
    auto right = true;
    for (int ranks = 1; ranks <= 4; ++ranks) {
        auto const many = compute<row_attention>(ranks);
        auto const same = same_bits(many.o, one.o) && same_bits(many.dq, one.dq);
        // Sums of at most a few hundred terms of magnitude about 10.
        auto const close = near(many.o, formula.o, 1e-5f) && near(many.dq, formula.dq, 1e-4f) &&
                           near(many.dk, formula.dk, 1e-4f) && near(many.dv, formula.dv, 1e-4f) &&
                           near(many.dsinks, formula.dsinks, 1e-3f);
        std::printf("own attention on %d ranks: o and dq %s one rank's, all %s the formula\n",
                    ranks, same ? "equal" : "differ from", close ? "near" : "far from");
        right = right && same && close;
    }
    return right ? 0 : 1;
}
