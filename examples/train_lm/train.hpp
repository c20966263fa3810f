#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "model.hpp"
#include "model_file.hpp"
#include "optimizer.hpp"
#include "options.hpp"
#include "progress.hpp"
#include "sample.hpp"
#include "text.hpp"
#include "trace.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <span>
#include <string>
#include <vector>

namespace lm {

/// What one training run tells.
struct run_report {
    int ranks = 0;
    std::vector<double> losses;  ///< nats a token, of every step
    double seconds = 0;          ///< of the training steps alone
    std::size_t parameters = 0;
    std::size_t activation_bytes = 0;       ///< of the rank that holds most
    std::size_t workspace_bytes = 0;        ///< of the rank that holds most
    std::int64_t moved_bytes = 0;           ///< counted, all ranks, of all training steps
    std::int64_t planned_bytes = 0;         ///< what the plans say of the same
    double first_bits = 0, final_bits = 0;  ///< a byte, on held-out text
    std::string prompt, sample;             ///< the sample begins with the prompt
};

inline ulysses::session_config config_of(int ranks, std::int64_t batch, std::int64_t tokens) {
    return {.parallel = {.sp = ranks},
            .step = {.micro_batch = batch, .tokens = tokens},
            .batches = {.shift_labels = false, .end = ulysses::at_end::pad},
            .largest_norm = 1};
}

/// What one rank of a run does, whatever the ranks are. `recorder`, if any, is paused; it records the
/// last steps. The last run writes the sample, and its rank 0 the parameters to `saved`, if any.
template <class T, class Attention, class Ranks>
run_report train(Ranks ranks, options const& given, text const& source, bool last,
                 ulysses::trace_recorder* recorder, model_file* saved) {
    auto const learnt = source.training(), held_out = source.held_out();
    auto const starts =
        random_starts(given.seed, given.steps * given.batch, given.tokens, learnt.size());
    // Over about 16 thousand tokens that are spread over the held-out text.
    auto const a_batch = given.batch * given.tokens;
    auto const batches = std::max<std::int64_t>(
        1, std::min<std::int64_t>(16384, static_cast<std::int64_t>(held_out.size())) / a_batch);
    auto const held_out_starts = even_starts(batches * given.batch, given.tokens, held_out.size());

    auto run = ulysses::prepare(config_of(ranks.size(), given.batch, given.tokens), ranks,
                                excerpts(learnt, starts, given.tokens), excerpt_fields);
    model<T, Attention, Ranks> network(run.ranks().sp(), given.model, Attention{}, recorder);
    weights<T> parameters(given.model), gradients(given.model);
    parameters.initialise(given.seed);
    adamw<T> optimizer(parameters.all().size());
    ulysses::trace_observer input;
    if (recorder != nullptr) input = recorder->observe("input");

    auto const held_out_bits = [&] {
        auto const sums =
            run.evaluate(excerpts(held_out, held_out_starts, given.tokens), [&](auto const& batch) {
                return cross_entropy(network.infer(batch.step, parameters, batch.ids()),
                                     batch.labels());
            });
        return sums.mean_loss() / std::numbers::ln2;
    };
    auto const over_ranks = [&](std::size_t bytes, ulysses::reduction how) {
        auto value = static_cast<std::int64_t>(bytes);
        ranks.all_reduce(std::span(&value, 1), how);
        return value;
    };

    run_report report;
    report.ranks = ranks.size();
    report.parameters = parameters.all().size();
    report.first_bits = held_out_bits();
    auto& counted = network.counted();
    counted.reset();
    progress bar(ranks.rank() == 0, ranks.size());
    auto const begin = std::chrono::steady_clock::now();
    for (std::int64_t i = 0; i < given.steps; ++i) {
        if (recorder != nullptr && i == given.steps - traced_steps(given)) recorder->resume();
        input.begin(ulysses::step_id::shard);
        auto const update = run.step(gradients.all(), [&](auto const& batch) {
            input.end(ulysses::step_id::shard);
            auto const& logits = network.forward(batch.step, parameters, batch.ids());
            auto const sums = cross_entropy(logits, batch.labels());
            network.backward(batch.step, parameters, gradients, batch.ids());
            return sums;
        });
        optimizer.step(parameters, gradients,
                       learning_rate_at(i, given.steps, given.learning_rate));
        report.losses.push_back(update->sums.mean_loss());
        bar.show(i + 1, given.steps, report.losses.back());
    }
    if (recorder != nullptr) recorder->pause();
    report.seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    using ulysses::reduction;
    report.moved_bytes = over_ranks(counted.bytes_sent + counted.bytes_received, reduction::sum);
    report.planned_bytes = given.steps * over_ranks(network.planned_bytes(ulysses::sequence::split(
                                                        ranks.size(), given.batch, given.tokens)),
                                                    reduction::sum);
    report.activation_bytes =
        static_cast<std::size_t>(over_ranks(network.activation_bytes(), reduction::max));
    report.workspace_bytes =
        static_cast<std::size_t>(over_ranks(network.workspace_bytes(), reduction::max));
    report.final_bits = held_out_bits();
    if (!last) return report;
    // It continues the beginning of the held-out text.
    auto const prompt =
        held_out.first(static_cast<std::size_t>(std::min<std::int64_t>(given.tokens, 48)));
    report.prompt.assign(prompt.begin(), prompt.end());
    report.sample = continued(network, parameters, report.prompt, given.tokens, given.sample,
                              sampler(0.6, given.seed));
    if (ranks.rank() == 0 && saved != nullptr) saved->write(parameters);
    return report;
}

}  // namespace lm
