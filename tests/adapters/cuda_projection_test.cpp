// SPDX-License-Identifier: Apache-2.0

#include "../doubles/cublas.hpp"
#include "../pipeline/six_steps.hpp"
#include "cuda_pipeline.hpp"
#include "cuda_ranks.hpp"

#include <ulysses/adapters/cublas.hpp>
#include <ulysses/attention/reference.hpp>
#include <ulysses/projection/epilogues.hpp>
#include <ulysses/projection/qk_norm.hpp>
#include <ulysses/projection/rope.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// Projections and epilogues over doubles of cuBLAS and of the CUDA runtime: what the host computes.
namespace {

namespace uly = ulysses;
using namespace pipeline_test;
using cuda_test::device_tensor;
using uly::cuda_space;

struct stream_owner {
    cudaStream_t stream = nullptr;
    stream_owner() { REQUIRE(cudaStreamCreateWithFlags(&stream, 0) == cudaSuccess); }
    stream_owner(stream_owner const&) = delete;
    stream_owner& operator=(stream_owner const&) = delete;
    ~stream_owner() { cudaStreamDestroy(stream); }
    cuda_space::queue queue() const { return {.stream = stream}; }
    void wait() const { REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess); }
};

template <class T>
bool same_bits(std::vector<T> const& a, std::vector<T> const& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Six steps -----------------------------------------------------------------------------------------

constexpr std::int64_t documents[] = {0, 5, 17, 20, 29};

/// A layer with biases, norms and rotary embedding over packed documents; the norms' weights lie behind the
/// other parameters.
struct trial {
    six_problem<double> p;

    explicit trial(uly::keep keep, bool transposed)
        : p(7,
            {.heads = 6,
             .kv_heads = 2,
             .head_dim = 6,
             .value_dim = 3,
             .mask = uly::mask::causal,
             .keep = keep},
            2, 17, 9) {
        p.transposed = transposed;
        std::mt19937_64 random{8};
        tensor<double> norms({1, 1, 1, 2 * p.layer.head_dim});
        fill_uniform(random, norms);
        for (auto const each : norms.memory) p.parameters.push_back(1.5 + each);
    }

    uly::sequence step(int ranks) const {
        auto made = uly::sequence::of(p.batch, zigzag(p.tokens, ranks));
        made.pack({.documents = documents});
        return made;
    }
    auto epilogue() const {
        return uly::epilogues{uly::qk_norm{{.epsilon = 0.1}}, uly::rope{p.layer.head_dim}};
    }
    template <class Views, class Pointer>
    Views with_norms(Views views, Pointer parameters) const {
        views.q_norm = parameters + p.places().count();
        views.k_norm = views.q_norm + p.layer.head_dim;
        return views;
    }
    auto weights(double const* of) const { return with_norms(p.places().weights(of), of); }
    auto gradients(double* of) const { return with_norms(p.places().gradients(of), of); }
};

/// [B, s, C] on a device: an operand of whole tokens.
struct device_tokens {
    using space_type = cuda_space;
    device_tensor<double> const* memory;
    double* data() const { return memory->data(); }
    std::array<std::int64_t, 3> extents() const {
        auto const& sizes = memory->extents();
        return {sizes[0], sizes[1], sizes[3]};
    }
};

/// What one rank has after forward and backward, twice: y, dx and gradients.
struct rank_results {
    std::vector<double> y, dx, gradients;
    friend bool operator==(rank_results const& a, rank_results const& b) {
        return same_bits(a.y, b.y) && same_bits(a.dx, b.dx) && same_bits(a.gradients, b.gradients);
    }
};

rank_results on_host(uly::threads::communicator ranks, trial const& t) {
    auto const step = t.step(ranks.size());
    uly::pipeline layer{ranks, uly::sequence_local{}, uly::reference_attention{}, t.p.layer,
                        uly::dense{uly::builtin_gemm{}, t.epilogue()}};
    auto const x = own_part(step.queries(), ranks.rank(), t.p.x),
               dy = own_part(step.queries(), ranks.rank(), t.p.dy);
    tensor<double> y(x.sizes), dx(x.sizes);
    std::vector<double> gradients(t.p.parameters.size());
    auto saved = layer.make_context();
    for (int i = 0; i < 2; ++i) {
        auto const weights = t.weights(t.p.parameters.data());
        layer.forward(step, saved, token_operand(x), weights, token_operand(y));
        layer.backward(step, saved, token_operand(x), weights, token_operand(dy), token_operand(dx),
                       t.gradients(gradients.data()));
    }
    return {y.memory, dx.memory, gradients};
}

rank_results on_device(cuda_test::ranks_type const& ranks, trial const& t) {
    auto const step = t.step(ranks.size());
    auto const queue = ranks.queue();
    uly::pipeline layer{ranks, uly::sequence_local{},
                        cuda_test::on_stream<uly::reference_attention>{}, t.p.layer,
                        uly::dense{uly::cublas{}, t.epilogue()}};
    auto const own_x = own_part(step.queries(), ranks.rank(), t.p.x),
               own_dy = own_part(step.queries(), ranks.rank(), t.p.dy);
    auto const count = static_cast<std::int64_t>(t.p.parameters.size());
    tensor<double> parameters({1, 1, 1, count}), zeros({1, 1, 1, count});
    parameters.memory = t.p.parameters;
    zeros.memory.assign(t.p.parameters.size(), 0.0);
    device_tensor<double> const x(queue, own_x), dy(queue, own_dy), y(queue, own_x.sizes),
        dx(queue, own_x.sizes), all(queue, parameters), sums(queue, zeros);
    auto saved = layer.make_context();
    for (int i = 0; i < 2; ++i) {
        layer.forward(step, saved, device_tokens{&x}, t.weights(all.data()), device_tokens{&y});
        layer.backward(step, saved, device_tokens{&x}, t.weights(all.data()), device_tokens{&dy},
                       device_tokens{&dx}, t.gradients(sums.data()));
    }
    tensor<double> host_y(own_x.sizes), host_dx(own_x.sizes), host_sums(zeros);
    y.get(host_y);
    dx.get(host_dx);
    sums.get(host_sums);
    cudaStreamSynchronize(queue.stream);
    return {host_y.memory, host_dx.memory, host_sums.memory};
}

}  // namespace

TEST_CASE(
    "six steps over cuda_peers and cuBLAS, with biases, norms and rope, have the host's bits") {
    auto const before = doubles::allocated_bytes();
    for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing})
        for (int const ranks : {1, 2, 3}) {
            CAPTURE(ranks);
            trial const t(keep, keep == uly::keep::local);
            std::vector<rank_results> expected(static_cast<std::size_t>(ranks)), seen(expected);
            uly::threads::run(ranks, [&](uly::threads::communicator of) {
                expected[static_cast<std::size_t>(of.rank())] = on_host(of, t);
            });
            cuda_test::run(ranks, [&](cuda_test::ranks_type of) {
                seen[static_cast<std::size_t>(of.rank())] = on_device(of, t);
            });
            for (std::size_t r = 0; r < seen.size(); ++r) CHECK(seen[r] == expected[r]);
        }
    CHECK(doubles::allocated_bytes() == before);
    CHECK(doubles::cublas_handles() == 0);
}

TEST_CASE("a weight that cuBLAS refuses on one rank is the same error on every rank") {
    trial const t(uly::keep::exchanged, false);
    std::vector<std::string> texts(2);
    cuda_test::run(2, [&](cuda_test::ranks_type ranks) {
        auto const step = t.step(2);
        auto const queue = ranks.queue();
        uly::pipeline layer{ranks, uly::sequence_local{},
                            cuda_test::on_stream<uly::reference_attention>{}, t.p.layer,
                            uly::dense{uly::cublas{}}};
        auto const own_x = own_part(step.queries(), ranks.rank(), t.p.x);
        tensor<double> parameters({1, 1, 1, static_cast<std::int64_t>(t.p.parameters.size())});
        parameters.memory = t.p.parameters;
        device_tensor<double> const x(queue, own_x), y(queue, own_x.sizes), all(queue, parameters);
        auto weights = t.weights(all.data());
        auto const forward = [&] {
            layer.forward(step, device_tokens{&x}, weights, device_tokens{&y});
        };
        auto const good = weights.k.stride;
        if (ranks.rank() == 1) weights.k.stride = 5;
        try {
            forward();
        } catch (uly::invalid_tensor const& e) {
            texts[static_cast<std::size_t>(ranks.rank())] = e.what();
        }
        weights.k.stride = good;
        forward();  // the group goes on
        cudaStreamSynchronize(queue.stream);
    });
    CHECK(texts[0] == "ulysses: cublas: rows must not overlap: b stride 5, columns 12 (rank 1)");
    CHECK(texts[1] == texts[0]);
}

// Epilogues -----------------------------------------------------------------------------------------

namespace {

template <class T>
std::vector<T> uniform(std::uint64_t seed, std::size_t count) {
    std::mt19937_64 random{seed};
    std::vector<T> values(count);
    for (auto& each : values) {
        auto const x = static_cast<double>(random() >> 11) * 0x1p-52 - 1;
        if constexpr (std::is_same_v<T, double>)
            each = x;
        else
            each = static_cast<T>(static_cast<float>(x));
    }
    return values;
}

/// Rows [B, s, H, D] with something between them, and more in front.
template <class T>
struct padded_rows {
    std::vector<T> memory;
    uly::extents4 sizes, strides;
    std::size_t front;

    padded_rows(std::uint64_t seed, uly::extents4 const& extents, std::int64_t padding,
                std::size_t before = 0)
        : sizes(extents), front(before) {
        auto const row = extents[3] + padding;
        strides = {extents[1] * extents[2] * row, extents[2] * row, row, 1};
        memory = uniform<T>(seed, front + static_cast<std::size_t>(extents[0] * strides[0]));
    }
    uly::token_view<T> view() { return {memory.data() + front, sizes, strides}; }
};

uly::queued<uly::projection_call, cuda_space> on(uly::projection_call const& call,
                                                 stream_owner const& stream) {
    return {call, stream.queue()};
}

/// A step whose positions begin anew every few tokens: more runs of positions than a launch lists.
struct many_documents {
    static constexpr std::int64_t tokens = 301;
    std::vector<std::int64_t> begins;
    uly::sequence step = uly::sequence::of(2, striped(tokens, 2));

    many_documents() {
        for (std::int64_t sample : {0, 1})
            for (std::int64_t i = 0; i < tokens; i += 1 + i % 5)
                begins.push_back(sample * tokens + i);
        step.pack({.documents = begins});
    }
};

}  // namespace

TEST_CASE_TEMPLATE("rope on a queue has the host's bits", T, double, float, uly::half, uly::bf16) {
    stream_owner const stream;
    many_documents const packed;
    struct {
        std::int64_t dim;
        uly::rope_options options;
    } const cases[] = {{6, {}},
                       {300, {.base = 500}},
                       {8, {.dims = 4, .pairs = uly::rope_pairs::interleaved}},
                       {8, {.position_scale = 0.5, .restart_in_documents = false}}};
    for (auto const& each : cases)
        for (int const rank : {0, 1}) {
            auto const dim = each.dim;
            CAPTURE(dim);
            CAPTURE(rank);
            uly::projection_call call = uly::projection_call_of(packed.step, rank);
            if (dim == 6) {  // one whose runs are not known
                auto const position = [](void const* orders, int r, std::int64_t token) {
                    return static_cast<uly::token_orders const*>(orders)->position(r, token);
                };
                call.query_positions = {&packed.step.queries(), rank, position};
            }
            auto const own = packed.step.queries().count(rank);
            padded_rows<T> q(1, {2, own, 3, dim}, 2), k(2, {2, own, 1, dim}, 0);
            auto there_q = q, there_k = k;
            uly::rope const rope(dim, each.options);
            rope.forward(call, q.view(), k.view());
            rope.forward(on(call, stream), there_q.view(), there_k.view());
            stream.wait();
            CHECK(same_bits(there_q.memory, q.memory));
            CHECK(same_bits(there_k.memory, k.memory));
            rope.backward(call, q.view(), k.view());
            rope.backward(on(call, stream), there_q.view(), there_k.view());
            stream.wait();
            CHECK(same_bits(there_q.memory, q.memory));
            CHECK(same_bits(there_k.memory, k.memory));
        }
}

TEST_CASE_TEMPLATE("qk_norm on a queue has the host's bits, of rows that are aligned or not", T,
                   double, float, uly::half, uly::bf16) {
    stream_owner const stream;
    auto const step = uly::sequence::split(1, 2, 5);
    auto const call = uly::projection_call_of(step, 0);
    uly::qk_norm const norm({.epsilon = 1e-3});
    for (std::int64_t const dim : {1, 5, 16, 128})
        for (std::size_t const front : {0, 1}) {
            CAPTURE(dim);
            padded_rows<T> q(1, {2, 5, 3, dim}, 16, front), k(2, {2, 5, 2, dim}, 0, front);
            padded_rows<T> dq(3, q.sizes, 16), dk(4, k.sizes, 0);
            auto const gain = uniform<T>(5, static_cast<std::size_t>(dim));
            uly::dense_weights<T> weights;
            weights.q_norm = gain.data();
            auto there_q = q, there_k = k, there_dq = dq, there_dk = dk;
            norm.forward(call, weights, q.view(), k.view());
            norm.forward(on(call, stream), weights, there_q.view(), there_k.view());
            stream.wait();
            CHECK(same_bits(there_q.memory, q.memory));
            CHECK(same_bits(there_k.memory, k.memory));
            norm.backward(call, weights, q.view(), k.view(), dq.view(), dk.view());
            norm.backward(on(call, stream), weights, there_q.view(), there_k.view(),
                          there_dq.view(), there_dk.view());
            stream.wait();
            for (auto const& [there, here] :
                 {std::pair{&there_q, &q}, {&there_k, &k}, {&there_dq, &dq}, {&there_dk, &dk}})
                CHECK(same_bits(there->memory, here->memory));
        }
}

// Projections ---------------------------------------------------------------------------------------

namespace {

/// Small whole numbers, which all types hold and whose products and sums are exact.
template <class T>
std::vector<T> whole_numbers(std::uint64_t seed, std::size_t count) {
    std::mt19937_64 random{seed};
    std::vector<T> values(count);
    for (auto& each : values) each = static_cast<T>(static_cast<float>(below(random, 3) - 1));
    return values;
}

/// One layer [2, 7, 5] -> q [2, 7, 2, 3], k and v [2, 7, 1, 3] and back, with every gradient.
template <class T, class Dense, class Call>
std::vector<T> projected(Dense const& dense, Call const& call, int times) {
    constexpr std::int64_t c = 5, q_columns = 6, kv_columns = 3;
    auto const x = whole_numbers<T>(1, 2 * 7 * c), w = whole_numbers<T>(2, c * q_columns),
               bias = whole_numbers<T>(3, q_columns);
    std::vector<T> q(2 * 7 * q_columns), k(2 * 7 * kv_columns), v(k),
        dq(whole_numbers<T>(4, q.size())), dk(whole_numbers<T>(5, k.size())), dv(dk), dx(x.size()),
        y(x.size());
    std::vector<T> sums(c * q_columns + q_columns + c);
    auto const view = [](auto& of, std::int64_t heads, std::int64_t dim) {
        return uly::token_view<std::remove_reference_t<decltype(of[0])>>(of.data(),
                                                                         {2, 7, heads, dim});
    };
    uly::dense_weights<T> weights;
    weights.q = {w.data(), q_columns};
    weights.k = {w.data(), q_columns};
    weights.v = {w.data() + 3, q_columns};
    weights.o = {w.data(), q_columns, true};  // [C, Hq Dv]: stored as the transpose
    weights.q_bias = bias.data();
    weights.o_bias = bias.data();
    uly::dense_gradients<T> gradients;
    gradients.q = {sums.data(), q_columns};
    gradients.q_bias = sums.data() + c * q_columns;
    gradients.o_bias = gradients.q_bias + q_columns;
    for (int i = 0; i < times; ++i) {
        dense.template project_in<T>(call, view(x, 1, c), weights, view(q, 2, 3), view(k, 1, 3),
                                     view(v, 1, 3));
        dense.template project_in_backward<T>(call, view(x, 1, c), weights, view(dq, 2, 3),
                                              view(dk, 1, 3), view(dv, 1, 3), view(dx, 1, c),
                                              gradients);
        dense.template project_out<T>(call, view(q, 2, 3), weights, view(y, 1, c));
        dense.template project_out_gradients<T>(call, view(q, 2, 3), view(x, 1, c), gradients);
    }
    if constexpr (requires { call.queue.stream; }) cudaStreamSynchronize(call.queue.stream);
    std::vector<T> all;
    for (auto const* each : {&q, &k, &v, &dx, &y, &sums})
        all.insert(all.end(), each->begin(), each->end());
    return all;
}

}  // namespace

TEST_CASE_TEMPLATE("dense over cuBLAS: every product, bias and gradient, of any type", T, double,
                   float, uly::half, uly::bf16) {
    stream_owner const stream;
    auto const step = uly::sequence::split(1, 2, 7);
    auto const call = uly::projection_call_of(step, 0);
    auto const expected = projected<double>(uly::dense{uly::builtin_gemm{}}, call, 2);
    auto const seen = projected<T>(uly::dense{uly::cublas{}}, on(call, stream), 2);
    REQUIRE(seen.size() == expected.size());
    for (std::size_t i = 0; i < seen.size(); ++i)
        CHECK(static_cast<double>(seen[i]) == expected[i]);
}

TEST_CASE("dense over cuBLAS: captured after a first call, with the weights' gradients") {
    stream_owner const stream;
    auto const step = uly::sequence::split(1, 1, 40);
    auto const call = on(uly::projection_call_of(step, 0), stream);
    uly::dense const dense{uly::cublas{}, uly::epilogues{uly::qk_norm{}, uly::rope{4}}};
    auto const w = uniform<float>(1, 8 * 4), gain = uniform<float>(2, 4);
    auto x = uniform<float>(3, 40 * 8);
    std::vector<float> q(40 * 4), k(q), v(q), dq(q), dk(q), dv(q), dx(x.size()), sums(8 * 4 + 4);
    auto const view = [](auto& of, std::int64_t dim) {
        return uly::token_view<std::remove_reference_t<decltype(of[0])>>(of.data(),
                                                                         {1, 40, 1, dim});
    };
    uly::dense_weights<float> weights;
    weights.q = weights.k = weights.v = {w.data(), 4};
    weights.q_norm = weights.k_norm = gain.data();
    uly::dense_gradients<float> gradients;
    gradients.q = {sums.data(), 4};
    gradients.q_norm = sums.data() + 8 * 4;
    auto const enqueue = [&] {
        auto const in = view(std::as_const(x), 8);
        dense.project_in<float>(call, in, weights, view(q, 4), view(k, 4), view(v, 4));
        dense.project_in_backward<float>(call, in, weights, view(dq, 4), view(dk, 4), view(dv, 4),
                                         view(dx, 8), gradients);
    };
    auto const results = [&](auto const& run, std::uint64_t seed) {
        // In place: a graph knows addresses.
        auto const values = uniform<float>(seed, x.size());
        std::copy(values.begin(), values.end(), x.begin());
        for (auto* const each : {&dq, &dk, &dv})
            std::copy_n(values.begin(), each->size(), each->begin());
        std::fill(sums.begin(), sums.end(), 0.f);
        run();
        stream.wait();
        auto all = q;
        for (auto const* each : {&k, &dx, &sums}) all.insert(all.end(), each->begin(), each->end());
        return all;
    };
    auto const first = results(enqueue, 10), second = results(enqueue, 20);
    REQUIRE(!same_bits(first, second));
    REQUIRE(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    enqueue();
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamEndCapture(stream.stream, &graph) == cudaSuccess);
    cudaGraphExec_t program = nullptr;
    REQUIRE(cudaGraphInstantiate(&program, graph, 0) == cudaSuccess);
    auto const launch = [&] { cudaGraphLaunch(program, stream.stream); };
    CHECK(same_bits(results(launch, 20), second));
    CHECK(same_bits(results(launch, 10), first));
    cudaGraphExecDestroy(program);
    cudaGraphDestroy(graph);
}
