// SPDX-License-Identifier: Apache-2.0

#include "engine.hpp"
#include "layers.hpp"
#include "parts.hpp"

#include <ulysses/adapters/cublas.hpp>
#include <ulysses/attention/reference.hpp>
#include <ulysses/comm/serial.hpp>
#include <ulysses/gemm/builtin.hpp>
#include <ulysses/projection/dense.hpp>
#include <ulysses/space/host.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

/// Six steps, projections by cuBLAS and attention by cuDNN in bf16, forward and backward: over ranks that share the
/// device, against the formula, and against products and attention that nothing is around.
namespace ulysses_bench {

namespace {

namespace uly = ulysses;
using uly::bf16;
using uly::cuda_peers::fence_way;

struct layer_sizes {
    std::int64_t tokens, channels, heads, dim;

    uly::shape shape() const {
        return {.heads = heads, .kv_heads = heads, .head_dim = dim, .mask = uly::mask::causal};
    }
    std::int64_t inner() const { return heads * dim; }
    std::int64_t elements() const { return tokens * channels; }
    std::int64_t inward() const { return channels * 3 * inner(); }
    std::int64_t outward() const { return inner() * channels; }
};

/// x, the weights of q, k and v as columns of one matrix, those of the output, and dy. As outputs: y, their
/// gradients, dx.
template <class T>
using matrices = std::array<std::vector<T>, 4>;

template <class T>
matrices<T> made(layer_sizes const& of) {
    std::array const counts{of.elements(), of.inward(), of.outward(), of.elements()};
    auto const scale = [&](std::size_t i) {
        if (i == 0 || i == 3) return 1.0;
        return 3 / std::sqrt(static_cast<double>(i == 1 ? of.channels : of.inner()));
    };
    matrices<T> all;
    for (std::size_t i = 0; i < 4; ++i)
        for (std::int64_t j = 0; j < counts[i]; ++j)
            all[i].push_back(static_cast<T>(
                static_cast<float>(bf16(value_of(i, j) * static_cast<float>(scale(i))))));
    return all;
}

/// `Weights` over one matrix for q, k and v and another for the output.
template <class Weights, class T>
Weights weights(layer_sizes const& of, T* inward, T* outward) {
    auto const stride = 3 * of.inner();
    Weights all;
    all.q = {inward, stride, false};
    all.k = {inward + of.inner(), stride, false};
    all.v = {inward + 2 * of.inner(), stride, false};
    all.o = {outward, of.channels, false};
    return all;
}

/// A layer's calls on one rank: forward, and backward if it trains.
template <class Layer, class T, class Space>
class calls_of_layer {
   public:
    using operand = device_operand<T, 3, Space>;

    calls_of_layer(Layer& layer, layer_sizes const& of, int rank, int ranks, bool trains,
                   std::array<T*, 4> const& in, std::array<T*, 4> const& out)
        : layer_(layer),
          of_(of),
          sizes_{1, share(of.tokens, rank, ranks).second, of.channels},
          step_(uly::sequence::of(1, shares(of.tokens, ranks))),
          saved_(layer.make_context()),
          trains_(trains),
          in_(in),
          out_(out) {}

    void operator()() {
        auto const given = weights<uly::dense_weights<T>>(of_, in_[1], in_[2]);
        operand const x{in_[0], sizes_}, y{out_[0], sizes_}, dy{in_[3], sizes_},
            dx{out_[3], sizes_};
        if (!trains_) return layer_.forward(step_, x, given, y);
        layer_.forward(step_, saved_, x, given, y);
        layer_.backward(step_, saved_, x, given, dy, dx,
                        weights<uly::dense_gradients<T>>(of_, out_[1], out_[2]));
    }

   private:
    Layer& layer_;
    layer_sizes of_;
    std::array<std::int64_t, 3> sizes_;
    uly::sequence step_;
    typename Layer::context_type saved_;
    bool trains_;
    std::array<T*, 4> in_, out_;
};

/// Outputs in double.
matrices<double> on_host(layer_sizes const& of) {
    auto in = made<double>(of);
    matrices<double> out;
    std::array<double*, 4> from{}, to{};
    for (std::size_t i = 0; i < 4; ++i) {
        out[i].resize(in[i].size());
        from[i] = in[i].data(), to[i] = out[i].data();
    }
    uly::pipeline layer{uly::serial{}, uly::sequence_local{}, uly::reference_attention{},
                        of.shape(), uly::dense{uly::builtin_gemm{}}};
    calls_of_layer<decltype(layer), double, uly::host_space>(layer, of, 0, 1, true, from, to)();
    return out;
}

/// A rank's matrices on the device: `count` tokens of x and dy, or of y and dx.
class device_matrices {
   public:
    device_matrices(cudaStream_t stream, layer_sizes const& of, std::int64_t count) {
        for (auto const elements :
             {count * of.channels, of.inward(), of.outward(), count * of.channels})
            all_.push_back(std::make_unique<device_array<bf16>>(stream, elements));
    }
    device_array<bf16> const& operator[](std::size_t i) const { return *all_[i]; }
    std::array<bf16*, 4> data() const {
        return {all_[0]->data(), all_[1]->data(), all_[2]->data(), all_[3]->data()};
    }
    void clear() const {
        for (auto const& each : all_) each->clear();
    }

   private:
    std::vector<std::unique_ptr<device_array<bf16>>> all_;
};

/// Products and attention on one stream, forward, and backward if it trains.
class bare_calls {
   public:
    bare_calls(cudaStream_t stream, engine_type& engine, layer_sizes const& of, bool trains,
               std::array<bf16*, 4> const& in, std::array<bf16*, 4> const& out)
        : of_(of),
          trains_(trains),
          in_(in),
          out_(out),
          attention_(engine),
          qkv_(stream, 3 * of.tokens * of.inner()),
          dqkv_(stream, 3 * of.tokens * of.inner()),
          o_(stream, of.tokens * of.inner()),
          dout_(stream, of.tokens * of.inner()),
          lse_(stream, of.tokens * of.heads),
          sums_(stream, 2 * of.tokens * of.inner()) {
        call_.queue = {.stream = stream};
        call_.visible.mask = uly::mask::causal;
        call_.visible.queries = call_.visible.keys = of.tokens;
        call_.scale = uly::softmax_scale(uly::checked(of.shape()));
        uly::extents4 const extents{1, of.tokens, of.heads, of.dim};
        auto const inner = of.inner();
        auto const part = [&](auto const& of_three, std::int64_t which) {
            return uly::head_view<bf16>(of_three.data() + which * inner, extents,
                                        {3 * of.tokens * inner, 3 * inner, of.dim, 1});
        };
        auto const constant = [](auto const& x) {
            return uly::head_view<typename std::remove_cvref_t<decltype(*x.data)> const>(
                x.data, x.extents, x.strides);
        };
        output_ = {o_.data(), extents};
        rows_ = {lse_.data(), {1, of.tokens, of.heads, 1}};
        views_ = {constant(part(qkv_, 0)),
                  constant(part(qkv_, 1)),
                  constant(part(qkv_, 2)),
                  constant(output_),
                  uly::head_view<bf16 const>(dout_.data(), extents),
                  constant(rows_),
                  part(dqkv_, 0),
                  {sums_.data(), extents},
                  {sums_.data() + of.tokens * inner, extents},
                  {}};
        auto bytes = attention_.prepare(call_, views_.q, views_.k, views_.v, output_, rows_);
        if (trains) bytes = std::max(bytes, attention_.prepare(call_, views_));
        workspace_ =
            std::make_unique<device_array<std::byte>>(stream, static_cast<std::int64_t>(bytes));
        call_.workspace = {workspace_->data(), workspace_->bytes()};
    }

    /// dk and dv stay sums of floats, and the products take what is in their place.
    void operator()() const {
        auto const t = of_.tokens, c = of_.channels, i = of_.inner();
        multiply(t, 3 * i, c, {in_[0], c}, {in_[1], 3 * i}, qkv_.data());
        attention_.forward(call_, views_.q, views_.k, views_.v, output_, rows_);
        multiply(t, c, i, {o_.data(), i}, {in_[2], c}, out_[0]);
        if (!trains_) return;
        multiply(t, i, c, {in_[3], c}, {in_[2], c, true}, dout_.data());
        multiply(i, c, t, {o_.data(), i, true}, {in_[3], c}, out_[2]);
        attention_.backward(call_, views_);
        multiply(t, c, 3 * i, {dqkv_.data(), 3 * i}, {in_[1], 3 * i, true}, out_[3]);
        multiply(c, 3 * i, t, {in_[0], c, true}, {dqkv_.data(), 3 * i}, out_[1]);
    }

   private:
    void multiply(std::int64_t m, std::int64_t n, std::int64_t k, uly::gemm_operand<bf16> const& a,
                  uly::gemm_operand<bf16> const& b, bf16* c) const {
        uly::queued<uly::gemm_call<bf16>, uly::cuda_space> call;
        call.m = m, call.n = n, call.k = k;
        call.a = a, call.b = b, call.c = c, call.c_stride = n;
        call.queue = call_.queue;
        multiply_(call);
    }

    layer_sizes of_;
    bool trains_;
    std::array<bf16*, 4> in_, out_;
    sdpa_type attention_;
    uly::cublas multiply_;
    device_array<bf16> qkv_, dqkv_, o_, dout_;
    device_array<float> lse_, sums_;
    uly::queued<uly::attention_call, uly::cuda_space> call_;
    uly::head_view<bf16> output_;
    uly::head_view<float> rows_;
    uly::attention_backward_views<bf16> views_;
    std::unique_ptr<device_array<std::byte>> workspace_;
};

struct outcome {
    matrices<float> out;  ///< gradients of the weights are summed over ranks
    seconds_of_calls calls{}, graph{};
};

/// The largest difference of an output as a part of what is allowed, and of which.
struct worst_part {
    double part = 0;
    std::string_view of = "";
};

/// A layer, and what a process has measured of it.
class case_of_layer {
   public:
    case_of_layer(layer_sizes const& of, int calls, bool compares_with_host)
        : of_(of), calls_(calls), in_(made<bf16>(of)) {
        if (!compares_with_host) return;
        auto const out = on_host(of);
        for (std::size_t i = 0; i < 4; ++i) exact_[i].assign(out[i].begin(), out[i].end());
    }

    void measure_bare(report const& to) {
        auto const seen = compare(bare(false).out, exact_);
        to.add({"bare calls: difference", seen.part, "parts", "fp64 on the host: what is allowed",
                seen.part, "<= 1"});
    }
    void measure(report const& to, std::string const& name, int ranks, bool trains,
                 fence_way fence) {
        auto const several = ranks == 1 ? outcome{} : over_ranks(ranks, trains, fence);
        auto const& alone = one(trains, fence);
        auto const& seen = ranks == 1 ? alone : several;
        auto const by_host = !exact_[0].empty();
        auto const worst = compare(seen.out, by_host      ? exact_
                                             : ranks == 1 ? bare(trains).out
                                                          : alone.out);
        to.add({name + ": difference", worst.part, "parts",
                uly::concat(by_host      ? "fp64 on the host"
                            : ranks == 1 ? "bare calls"
                                         : "1 rank",
                            ": what is allowed, of ", worst.of),
                worst.part, "<= 1"});
        if (ranks > 1)
            for (auto const& [output, i] : {std::pair{"y", 0u}, std::pair{"dx", 3u}})
                if (i == 0 || trains) {
                    auto const differ = others(seen.out[i], alone.out[i]);
                    to.add({uly::concat(name, ": ", output), differ, "elements",
                            "other bits than 1 rank, of all",
                            differ / static_cast<double>(seen.out[i].size())});
                }
        if (fence == fence_way::flags)
            to.add({name, seen.graph.all * 1e6, "us", "by calls", seen.graph.all / seen.calls.all});
        else if (by_host)
            to.add({"host time of " + name, seen.calls.host * 1e6, "us", "of the bare calls",
                    seen.calls.host / bare(trains).calls.host});
        else
            to.add({name, seen.calls.all * 1e3, "ms", "bare products and attention",
                    seen.calls.all / bare(trains).calls.all});
    }

   private:
    outcome const& bare(bool trains) {
        auto& result = bare_[trains];
        if (!result) result = on_one_stream(trains);
        return *result;
    }
    outcome const& one(bool trains, fence_way fence) {
        auto& result = one_[trains][fence == fence_way::flags];
        if (!result) result = over_ranks(1, trains, fence);
        return *result;
    }

    /// Of it y alone is what a layer computes.
    outcome on_one_stream(bool trains) {
        stream_owner const stream;
        device_matrices const in(stream.get(), of_, of_.tokens), out(stream.get(), of_, of_.tokens);
        put(in, 0, of_.tokens), out.clear();
        bare_calls const call(stream.get(), engines_[0].get(), of_, trains, in.data(), out.data());
        call();
        outcome result;
        result.calls = timed(calls_, call, [&] { stream.wait(); });
        result.out[0].resize(in_[0].size());
        get(out, 0, std::span(result.out[0]));
        return result;
    }

    /// With `fence_way::flags` the results are a graph's.
    outcome over_ranks(int ranks, bool trains, fence_way fence) {
        outcome result;
        for (std::size_t i = 0; i < (trains ? 4 : 1); ++i) result.out[i].resize(in_[i].size());
        std::vector<seconds_of_calls> calls(static_cast<std::size_t>(ranks)), graphs(calls);
        std::mutex adding;
        on_threads(ranks, group_options(fence), [&](ranks_type const& each) {
            auto const stream = each.queue().stream;
            auto const me = static_cast<std::size_t>(each.rank());
            auto const own = share(of_.tokens, each.rank(), ranks);
            device_matrices const in(stream, of_, own.second), out(stream, of_, own.second);
            put(in, own.first, own.second), out.clear();
            uly::pipeline layer{each, uly::sequence_local{}, sdpa_type(engines_[me].get()),
                                of_.shape(), uly::dense{uly::cublas{}}};
            calls_of_layer<decltype(layer), bf16, uly::cuda_space> run(
                layer, of_, each.rank(), ranks, trains, in.data(), out.data());
            auto const call = [&] { run(); };
            auto const wait = [&] { wait_for(each); };
            auto const take = [&] {
                wait();
                std::lock_guard const lock(adding);
                for (std::size_t i = 0; i < 4; ++i)
                    if (!result.out[i].empty())
                        get(out, i, part(std::span(result.out[i]), i, own.first, own.second));
            };
            call();  // plans, windows and memory
            calls[me] = timed(calls_, call, wait);
            if (fence != fence_way::flags) {
                out.clear();
                call();
                return take();
            }
            graph_of_call const graph(stream, call);
            graphs[me].all = seconds_of_launch(graph, calls_, wait);
            out.clear();
            graph.launch();
            take();
        });
        result.calls = slowest(calls), result.graph = slowest(graphs);
        return result;
    }

    void put(device_matrices const& to, std::int64_t first, std::int64_t count) const {
        for (std::size_t i = 0; i < 4; ++i) to[i].put(part(std::span(in_[i]), i, first, count));
    }
    /// Weights, of which each rank has all, or the rows of some tokens.
    template <class T>
    std::span<T> part(std::span<T> all, std::size_t i, std::int64_t first,
                      std::int64_t count) const {
        if (i == 1 || i == 2) return all;
        return all.subspan(static_cast<std::size_t>(first * of_.channels),
                           static_cast<std::size_t>(count * of_.channels));
    }
    /// Adds to what is there.
    static void get(device_matrices const& from, std::size_t i, std::span<float> to) {
        std::vector<bf16> values(to.size());
        from[i].get(values);
        for (std::size_t j = 0; j < to.size(); ++j) to[j] += static_cast<float>(values[j]);
    }

    static double others(std::vector<float> const& x, std::vector<float> const& y) {
        double differ = 0;
        for (std::size_t i = 0; i < x.size(); ++i)
            differ += std::memcmp(&x[i], &y[i], sizeof x[i]) != 0;
        return differ;
    }

    /// What both have. Each rounding to bf16 moves a value by up to half a step of 2^-8; what is rounded on the way
    /// counts as much as the largest value that comes of it. To y: q, k, v, P, o, y; to a gradient also dO, dP, dS,
    /// dq, dk, dv and itself, in dx once for each of q, k and v.
    worst_part compare(matrices<float> const& seen, matrices<float> const& exact) const {
        auto const c = of_.channels, inner = of_.inner();
        struct output {
            std::string_view name;
            std::size_t matrix;
            std::int64_t stride, first, columns;
            int roundings;
        };
        worst_part worst;
        for (auto const& each :
             {output{"y", 0, c, 0, c, 6}, output{"dx", 3, c, 0, c, 15},
              output{"dWq", 1, 3 * inner, 0, inner, 13},
              output{"dWk", 1, 3 * inner, inner, inner, 13},
              output{"dWv", 1, 3 * inner, 2 * inner, inner, 13}, output{"dWo", 2, c, 0, c, 13}}) {
            auto const &x = seen[each.matrix], &y = exact[each.matrix];
            if (x.empty() || y.empty()) continue;
            double largest = 0, magnitude = 0;
            for (std::size_t i = 0; i < y.size(); ++i) {
                auto const column = static_cast<std::int64_t>(i) % each.stride - each.first;
                if (column < 0 || column >= each.columns) continue;
                auto const off = std::fabs(static_cast<double>(x[i]) - static_cast<double>(y[i]));
                if (!(off <= largest)) largest = off;
                magnitude = std::max(magnitude, std::fabs(static_cast<double>(y[i])));
            }
            auto const part = largest / (each.roundings * 0x1p-9 * magnitude);
            if (!(part <= worst.part)) worst = {part, each.name};
        }
        return worst;
    }

    layer_sizes of_;
    int calls_;
    matrices<bf16> in_;
    matrices<float> exact_;  ///< empty: not compared with
    std::array<made_once<engine_type>, 8> engines_;
    std::optional<outcome> bare_[2], one_[2][2];
};

}  // namespace

group six_steps(bool quick) {
    layer_sizes const small = quick ? layer_sizes{64, 16, 8, 8} : layer_sizes{512, 512, 8, 64},
                      large{16384, 2048, 16, 128};
    using shared_case = std::shared_ptr<made_once<case_of_layer>>;
    auto const on_small = std::make_shared<made_once<case_of_layer>>(),
               on_large = std::make_shared<made_once<case_of_layer>>();
    group parts{{"bare calls", 60, [=](report const& to) {
                     on_small->get(small, quick ? 1 : 50, true).measure_bare(to);
                 }}};
    auto const add = [&](shared_case const& layer, layer_sizes const& of, int calls, bool exact,
                         std::string const& what, fence_way fence) {
        for (auto const trains : {false, true})
            for (int const ranks : {1, 2, 4, 8}) {
                auto const name =
                    uly::concat(trains ? "training" : "6 steps", what, ", ", ranks, " ranks");
                parts.push_back(
                    {name, 60, [=](report const& to) {
                         layer->get(of, calls, exact).measure(to, name, ranks, trains, fence);
                     }});
            }
    };
    add(on_small, small, quick ? 1 : 50, true, "", fence_way::events);
    add(on_small, small, quick ? 1 : 50, true, " by a graph", fence_way::flags);
    if (!quick)
        add(on_large, large, 10, false, uly::concat(" of ", large.tokens, " tokens"),
            fence_way::events);
    return parts;
}

}  // namespace ulysses_bench
