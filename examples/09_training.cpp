// SPDX-License-Identifier: Apache-2.0
// usage: 09_training [CONFIG.json]
// A session around a model of one attention layer, configured by JSON: the losses of one rank on any.

#include <ulysses/ulysses.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace uly = ulysses;
using ranks_type = uly::threads::communicator;

constexpr auto usual_config =
    R"({"sp": 2, "dp_shard": 2, "micro_batch": 2, "gradient_accumulation": 2,
                                  "tokens": 24, "largest_norm": 1.0, "evaluation": "bypass"})";

// [snippet config]
/// The settings of `key=value` text, and two that are no whole numbers.
uly::session_config config_from(nlohmann::json const& file) {
    uly::session_config config;
    auto const numbers = uly::settings_of(config);
    for (auto const& [key, value] : file.items()) {
        auto const at = std::ranges::find(numbers, key, &uly::setting::key);
        if (at != numbers.end())
            value.get_to(*at->value);
        else if (key == "largest_norm")
            value.get_to(config.largest_norm);
        else if (key == "evaluation" && (value == "bypass" || value == "sharded"))
            config.evaluates =
                value == "bypass" ? uly::evaluation::bypass : uly::evaluation::sharded;
        else
            throw std::runtime_error("what is \"" + key + "\": " + value.dump() + "?");
    }
    return config;
}
// [/snippet]

/// What is to be learnt: after a token comes what is three further, of 16.
struct sample {
    std::vector<std::int64_t> ids;
};
std::vector<sample> samples(std::int64_t count, std::int64_t tokens) {
    std::vector<sample> all(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i)
        for (std::int64_t t = 0; t < 1 + i * 5 % tokens; ++t)
            all[static_cast<std::size_t>(i)].ids.push_back((7 * i + 3 * t) % 16);
    return all;
}

/// x = E[ids], y = x + attention(x, x, x), the loss of softmax(y W); over ranks that share a sequence.
class model {
   public:
    explicit model(ranks_type const& ranks)
        : layer_(ranks, uly::sequence_local{}, uly::reference_attention{}, shape) {
        std::mt19937 random(1);
        std::normal_distribution<double> normal(0, 0.3);
        for (auto& each : weights) each = normal(random);
    }

    /// Adds the gradients of the loss sum over this rank's tokens.
    template <class Batch>
    uly::token_sums learn(Batch const& batch) {
        embed(batch);
        layer_.attend(batch.step, context_, heads(x_), heads(x_), heads(x_), heads(y_));
        add(x_, y_);
        auto const sums = loss_.backward(tiles_, 1.0, rows(y_), batch.labels(), rows(dy_),
                                         {&gradients[c * c], c});
        layer_.attend_backward(batch.step, context_, heads(dy_), heads(dq_), heads(dk_),
                               heads(dv_));
        for (auto const* each : {&dq_, &dk_, &dv_}) add(*each, dy_);
        for (std::size_t i = 0; i < dy_.size(); ++i)
            gradients[static_cast<std::size_t>(batch.ids()[i / c]) * c + i % c] += dy_[i];
        return sums;
    }
    template <class Batch>
    uly::token_sums loss_of(Batch const& batch) {
        embed(batch);
        layer_.attend(batch.step, heads(x_), heads(x_), heads(x_), heads(y_));
        add(x_, y_);
        return loss_.forward(tiles_, rows(y_), batch.labels());
    }

    std::vector<double> weights = std::vector<double>(2 * c * c), gradients = weights;  // E, W

   private:
    static constexpr std::size_t c = 16;
    static constexpr uly::shape shape{.heads = 2, .head_dim = 8, .mask = uly::mask::causal};
    using pipeline_type = uly::pipeline<ranks_type, uly::sequence_local, uly::reference_attention>;
    using memory = std::vector<double>;  // [B, s, C]

    template <class Batch>
    void embed(Batch const& batch) {
        batch_ = batch.step.batch();
        for (auto* each : {&x_, &y_, &dy_, &dq_, &dk_, &dv_}) each->resize(batch.ids().size() * c);
        tiles_ = uly::tiling::of_rows(static_cast<std::int64_t>(batch.ids().size()), 8);
        for (std::size_t i = 0; i < x_.size(); ++i)
            x_[i] = weights[static_cast<std::size_t>(batch.ids()[i / c]) * c + i % c];
    }
    static void add(memory const& from, memory& to) {
        for (std::size_t i = 0; i < to.size(); ++i) to[i] += from[i];
    }
    uly::token_view<double> heads(memory& x) const {
        auto const tokens = static_cast<std::int64_t>(x.size() / c) / batch_;
        return {x.data(), {batch_, tokens, shape.heads, shape.head_dim}};
    }
    static uly::row_view<double> rows(memory& x) {
        return {x.data(), static_cast<std::int64_t>(x.size() / c), c};
    }

    pipeline_type layer_;
    pipeline_type::context_type context_;
    uly::fused_cross_entropy<double, uly::builtin_gemm> loss_{{}, {&weights[c * c], c}, c};
    uly::tiling tiles_ = uly::tiling::of(0, 1);
    std::int64_t batch_ = 1;
    memory x_, y_, dy_, dq_, dk_, dv_;
};

// [snippet session]
/// The losses of an epoch's updates, and behind them that of samples held out.
std::vector<double> train(ranks_type const& group, uly::session_config const& config) {
    auto run =
        uly::prepare(config, group, samples(48, config.step.tokens),
                     std::tuple{uly::ids_field(&sample::ids), uly::labels_field(&sample::ids)});
    model learning(run.ranks().sp());
    std::vector<double> losses;
    while (auto const update = run.step(std::span(learning.gradients),
                                        [&](auto const& batch) { return learning.learn(batch); })) {
        for (std::size_t i = 0; i < learning.weights.size(); ++i)
            learning.weights[i] -= 0.5 * learning.gradients[i];
        losses.push_back(update->sums.mean_loss());
    }
    model tested(run.evaluation_ranks());
    tested.weights = learning.weights;
    auto const held_out = run.evaluate(samples(9, config.step.tokens),
                                       [&](auto const& batch) { return tested.loss_of(batch); });
    losses.push_back(held_out.mean_loss());
    return losses;
}
// [/snippet]

std::vector<double> train_on_threads(uly::session_config const& config) {
    std::vector<double> losses;
    uly::threads::run(static_cast<int>(config.parallel.ranks()), [&](ranks_type group) {
        auto const mine = train(group, config);
        if (group.rank() == 0) losses = mine;
    });
    return losses;
}

int main(int argc, char** argv) try {
    nlohmann::json file = nlohmann::json::parse(usual_config);
    if (argc > 1) std::ifstream(argv[1]) >> file;
    auto const config = config_from(file);
    uly::accounting const numbers(config.parallel, config.step);
    std::printf("%s", numbers.describe().c_str());
    auto alone = config;  // with the same tokens an update
    alone.parallel = {};
    alone.step = numbers.with_equal_tokens(alone.parallel).step();
    auto const losses = train_on_threads(config), expected = train_on_threads(alone);
    double largest = losses.size() == expected.size() ? 0 : 1;
    for (std::size_t i = 0; i < std::min(losses.size(), expected.size()); ++i) {
        std::printf("%s %.9f, on 1 rank %.9f\n", i + 1 == losses.size() ? "held out" : "loss",
                    losses[i], expected[i]);
        largest = std::max(largest, std::abs(losses[i] - expected[i]));
    }
    return largest < 1e-9 ? 0 : 1;
} catch (std::exception const& e) {
    std::fprintf(stderr, "09_training: %s\n", e.what());
    return 2;
}
