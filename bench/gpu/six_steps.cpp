// SPDX-License-Identifier: Apache-2.0

#include "engine.hpp"
#include "layers.hpp"
#include "sections.hpp"

#include <ulysses/adapters/cublas.hpp>
#include <ulysses/attention/reference.hpp>
#include <ulysses/comm/serial.hpp>
#include <ulysses/gemm/builtin.hpp>
#include <ulysses/projection/dense.hpp>
#include <ulysses/space/host.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

/// Six steps, projections by cuBLAS and attention by cuDNN in bf16: over ranks that share the device, against the
/// formula, and against one product, one attention and one product that nothing is around.
namespace ulysses_bench {

namespace {

namespace uly = ulysses;
using uly::bf16;

struct layer_sizes {
    std::int64_t tokens, channels, heads, dim;

    uly::shape shape() const {
        return {.heads = heads, .kv_heads = heads, .head_dim = dim, .mask = uly::mask::causal};
    }
    std::int64_t inner() const { return heads * dim; }
    std::int64_t elements() const { return tokens * channels; }
};

/// x, the weights of q, k and v as columns of one matrix, and those of the output.
template <class T>
using operands = std::array<std::vector<T>, 3>;

template <class T>
operands<T> made(layer_sizes const& of) {
    std::array const counts{of.elements(), of.channels * 3 * of.inner(), of.inner() * of.channels};
    std::array const sums{1.0, static_cast<double>(of.channels), static_cast<double>(of.inner())};
    operands<T> all;
    for (std::size_t i = 0; i < 3; ++i)
        for (std::int64_t j = 0; j < counts[i]; ++j)
            all[i].push_back(static_cast<T>(static_cast<float>(
                bf16(value_of(i, j) * static_cast<float>((i == 0 ? 1 : 3) / std::sqrt(sums[i]))))));
    return all;
}

template <class T>
uly::dense_weights<T> weights(layer_sizes const& of, T const* inward, T const* outward) {
    auto const stride = 3 * of.inner();
    uly::dense_weights<T> all;
    all.q = {inward, stride, false};
    all.k = {inward + of.inner(), stride, false};
    all.v = {inward + 2 * of.inner(), stride, false};
    all.o = {outward, of.channels, false};
    return all;
}

/// y in double.
std::vector<double> on_host(layer_sizes const& of) {
    auto all = made<double>(of);
    std::vector<double> y(static_cast<std::size_t>(of.elements()));
    uly::pipeline layer{uly::serial{}, uly::sequence_local{}, uly::reference_attention{},
                        of.shape(), uly::dense{uly::builtin_gemm{}}};
    using operand = device_operand<double, 3, uly::host_space>;
    std::array const sizes{std::int64_t{1}, of.tokens, of.channels};
    layer.forward(uly::sequence::of(1, shares(of.tokens, 1)), operand{all[0].data(), sizes},
                  weights<double>(of, all[1].data(), all[2].data()), operand{y.data(), sizes});
    return y;
}

struct outcome {
    std::vector<bf16> y;
    double seconds = 0, host_seconds = 0, graph_seconds = 0;
};

struct seconds_of_calls {
    double all, host;
};

/// Of one of `calls` calls, until the stream has done them, and until the host has.
template <class Call, class Wait>
seconds_of_calls timed(int calls, Call const& call, Wait const& wait) {
    wait();
    auto const start = std::chrono::steady_clock::now();
    auto const since = [&] {
        std::chrono::duration<double> const taken = std::chrono::steady_clock::now() - start;
        return taken.count() / calls;
    };
    for (int i = 0; i < calls; ++i) call();
    auto const host = since();
    wait();
    return {since(), host};
}

outcome bare(layer_sizes const& of, operands<bf16> const& in, int calls) {
    stream_owner const stream;
    auto const queue = uly::cuda_space::queue{.stream = stream.get()};
    engine_type engine;
    sdpa_type const attention(engine);
    uly::cublas const multiply;
    auto const inner = of.inner();
    device_array<bf16> const x(stream.get(), of.elements()), y(stream.get(), of.elements()),
        inward(stream.get(), of.channels * 3 * inner), outward(stream.get(), inner * of.channels),
        qkv(stream.get(), of.tokens * 3 * inner), o(stream.get(), of.tokens * inner);
    device_array<float> const lse(stream.get(), of.tokens * of.heads);
    x.put(in[0]), inward.put(in[1]), outward.put(in[2]);
    uly::queued<uly::gemm_call<bf16>, uly::cuda_space> first, last;
    first.m = last.m = of.tokens;
    first.n = 3 * inner, first.k = of.channels;
    first.a = {x.data(), of.channels}, first.b = {inward.data(), 3 * inner};
    first.c = qkv.data(), first.c_stride = 3 * inner;
    last.n = of.channels, last.k = inner;
    last.a = {o.data(), inner}, last.b = {outward.data(), of.channels};
    last.c = y.data(), last.c_stride = of.channels;
    first.queue = last.queue = queue;
    uly::queued<uly::attention_call, uly::cuda_space> call;
    call.queue = queue;
    call.visible.mask = uly::mask::causal;
    call.visible.queries = call.visible.keys = of.tokens;
    call.scale = uly::softmax_scale(uly::checked(of.shape()));
    uly::extents4 const extents{1, of.tokens, of.heads, of.dim};
    auto const part = [&](std::int64_t which) {
        return uly::head_view<bf16 const>(qkv.data() + which * inner, extents,
                                          {of.tokens * 3 * inner, 3 * inner, of.dim, 1});
    };
    uly::head_view<bf16> const out(o.data(), extents);
    uly::head_view<float> const rows(lse.data(), {1, of.tokens, of.heads, 1});
    auto const bytes = attention.prepare(call, part(0), part(1), part(2), out, rows);
    device_array<std::byte> const workspace(stream.get(), static_cast<std::int64_t>(bytes));
    call.workspace = {workspace.data(), workspace.bytes()};
    auto const run = [&] {
        multiply(first);
        attention.forward(call, part(0), part(1), part(2), out, rows);
        multiply(last);
    };
    run();
    auto const taken = timed(calls, run, [&] { stream.wait(); });
    outcome result{std::vector<bf16>(static_cast<std::size_t>(of.elements())), taken.all,
                   taken.host};
    y.get(result.y);
    return result;
}

/// Over ranks; with `fence_way::flags` by a graph as well.
outcome over_ranks(layer_sizes const& of, operands<bf16> const& in, int ranks, int calls,
                   uly::cuda_peers::fence_way fence) {
    outcome result{std::vector<bf16>(static_cast<std::size_t>(of.elements()))};
    auto const most = [](std::vector<double> const& x) { return *std::ranges::max_element(x); };
    std::vector<double> all(static_cast<std::size_t>(ranks)), host(all), graphs(all);
    on_threads(ranks, {.fence = fence}, [&](ranks_type const& each) {
        auto const stream = each.queue().stream;
        auto const [begin, count] = share(of.tokens, each.rank(), ranks);
        auto const first = static_cast<std::size_t>(begin * of.channels),
                   elements = static_cast<std::size_t>(count * of.channels),
                   me = static_cast<std::size_t>(each.rank());
        device_array<bf16> const x(stream, count * of.channels), y(stream, count * of.channels),
            inward(stream, of.channels * 3 * of.inner()), outward(stream, of.inner() * of.channels);
        x.put(std::span(in[0]).subspan(first, elements));
        inward.put(in[1]), outward.put(in[2]);
        engine_type engine;
        uly::pipeline layer{each, uly::sequence_local{}, sdpa_type(engine), of.shape(),
                            uly::dense{uly::cublas{}}};
        auto const step = uly::sequence::of(1, shares(of.tokens, ranks));
        using operand = device_operand<bf16, 3>;
        std::array const sizes{std::int64_t{1}, count, of.channels};
        auto const run = [&] {
            layer.forward(step, operand{x.data(), sizes},
                          weights<bf16>(of, inward.data(), outward.data()),
                          operand{y.data(), sizes});
        };
        auto const wait = [&] {
            uly::detail::expect_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
            each.host().fence({});
        };
        run();
        auto const taken = timed(calls, run, wait);
        all[me] = taken.all, host[me] = taken.host;
        y.get(std::span(result.y).subspan(first, elements));
        if (fence != uly::cuda_peers::fence_way::flags) return;
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t replay = nullptr;
        uly::detail::expect_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                                 "cudaStreamBeginCapture");
        run();
        uly::detail::expect_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
        uly::detail::expect_cuda(cudaGraphInstantiate(&replay, graph, 0), "cudaGraphInstantiate");
        std::vector<bf16> const nothing(elements);
        y.put(nothing);
        auto const launch = [&] {
            uly::detail::expect_cuda(cudaGraphLaunch(replay, stream), "cudaGraphLaunch");
        };
        graphs[me] = timed(calls, launch, wait).all;
        y.get(std::span(result.y).subspan(first, elements));  // what the graph computed
        each.host().fence({});
        cudaGraphExecDestroy(replay);
        cudaGraphDestroy(graph);
    });
    result.seconds = most(all), result.host_seconds = most(host),
    result.graph_seconds = most(graphs);
    return result;
}

/// The largest difference as a part of what is allowed: q, k, v, P, o and y are rounded to bf16, each by half a step
/// of 2^-8, of what is at most as large as the largest y.
template <class T>
double part_of_allowed(std::vector<bf16> const& seen, std::vector<T> const& exact) {
    double largest = 0, magnitude = 0;
    for (std::size_t i = 0; i < seen.size(); ++i) {
        auto const x = static_cast<double>(exact[i]);
        auto const off = std::fabs(static_cast<double>(static_cast<float>(seen[i])) - x);
        if (!(off <= largest)) largest = off;
        magnitude = std::max(magnitude, std::fabs(x));
    }
    return largest / (6 * 0x1p-9 * magnitude);
}

void add_difference(std::vector<result>& rows, std::string const& name, double part,
                    std::string_view against) {
    rows.push_back({name + ": difference", part, "parts", uly::concat(against, ": what is allowed"),
                    part, "<= 1"});
}

void add_bits(std::vector<result>& rows, std::string const& name, outcome const& seen,
              std::vector<bf16> const& one) {
    double differ = 0;
    for (std::size_t i = 0; i < one.size(); ++i) differ += seen.y[i].bits != one[i].bits;
    rows.push_back({name + ": other elements", differ, "", "the bits of 1 rank, of all",
                    differ / static_cast<double>(one.size())});
}

}  // namespace

void measure_six_steps(std::vector<result>& rows, bool quick) {
    using uly::cuda_peers::fence_way;
    auto const small = quick ? layer_sizes{64, 16, 8, 8} : layer_sizes{1024, 512, 8, 64};
    auto const in = made<bf16>(small);
    auto const exact = on_host(small);
    auto const alone = bare(small, in, quick ? 1 : 50);
    add_difference(rows, "bare calls", part_of_allowed(alone.y, exact), "fp64 on the host");
    std::vector<bf16> one;
    for (auto const fence : {fence_way::events, fence_way::flags})
        for (int const ranks : {1, 2, 4, 8}) {
            auto const by_graph = fence == fence_way::flags;
            auto const name =
                uly::concat("6 steps", by_graph ? " by a graph, " : ", ", ranks, " ranks");
            section(rows, name, [&] {
                auto const seen = over_ranks(small, in, ranks, quick ? 1 : 50, fence);
                if (one.empty()) one = seen.y;
                add_difference(rows, name, part_of_allowed(seen.y, exact), "fp64 on the host");
                add_bits(rows, name, seen, one);
                if (by_graph)
                    rows.push_back({name, seen.graph_seconds * 1e6, "us", "by calls",
                                    seen.graph_seconds / seen.seconds});
                else
                    rows.push_back({uly::concat("host time of ", name), seen.host_seconds * 1e6,
                                    "us", "of the bare calls",
                                    seen.host_seconds / alone.host_seconds});
            });
        }
    if (quick) return;
    layer_sizes const large{32768, 2048, 16, 128};
    auto const operands = made<bf16>(large);
    auto const expected = bare(large, operands, 10);
    one.clear();
    for (int const ranks : {1, 2, 4, 8}) {
        auto const name = uly::concat("6 steps of ", large.tokens, " tokens, ", ranks, " ranks");
        section(rows, name, [&] {
            auto const seen = over_ranks(large, operands, ranks, 10, fence_way::events);
            if (one.empty()) one = seen.y;
            add_difference(rows, name, part_of_allowed(seen.y, expected.y), "bare calls");
            add_bits(rows, name, seen, one);
            rows.push_back({name, seen.seconds * 1e3, "ms", "bare GEMM, SDPA, GEMM",
                            seen.seconds / expected.seconds});
        });
    }
}

}  // namespace ulysses_bench
