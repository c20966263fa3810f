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
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <random>
#include <span>
#include <string>
#include <utility>
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

/// One rank's part of a run.
template <class T, class Attention, class Ranks>
class trainer {
   public:
    /// `recorder`, if any, is paused; it records the last steps.
    trainer(Ranks ranks, options const& given, text const& source,
            ulysses::trace_recorder* recorder)
        : ranks_(ranks),
          given_(given),
          source_(source),
          recorder_(recorder),
          model_(ranks, given.model, Attention{}, recorder),
          weights_(given.model),
          gradients_(given.model),
          optimizer_(weights_.all().size()),
          step_(ulysses::sequence::agree(
              ranks, {.batch = given.batch, .tokens = share_of(given.tokens)})) {
        weights_.initialise(given.seed);
        if (recorder_ != nullptr) input_ = recorder_->observe("input");
    }

    run_report run(progress& bar) {
        run_report report;
        report.ranks = ranks_.size();
        report.parameters = weights_.all().size();
        report.first_bits = held_out_bits();
        std::mt19937_64 generator(given_.seed);
        auto& counted = model_.counted();
        counted.reset();
        auto const begin = std::chrono::steady_clock::now();
        for (std::int64_t i = 0; i < given_.steps; ++i) {
            if (recorder_ != nullptr && i == given_.steps - traced_steps(given_))
                recorder_->resume();
            report.losses.push_back(train_step(i, generator));
            bar.show(i + 1, given_.steps, report.losses.back());
        }
        if (recorder_ != nullptr) recorder_->pause();
        report.seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        report.moved_bytes =
            over_ranks(counted.bytes_sent + counted.bytes_received, ulysses::reduction::sum);
        report.planned_bytes = given_.steps * planned_bytes();
        report.activation_bytes = static_cast<std::size_t>(
            over_ranks(model_.activation_bytes(), ulysses::reduction::max));
        report.workspace_bytes =
            static_cast<std::size_t>(over_ranks(model_.workspace_bytes(), ulysses::reduction::max));
        report.final_bits = held_out_bits();
        return report;
    }

    /// Continues the beginning of the held-out text.
    void write_sample(run_report& report) {
        auto const from = source_.held_out().first(
            static_cast<std::size_t>(std::min<std::int64_t>(given_.tokens, 48)));
        report.prompt.assign(from.begin(), from.end());
        report.sample = continued(model_, weights_, report.prompt, given_.tokens, given_.sample,
                                  sampler(0.6, given_.seed));
    }

    weights<T> const& trained() const { return weights_; }

   private:
    std::int64_t share_of(std::int64_t tokens) const {
        return tokens / ranks_.size() + (ranks_.rank() < tokens % ranks_.size() ? 1 : 0);
    }

    /// *Returns* the loss in nats a token, the same on every rank.
    double train_step(std::int64_t i, std::mt19937_64& generator) {
        auto const from = source_.training();
        input_.begin(ulysses::step_id::shard);
        batch_.take(step_, ranks_.rank(), from,
                    random_starts(generator, given_.batch, given_.tokens, from.size()));
        input_.end(ulysses::step_id::shard);
        auto const& logits = model_.forward(step_, weights_, batch_.bytes);
        auto const tokens = static_cast<double>(given_.batch * given_.tokens);
        auto const loss = sum_over_ranks(cross_entropy(logits, batch_.targets)) / tokens;
        std::ranges::fill(gradients_.all(), T(0));
        model_.backward(step_, weights_, gradients_, batch_.bytes);
        // Each rank has the gradient of its tokens' loss sum; their sum is the whole's.
        ranks_.all_reduce(gradients_.all(), ulysses::reduction::sum);
        optimizer_.step(weights_, gradients_, tokens,
                        learning_rate_at(i, given_.steps, given_.learning_rate));
        return loss;
    }

    /// Over about 16 thousand tokens that are spread over the held-out text.
    double held_out_bits() {
        auto const from = source_.held_out();
        auto const a_batch = given_.batch * given_.tokens;
        auto const batches = std::max<std::int64_t>(
            1, std::min<std::int64_t>(16384, static_cast<std::int64_t>(from.size())) / a_batch);
        auto const starts = even_starts(batches * given_.batch, given_.tokens, from.size());
        double sum = 0;
        for (std::int64_t i = 0; i < batches; ++i) {
            batch_.take(step_, ranks_.rank(), from,
                        std::span(starts).subspan(static_cast<std::size_t>(i * given_.batch),
                                                  static_cast<std::size_t>(given_.batch)));
            sum += cross_entropy(model_.infer(step_, weights_, batch_.bytes), batch_.targets);
        }
        return sum_over_ranks(sum) / static_cast<double>(batches * a_batch) / std::numbers::ln2;
    }

    /// Bytes that one training step exchanges by its plan, all ranks.
    std::int64_t planned_bytes() {
        auto const& plan = model_.attention().planned(step_);
        auto const forward = ulysses::forward_traffic(plan, sizeof(T));
        auto const backward =
            ulysses::backward_traffic(plan, sizeof(T), sizeof(ulysses::accumulator_t<T>));
        return given_.model.layers *
               over_ranks(forward.sent + backward.sent, ulysses::reduction::sum);
    }

    double sum_over_ranks(double value) const {
        ranks_.all_reduce(std::span(&value, 1), ulysses::reduction::sum);
        return value;
    }
    std::int64_t over_ranks(std::size_t bytes, ulysses::reduction how) const {
        auto value = static_cast<std::int64_t>(bytes);
        ranks_.all_reduce(std::span(&value, 1), how);
        return value;
    }

    Ranks ranks_;
    options const& given_;
    text const& source_;
    ulysses::trace_recorder* recorder_;
    ulysses::trace_observer input_;
    model<T, Attention, Ranks> model_;
    weights<T> weights_, gradients_;
    adamw<T> optimizer_;
    ulysses::sequence step_;
    batch batch_;
};

/// What one rank of a run does, whatever the ranks are. The last run writes the sample, and its rank 0
/// the parameters to `saved`, if any.
template <class T, class Attention, class Ranks>
run_report train(Ranks ranks, options const& given, text const& source, bool last,
                 ulysses::trace_recorder* recorder, model_file* saved) {
    trainer<T, Attention, Ranks> mine(ranks, given, source, recorder);
    progress bar(ranks.rank() == 0, ranks.size());
    auto report = mine.run(bar);
    if (last) mine.write_sample(report);
    if (last && ranks.rank() == 0 && saved != nullptr) saved->write(mine.trained());
    return report;
}

}  // namespace lm
