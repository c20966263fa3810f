// SPDX-License-Identifier: Apache-2.0
// usage: cudnn [--json FILE]
// cuDNN's functor on the current device: what its options compute against the formula in double, how far
// off of what is allowed, then how fast it is. Exits with 1 where something is off, with 3 without a device.

#include <ulysses/adapters/cudnn.hpp>
#include <ulysses/attention/reference.hpp>

#include "../../tests/attention/problem.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace uly = ulysses;
using attention_test::operand;
using attention_test::problem;
using attention_test::sizes;

namespace {

void expect(cudaError_t result) { uly::detail::expect_cuda(result, "bench"); }

/// Device memory with the bytes of a vector, given back to it by `fetch`.
template <class T>
class mirror {
   public:
    explicit mirror(std::vector<T>& host) : host_(host) {
        expect(cudaMalloc(&device_, std::max<std::size_t>(bytes(), 1)));
        expect(cudaMemcpy(device_, host.data(), bytes(), cudaMemcpyHostToDevice));
    }
    mirror(mirror const&) = delete;
    mirror& operator=(mirror const&) = delete;
    ~mirror() { cudaFree(device_); }

    T* data() const { return static_cast<T*>(device_); }
    void fetch() const {
        expect(cudaMemcpy(host_.data(), device_, bytes(), cudaMemcpyDeviceToHost));
    }
    std::span<T> span() const { return {data(), host_.size()}; }

   private:
    std::size_t bytes() const { return host_.size() * sizeof(T); }
    std::vector<T>& host_;
    void* device_ = nullptr;
};

/// A problem's operands on the device, and the calls on them.
template <class T>
struct device_problem {
    problem<T>& p;
    mirror<T> q{p.q.memory}, k{p.k.memory}, v{p.v.memory}, o{p.o.memory}, dout{p.dout.memory},
        dq{p.dq.memory};
    mirror<float> lse{p.lse.memory}, dk{p.dk.memory}, dv{p.dv.memory};
    mirror<float> slopes{p.slopes}, sinks{p.sinks}, bias{p.bias}, dsinks{p.dsinks}, dbias{p.dbias};
    cudaStream_t stream = nullptr;
    void* workspace = nullptr;
    std::size_t workspace_bytes = 0;

    explicit device_problem(problem<T>& on) : p(on) { expect(cudaStreamCreate(&stream)); }
    device_problem(device_problem const&) = delete;
    device_problem& operator=(device_problem const&) = delete;
    ~device_problem() {
        cudaFree(workspace);
        cudaStreamDestroy(stream);
    }

    template <class U, class V>
    static uly::head_view<U> view(operand<V> const& like, mirror<V> const& memory) {
        return {memory.data(), like.extents, like.strides};
    }

    uly::queued<uly::attention_call, uly::cuda_space> call() {
        uly::queued<uly::attention_call, uly::cuda_space> result;
        static_cast<uly::attention_call&>(result) = p.call();
        result.queue.stream = stream;
        if (!p.slopes.empty()) result.slopes = slopes.span();
        if (!p.sinks.empty()) result.sinks = sinks.span();
        if (!p.bias.empty()) result.bias = {static_cast<float const*>(bias.data()), p.bias_extents};
        result.workspace = {static_cast<std::byte*>(workspace), workspace_bytes};
        return result;
    }
    void reserve(std::size_t bytes) {
        if (bytes <= workspace_bytes) return;
        cudaFree(workspace);
        expect(cudaMalloc(&workspace, bytes));
        workspace_bytes = bytes;
    }

    void forward(uly::cudnn_attention const& attention) {
        auto const run = [&](auto const& with) {
            with(call(), view<T const>(p.q, q), view<T const>(p.k, k), view<T const>(p.v, v),
                 view<T>(p.o, o), view<float>(p.lse, lse));
        };
        run([&](auto const&... given) { reserve(attention.prepare(given...)); });
        run([&](auto const&... given) { attention.forward(given...); });
    }
    void backward(uly::cudnn_attention const& attention) {
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
        expect(cudaStreamSynchronize(stream));
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

/// One option's largest errors as parts of what is allowed; a text where cuDNN has no such plan.
struct outcome {
    std::string name, refused;
    std::array<double, 7> parts{};  // o, lse, dq, dk, dv, dsinks, dbias
    bool right() const {
        return std::all_of(parts.begin(), parts.end(), [](double part) { return part <= 1; });
    }
};

outcome compare(uly::cudnn_engine& engine, option const& asked, bool backward) {
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
    outcome result{asked.name, {}, {}};
    uly::cudnn_attention const attention(engine, asked.options);
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
            largest = std::max(largest, std::fabs(static_cast<double>(x[i]) - y[i]));
        return largest;
    };
    // P and dS are rounded to bf16 between products: half a step of each, of sums of up to 1.
    constexpr double product = 4 * 0x1p-8;
    result.parts[0] = largest_difference(p.o, exact.o) / (allowed.o + product);
    result.parts[1] = largest_difference(p.lse, exact.lse) / (allowed.lse + 1e-5);
    if (!backward) return result;
    result.parts[2] = largest_difference(p.dq, exact.dq) / (allowed.dq + product);
    result.parts[3] =
        largest_difference(p.dk, exact.dk) / (allowed.dk + rounding(exact.dk) + product);
    result.parts[4] =
        largest_difference(p.dv, exact.dv) / (allowed.dv + rounding(exact.dv) + product);
    result.parts[5] = worst(p.dsinks, exact.dsinks) / (allowed.dsinks + product);
    result.parts[6] = worst(p.dbias, exact.dbias) / (allowed.dbias + product);
    return result;
}

/// Dropout's masks are cuDNN's own: with values of 1 an output is, on average, 1, and a call repeats.
bool dropout_is_right(uly::cudnn_engine& engine) {
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
    uly::cudnn_attention const attention(engine);
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

/// Milliseconds on the device and microseconds on the host of a call, forward and backward.
struct timing {
    std::int64_t tokens;
    double forward_ms, backward_ms, forward_host_us, backward_host_us;
    /// Causal: half of 4 S^2 D operations a head forward, 2.5 times that backward.
    double tflops(double ms, double factor) const {
        auto const s = static_cast<double>(tokens);
        return factor * 2 * s * s * 128 * 8 / (ms * 1e9);
    }
};

timing measure(uly::cudnn_engine& engine, std::int64_t tokens) {
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
    uly::cudnn_attention const attention(engine);
    device_problem<uly::bf16> on(p);
    cudaEvent_t begun = nullptr, done = nullptr;
    expect(cudaEventCreate(&begun));
    expect(cudaEventCreate(&done));
    auto const timed = [&](auto const& call) {
        constexpr int calls = 10;
        for (int i = 0; i < 3; ++i) call();
        expect(cudaStreamSynchronize(on.stream));
        expect(cudaEventRecord(begun, on.stream));
        auto const before = std::chrono::steady_clock::now();
        for (int i = 0; i < calls; ++i) call();
        std::chrono::duration<double, std::micro> const host =
            std::chrono::steady_clock::now() - before;
        expect(cudaEventRecord(done, on.stream));
        expect(cudaEventSynchronize(done));
        float ms = 0;
        expect(cudaEventElapsedTime(&ms, begun, done));
        return std::pair(static_cast<double>(ms) / calls, host.count() / calls);
    };
    auto const [forward, forward_host] = timed([&] { on.forward(attention); });
    auto const [backward, backward_host] = timed([&] { on.backward(attention); });
    cudaEventDestroy(begun);
    cudaEventDestroy(done);
    return {tokens, forward, backward, forward_host, backward_host};
}

}  // namespace

int main(int count, char** arguments) {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("skipped: there is no device of CUDA here\n");
        return 3;
    }
    std::FILE* json = nullptr;
    if (count == 3 && std::string_view(arguments[1]) == "--json")
        json = std::fopen(arguments[2], "w");
    uly::cudnn_engine engine;
    auto right = true;
    std::printf("errors as parts of what is allowed\n%-34s %6s %6s %6s %6s %6s %6s %6s\n", "option",
                "o", "lse", "dq", "dk", "dv", "dsinks", "dbias");
    if (json != nullptr) std::fprintf(json, "{\"options\": {");
    auto first = true;
    for (auto const& asked : options())
        for (auto const backward : {false, true}) {
            auto const result = compare(engine, asked, backward);
            // Forward alone is shown where there is no backward.
            if (!backward && result.refused.empty()) {
                if (compare(engine, asked, true).refused.empty()) continue;
            }
            auto const name = asked.name + (backward ? "" : ", forward");
            if (!result.refused.empty()) {
                std::printf("%-34s %s\n", name.c_str(), result.refused.c_str());
            } else {
                right = right && result.right();
                std::printf("%-34s", name.c_str());
                for (auto const part : result.parts) std::printf(" %6.3f", part);
                std::printf("%s\n", result.right() ? "" : "  OFF");
            }
            if (json != nullptr) {
                std::fprintf(json, "%s\n  \"%s\": ", first ? "" : ",", name.c_str());
                if (result.refused.empty()) {
                    std::fprintf(json, "[");
                    for (std::size_t i = 0; i < result.parts.size(); ++i)
                        std::fprintf(json, "%s%.4g", i == 0 ? "" : ", ", result.parts[i]);
                    std::fprintf(json, "]");
                } else {
                    std::fprintf(json, "null");
                }
                first = false;
            }
        }
    auto const dropout = dropout_is_right(engine);
    right = right && dropout;
    std::printf("%-34s %s\n", "dropout: means, and repeats", dropout ? "right" : "OFF");
    std::printf("\ncausal, 8 heads of 128, 2 key-value heads, bf16\n%8s %12s %10s %12s %10s %9s\n",
                "tokens", "forward ms", "TFLOP/s", "backward ms", "TFLOP/s", "host us");
    if (json != nullptr)
        std::fprintf(json, "},\n \"dropout\": %s,\n \"speed\": [", dropout ? "true" : "false");
    first = true;
    for (std::int64_t const tokens : {2048, 8192, 32768}) {
        auto const time = measure(engine, tokens);
        std::printf(
            "%8lld %12.3f %10.1f %12.3f %10.1f %4.0f %4.0f\n", static_cast<long long>(tokens),
            time.forward_ms, time.tflops(time.forward_ms, 1), time.backward_ms,
            time.tflops(time.backward_ms, 2.5), time.forward_host_us, time.backward_host_us);
        if (json != nullptr)
            std::fprintf(json, "%s[%lld, %g, %g, %g, %g]", first ? "" : ", ",
                         static_cast<long long>(tokens), time.forward_ms, time.backward_ms,
                         time.forward_host_us, time.backward_host_us);
        first = false;
    }
    if (json != nullptr) {
        std::fprintf(json, "]}\n");
        std::fclose(json);
    }
    std::printf("%zu plans made\n%s\n", engine.plans(),
                right ? "all within what is allowed" : "OFF");
    return right ? 0 : 1;
}
