// SPDX-License-Identifier: Apache-2.0

#include "bench.hpp"
#include "team.hpp"

#include <ulysses/adapters/cblas.hpp>
#include <ulysses/attention/blocked.hpp>
#include <ulysses/comm/serial.hpp>
#include <ulysses/pipeline.hpp>
#include <ulysses/projection/dense.hpp>
#include <ulysses/space/host.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <random>
#include <string>
#include <vector>

/// The six steps, forward, at two ranks: against one rank, and against their products and attention
/// alone, on as many threads, over operands that already lie where each wants them.
namespace ulysses_bench {

namespace {

using std::int64_t;
using attention = ulysses::blocked_attention<ulysses::cblas>;
using projection = ulysses::dense<ulysses::cblas>;

constexpr int ranks = 2;
constexpr int64_t heads = 16, dim = 64, width = heads * dim;

std::vector<float> random_values(int64_t count) {
    std::mt19937 random{1};
    std::vector<float> values(static_cast<std::size_t>(count));
    for (auto& x : values) x = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
    return values;
}

struct weight_memory {
    std::vector<float> q = random_values(width * width), k = q, v = q, o = q;
    ulysses::dense_weights<float> view() const {
        ulysses::dense_weights<float> weights;
        weights.q = {q.data(), width};
        weights.k = {k.data(), width};
        weights.v = {v.data(), width};
        weights.o = {o.data(), width};
        return weights;
    }
};

struct token_memory {
    int64_t tokens;
    std::vector<float> x = random_values(tokens * width), y = x;
    ulysses::token_view<float> view(std::vector<float>& memory) const {
        return {memory.data(), {1, tokens, 1, width}};
    }
};

/// A rank's products and attention with nothing between them: the floor of a layer.
struct bare_rank {
    int64_t tokens, all_tokens;
    token_memory io{tokens};
    std::vector<float> q = random_values(tokens * width), k = q, v = q, o = q;
    std::vector<float> head_q = random_values(all_tokens * width / ranks), head_k = head_q,
                       head_v = head_q, head_o = head_q;
    std::vector<float> lse =
        std::vector<float>(static_cast<std::size_t>(all_tokens * heads / ranks));
    ulysses::buffer<ulysses::host_space> workspace{};

    ulysses::token_view<float> local(std::vector<float>& memory) const {
        return {memory.data(), {1, tokens, heads, dim}};
    }
    ulysses::head_view<float> head_major(std::vector<float>& memory, int64_t last) const {
        return {
            memory.data(), {1, all_tokens, heads / ranks, last}, {0, last, all_tokens * last, 1}};
    }

    void run(attention const& attend, projection const& project, weight_memory const& weights,
             ulysses::sequence const& step) {
        auto const call = ulysses::projection_call_of(step, 0);
        project.project_in<float>(call, io.view(io.x), weights.view(), local(q), local(k),
                                  local(v));
        ulysses::attention_call where;
        where.visible = {.mask = ulysses::mask::causal, .queries = all_tokens, .keys = all_tokens};
        where.scale = 0.125;
        where.workspace = workspace.reserve(attention::workspace_bytes<float>(
            {1, all_tokens, heads / ranks, all_tokens, heads / ranks, dim, dim}));
        attend.forward<float>(where, head_major(head_q, dim), head_major(head_k, dim),
                              head_major(head_v, dim), head_major(head_o, dim), head_major(lse, 1));
        project.project_out<float>(call, local(o), weights.view(), io.view(io.y));
    }
};

}  // namespace

void bench_layer(std::vector<result>& results, bench_options const& options) {
    int64_t const tokens = options.quick ? 512 : 4096;
    ulysses::cblas const blas;
    attention const attend{blas};
    projection const project{blas};
    weight_memory const weights;
    ulysses::shape const shape{.heads = heads, .head_dim = dim, .mask = ulysses::mask::causal};
    auto const split = ulysses::sequence::split(ranks, 1, tokens);
    auto const whole = ulysses::sequence::split(1, 1, tokens);

    using threaded = ulysses::pipeline<ulysses::threads::communicator, ulysses::sequence_local,
                                       attention, projection>;
    team const threads(ranks);
    std::deque<threaded> layers;
    std::deque<token_memory> memory;
    std::deque<bare_rank> bare;
    for (int r = 0; r < ranks; ++r) {
        layers.emplace_back(threads.handle(r), ulysses::sequence_local{}, attend, shape, project);
        memory.push_back({tokens / ranks});
        bare.push_back({tokens / ranks, tokens});
    }
    ulysses::pipeline one_rank{ulysses::serial{}, ulysses::sequence_local{}, attend, shape,
                               project};
    token_memory all{tokens};

    auto const seconds = interleaved(
        options,
        [&] {
            return threads.seconds([&](auto const& handle) {
                auto const me = static_cast<std::size_t>(handle.rank());
                auto& mine = memory[me];
                layers[me].forward(split, mine.view(mine.x), weights.view(), mine.view(mine.y));
            });
        },
        [&] { one_rank.forward(whole, all.view(all.x), weights.view(), all.view(all.y)); },
        [&] {
            return threads.seconds([&](auto const& handle) {
                bare[static_cast<std::size_t>(handle.rank())].run(attend, project, weights, split);
            });
        },
        [&] {
            return threads.seconds([&](auto const& handle) {
                if (handle.rank() == 0) bare[0].run(attend, project, weights, split);
            });
        });
    auto const name = "six steps S " + std::to_string(tokens) + ", 2 ranks";
    auto const rate = static_cast<double>(tokens) / seconds[0];
    results.push_back({name, rate, "tokens/s", "one rank", seconds[1] / seconds[0], ">= 1.9"});
    // What the machine itself allows: the same work on one thread and on two at once.
    results.push_back({"products and attention alone", 2 * seconds[3] / seconds[2], "threads",
                       "one thread of two", seconds[3] * 2 / seconds[2], ""});
    results.push_back({name, seconds[0] * 1e3, "ms", "its products and attention alone (time)",
                       seconds[0] / seconds[2], "<= 1.05"});
}

}  // namespace ulysses_bench
