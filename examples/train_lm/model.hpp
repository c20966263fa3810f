#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "layers.hpp"
#include "linear.hpp"
#include "tensor.hpp"
#include "weights.hpp"

#include <ulysses/ulysses.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lm {

/// A causal decoder over a sequence whose tokens are spread over the ranks: norms, projections and
/// MLPs are local to a rank's tokens, attention is the pipeline's. All layers have one shape, so
/// they share one pipeline; each has a context of its own, which keeps what its backward needs. The
/// ranks are those of any communicator that can reduce.
template <class T, class Attention, class Ranks>
class model {
   public:
    using ranks_type = Ranks;

    /// `recorder`, if any, is told what attention does in each layer. Caches need whole heads.
    model(ranks_type ranks, model_shape const& shape, Attention attention,
          ulysses::trace_recorder* recorder = nullptr,
          ulysses::assignment assignment = ulysses::assignment::balanced)
        : shape_(shape),
          projection_(gemm{}, ulysses::rope(shape.head_dim())),
          attention_(ranks, ulysses::sequence_local{}, attention, layer_shape(shape, assignment),
                     projection_, observer_type(ulysses::counting_observer(ranks.rank()), {})),
          by_heads_(ranks, ulysses::head_local{}, attention, layer_shape(shape, assignment)),
          layers_(static_cast<std::size_t>(shape.layers)) {
        for (std::size_t i = 0; recorder != nullptr && i < layers_.size(); ++i)
            layers_[i].seen = recorder->observe("layer " + std::to_string(i));
    }

    /// Logits [B, s, 256] of the tokens this rank holds; bytes [B, s]. Keeps what `backward` needs.
    tensor<T> const& forward(ulysses::sequence const& step, weights<T> const& w,
                             std::span<std::uint8_t const> bytes) {
        return logits_of(
            own_tokens(step), step.batch(), w, bytes, [&](layer& a, layer_weights<T> const& of) {
                attention_.forward(step, a.context, a.attention_in, projections(of), branch_);
            });
    }

    /// The same logits, for evaluation: nothing is kept.
    tensor<T> const& infer(ulysses::sequence const& step, weights<T> const& w,
                           std::span<std::uint8_t const> bytes) {
        return logits_of(own_tokens(step), step.batch(), w, bytes,
                         [&](layer& a, layer_weights<T> const& of) {
                             attention_.forward(step, a.attention_in, projections(of), branch_);
                         });
    }

    /// Makes every layer's cache, empty, for one sample of `tokens` tokens.
    void make_caches(std::int64_t tokens) {
        for (auto& each : layers_) each.cache = attention_.template make_cache<T>(1, tokens);
    }
    /// How many tokens the caches hold: the `past` of the next step.
    std::span<std::int64_t const> cached() const { return layers_.front().cache.lengths(); }
    std::size_t cache_bytes() const {
        std::size_t sum = 0;
        for (auto const& each : layers_) sum += each.cache.bytes();
        return sum;
    }

    // [snippet extend]
    /// The logits of tokens that follow those in the caches, and go into them.
    tensor<T> const& extend(ulysses::sequence const& step, weights<T> const& w,
                            std::span<std::uint8_t const> bytes) {
        return logits_of(
            own_tokens(step), step.batch(), w, bytes, [&](layer& a, layer_weights<T> const& of) {
                attention_.forward(step, a.cache, a.attention_in, projections(of), branch_);
            });
    }
    // [/snippet]

    /// The same where every rank holds all tokens of the step, and computes its own heads with them:
    /// attention exchanges nothing, the output projections of all heads are summed.
    tensor<T> const& extend_by_heads(ulysses::sequence const& step, weights<T> const& w,
                                     std::span<std::uint8_t const> bytes) {
        return logits_of(step.queries().total(), step.batch(), w, bytes,
                         [&](layer& a, layer_weights<T> const& of) { attend_heads(step, a, of); });
    }

    /// Takes the gradient that `cross_entropy` left in the logits and adds this rank's part of all
    /// gradients.
    void backward(ulysses::sequence const& step, weights<T> const& w, weights<T>& gradients,
                  std::span<std::uint8_t const> bytes) {
        auto const output = transposed(w.embedding), doutput = transposed(gradients.embedding);
        linear_gradient(final_, logits_, doutput);
        linear_backward<T>(logits_, output, branch_);
        std::fill_n(stream_.data(), stream_.size(), T(0));
        rms_norm_backward(last_, w.final_gain, final_inverse_, branch_, stream_,
                          gradients.final_gain);
        for (std::size_t i = layers_.size(); i-- > 0;)
            layer_backward(step, layers_[i], w.layers[i], gradients.layers[i]);
        embed_backward(bytes, stream_, gradients.embedding.data);
    }

    auto& attention() { return attention_; }
    auto& counted() { return attention_.observer().template get<ulysses::counting_observer>(); }

    /// Bytes that a forward and a backward of all layers exchange on this rank by their plan.
    std::size_t planned_bytes(ulysses::sequence const& step) {
        auto const& plan = attention_.planned(step);
        auto const forward = ulysses::forward_traffic(plan, sizeof(T));
        auto const backward =
            ulysses::backward_traffic(plan, sizeof(T), sizeof(ulysses::accumulator_t<T>));
        return layers_.size() * (forward.sent + backward.sent);
    }

    /// What forward leaves for backward, and the working tensors, on this rank.
    std::size_t activation_bytes() const {
        std::size_t sum = 0;
        for (auto const* each :
             {&last_, &final_, &final_inverse_, &logits_, &branch_, &stream_, &dhidden_})
            sum += each->bytes();
        for (auto const& each : layers_) {
            sum += each.context.bytes();
            for (auto const* x :
                 {&each.in, &each.attention_in, &each.attention_inverse, &each.middle, &each.mlp_in,
                  &each.mlp_inverse, &each.gate_up, &each.hidden})
                sum += x->bytes();
        }
        return sum;
    }

    /// What the library holds beside: the pipeline's scratch and the windows that all its calls
    /// share.
    std::size_t workspace_bytes() const {
        return attention_.scratch_bytes() +
               attention_.ranks().shared_window_bytes(ulysses::arena::inbox) +
               attention_.ranks().shared_window_bytes(ulysses::arena::outbox);
    }

   private:
    using projection_type = ulysses::dense<gemm, ulysses::rope>;
    using observer_type = ulysses::observers<ulysses::counting_observer, ulysses::trace_observer>;
    using pipeline_type = ulysses::pipeline<ranks_type, ulysses::sequence_local, Attention,
                                            projection_type, observer_type>;
    using heads_pipeline_type = ulysses::pipeline<ranks_type, ulysses::head_local, Attention>;

    struct layer {
        typename pipeline_type::context_type context;
        typename pipeline_type::cache_type cache;
        ulysses::trace_observer seen;                // does nothing without a recorder
        tensor<T> in, attention_in, middle, mlp_in;  // [B, s, C]
        tensor<T> gate_up, hidden;                   // [B, s, 2F], [B, s, F]
        tensor<T> attention_inverse, mlp_inverse;    // [B, s, 1]
    };

    static ulysses::shape layer_shape(model_shape const& shape, ulysses::assignment assignment) {
        return {.heads = shape.heads,
                .kv_heads = shape.kv_heads,
                .head_dim = shape.head_dim(),
                .mask = ulysses::mask::causal,
                .assignment = assignment};
    }
    std::int64_t own_tokens(ulysses::sequence const& step) const {
        return step.queries().count(attention_.ranks().rank());
    }

    static ulysses::dense_weights<T> projections(layer_weights<T> const& w) {
        return {.q = w.q, .k = w.k, .v = w.v, .o = w.o};
    }

    void reshape(std::int64_t batch, std::int64_t tokens) {
        auto const c = shape_.width, f = shape_.hidden();
        for (auto* each : {&last_, &final_, &branch_, &stream_}) each->reshape(batch, tokens, c);
        final_inverse_.reshape(batch, tokens, 1);
        logits_.reshape(batch, tokens, vocabulary);
        dhidden_.reshape(batch, tokens, f);
        for (auto& each : layers_) {
            for (auto* x : {&each.in, &each.attention_in, &each.middle, &each.mlp_in})
                x->reshape(batch, tokens, c);
            for (auto* x : {&each.attention_inverse, &each.mlp_inverse})
                x->reshape(batch, tokens, 1);
            each.gate_up.reshape(batch, tokens, 2 * f);
            each.hidden.reshape(batch, tokens, f);
        }
    }

    /// `attend(layer, weights)` writes the attention of layer.attention_in to branch_.
    template <class Attend>
    tensor<T> const& logits_of(std::int64_t tokens, std::int64_t batch, weights<T> const& w,
                               std::span<std::uint8_t const> bytes, Attend const& attend) {
        reshape(batch, tokens);
        embed(bytes, static_cast<T const*>(w.embedding.data), layers_.front().in);
        for (std::size_t i = 0; i < layers_.size(); ++i)
            layer_forward(layers_[i], w.layers[i],
                          i + 1 < layers_.size() ? layers_[i + 1].in : last_, attend);
        rms_norm(last_, w.final_gain, final_inverse_, final_);
        linear<T>(final_, transposed(w.embedding), logits_);
        return logits_;
    }

    /// The pipeline's calls are those of `a` from here on.
    void observe(layer const& a) {
        attention_.observer().template get<ulysses::trace_observer>() = a.seen;
    }

    /// x + attention(norm(x)), then x + mlp(norm(x)).  a.in [B, s, C] -> out [B, s, C]
    template <class Attend>
    void layer_forward(layer& a, layer_weights<T> const& w, tensor<T> const& out,
                       Attend const& attend) {
        observe(a);
        rms_norm(a.in, w.attention_gain, a.attention_inverse, a.attention_in);
        attend(a, w);
        add(a.in, branch_, a.middle);
        rms_norm(a.middle, w.mlp_gain, a.mlp_inverse, a.mlp_in);
        linear<T>(a.mlp_in, w.gate_up, a.gate_up);
        swiglu(a.gate_up, a.hidden);
        linear<T>(a.hidden, w.down, branch_);
        add(a.middle, branch_, out);
    }

    // [snippet heads]
    void attend_heads(ulysses::sequence const& step, layer& a, layer_weights<T> const& w) {
        auto const& ranks = attention_.ranks();
        auto const share = a.cache.share();  // the heads of this rank
        auto const dim = shape_.head_dim(), n = step.queries().total();
        auto const columns = [&](ulysses::weight_view<T> const& whole, std::int64_t head) {
            return ulysses::weight_view<T>{whole.data + head * dim, whole.stride};
        };
        ulysses::dense_weights<T> const own{
            .q = columns(w.q, share.head_begin),
            .k = columns(w.k, share.kv_begin),
            .v = columns(w.v, share.kv_begin),
            .o = {w.o.data + share.head_begin * dim * w.o.stride, w.o.stride}};
        auto const operand = [&](tensor<T>& memory, std::int64_t heads) {
            memory.reshape(1, n, heads * dim);
            return ulysses::token_view<T>(memory.data(), {1, n, heads, dim});
        };
        auto const q = operand(q_, share.heads()), k = operand(k_, share.kv_heads()),
                   v = operand(v_, share.kv_heads()), o = operand(o_, share.heads());
        auto const x = ulysses::view_of_tokens<ulysses::sequence_local>(a.attention_in, "x");
        auto const y = ulysses::view_of_tokens<ulysses::sequence_local>(branch_, "y");
        // Every rank holds what rank 0 does in the step.
        ulysses::project_in<projection_type, T>(projection_, step, 0, x, own, q, k, v);
        by_heads_.attend(step, a.cache, of_heads(q), of_heads(k), of_heads(v), of_heads(o));
        ulysses::project_out<projection_type, T>(projection_, step, 0, o, own, y);
        ranks.all_reduce(std::span<T>(branch_.data(), static_cast<std::size_t>(branch_.size())),
                         ulysses::reduction::sum);
    }
    // [/snippet]
    static ulysses::head_view<T> of_heads(ulysses::token_view<T> const& x) {
        return {x.data, x.extents, x.strides};
    }

    /// Turns stream_, the gradient of the layer's output, into that of its input.
    void layer_backward(ulysses::sequence const& step, layer& a, layer_weights<T> const& w,
                        layer_weights<T> const& d) {
        observe(a);
        linear_gradient(a.hidden, stream_, d.down);
        linear_backward<T>(stream_, w.down, dhidden_);
        swiglu_backward(a.gate_up, dhidden_);
        linear_gradient(a.mlp_in, a.gate_up, d.gate_up);
        linear_backward<T>(a.gate_up, w.gate_up, branch_);
        rms_norm_backward(a.middle, w.mlp_gain, a.mlp_inverse, branch_, stream_, d.mlp_gain);
        attention_.backward(step, a.context, a.attention_in, projections(w), stream_, branch_,
                            ulysses::dense_gradients<T>{.q = d.q, .k = d.k, .v = d.v, .o = d.o});
        rms_norm_backward(a.in, w.attention_gain, a.attention_inverse, branch_, stream_,
                          d.attention_gain);
    }

    model_shape shape_;
    projection_type projection_;
    pipeline_type attention_;
    heads_pipeline_type by_heads_;  // over the same caches
    std::vector<layer> layers_;
    tensor<T> last_, final_, branch_, stream_;  // [B, s, C]
    tensor<T> final_inverse_;                   // [B, s, 1]
    tensor<T> logits_;                          // [B, s, 256]
    tensor<T> dhidden_;                         // [B, s, F]
    tensor<T> q_, k_, v_, o_;                   // [1, n, heads of this rank x D]
};

}  // namespace lm
