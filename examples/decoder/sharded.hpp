#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "engine/decoder.hpp"
#include "engine/thread_pool.hpp"

#include <ulysses/ulysses.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <span>
#include <stdexcept>
#include <utility>

/// The engine's decoder with its prompt sharded over the workers of its thread pool. All that the
/// engine needs for it is in this file; nothing in engine/ changes.

// The engine's tensor as an operand.
// [snippet tensor]
template <>
struct ulysses::tensor_traits<engine::Heads> {
    using three = std::array<std::int64_t, 3>;
    static float* data(engine::Heads const& x) { return x.first; }
    static three extents(engine::Heads const& x) { return {x.rows, x.heads, x.dim}; }
    static three strides(engine::Heads const& x) { return {x.stride, x.dim, 1}; }
};
// [/snippet]

namespace sharded {

// The engine's kernel as step 4.
// [snippet kernel]
struct EngineKernel {
    using space_type = ulysses::host_space;
    static constexpr ulysses::attention_features features{
        .causal = true, .grouped = true, .row_range = true};
    static constexpr std::int64_t row_multiple() { return 1; }
    template <class T>
    static std::size_t workspace_bytes(ulysses::attention_extents const& e) {
        return static_cast<std::size_t>(e.keys) * sizeof(T);
    }

    void forward(ulysses::attention_call const& call, ulysses::head_view<float const> q,
                 ulysses::head_view<float const> k, ulysses::head_view<float const> v,
                 ulysses::head_view<float> o, ulysses::head_view<float> lse) const {
        auto* const weights = reinterpret_cast<float*>(call.workspace.data());
        for (std::int64_t b = 0; b < q.batch(); ++b)
            for (std::int64_t h = 0; h < q.heads(); ++h)
                for (std::int64_t i = 0; i < q.tokens(); ++i) {
                    auto const g = h / (q.heads() / k.heads());
                    lse(b, i, h, 0) =
                        engine::attend_row(q.row(b, i, h), {k.row(b, 0, g), k.strides[1]},
                                           {v.row(b, 0, g), v.strides[1]}, call.query_begin + i + 1,
                                           q.dim(), weights, o.row(b, i, h));
                }
    }
    // [/snippet]

    // [snippet kernel_backward]
    void backward(ulysses::attention_call const& call,
                  ulysses::attention_backward_views<float> const& views) const {
        auto const& [q, k, v, o, dout, lse, dq, dk, dv, dlogits] = views;
        auto* const weights = reinterpret_cast<float*>(call.workspace.data());
        for (std::int64_t b = 0; b < q.batch(); ++b)
            for (std::int64_t h = 0; h < q.heads(); ++h)
                for (std::int64_t i = 0; i < q.tokens(); ++i) {
                    auto const g = h / (q.heads() / k.heads());
                    engine::attend_row_backward(
                        q.row(b, i, h), {k.row(b, 0, g), k.strides[1]},
                        {v.row(b, 0, g), v.strides[1]}, call.query_begin + i + 1, q.dim(),
                        o.row(b, i, h), dout.row(b, i, h), weights, dq.row(b, i, h),
                        {dk.row(b, 0, g), dk.strides[1]}, {dv.row(b, 0, g), dv.strides[1]});
                }
    }
    // [/snippet]
};
static_assert(ulysses::differentiable_attention_for<EngineKernel, float>);

// One pipeline a layer, as each has its own numbers of heads. The engine keeps q, k, v and o for
// its backward anyway: then a context need not.
// [snippet backend]
template <class Kernel, class Ranks = ulysses::threads::communicator>
class Attention : public engine::AttentionBackend {
    using Pipeline = ulysses::pipeline<Ranks, ulysses::sequence_local, Kernel>;

   public:
    Attention(Ranks ranks, engine::Config const& config, ulysses::sequence step)
        : step_(std::move(step)) {
        for (auto const& [heads, kv_heads, dim] : config.layers)
            layers_.emplace_back(ranks, ulysses::sequence_local{}, Kernel{},
                                 ulysses::shape{.heads = heads,
                                                .kv_heads = kv_heads,
                                                .head_dim = dim,
                                                .mask = ulysses::mask::causal,
                                                .keep = ulysses::keep::local});
    }

    void attend(std::size_t layer, engine::Heads q, engine::Heads k, engine::Heads v,
                engine::Heads o) override {
        layers_[layer].attend(step_, q, k, v, o);
    }
    // [/snippet]

    void backward(std::size_t, engine::Heads, engine::Heads, engine::Heads, engine::Heads,
                  engine::Heads, engine::Heads, engine::Heads, engine::Heads) override {
        throw std::logic_error("attention for prefill has no backward");
    }

    /// Memory of the pipelines on this worker, apart from what the ranks share.
    std::size_t bytes() const {
        std::size_t sum = 0;
        for (auto const& layer : layers_) sum += layer.scratch_bytes();
        return sum;
    }

   protected:
    ulysses::sequence step_;
    std::deque<Pipeline> layers_;
};

// [snippet training]
template <class Kernel>
class TrainingAttention : public Attention<Kernel> {
   public:
    TrainingAttention(ulysses::threads::communicator ranks, engine::Config const& config,
                      ulysses::sequence step)
        : Attention<Kernel>(ranks, config, std::move(step)) {
        for (auto const& layer : this->layers_) contexts_.push_back(layer.make_context());
    }

    void attend(std::size_t layer, engine::Heads q, engine::Heads k, engine::Heads v,
                engine::Heads o) override {
        this->layers_[layer].attend(this->step_, contexts_[layer], q, k, v, o);
    }
    void backward(std::size_t layer, engine::Heads q, engine::Heads k, engine::Heads v,
                  engine::Heads o, engine::Heads dout, engine::Heads dq, engine::Heads dk,
                  engine::Heads dv) override {
        this->layers_[layer].attend_backward(this->step_, contexts_[layer], q, k, v, o, dout, dq,
                                             dk, dv);
    }

   private:
    std::deque<ulysses::context<ulysses::threads::communicator>> contexts_;
};
// [/snippet]

// Every worker of the pool is a rank. One that fails must leave the group, and one that is through
// says so, else the others might wait for it.
// [snippet workers]
/// Calls `body(ranks, step, begin, count)` on every worker, with its part of the prompt.
template <class Body>
void on_every_worker(engine::ThreadPool& pool, std::int64_t tokens, Body const& body) {
    ulysses::threads::group const group(pool.workers());
    pool.run([&](int worker) {
        auto const ranks = group.handle(worker);
        try {
            auto const step = ulysses::sequence::split(ranks.size(), 1, tokens);
            body(ranks, step, step.queries().position(worker, 0), step.queries().count(worker));
            ranks.finish();
        } catch (std::exception const& e) {
            ranks.leave(e.what());
            throw;
        }
    });
}
// [/snippet]

}  // namespace sharded
