// SPDX-License-Identifier: Apache-2.0

#include "engine.hpp"
#include "layers.hpp"
#include "sections.hpp"

#include <ulysses/attention/reference.hpp>

#include "../../tests/attention/problem.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// cuDNN's functor: what its options compute against the formula in double, as a part of what is allowed;
/// how fast it is; and a causal forward of a million tokens.
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

/// One option's largest error as a part of what is allowed, and of what; a text where cuDNN has no such plan.
struct outcome {
    std::string refused{};
    double part = 0;
    std::string_view worst = "o";

    void take(std::string_view of, double seen) {
        if (!(seen <= part)) part = seen, worst = of;
    }
};

outcome compare(engine_type& engine, option const& asked, bool backward) {
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
    outcome result;
    sdpa_type const attention(engine, asked.options);
    try {
        device_problem<uly::bf16> on(p);
        on.forward(attention);
        if (backward) on.backward(attention);
        on.fetch();
    } catch (uly::unsupported const& failure) {
        result.refused = failure.what();
        return result;
    }
    auto exact = attention_test::converted<double>(p);
    exact.forward(uly::reference_attention{});
    exact.backward(uly::reference_attention{});
    auto const allowed = attention_test::bounds_of(p);
    // An item's dk and dv are rounded to bf16 once more.
    auto const rounding = [](operand<double> const& x) {
        double largest = 0;
        for (auto const value : x.memory) largest = std::max(largest, std::fabs(value));
        return largest * 0x1p-8;
    };
    auto const worst = [](std::vector<float> const& x, std::vector<double> const& y) {
        double largest = 0;
        for (std::size_t i = 0; i < x.size(); ++i)
            if (auto const off = std::fabs(static_cast<double>(x[i]) - y[i]); !(off <= largest))
                largest = off;
        return largest;
    };
    // P and dS are rounded to bf16 between products: half a step of each, of sums of up to 1.
    constexpr double product = 4 * 0x1p-8;
    result.take("o", largest_difference(p.o, exact.o) / (allowed.o + product));
    result.take("lse", largest_difference(p.lse, exact.lse) / (allowed.lse + 1e-5));
    if (!backward) return result;
    result.take("dq", largest_difference(p.dq, exact.dq) / (allowed.dq + product));
    result.take("dk",
                largest_difference(p.dk, exact.dk) / (allowed.dk + rounding(exact.dk) + product));
    result.take("dv",
                largest_difference(p.dv, exact.dv) / (allowed.dv + rounding(exact.dv) + product));
    result.take("dsinks", worst(p.dsinks, exact.dsinks) / (allowed.dsinks + product));
    result.take("dbias", worst(p.dbias, exact.dbias) / (allowed.dbias + product));
    return result;
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
        device_problem<uly::bf16> on(p);
        on.forward(attention);
        on.fetch();
        for (auto const value : p.o.memory) mean += static_cast<double>(value);
        mean /= static_cast<double>(p.o.memory.size());
    }
    return std::fabs(means[0] - 1) < 0.01 && means[0] == means[1];
}

/// Milliseconds on the device and microseconds on the host of a call.
struct timing {
    double ms, host_us;
};

/// Causal: half of 4 S^2 D operations a head forward, 2.5 times that backward.
double tflops(std::int64_t tokens, std::int64_t heads, double ms, double factor) {
    auto const s = static_cast<double>(tokens);
    return factor * 2 * s * s * 128 * static_cast<double>(heads) / (ms * 1e9);
}

void measure_speed(std::vector<result>& rows, engine_type& engine, std::int64_t tokens,
                   bool quick) {
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
    device_problem<uly::bf16> on(p);
    auto const timed = [&](auto const& call) {
        int const calls = quick ? 1 : 10;
        for (int i = 0; i < (quick ? 1 : 3); ++i) call();
        on.stream.wait();
        event_pair const events;
        events.begin(on.stream);
        auto const before = std::chrono::steady_clock::now();
        for (int i = 0; i < calls; ++i) call();
        std::chrono::duration<double, std::micro> const host =
            std::chrono::steady_clock::now() - before;
        return timing{events.end(on.stream) / calls, host.count() / calls};
    };
    auto const add = [&](std::string_view pass, double factor, timing const& took) {
        auto const name = uly::concat("cuDNN ", pass, ", ", tokens, " tokens");
        rows.push_back({name, tflops(tokens, 8, took.ms, factor), "TFLOP/s",
                        uly::concat("causal, 8 heads of 128, 2 kv; ", took.ms, " ms")});
        rows.push_back({name + ", host time", took.host_us, "us", ""});
    };
    add("forward", 1, timed([&] { on.forward(attention); }));
    add("backward", 2.5, timed([&] { on.backward(attention); }));
}

/// A million tokens ------------------------------------------------------------------------------

/// Values that repeat after a prime number of elements; queries are large, so that few keys count.
constexpr std::int64_t period = 1000003;
uly::bf16 long_value(std::size_t operand, std::int64_t index) {
    auto const value = value_of(operand, index % period);
    return uly::bf16(operand == 0 ? 12 * value : value);
}

/// o of one row and head in double.
std::vector<double> exact_row(std::int64_t row, std::int64_t head, std::int64_t heads) {
    constexpr std::int64_t dim = 128;
    std::array<std::vector<double>, 3> values;
    for (std::size_t i = 0; i < 3; ++i)
        for (std::int64_t j = 0; j < period; ++j)
            values[i].push_back(static_cast<double>(static_cast<float>(long_value(i, j))));
    auto const at = [&](std::size_t i, std::int64_t index) {
        return values[i][static_cast<std::size_t>(index % period)];
    };
    std::vector<double> scores, o(dim);
    for (std::int64_t j = 0; j <= row; ++j) {
        double sum = 0;
        for (std::int64_t d = 0; d < dim; ++d)
            sum += at(0, (row * heads + head) * dim + d) * at(1, j * dim + d);
        scores.push_back(sum / std::sqrt(static_cast<double>(dim)));
    }
    auto const most = *std::ranges::max_element(scores);
    double total = 0;
    for (std::int64_t j = 0; j <= row; ++j) {
        auto const weight = std::exp(scores[static_cast<std::size_t>(j)] - most);
        total += weight;
        if (weight < 1e-12) continue;
        for (std::int64_t d = 0; d < dim; ++d)
            o[static_cast<std::size_t>(d)] += weight * at(2, j * dim + d);
    }
    for (auto& each : o) each /= total;
    return o;
}

/// Causal attention of 8 heads with one key-value head over ranks that share the device.
void measure_long(std::vector<result>& rows, int ranks, bool quick) {
    constexpr std::int64_t heads = 8, dim = 128;
    std::int64_t const tokens = quick ? 128 : 1048576;
    uly::shape const layer{
        .heads = heads, .kv_heads = 1, .head_dim = dim, .mask = uly::mask::causal};
    auto const name = uly::concat(tokens, " tokens, causal, ", ranks, " ranks");
    std::vector<double> taken(static_cast<std::size_t>(ranks)), off(taken);
    auto const body = [&](ranks_type const& each) {
        engine_type engine;
        auto const stream = each.queue().stream;
        auto const [first, count] = share(tokens, each.rank(), each.size());
        std::array<std::int64_t, 4> const columns{heads * dim, dim, dim, heads * dim};
        std::vector<std::unique_ptr<device_array<uly::bf16>>> memory;
        for (std::size_t i = 0; i < 4; ++i) {
            auto const elements = count * columns[i];
            memory.push_back(std::make_unique<device_array<uly::bf16>>(stream, elements));
            if (i == 3) break;
            std::vector<uly::bf16> part(
                static_cast<std::size_t>(std::min<std::int64_t>(period, elements)));
            for (std::int64_t j = 0; j < static_cast<std::int64_t>(part.size()); ++j)
                part[static_cast<std::size_t>(j)] = long_value(i, first * columns[i] + j);
            for (std::int64_t done = 0; done < elements; done += period)
                memory[i]->put(std::span(part).first(
                                   static_cast<std::size_t>(std::min(period, elements - done))),
                               done);
        }
        auto const operand = [&](std::size_t i) {
            return device_operand<uly::bf16>{memory[i]->data(), {1, count, columns[i] / dim, dim}};
        };
        uly::pipeline whole{each, uly::sequence_local{}, sdpa_type(engine), layer};
        auto const step = uly::sequence::of(1, shares(tokens, ranks));
        auto& seconds = taken[static_cast<std::size_t>(each.rank())];
        // The second call has its plans, windows and memory.
        for (int call = 0; call < 2; ++call) {
            each.host().fence({});
            auto const start = std::chrono::steady_clock::now();
            whole.attend(step, operand(0), operand(1), operand(2), operand(3));
            uly::detail::expect_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
            each.host().fence({});
            seconds =
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        }
        if (each.rank() != 0 && each.rank() + 1 != each.size()) return;
        auto const head = each.rank() == 0 ? 0 : heads - 1, row = count - 1;
        auto const exact = exact_row(first + row, head, heads);
        std::vector<uly::bf16> all(static_cast<std::size_t>(count * columns[3]));
        memory[3]->get(all);
        auto& largest = off[static_cast<std::size_t>(each.rank())];
        for (std::int64_t d = 0; d < dim; ++d) {
            auto const seen =
                static_cast<float>(all[static_cast<std::size_t>((row * heads + head) * dim + d)]);
            auto const differs =
                std::fabs(static_cast<double>(seen) - exact[static_cast<std::size_t>(d)]);
            if (!(differs <= largest)) largest = differs;
        }
    };
    try {
        on_threads(ranks, {}, body);
    } catch (uly::error const& failure) {
        if (failure.code() != uly::errc::out_of_memory) throw;
        rows.push_back(not_measured(name, "memory is short"));
        return;
    }
    auto const seconds = *std::ranges::max_element(taken);
    rows.push_back({name, tflops(tokens, heads, seconds * 1e3, 1), "TFLOP/s",
                    uly::concat("8 heads of 128, 1 kv, bf16; ", seconds, " s")});
    // P is rounded to bf16, as is o.
    constexpr double allowed = 4 * 0x1p-8;
    auto const worst = std::ranges::any_of(off, [](double x) { return !(x <= 1e30); })
                           ? std::nan("")
                           : *std::ranges::max_element(off);
    rows.push_back({name + ": difference", worst / allowed, "parts",
                    "fp64 on the host, two rows: what is allowed", worst / allowed, "<= 1"});
}

}  // namespace

void measure_cudnn(std::vector<result>& rows, bool quick) {
    engine_type engine;
    auto const all = options();
    for (std::size_t i = 0; i < all.size(); i += quick ? 9 : 1)
        section(rows, "cuDNN, " + all[i].name, [&] {
            auto name = "cuDNN, " + all[i].name;
            auto seen = compare(engine, all[i], true);
            if (!seen.refused.empty()) {
                rows.push_back(not_measured(name + ", backward", seen.refused));
                seen = compare(engine, all[i], false);
                name += ", forward";
            }
            if (!seen.refused.empty())
                rows.push_back(not_measured(name, seen.refused));
            else
                rows.push_back({name, seen.part, "parts",
                                uly::concat("fp64 on the host: what is allowed, of ", seen.worst),
                                seen.part, "<= 1"});
        });
    section(rows, "cuDNN, dropout", [&] {
        auto const wrong = dropout_is_right(engine) ? 0.0 : 1.0;
        rows.push_back({"cuDNN, dropout", wrong, "", "a mean of 1, and repeats", wrong, "<= 0"});
    });
    for (std::int64_t const tokens : {2048, 8192, 32768}) {
        if (quick && tokens > 2048) break;
        section(rows, "cuDNN, speed",
                [&] { measure_speed(rows, engine, quick ? 64 : tokens, quick); });
    }
    for (int const ranks : {1, 8})
        section(rows, "1048576 tokens", [&] { measure_long(rows, ranks, quick); });
}

}  // namespace ulysses_bench
