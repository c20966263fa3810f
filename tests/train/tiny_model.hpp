#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/reference.hpp>
#include <ulysses/gemm/builtin.hpp>
#include <ulysses/pipeline.hpp>
#include <ulysses/projection/dense.hpp>
#include <ulysses/train/checkpoint.hpp>
#include <ulysses/train/cross_entropy.hpp>
#include <ulysses/train/session.hpp>
#include <ulysses/train/tiled.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

/// A language model that is small, in double, and uses what there is: six-step attention, a tiled MLP,
/// the fused loss, layers computed again; and runs of it in which only the ranks differ.
namespace train_test {

namespace uly = ulysses;
using std::int64_t;

inline constexpr int64_t vocabulary = 11, width = 6, hidden = 10;
inline constexpr uly::shape attention_shape{
    .heads = 3, .kv_heads = 1, .head_dim = 2, .mask = uly::mask::causal};

/// [B, s, C]
template <class T>
struct token_rows {
    T* memory;
    std::array<int64_t, 3> sizes;
    T* data() const { return memory; }
    std::array<int64_t, 3> const& extents() const { return sizes; }
};

/// Views of parameters, or of their gradients, in one piece of memory.
template <class T>
struct parts {
    struct layer {
        uly::weight_view<T> q, k, v, o, gate, up, down;
    };
    uly::weight_view<T> embedding, output;  // [V, C], [C, V]
    std::vector<layer> layers;

    static constexpr auto heads = attention_shape.heads * attention_shape.head_dim;
    static constexpr auto kv = attention_shape.kv_heads * attention_shape.head_dim;

    static std::size_t count(int64_t depth) {
        auto const layer = width * (2 * heads + 2 * kv + 3 * hidden);
        return static_cast<std::size_t>(2 * vocabulary * width + depth * layer);
    }
    parts(T* memory, int64_t depth) {
        auto const take = [&](int64_t rows, int64_t columns) {
            uly::weight_view<T> const view{memory, columns};
            memory += rows * columns;
            return view;
        };
        embedding = take(vocabulary, width);
        output = take(width, vocabulary);
        for (int64_t i = 0; i < depth; ++i)
            layers.push_back({take(width, heads), take(width, kv), take(width, kv),
                              take(heads, width), take(width, hidden), take(width, hidden),
                              take(hidden, width)});
    }
};

/// Each layer m = x + attention(x), y = m + mlp(m).
template <class Comm>
class tiny_model {
   public:
    tiny_model(Comm const& ranks, int64_t depth, uly::keep keep = uly::keep::exchanged,
               uly::checkpoint_options const& saving = {}, double dropout = 0)
        : weights_(parts<double>::count(depth)),
          gradients_(weights_.size()),
          w_(weights_.data(), depth),
          d_(gradients_.data(), depth),
          attention_(ranks, uly::sequence_local{}, uly::reference_attention{}, with(keep, dropout),
                     uly::dense{uly::builtin_gemm{}}),
          contexts_(static_cast<std::size_t>(saving.every)),
          middles_(contexts_.size()),
          saved_(ranks, depth, saving) {
        std::mt19937_64 random{7};
        std::normal_distribution<double> normal(0, 0.5);
        for (auto& each : weights_) each = normal(random);
    }

    std::span<double> weights() { return weights_; }
    std::span<double> gradients() { return gradients_; }
    uly::checkpoint<double>& saved() { return saved_; }

    /// Forward and backward: adds the gradients of the loss sum of this rank's tokens.
    template <class Batch>
    uly::token_sums learn(Batch const& batch) {
        ++micro_batches_;
        prepare(batch);
        embed(batch, saved_.input(rows_, width));
        saved_.forward(*this, view(y_));
        uly::fused_cross_entropy<double, uly::builtin_gemm> loss{{}, w_.output, vocabulary};
        auto const sums = loss.backward(tiles_, 1.0, row(y_), batch.labels(), view(dx_), d_.output);
        saved_.backward(*this, view(dx_));
        for (int64_t i = 0; i < rows_; ++i)
            for (int64_t c = 0; c < width; ++c)
                d_.embedding.data[id(batch, i) * width + c] += view(dx_).row(i)[c];
        return sums;
    }

    /// Forward alone, which keeps nothing.
    template <class Batch>
    uly::token_sums loss_of(Batch const& batch) {
        prepare(batch);
        embed(batch, view(y_));
        for (std::size_t i = 0; i < w_.layers.size(); ++i) {
            std::swap(y_, dx_);
            forward(static_cast<int64_t>(i), row(dx_), view(y_));
        }
        uly::fused_cross_entropy<double, uly::builtin_gemm> loss{{}, w_.output, vocabulary};
        return loss.forward(tiles_, row(y_), batch.labels());
    }

    // As `checkpointed_layers`.
    void forward(int64_t i, uly::row_view<double const> x, uly::row_view<double> y) {
        ++forwards;
        attention_.forward(*step_, operand(x), dense_of(i), operand(view(middle_)), dropped(i));
        finish(i, x, view(middle_), y);
    }
    void forward_keeping(int64_t i, int64_t place, uly::row_view<double const> x,
                         uly::row_view<double> y) {
        ++keeping_forwards;
        auto& m = middles_[static_cast<std::size_t>(place)];
        m.resize(middle_.size());
        attention_.forward(*step_, contexts_[static_cast<std::size_t>(place)], operand(x),
                           dense_of(i), operand(view(m)), dropped(i));
        finish(i, x, view(m), y);
    }
    void backward(int64_t i, int64_t place, uly::row_view<double const> x,
                  uly::row_view<double> d) {
        auto const m = row(middles_[static_cast<std::size_t>(place)]);
        auto mlp = mlp_of(i);
        uly::tiled_backward<double>(tiles_, mlp, m, d, view(branch_));
        add(branch_, d);
        auto const& to = d_.layers[static_cast<std::size_t>(i)];
        attention_.backward(
            *step_, contexts_[static_cast<std::size_t>(place)], operand(x), dense_of(i), operand(d),
            operand(view(branch_)),
            uly::dense_gradients<double>{.q = to.q, .k = to.k, .v = to.v, .o = to.o}, dropped(i));
        add(branch_, d);
    }

    int64_t forwards = 0, keeping_forwards = 0;

   private:
    using projection_type = uly::dense<uly::builtin_gemm>;
    using pipeline_type =
        uly::pipeline<Comm, uly::sequence_local, uly::reference_attention, projection_type>;
    using memory = std::vector<double>;

    static uly::shape with(uly::keep keep, double dropout) {
        auto shape = attention_shape;
        shape.keep = keep;
        shape.dropout = dropout;
        return shape;
    }
    /// Drops others in each layer and micro-batch.
    uly::logit_inputs dropped(int64_t i) const {
        if (attention_.layer().dropout.value() == 0) return {};
        return {.dropout = uly::dropout_key{.step = micro_batches_,
                                            .layer = static_cast<std::uint64_t>(i)}};
    }
    template <class Batch>
    static int64_t id(Batch const& batch, int64_t i) {
        return batch.ids()[static_cast<std::size_t>(i)];
    }

    template <class Batch>
    void prepare(Batch const& batch) {
        step_ = &batch.step;
        rows_ = static_cast<int64_t>(batch.ids().size());
        tiles_ = uly::tiling::of_rows(rows_, 3);
        for (auto* each : {&y_, &dx_, &middle_, &branch_})
            each->resize(static_cast<std::size_t>(rows_ * width));
    }
    template <class Batch>
    void embed(Batch const& batch, uly::row_view<double> x) const {
        for (int64_t i = 0; i < rows_; ++i)
            std::copy_n(w_.embedding.data + id(batch, i) * width, width, x.row(i));
    }
    void finish(int64_t i, uly::row_view<double const> x, uly::row_view<double> m,
                uly::row_view<double> y) {
        for (int64_t j = 0; j < rows_ * width; ++j) m.data[j] += x.data[j];
        auto mlp = mlp_of(i);
        uly::tiled_forward<double>(tiles_, mlp, m, y);
        for (int64_t j = 0; j < rows_ * width; ++j) y.data[j] += m.data[j];
    }
    static void add(memory const& from, uly::row_view<double> to) {
        for (std::size_t j = 0; j < from.size(); ++j) to.data[j] += from[j];
    }

    uly::row_view<double> view(memory& x) const { return {x.data(), rows_, width}; }
    uly::row_view<double const> row(memory const& x) const { return {x.data(), rows_, width}; }
    template <class T>
    token_rows<T> operand(uly::row_view<T> x) const {
        return {x.data, {step_->batch(), rows_ / step_->batch(), width}};
    }
    uly::dense_weights<double> dense_of(int64_t i) const {
        auto const& from = w_.layers[static_cast<std::size_t>(i)];
        return {.q = from.q, .k = from.k, .v = from.v, .o = from.o};
    }
    uly::tiled_mlp<double, uly::builtin_gemm> mlp_of(int64_t i) const {
        auto const& from = w_.layers[static_cast<std::size_t>(i)];
        auto const& to = d_.layers[static_cast<std::size_t>(i)];
        return {{}, hidden, {from.gate, from.up, from.down}, {to.gate, to.up, to.down}};
    }

    memory weights_, gradients_;
    parts<double> w_, d_;
    pipeline_type attention_;
    std::vector<typename pipeline_type::context_type> contexts_;
    std::vector<memory> middles_;
    uly::checkpoint<double> saved_;
    uly::sequence const* step_ = nullptr;
    uly::tiling tiles_ = uly::tiling::of(0, 1);
    int64_t rows_ = 0;
    std::uint64_t micro_batches_ = 0;
    memory y_, dx_, middle_, branch_;
};

struct text_sample {
    std::vector<int64_t> ids, labels;
};
inline auto const text_fields =
    std::tuple{uly::ids_field(&text_sample::ids), uly::labels_field(&text_sample::labels)};

/// Of 1 to `longest` tokens, each of which tells the next; a third with a masked prompt, some masked
/// as a whole.
inline constexpr int64_t longest = 13;
inline std::vector<text_sample> text_samples(int64_t count, int64_t first = 0) {
    std::vector<text_sample> all;
    for (auto i = first; i < first + count; ++i) {
        text_sample one;
        auto const tokens = 1 + i * 7 % longest;
        for (int64_t t = 0, id = i % vocabulary; t < tokens; ++t, id = (3 * id + 1) % vocabulary) {
            auto const masked = i % 16 == 5 || (i % 3 == 0 && t < tokens / 2);
            one.ids.push_back(id);
            one.labels.push_back(masked ? uly::ignored_label : id);
        }
        all.push_back(one);
    }
    return all;
}

/// What a run shows, on each of its ranks the same.
struct curve {
    std::vector<double> losses, norms;  ///< of each update
    std::vector<int64_t> tokens;        ///< likewise
    double held_out = 0;                ///< mean loss at the end
    int64_t held_out_tokens = 0;
};

/// `epochs` epochs of 59 samples, 8 of them an update however the ranks are divided.
template <class Comm>
curve curve_of(Comm const& world, uly::parallel_config const& parallel, int64_t epochs,
               uly::evaluation evaluates = uly::evaluation::sharded, bool balance = false) {
    constexpr int64_t depth = 2;
    uly::accounting const alone({},
                                {.micro_batch = 2, .gradient_accumulation = 4, .tokens = longest});
    auto const samples = text_samples(59);
    auto run = uly::prepare({.parallel = parallel,
                             .step = alone.with_equal_tokens(parallel).step(),
                             .batches = {.balance_valid_tokens = balance, .end = uly::at_end::pad},
                             .largest_norm = 2,
                             .evaluates = evaluates},
                            world, samples, text_fields);
    tiny_model model(run.ranks().sp(), depth, uly::keep::exchanged, {.every = depth});
    curve seen;
    for (int64_t epoch = 0; epoch < epochs; ++epoch) {
        if (epoch > 0) run.restart();
        while (auto const update = run.step(
                   model.gradients(), [&](auto const& batch) { return model.learn(batch); })) {
            seen.losses.push_back(update->sums.mean_loss());
            seen.norms.push_back(update->clip.norm);
            seen.tokens.push_back(update->sums.tokens);
            auto w = model.weights();
            for (std::size_t i = 0; i < w.size(); ++i) w[i] -= 0.3 * model.gradients()[i];
        }
    }
    tiny_model tested(run.evaluation_ranks(), depth, uly::keep::exchanged, {.every = depth});
    std::ranges::copy(model.weights(), tested.weights().begin());
    auto const held_out = run.evaluate(text_samples(13, 1000),
                                       [&](auto const& batch) { return tested.loss_of(batch); });
    seen.held_out = held_out.mean_loss();
    seen.held_out_tokens = held_out.tokens;
    return seen;
}

}  // namespace train_test
