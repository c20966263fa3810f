// SPDX-License-Identifier: Apache-2.0
// The model's hand-written backward against central differences of its loss, on three ranks.

#include "model.hpp"
#include "text.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <span>
#include <vector>

namespace {

using lm::weights;
constexpr lm::model_shape shape{.layers = 2, .width = 24, .heads = 6, .kv_heads = 2};

/// The largest error of a gradient, as a share of the difference quotient.
double largest_error(ulysses::threads::communicator ranks) {
    std::mt19937_64 generator(1);
    weights<double> w(shape), gradients(shape);
    w.initialise(1);
    std::normal_distribution<double> normal(0, 0.2);
    for (auto& each : w.all()) each += normal(generator);  // gains other than 1
    std::vector<std::uint8_t> source(100);
    for (auto& each : source) each = static_cast<std::uint8_t>(generator());
    std::vector<std::size_t> const starts{0, 50};
    auto const samples = lm::excerpts(source, starts, 37);
    auto run = ulysses::prepare({.parallel = {.sp = ranks.size()},
                                 .step = {.micro_batch = 2, .tokens = 37},
                                 .batches = {.shift_labels = false, .end = ulysses::at_end::pad}},
                                ranks, samples, lm::excerpt_fields);

    lm::model<double, ulysses::blocked_attention<lm::gemm>, ulysses::threads::communicator> model(
        run.ranks().sp(), shape, {});
    auto const loss = [&] {
        return run
            .evaluate(samples,
                      [&](auto const& batch) {
                          return lm::cross_entropy(model.infer(batch.step, w, batch.ids()),
                                                   batch.labels());
                      })
            .mean_loss();
    };
    run.step(gradients.all(), [&](auto const& batch) {
        auto const sums =
            lm::cross_entropy(model.forward(batch.step, w, batch.ids()), batch.labels());
        model.backward(batch.step, w, gradients, batch.ids());
        return sums;
    });

    // Every gain, which lie last, and as many parameters of the matrices drawn at random.
    auto const count = w.all().size(), gains = count - w.matrices().size();
    double largest = 0;
    for (std::size_t i = 0; i < 2 * gains; ++i) {
        auto const at = i < gains ? count - 1 - i : generator() % (count - gains);
        auto& parameter = w.all()[at];
        auto const kept = parameter;
        constexpr double small = 1e-5;
        parameter = kept + small;
        auto const above = loss();
        parameter = kept - small;
        auto const below = loss();
        parameter = kept;
        auto const quotient = (above - below) / (2 * small);
        auto const error = std::abs(quotient - gradients.all()[at]) / (1e-2 + std::abs(quotient));
        if (!(error <= largest)) largest = error;
    }
    return largest;
}

}  // namespace

int main() {
    double error = 0;
    ulysses::threads::run(3, [&](ulysses::threads::communicator ranks) {
        auto const mine = largest_error(ranks);
        if (ranks.rank() == 0) error = mine;
    });
    std::printf("gradients against central differences: largest error %.1e\n", error);
    return error < 1e-5 ? 0 : 1;
}
