#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/projection/dense.hpp>

#include "harness.hpp"

/// As harness.hpp, for all six steps over dense projections.
namespace pipeline_test {

/// All weights and biases of a layer one behind the other, so that tests can walk over them.
struct parameter_layout {
    int64_t channels, q, k, v, o;  // columns of the matrices; o: rows of the last
    bool transposed, biased;

    parameter_layout(ulysses::shape const& layer, int64_t width, bool turned = false,
                     bool bias = true)
        : channels(width),
          q(layer.heads * layer.head_dim),
          k(layer.kv_heads * layer.head_dim),
          v(layer.kv_heads * layer.value_dim),
          o(layer.heads * layer.value_dim),
          transposed(turned),
          biased(bias) {}

    int64_t matrices() const { return channels * (q + k + v + o); }
    int64_t count() const { return matrices() + q + k + v + channels; }

    template <class T>
    ulysses::dense_weights<T> weights(T const* p) const {
        return views<ulysses::dense_weights<T>>(p);
    }
    template <class T>
    ulysses::dense_gradients<T> gradients(T* p) const {
        return views<ulysses::dense_gradients<T>>(p);
    }

   private:
    template <class Views, class T>
    Views views(T* p) const {
        auto const matrix = [&](int64_t rows, int64_t columns) {
            ulysses::weight_view<T> const view{p, transposed ? rows : columns, transposed};
            p += rows * columns;
            return view;
        };
        Views all;
        all.q = matrix(channels, q);
        all.k = matrix(channels, k);
        all.v = matrix(channels, v);
        all.o = matrix(o, channels);
        if (!biased) return all;
        all.q_bias = p;
        all.k_bias = all.q_bias + q;
        all.v_bias = all.k_bias + k;
        all.o_bias = all.v_bias + v;
        return all;
    }
};

template <class T>
struct six_problem {
    ulysses::shape layer;
    int64_t batch, tokens, channels;
    bool transposed = false, biased = true;
    ulysses::logit_inputs logits{};
    tensor<T> x{}, dy{};  // [B, S, 1, C]
    std::vector<T> parameters{};

    six_problem(std::uint64_t seed, ulysses::shape const& given, int64_t samples, int64_t length,
                int64_t width)
        : layer(ulysses::checked(given)), batch(samples), tokens(length), channels(width) {
        std::mt19937_64 random{seed};
        x = tensor<T>({batch, tokens, 1, channels});
        dy = tensor<T>({batch, tokens, 1, channels});
        tensor<T> all({1, 1, 1, places().count()});
        for (auto* each : {&x, &dy, &all}) fill_uniform(random, *each);
        parameters = all.memory;
    }

    parameter_layout places() const { return {layer, channels, transposed, biased}; }
};

template <class T>
struct six_results {
    tensor<T> y, dx;
    std::vector<T> gradients;  // summed over ranks, in rank order
    std::vector<std::vector<T>> rank_gradients;

    explicit six_results(six_problem<T> const& p, int ranks)
        : y(p.x.sizes), dx(p.x.sizes), rank_gradients(static_cast<std::size_t>(ranks)) {}
};

/// [B, s, C]: an operand of whole tokens.
template <class T>
struct token_operand {
    T* memory;
    std::array<int64_t, 3> sizes;
    explicit token_operand(tensor<T> const& x)
        : memory(x.data()), sizes{x.sizes[0], x.sizes[1], x.sizes[3]} {}
    T* data() const { return memory; }
    std::array<int64_t, 3> const& extents() const { return sizes; }
};

template <class Comm, class T, class Attention, class Epilogue>
void six_steps_rank(Comm const& ranks, six_problem<T> const& p, ulysses::sequence const& step,
                    Attention const& attention, Epilogue const& epilogue, six_results<T>& whole,
                    bool backward) {
    auto const me = ranks.rank();
    ulysses::pipeline layer{ranks, ulysses::sequence_local{}, attention, p.layer,
                            ulysses::dense{ulysses::builtin_gemm{}, epilogue}};
    auto const places = p.places();
    auto const x = own_part(step.queries(), me, p.x), dy = own_part(step.queries(), me, p.dy);
    tensor<T> y(x.sizes), dx(x.sizes);
    auto const weights = places.weights(p.parameters.data());
    if (!backward) {
        layer.forward(step, token_operand(x), weights, token_operand(y), p.logits);
        put_back(step.queries(), me, y, whole.y);
        return;
    }
    auto saved = layer.make_context();
    layer.forward(step, saved, token_operand(x), weights, token_operand(y), p.logits);
    auto& gradients = whole.rank_gradients[static_cast<std::size_t>(me)];
    gradients.assign(p.parameters.size(), T(0));  // backward adds to them
    layer.backward(step, saved, token_operand(x), weights, token_operand(dy), token_operand(dx),
                   places.gradients(gradients.data()), p.logits);
    put_back(step.queries(), me, y, whole.y);
    put_back(step.queries(), me, dx, whole.dx);
}

template <class T, class Attention = ulysses::reference_attention,
          class Epilogue = ulysses::no_epilogue>
six_results<T> six_steps(six_problem<T> const& p, orders const& order, bool backward = true,
                         Attention const& attention = {}, Epilogue const& epilogue = {}) {
    auto const step = ulysses::sequence::of(p.batch, order);
    six_results<T> whole(p, step.ranks());
    run_ranks(step.ranks(), [&](ulysses::threads::communicator ranks) {
        six_steps_rank(ranks, p, step, attention, epilogue, whole, backward);
    });
    whole.gradients.assign(p.parameters.size(), T(0));
    for (auto const& part : whole.rank_gradients)
        for (std::size_t i = 0; i < part.size(); ++i) whole.gradients[i] += part[i];
    return whole;
}

// Instantiated once, in harness.cpp.
extern template six_results<double>
six_steps<double, ulysses::reference_attention, ulysses::no_epilogue>(
    six_problem<double> const&, orders const&, bool, ulysses::reference_attention const&,
    ulysses::no_epilogue const&);

}  // namespace pipeline_test
