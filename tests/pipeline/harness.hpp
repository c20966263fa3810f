#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/blocked.hpp>
#include <ulysses/attention/reference.hpp>
#include <ulysses/comm/serial.hpp>
#include <ulysses/comm/threads.hpp>
#include <ulysses/gemm/builtin.hpp>
#include <ulysses/pipeline.hpp>
#include <ulysses/space/host.hpp>

#include "orders.hpp"
#include "ranks.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <string>

/// Runs a layer on whole tensors: deals them to ranks by any token order, calls a pipeline on every
/// rank, and puts the results together. Everything that is to be written holds NaN before.
namespace pipeline_test {

using builtin_attention = ulysses::blocked_attention<ulysses::builtin_gemm>;

template <class T>
T not_a_number() {
    return T(std::numeric_limits<float>::quiet_NaN());
}

/// A packed tensor [B, S, H, D] that owns its memory and is an operand by its members.
template <class T>
struct tensor {
    std::vector<T> memory;
    ulysses::extents4 sizes{};

    tensor() = default;
    explicit tensor(ulysses::extents4 const& given, T value = not_a_number<T>())
        : memory(static_cast<std::size_t>(given[0] * given[1] * given[2] * given[3]), value),
          sizes(given) {}

    // A tensor without elements has no address, as an engine's may.
    T* data() const { return memory.empty() ? nullptr : const_cast<T*>(memory.data()); }
    ulysses::extents4 const& extents() const { return sizes; }
    T& operator()(int64_t b, int64_t s, int64_t h, int64_t d) {
        return memory[static_cast<std::size_t>(((b * sizes[1] + s) * sizes[2] + h) * sizes[3] + d)];
    }
    T const& operator()(int64_t b, int64_t s, int64_t h, int64_t d) const {
        return const_cast<tensor&>(*this)(b, s, h, d);
    }
    void poison() { std::fill(memory.begin(), memory.end(), not_a_number<T>()); }
};

template <class T>
bool same_bits(tensor<T> const& a, tensor<T> const& b) {
    return a.sizes == b.sizes &&
           (a.memory.empty() ||
            std::memcmp(a.memory.data(), b.memory.data(), a.memory.size() * sizeof(T)) == 0);
}

/// Largest |a - b|; NaN in either counts as infinite.
template <class A, class B>
double largest_difference(tensor<A> const& a, tensor<B> const& b) {
    if (a.sizes != b.sizes) return std::numeric_limits<double>::infinity();
    double largest = 0;
    for (std::size_t i = 0; i < a.memory.size(); ++i) {
        auto const one = static_cast<double>(a.memory[i]);
        auto const other = static_cast<double>(b.memory[i]);
        auto const d = one == other ? 0.0 : std::fabs(one - other);  // both may be -inf
        if (!(d <= largest)) largest = std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
    }
    return largest;
}

template <class T>
void fill_uniform(std::mt19937_64& random, tensor<T>& x) {
    for (auto& value : x.memory)
        value = T(static_cast<float>(below(random, 2001) - 1000) / 1000.0f);
}

/// A layer and its operands over the whole sequence.
template <class T>
struct problem {
    ulysses::shape layer;  // completed
    int64_t batch = 1, tokens = 1, keys = 1;
    tensor<T> q, k, v, dout;
    std::vector<int64_t> documents{}, lengths{}, positions{};  // what is packed
    std::vector<std::uint8_t> present{};
    std::vector<T> slopes{}, sinks{};  // what the layer's logits ask for
    tensor<T> bias{};                  // [B or 1, Hq or 1, Sq or 1, Sk or 1]
    std::optional<ulysses::dropout_key> dropout{};

    ulysses::logit_inputs logits() const {
        return {slopes, sinks,
                bias.memory.empty() ? ulysses::logit_bias{}
                                    : ulysses::logit_bias(bias.data(), bias.sizes),
                dropout};
    }

    ulysses::sequence step(orders const& queries, orders const& keys_of = {}) const {
        auto result = ulysses::sequence::of(batch, queries, keys_of);
        result.pack({.documents = documents,
                     .lengths = lengths,
                     .query_positions = positions,
                     .present = present});
        return result;
    }

    ulysses::extents4 query_extents(int64_t dim) const { return {batch, tokens, layer.heads, dim}; }
    ulysses::extents4 key_extents(int64_t dim) const { return {batch, keys, layer.kv_heads, dim}; }

    std::string text() const {
        return ulysses::concat(
            "heads ", layer.heads, "/", layer.kv_heads, ", dims ", layer.head_dim, " and ",
            layer.value_dim, ", batch ", batch, ", tokens ", tokens, ", keys ", keys,
            layer.mask == ulysses::mask::causal ? ", causal" : ", full", ", window ",
            layer.window.left, " ", layer.window.right, ", ", layer.head_windows.count,
            " head windows, ", documents.size(), " documents, ", lengths.size(), " lengths, ",
            positions.size(), " positions, ", present.size(), " present, softcap ",
            layer.logits.softcap.value(), layer.logits.alibi ? ", alibi" : "",
            layer.logits.sinks ? ", sinks" : "", layer.logits.bias ? ", bias of " : "",
            bias.memory.size(), ", dropout ", layer.dropout.value());
    }
};

template <class T>
problem<T> make_problem(std::uint64_t seed, ulysses::shape const& layer, int64_t batch,
                        int64_t tokens, int64_t keys = -1) {
    std::mt19937_64 random{seed};
    problem<T> p;
    p.layer = ulysses::checked(layer);
    p.batch = batch;
    p.tokens = tokens;
    p.keys = keys < 0 ? tokens : keys;
    p.q = tensor<T>(p.query_extents(p.layer.head_dim));
    p.k = tensor<T>(p.key_extents(p.layer.head_dim));
    p.v = tensor<T>(p.key_extents(p.layer.value_dim));
    p.dout = tensor<T>(p.query_extents(p.layer.value_dim));
    for (auto* each : {&p.q, &p.k, &p.v, &p.dout}) fill_uniform(random, *each);
    return p;
}

template <class To, class From>
tensor<To> converted(tensor<From> const& from) {
    tensor<To> to(from.sizes);
    for (std::size_t i = 0; i < from.memory.size(); ++i)
        to.memory[i] = static_cast<To>(static_cast<ulysses::accumulator_t<To>>(from.memory[i]));
    return to;
}

template <class To, class From>
problem<To> converted(problem<From> const& p) {
    return {p.layer,
            p.batch,
            p.tokens,
            p.keys,
            converted<To>(p.q),
            converted<To>(p.k),
            converted<To>(p.v),
            converted<To>(p.dout),
            p.documents,
            p.lengths,
            p.positions,
            p.present,
            {p.slopes.begin(), p.slopes.end()},
            {p.sinks.begin(), p.sinks.end()},
            converted<To>(p.bias),
            p.dropout};
}

template <class T>
struct results {
    using wide = ulysses::accumulator_t<T>;
    tensor<T> o, dq, dk, dv;
    tensor<wide> lse;
    tensor<wide> dsinks, dbias;  // summed over the ranks that have put theirs back

    explicit results(problem<T> const& p)
        : o(p.query_extents(p.layer.value_dim)),
          dq(p.query_extents(p.layer.head_dim)),
          dk(p.key_extents(p.layer.head_dim)),
          dv(p.key_extents(p.layer.value_dim)),
          lse(p.query_extents(1)),
          dsinks({1, 1, static_cast<int64_t>(p.sinks.size()), 1}, wide(0)),
          dbias(p.bias.sizes, wide(0)) {}

    void add_logit_gradients(tensor<wide> const& sinks, tensor<wide> const& bias) {
        std::lock_guard const lock(adding_);
        for (std::size_t i = 0; i < sinks.memory.size(); ++i) dsinks.memory[i] += sinks.memory[i];
        for (std::size_t i = 0; i < bias.memory.size(); ++i) dbias.memory[i] += bias.memory[i];
    }

   private:
    inline static std::mutex adding_;
};

/// A rank's tokens of `whole`.
template <class T>
tensor<T> own_part(ulysses::token_orders const& order, int rank, tensor<T> const& whole) {
    auto const& e = whole.sizes;
    tensor<T> part({e[0], order.count(rank), e[2], e[3]});
    for (int64_t b = 0; b < e[0]; ++b)
        for (int64_t s = 0; s < part.sizes[1]; ++s)
            for (int64_t h = 0; h < e[2]; ++h)
                for (int64_t d = 0; d < e[3]; ++d)
                    part(b, s, h, d) = whole(b, order.position(rank, s), h, d);
    return part;
}

/// The inverse; ranks write different tokens.
template <class T>
void put_back(ulysses::token_orders const& order, int rank, tensor<T> const& part,
              tensor<T>& whole) {
    auto const& e = part.sizes;
    for (int64_t b = 0; b < e[0]; ++b)
        for (int64_t s = 0; s < e[1]; ++s)
            for (int64_t h = 0; h < e[2]; ++h)
                for (int64_t d = 0; d < e[3]; ++d)
                    whole(b, order.position(rank, s), h, d) = part(b, s, h, d);
}

/// One rank's operands, and where its results go.
template <class T>
struct local_problem {
    using wide = ulysses::accumulator_t<T>;
    tensor<T> q, k, v, dout;
    tensor<T> o, dq, dk, dv;
    ulysses::logit_inputs logits;
    tensor<wide> dsinks, dbias;

    ulysses::logit_gradients<wide> dlogits() {
        return {dsinks.memory, dbias.memory.empty()
                                   ? ulysses::bias_gradient<wide>{}
                                   : ulysses::bias_gradient<wide>(dbias.data(), dbias.sizes)};
    }

    local_problem(problem<T> const& p, ulysses::sequence const& step, int rank)
        : q(own_part(step.queries(), rank, p.q)),
          k(own_part(step.keys(), rank, p.k)),
          v(own_part(step.keys(), rank, p.v)),
          dout(own_part(step.queries(), rank, p.dout)),
          o(dout.sizes),
          dq(q.sizes),
          dk(k.sizes),
          dv(v.sizes),
          logits(p.logits()),
          dsinks({1, 1, static_cast<int64_t>(p.sinks.size()), 1}, wide(0)),
          dbias(p.bias.sizes, wide(0)) {}

    void put_back_into(results<T>& whole, ulysses::sequence const& step, int rank) const {
        put_back(step.queries(), rank, o, whole.o);
        put_back(step.queries(), rank, dq, whole.dq);
        put_back(step.keys(), rank, dk, whole.dk);
        put_back(step.keys(), rank, dv, whole.dv);
        whole.add_logit_gradients(dsinks, dbias);
    }
};

template <class T, class Context>
void collect_log_sum_exp(Context const& saved, ulysses::plan const& moves,
                         tensor<ulysses::accumulator_t<T>>& lse) {
    for (std::size_t i = 0; i < moves.items().size(); ++i) {
        auto const& work = moves.items()[i].work;
        auto const rows = saved.template log_sum_exp<T>(moves, i);
        for (int64_t b = 0; b < rows.batch(); ++b)
            for (int64_t s = 0; s < rows.tokens(); ++s)
                for (int64_t h = 0; h < rows.heads(); ++h)
                    lse(b, work.row_begin + s, work.head_begin + h, 0) = rows(b, s, h, 0);
    }
}

/// The backward call that the keep policy asks for.
template <class Pipeline, class Context, class Local>
void attend_backward(Pipeline& layer, ulysses::sequence const& step, Context& saved, Local& l) {
    if (layer.layer().keep == ulysses::keep::exchanged)
        layer.attend_backward(step, saved, l.dout, l.dq, l.dk, l.dv, l.logits, l.dlogits());
    else
        layer.attend_backward(step, saved, l.q, l.k, l.v, l.o, l.dout, l.dq, l.dk, l.dv, l.logits,
                              l.dlogits());
}

/// What every rank does in `compute`.
template <class Comm, class Attention, class T>
void compute_rank(Comm const& ranks, problem<T> const& p, ulysses::sequence const& step,
                  Attention const& attention, results<T>& whole) {
    ulysses::pipeline layer{ranks, ulysses::sequence_local{}, attention, p.layer};
    auto saved = layer.make_context();
    local_problem<T> local(p, step, ranks.rank());
    layer.attend(step, saved, local.q, local.k, local.v, local.o, local.logits);
    for (int64_t c = 0; c < layer.chunks(step) && p.layer.keep != ulysses::keep::nothing; ++c)
        collect_log_sum_exp<T>(saved, layer.planned(step, c), whole.lse);
    attend_backward(layer, step, saved, local);
    local.put_back_into(whole, step, ranks.rank());
}

template <class T>
bool same_bits(results<T> const& a, results<T> const& b) {
    return same_bits(a.o, b.o) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) &&
           same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv);
}

/// Where one rank is a serial group, as in an engine without sequence parallelism; elsewhere a
/// group of one thread, which spares the compiler a pipeline.
template <class Attention, class T>
inline constexpr bool serial_alone = false;
template <>
inline constexpr bool serial_alone<builtin_attention, float> = true;
template <>
inline constexpr bool serial_alone<builtin_attention, double> = true;

/// Forward and backward over as many ranks as `queries` lists.
template <class Attention, class T>
results<T> compute(problem<T> const& p, orders const& queries, orders const& keys = {},
                   Attention const& attention = {}, reach way = reach_under_test()) {
    results<T> whole(p);
    auto const step = p.step(queries, keys);
    if constexpr (serial_alone<Attention, T>)
        if (step.ranks() == 1) {
            compute_rank(ulysses::serial{}, p, step, attention, whole);
            return whole;
        }
    ulysses::threads::options settings;
    settings.hosts = hosts_of(way, step.ranks());
    ulysses::threads::run(
        step.ranks(),
        [&](ulysses::threads::communicator ranks) {
            compute_rank(ranks, p, step, attention, whole);
        },
        settings);
    return whole;
}

template <class Attention, class T>
results<T> compute_alone(problem<T> const& p) {
    auto const cross = p.keys != p.tokens;
    return compute<Attention>(p, equal_shares(p.tokens, 1),
                              cross ? equal_shares(p.keys, 1) : orders{});
}

// Instantiated once, in harness.cpp.
extern template void compute_rank<ulysses::threads::communicator, builtin_attention, double>(
    ulysses::threads::communicator const&, problem<double> const&, ulysses::sequence const&,
    builtin_attention const&, results<double>&);
extern template results<float> compute<builtin_attention, float>(problem<float> const&,
                                                                 orders const&, orders const&,
                                                                 builtin_attention const&, reach);
extern template results<double> compute<builtin_attention, double>(problem<double> const&,
                                                                   orders const&, orders const&,
                                                                   builtin_attention const&, reach);
extern template results<double>
compute<ulysses::reference_attention, double>(problem<double> const&, orders const&, orders const&,
                                              ulysses::reference_attention const&, reach);

/// How far results may lie from exact ones. With u the unit roundoff of the accumulator and largest
/// magnitudes of the operands: a score, of D products, is off by (D + 8) u |q||k|; a probability by
/// twice that and its normaliser's S u, relatively; sums over keys or rows add one u a term;
/// results stored in 16 bits add their own roundoff, and so does the o that backward reads.
struct bounds {
    double o = 0, lse = 0, dq = 0, dk = 0, dv = 0, dsinks = 0, dbias = 0;
};

template <class T>
constexpr double stored_roundoff() {
    switch (ulysses::dtype_of<T>) {
        case ulysses::dtype::f64: return 0x1p-53;
        case ulysses::dtype::f32: return 0x1p-24;
        case ulysses::dtype::f16: return 0x1p-11;
        default: return 0x1p-8;
    }
}

/// The largest sum, over all rows of a key's query heads, of the probabilities of that key.
double largest_key_weight(problem<double> const& p);

template <class T>
bounds bounds_of(problem<T> const& p, int ranks) {
    auto const magnitude = [](tensor<T> const& x) {
        double largest = 0;
        for (auto const value : x.memory)
            largest = std::max(largest, std::fabs(static_cast<double>(value)));
        return largest;
    };
    auto const u = stored_roundoff<ulysses::accumulator_t<T>>(), stored = stored_roundoff<T>();
    auto const dim = static_cast<double>(p.layer.head_dim);
    auto const value_dim = static_cast<double>(p.layer.value_dim);
    auto const keys = static_cast<double>(p.keys);
    auto const scale = std::fabs(ulysses::softmax_scale(p.layer));
    // Dropout raises what it keeps.
    auto const raised = 1 / (1 - p.layer.dropout.value());
    auto const q = magnitude(p.q), k = magnitude(p.k), v = magnitude(p.v) * raised,
               g = magnitude(p.dout);
    auto const largest_slope =
        p.slopes.empty() ? 0.0 : static_cast<double>(*std::ranges::max_element(p.slopes));
    auto const added = p.layer.logits.softcap.value() + magnitude(p.bias) +
                       largest_slope * (keys + static_cast<double>(p.tokens));
    auto const score = (dim + 8) * u * (scale * dim * q * k + 1) + 8 * u * added;
    auto const probability = 2 * score + (keys + 8) * u;
    auto const weight = largest_key_weight(converted<double>(p));
    auto const terms =
        static_cast<double>(p.layer.heads / p.layer.kv_heads * p.tokens + ranks + 4) * u;
    bounds b;
    b.o = v * (probability + (keys + 4) * u + stored);
    b.lse = score + (keys + 8) * u * (1 + std::log(keys + 1));
    auto const product = value_dim * g * v;  // |dout . v|, and so |delta|
    auto const ds =
        2 * product * (probability + 4 * u) + 2 * value_dim * u * product + value_dim * g * b.o;
    b.dq = scale * k * (ds + 2 * product * ((keys + 4) * u + stored));
    b.dv = g * raised * weight * (probability + terms + stored);
    b.dk = scale * q * weight * (ds + 2 * product * (terms + stored));
    // Sums over all rows, and over what a bias's extents of 1 stand for.
    auto const rows = static_cast<double>(p.batch * p.tokens);
    b.dsinks = rows * (ds + 2 * product * (rows + 8) * u);
    auto const all = rows * static_cast<double>(p.keys * p.layer.heads);
    auto const summed = all / std::max(1.0, static_cast<double>(p.bias.memory.size()));
    b.dbias = summed * (ds + 2 * product * (summed + 8) * u);
    return b;
}

#if ULYSSES_EXCEPTIONS
/// What one rank's call ended with.
struct outcome {
    ulysses::errc code = ulysses::errc::none;
    std::string text;
    int rank = -1;
};

template <class Body>
outcome outcome_of(Body&& body) {
    try {
        body();
    } catch (ulysses::error const& e) {
        return {e.code(), e.what(), e.rank()};
    }
    return {};
}
#endif

}  // namespace pipeline_test
