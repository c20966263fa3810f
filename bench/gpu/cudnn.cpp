// SPDX-License-Identifier: Apache-2.0

#include "../table.hpp"
#include "engine.hpp"
#include "layers.hpp"
#include "parts.hpp"

#include <ulysses/attention/reference.hpp>

#include "../../tests/attention/problem.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// cuDNN's functor: what its options compute against the formula in double, as a part of what is allowed, and how
/// fast it is.
namespace ulysses_bench {

namespace {

namespace uly = ulysses;
using attention_test::operand;
using attention_test::problem;
using attention_test::sizes;

/// Device memory with the bytes of a vector, given back to it by `fetch`.
template <class T>
class mirror {
   public:
    mirror(stream_owner const& stream, std::vector<T>& host)
        : host_(host), device_(stream.get(), static_cast<std::int64_t>(host.size())) {
        if (!host.empty()) device_.put(host);
    }
    T* data() const { return device_.data(); }
    void fetch() const {
        if (!host_.empty()) device_.get(host_);
    }
    std::span<T> span() const { return {data(), host_.size()}; }

   private:
    std::vector<T>& host_;
    device_array<T> device_;
};

/// A problem's operands on the device, and the calls on them.
template <class T>
struct device_problem {
    problem<T>& p;
    stream_owner stream{};
    mirror<T> q{stream, p.q.memory}, k{stream, p.k.memory}, v{stream, p.v.memory},
        o{stream, p.o.memory}, dout{stream, p.dout.memory}, dq{stream, p.dq.memory};
    mirror<float> lse{stream, p.lse.memory}, dk{stream, p.dk.memory}, dv{stream, p.dv.memory};
    mirror<float> slopes{stream, p.slopes}, sinks{stream, p.sinks}, bias{stream, p.bias},
        dsinks{stream, p.dsinks}, dbias{stream, p.dbias};
    std::unique_ptr<device_array<std::byte>> workspace{};

    template <class U, class V>
    static uly::head_view<U> view(operand<V> const& like, mirror<V> const& memory) {
        return {memory.data(), like.extents, like.strides};
    }

    uly::queued<uly::attention_call, uly::cuda_space> call() {
        uly::queued<uly::attention_call, uly::cuda_space> result;
        static_cast<uly::attention_call&>(result) = p.call();
        result.queue.stream = stream.get();
        if (!p.slopes.empty()) result.slopes = slopes.span();
        if (!p.sinks.empty()) result.sinks = sinks.span();
        if (!p.bias.empty()) result.bias = {static_cast<float const*>(bias.data()), p.bias_extents};
        if (workspace) result.workspace = {workspace->data(), workspace->bytes()};
        return result;
    }
    void reserve(std::size_t bytes) {
        if (workspace && bytes <= workspace->bytes()) return;
        workspace = std::make_unique<device_array<std::byte>>(stream.get(),
                                                              static_cast<std::int64_t>(bytes));
    }

    void forward(sdpa_type const& attention) {
        auto const run = [&](auto const& with) {
            with(call(), view<T const>(p.q, q), view<T const>(p.k, k), view<T const>(p.v, v),
                 view<T>(p.o, o), view<float>(p.lse, lse));
        };
        run([&](auto const&... given) { reserve(attention.prepare(given...)); });
        run([&](auto const&... given) { attention.forward(given...); });
    }
    void backward(sdpa_type const& attention) {
        uly::attention_backward_views<T> views{
            view<T const>(p.q, q),       view<T const>(p.k, k),
            view<T const>(p.v, v),       view<T const>(p.o, o),
            view<T const>(p.dout, dout), view<float const>(p.lse, lse),
            view<T>(p.dq, dq),           view<float>(p.dk, dk),
            view<float>(p.dv, dv),       {}};
        views.dlogits.sinks = dsinks.span();
        if (!p.dbias.empty()) views.dlogits.bias = {dbias.data(), p.bias_extents};
        reserve(attention.prepare(call(), views));
        attention.backward(call(), views);
    }
    void fetch() {
        o.fetch(), lse.fetch(), dq.fetch(), dk.fetch(), dv.fetch(), dsinks.fetch(), dbias.fetch();
    }
};

struct option {
    std::string name;
    std::function<void(sizes&)> change;
    std::function<void(problem<uly::bf16>&)> scores = {};
    uly::sdpa_options options = {};
};

std::vector<option> options() {
    auto const causal = [](sizes& s) { s.mask = uly::mask::causal; };
    auto const cut = [](sizes& s) { s.begin = 128, s.rows = s.tokens - 128; };
    auto const documents = [](sizes& s) {
        s.documents = {0, 100, 230, 0, 17};
        s.samples = {{0, s.keys, 0, 0, 3}, {0, s.keys, 0, 3, 2}};
    };
    auto const numbers = [](std::size_t count, float largest) {
        std::vector<float> result(count);
        for (std::size_t i = 0; i < count; ++i)
            result[i] = largest * static_cast<float>((i * 37 + 11) % 97) / 97;
        return result;
    };
    auto const with_bias = [=](problem<uly::bf16>& p) {
        p.bias_extents = {1, p.size.heads(), p.size.tokens, p.size.keys};
        p.bias = numbers(attention_test::at(p.size.heads() * p.size.tokens * p.size.keys), 1);
    };
    return {
        {"full", [](sizes&) {}},
        {"causal", causal},
        {"causal, cut rows", [=](sizes& s) { causal(s), cut(s); }},
        {"causal window, cut rows",
         [=](sizes& s) {
             causal(s), cut(s), s.window = {70, -1};
         }},
        {"window of both sides",
         [](sizes& s) {
             s.window = {70, 30};
         }},
        {"tokens first",
         [=](sizes& s) { causal(s), s.layout = attention_test::order::tokens_first; }},
        {"heads of their own", [=](sizes& s) { causal(s), s.kv_heads = 4, s.group = 1; }},
        {"Dv 128", [=](sizes& s) { causal(s), s.value_dim = 128; }},
        {"one row", [](sizes& s) { s.tokens = s.rows = 1; }},
        {"documents", documents},
        {"documents, causal", [=](sizes& s) { documents(s), causal(s); }},
        {"documents, causal, tokens first",
         [=](sizes& s) {
             documents(s), causal(s), s.layout = attention_test::order::tokens_first;
         }},
        {"documents, causal, cut rows", [=](sizes& s) { documents(s), causal(s), cut(s); }},
        {"documents, causal window",
         [=](sizes& s) {
             documents(s), causal(s), s.window = {40, -1};
         }},
        {"padding",
         [](sizes& s) {
             s.samples = {{0, 200, 0, 0, 0}, {40, s.keys, 0, 0, 0}};
         }},
        {"padding, causal",
         [=](sizes& s) {
             causal(s), s.samples = {{0, 200, 0, 0, 0}, {40, s.keys, 0, 0, 0}};
         }},
        {"rows without keys",
         [=](sizes& s) {
             causal(s), s.samples = {{0, 0, 0, 0, 0}, {0, s.keys, -60, 0, 0}};
         }},
        {"lengths rounded", causal, {}, {.round_lengths = true}},
        {"sinks", causal,
         [=](problem<uly::bf16>& p) { p.sinks = numbers(attention_test::at(p.size.heads()), 2); }},
        {"documents, sinks", [=](sizes& s) { documents(s), causal(s); },
         [=](problem<uly::bf16>& p) { p.sinks = numbers(attention_test::at(p.size.heads()), 2); }},
        {"softcap", causal, [](problem<uly::bf16>& p) { p.softcap = 1.5; }},
        {"softcap, cut rows", [=](sizes& s) { causal(s), cut(s); },
         [](problem<uly::bf16>& p) { p.softcap = 1.5; }},
        {"ALiBi", [](sizes&) {},
         [=](problem<uly::bf16>& p) {
             p.slopes = numbers(attention_test::at(p.size.heads()), 0.3f);
         }},
        {"ALiBi, causal, cut rows", [=](sizes& s) { causal(s), cut(s); },
         [=](problem<uly::bf16>& p) {
             p.slopes = numbers(attention_test::at(p.size.heads()), 0.3f);
         }},
        {"bias", causal, with_bias},
        {"bias, cut rows", [=](sizes& s) { causal(s), cut(s); }, with_bias},
        {"deterministic", causal, {}, {.deterministic = true}},
    };
}

/// The largest error of an option's outputs as a part of what is allowed, and of which.
struct worst_part {
    double part = 0;
    std::string_view of = "";

    void take(std::string_view name, double seen) {
        if (!(seen <= part)) part = seen, of = name;
    }
};

/// Forward, then backward, each a line.
void check_option(report const& to, engine_type& engine, option const& asked) {
    sizes size{.batch = 2,
               .tokens = 384,
               .keys = 384,
               .kv_heads = 2,
               .group = 2,
               .dim = 64,
               .value_dim = 64,
               .rows = 384,
               .held = 384,
               .scale = 0.125};
    asked.change(size);
    std::mt19937_64 random{1};
    auto p = attention_test::random_problem<uly::bf16>(random, size);
    if (asked.scores) asked.scores(p);
    attention_test::copy_scores(p, p);
    auto exact = attention_test::converted<double>(p);
    auto const allowed = attention_test::bounds_of(p);
    device_problem<uly::bf16> on{p};
    sdpa_type const attention(engine, asked.options);
    // `run` tells how far off it is; false: cuDNN has no such plan.
    auto const add = [&](std::string_view pass, auto const& run) {
        auto const name = uly::concat("cuDNN, ", asked.name, ", ", pass);
        worst_part seen;
        try {
            run(seen);
        } catch (uly::unsupported const& refused) {
            to.add(not_measured(name, refused.what()));
            return false;
        }
        to.add({name, seen.part, "parts",
                uly::concat("fp64 on the host: what is allowed, of ", seen.of), seen.part, "<= 1"});
        return true;
    };
    // P and dS are rounded to bf16 between products: half a step of each, of sums of up to 1.
    constexpr double product = 4 * 0x1p-8;
    auto const forward = add("forward", [&](worst_part& seen) {
        on.forward(attention);
        on.fetch();
        exact.forward(uly::reference_attention{});
        seen.take("o", largest_difference(p.o, exact.o) / (allowed.o + product));
        seen.take("lse", largest_difference(p.lse, exact.lse) / (allowed.lse + 1e-5));
    });
    if (!forward) return;
    // An item's dk and dv are rounded to bf16 once more.
    auto const rounding = [](operand<double> const& x) {
        double largest = 0;
        for (auto const value : x.memory) largest = std::max(largest, std::fabs(value));
        return largest * 0x1p-8;
    };
    auto const off = [](std::vector<float> const& x, std::vector<double> const& y) {
        double largest = 0;
        for (std::size_t i = 0; i < x.size(); ++i)
            if (auto const each = std::fabs(static_cast<double>(x[i]) - y[i]); !(each <= largest))
                largest = each;
        return largest;
    };
    add("backward", [&](worst_part& seen) {
        on.backward(attention);
        on.fetch();
        exact.backward(uly::reference_attention{});
        seen.take("dq", largest_difference(p.dq, exact.dq) / (allowed.dq + product));
        seen.take("dk",
                  largest_difference(p.dk, exact.dk) / (allowed.dk + rounding(exact.dk) + product));
        seen.take("dv",
                  largest_difference(p.dv, exact.dv) / (allowed.dv + rounding(exact.dv) + product));
        seen.take("dsinks", off(p.dsinks, exact.dsinks) / (allowed.dsinks + product));
        seen.take("dbias", off(p.dbias, exact.dbias) / (allowed.dbias + product));
    });
}

/// Dropout's masks are cuDNN's own: with values of 1 an output is, on average, 1, and a call repeats.
bool dropout_is_right(engine_type& engine) {
    sizes const size{.batch = 1,
                     .tokens = 1024,
                     .keys = 1024,
                     .kv_heads = 2,
                     .group = 1,
                     .dim = 64,
                     .value_dim = 64,
                     .rows = 1024,
                     .held = 1024,
                     .scale = 0.125};
    std::mt19937_64 random{1};
    auto p = attention_test::random_problem<uly::bf16>(random, size);
    std::fill(p.v.memory.begin(), p.v.memory.end(), uly::bf16(1.0f));
    p.dropout = {0.25, {.seed = 5}};
    sdpa_type const attention(engine);
    std::array<double, 2> means{};
    for (auto& mean : means) {
        device_problem<uly::bf16> on{p};
        on.forward(attention);
        on.fetch();
        for (auto const value : p.o.memory) mean += static_cast<double>(value);
        mean /= static_cast<double>(p.o.memory.size());
    }
    return std::fabs(means[0] - 1) < 0.01 && means[0] == means[1];
}

void measure_speed(report const& to, engine_type& engine, std::int64_t tokens, bool quick) {
    sizes const size{.batch = 1,
                     .tokens = tokens,
                     .keys = tokens,
                     .kv_heads = 2,
                     .group = 4,
                     .dim = 128,
                     .value_dim = 128,
                     .mask = uly::mask::causal,
                     .rows = tokens,
                     .held = tokens,
                     .scale = 0.0883};
    std::mt19937_64 random{1};
    auto p = attention_test::random_problem<uly::bf16>(random, size);
    sdpa_type const attention(engine);
    device_problem<uly::bf16> on{p};
    auto const add = [&](std::string_view pass, double factor, auto const& call) {
        for (int i = 0; i < (quick ? 1 : 3); ++i) call();
        int const calls = quick ? 1 : 10;
        auto const took = timed(calls, call, [&] { on.stream.wait(); });
        to.add({uly::concat("cuDNN ", pass, ", ", tokens, " tokens"),
                factor * causal_tflop(tokens, 8) / took.all, "TFLOP/s",
                uly::concat("8 heads, 2 kv, of 128; ", brief(took.all * 1e3), " ms, host ",
                            brief(took.host * 1e6), " us")});
    };
    add("forward", 1, [&] { on.forward(attention); });
    add("backward", 2.5, [&] { on.backward(attention); });
}

}  // namespace

group cudnn(bool quick) {
    auto const engine = std::make_shared<made_once<engine_type>>();
    auto const all = options();
    group parts;
    for (std::size_t i = 0; i < all.size(); i += quick ? 9 : 1)
        parts.push_back({"cuDNN, " + all[i].name, 60, [=, asked = all[i]](report const& to) {
                             check_option(to, engine->get(), asked);
                         }});
    parts.push_back(
        {"cuDNN, dropout", 60, [=](report const& to) {
             auto const wrong = dropout_is_right(engine->get()) ? 0.0 : 1.0;
             to.add({"cuDNN, dropout", wrong, "", "a mean of 1, and repeats", wrong, "<= 0"});
         }});
    for (std::int64_t const tokens : {2048, 8192, 32768})
        if (!quick || tokens == 2048)
            parts.push_back(
                {uly::concat("cuDNN, speed of ", tokens, " tokens"), 60, [=](report const& to) {
                     measure_speed(to, engine->get(), quick ? 64 : tokens, quick);
                 }});
    return parts;
}

}  // namespace ulysses_bench
