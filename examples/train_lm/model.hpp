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
/// they share one pipeline; each has a context of its own, which keeps what its backward needs.
template <class T, class Attention>
class model {
   public:
    using ranks_type = ulysses::threads::communicator;

    /// `recorder`, if any, is told what attention does in each layer.
    model(ranks_type ranks, model_shape const& shape, Attention attention,
          ulysses::trace_recorder* recorder = nullptr)
        : shape_(shape),
          attention_(ranks, ulysses::sequence_local{}, attention,
                     ulysses::shape{.heads = shape.heads,
                                    .kv_heads = shape.kv_heads,
                                    .head_dim = shape.head_dim(),
                                    .mask = ulysses::mask::causal},
                     projection_type(gemm{}, ulysses::rope(shape.head_dim())),
                     observer_type(ulysses::counting_observer(ranks.rank()), {})),
          layers_(static_cast<std::size_t>(shape.layers)) {
        for (std::size_t i = 0; recorder != nullptr && i < layers_.size(); ++i)
            layers_[i].seen = recorder->observe("layer " + std::to_string(i));
    }

    /// Logits [B, s, 256] of the tokens this rank holds; bytes [B, s]. Keeps what `backward` needs.
    tensor<T> const& forward(ulysses::sequence const& step, weights<T> const& w,
                             std::span<std::uint8_t const> bytes) {
        return logits_of(step, w, bytes, true);
    }

    /// The same logits, for evaluation: nothing is kept.
    tensor<T> const& infer(ulysses::sequence const& step, weights<T> const& w,
                           std::span<std::uint8_t const> bytes) {
        return logits_of(step, w, bytes, false);
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

    struct layer {
        typename pipeline_type::context_type context;
        ulysses::trace_observer seen;                // does nothing without a recorder
        tensor<T> in, attention_in, middle, mlp_in;  // [B, s, C]
        tensor<T> gate_up, hidden;                   // [B, s, 2F], [B, s, F]
        tensor<T> attention_inverse, mlp_inverse;    // [B, s, 1]
    };

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

    tensor<T> const& logits_of(ulysses::sequence const& step, weights<T> const& w,
                               std::span<std::uint8_t const> bytes, bool keep) {
        reshape(step.batch(), step.queries().count(attention_.ranks().rank()));
        embed(bytes, static_cast<T const*>(w.embedding.data), layers_.front().in);
        for (std::size_t i = 0; i < layers_.size(); ++i)
            layer_forward(step, layers_[i], w.layers[i],
                          i + 1 < layers_.size() ? layers_[i + 1].in : last_, keep);
        rms_norm(last_, w.final_gain, final_inverse_, final_);
        linear<T>(final_, transposed(w.embedding), logits_);
        return logits_;
    }

    /// The pipeline's calls are those of `a` from here on.
    void observe(layer const& a) {
        attention_.observer().template get<ulysses::trace_observer>() = a.seen;
    }

    /// x + attention(norm(x)), then x + mlp(norm(x)).  a.in [B, s, C] -> out [B, s, C]
    void layer_forward(ulysses::sequence const& step, layer& a, layer_weights<T> const& w,
                       tensor<T> const& out, bool keep) {
        observe(a);
        rms_norm(a.in, w.attention_gain, a.attention_inverse, a.attention_in);
        if (keep)
            attention_.forward(step, a.context, a.attention_in, projections(w), branch_);
        else
            attention_.forward(step, a.attention_in, projections(w), branch_);
        add(a.in, branch_, a.middle);
        rms_norm(a.middle, w.mlp_gain, a.mlp_inverse, a.mlp_in);
        linear<T>(a.mlp_in, w.gate_up, a.gate_up);
        swiglu(a.gate_up, a.hidden);
        linear<T>(a.hidden, w.down, branch_);
        add(a.middle, branch_, out);
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
    pipeline_type attention_;
    std::vector<layer> layers_;
    tensor<T> last_, final_, branch_, stream_;  // [B, s, C]
    tensor<T> final_inverse_;                   // [B, s, 1]
    tensor<T> logits_;                          // [B, s, 256]
    tensor<T> dhidden_;                         // [B, s, F]
};

}  // namespace lm
