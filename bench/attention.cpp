// SPDX-License-Identifier: Apache-2.0

#include "bench.hpp"

#include <ulysses/adapters/cblas.hpp>
#include <ulysses/attention/blocked.hpp>
#include <ulysses/gemm/builtin.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <random>
#include <span>
#include <string>
#include <vector>

/// Blocked attention against the BLAS's own product of large square matrices, one thread, causal,
/// heads one after the other in memory.
///
/// Operations counted are the useful ones: a causal head has S * S / 2 pairs of query and key;
/// forward is two products of 2 * pairs * D operations, backward five. The softmax counts nothing.
namespace ulysses_bench {

namespace {

using std::int64_t;

/// Seconds this thread computes in `body`: what other programs take of the machine is left out.
template <class Body>
auto on_this_thread(Body body) {
    return [body] {
        auto const now = [] {
            std::timespec time{};
            clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
            return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
        };
        auto const start = now();
        body();
        return now() - start;
    };
}

std::vector<float> random_values(int64_t count) {
    std::mt19937 random{1};
    std::vector<float> values(static_cast<std::size_t>(count));
    for (auto& x : values) x = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
    return values;
}

std::string blas_name() {
#if defined(OPENBLAS_VERSION)
    return std::string{"OpenBLAS "} + openblas_get_corename();
#else
    return "BLAS";
#endif
}

/// C = A B of size^3.
struct square_product {
    int64_t size;
    std::vector<float> a = random_values(size * size), b = random_values(size * size), c = a;

    double operations() const { return 2.0 * static_cast<double>(size * size * size); }

    template <class Gemm>
    void run(Gemm const& gemm) {
        gemm(ulysses::gemm_call<float>{.m = size,
                                       .n = size,
                                       .k = size,
                                       .a = {.data = a.data(), .stride = size},
                                       .b = {.data = b.data(), .stride = size},
                                       .c = c.data(),
                                       .c_stride = size});
    }
};

/// Causal self-attention, heads contiguous: [1, S, H, D] with strides {., D, S * D, 1}.
struct attention_problem {
    int64_t tokens, heads, dim;
    std::vector<float> q = random_values(tokens * heads * dim), k = q, v = q, dout = q, o = q,
                       dq = q, dk = q, dv = q;
    std::vector<float> lse = std::vector<float>(static_cast<std::size_t>(tokens * heads));
    std::vector<std::byte> workspace{};

    double products(int count) const {
        auto const pairs = static_cast<double>(tokens) * static_cast<double>(tokens) / 2;
        return count * 2.0 * pairs * static_cast<double>(dim * heads);
    }

    ulysses::head_view<float> view(std::vector<float>& memory, int64_t last) const {
        return {memory.data(), {1, tokens, heads, last}, {0, last, tokens * last, 1}};
    }

    template <class Attention>
    ulysses::attention_call call() {
        auto const bytes = Attention::template workspace_bytes<float>({.batch = 1,
                                                                       .rows = tokens,
                                                                       .heads = heads,
                                                                       .keys = tokens,
                                                                       .kv_heads = heads,
                                                                       .head_dim = dim,
                                                                       .value_dim = dim});
        workspace.resize(bytes + 64);
        auto const past = reinterpret_cast<std::uintptr_t>(workspace.data()) % 64;
        return {.visible = {.mask = ulysses::mask::causal, .queries = tokens, .keys = tokens},
                .scale = 1 / std::sqrt(static_cast<double>(dim)),
                .workspace = std::span{workspace}.subspan(past == 0 ? 0 : 64 - past)};
    }

    template <class Attention>
    void forward(Attention const& attention) {
        attention.template forward<float>(call<Attention>(), view(q, dim), view(k, dim),
                                          view(v, dim), view(o, dim), view(lse, 1));
    }

    template <class Attention>
    void backward(Attention const& attention) {
        attention.template backward<float>(call<Attention>(),
                                           {view(q, dim), view(k, dim), view(v, dim), view(o, dim),
                                            view(dout, dim), view(lse, 1), view(dq, dim),
                                            view(dk, dim), view(dv, dim)});
    }
};

}  // namespace

void bench_attention(std::vector<result>& results, bench_options const& options) {
    square_product square{options.quick ? 512 : 2048};
    ulysses::cblas const blas;
    ulysses::builtin_gemm const builtin;
    ulysses::blocked_attention const over_blas{blas};
    ulysses::blocked_attention const over_builtin{builtin};
    auto const against = blas_name() + " sgemm " + std::to_string(square.size);

    auto const [blas_seconds, builtin_seconds] =
        interleaved(options, on_this_thread([&] { square.run(blas); }),
                    on_this_thread([&] { square.run(builtin); }));
    results.push_back({"builtin_gemm " + std::to_string(square.size),
                       square.operations() / builtin_seconds * 1e-9, "GFLOP/s", against,
                       blas_seconds / builtin_seconds, ">= 0.40"});

    for (int64_t dim : {64, 128}) {
        attention_problem problem{options.quick ? 512 : 4096, 512 / dim, dim};
        auto const compare = [&](char const* what, int products, char const* target, auto pass) {
            auto const [square_seconds, seconds] = interleaved(
                options, on_this_thread([&] { square.run(blas); }), on_this_thread(pass));
            auto const rate = problem.products(products) / seconds;
            results.push_back({std::string{"attention "} + what + " S " +
                                   std::to_string(problem.tokens) + " D " + std::to_string(dim),
                               rate * 1e-9, "GFLOP/s", against,
                               rate * square_seconds / square.operations(), target});
        };
        compare("forward over cblas", 2, ">= 0.75", [&] { problem.forward(over_blas); });
        compare("backward over cblas", 5, ">= 0.75", [&] { problem.backward(over_blas); });
        compare("forward over builtin_gemm", 2, "", [&] { problem.forward(over_builtin); });
        compare("backward over builtin_gemm", 5, "", [&] { problem.backward(over_builtin); });
    }
}

}  // namespace ulysses_bench
