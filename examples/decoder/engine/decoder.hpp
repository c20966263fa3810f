#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "layers.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace engine {

struct Config {
    std::int64_t width, hidden;
    std::vector<AttentionConfig> layers;
};

/// A byte-level language model: embedding, pre-norm blocks, logits over the next byte.
class Decoder {
   public:
    static constexpr std::int64_t vocabulary = 256;

    Decoder(Config config, unsigned seed)
        : Decoder(std::move(config), Initializer{std::mt19937(seed)}) {}

    Config const& config() const { return config_; }
    std::size_t parameters() const { return parameters_; }

    /// Logits [tokens, 256] of a prompt, or of the part of it that begins at position `first`.
    Tensor prefill(std::span<std::uint8_t const> tokens, std::int64_t first,
                   AttentionBackend& backend, Arena& arena) const {
        auto x = embedded(tokens, arena);
        for (std::size_t i = 0; i < blocks_.size(); ++i) {
            auto const& [attention, mlp] = blocks_[i];
            add(x, attention(i, rms_norm(x, arena), first, backend, arena));
            add(x, mlp(rms_norm(x, arena), arena));
        }
        return logits_(rms_norm(x, arena), arena);
    }

    /// Cross entropy summed over `targets`, the bytes after `tokens`; adds to all gradients.
    double learn(std::span<std::uint8_t const> tokens, std::span<std::uint8_t const> targets,
                 std::int64_t first, AttentionBackend& backend, std::span<float> gradients,
                 Arena& arena) const {
        std::vector<BlockKept> kept(blocks_.size());
        auto x = embedded(tokens, arena);
        for (std::size_t i = 0; i < blocks_.size(); ++i) {
            kept[i].x.emplace(copied(x, arena));
            add(x, blocks_[i].attention(i, rms_norm(x, arena), first, backend, arena,
                                        &kept[i].attention));
            kept[i].middle.emplace(copied(x, arena));
            add(x, blocks_[i].mlp(rms_norm(x, arena), arena, &kept[i].mlp));
        }
        auto const last = rms_norm(x, arena);
        auto dlogits = logits_(last, arena);
        auto const loss = cross_entropy(dlogits, targets);

        auto dx = rms_norm_backward(x, logits_.backward(last, dlogits, gradients, arena), arena);
        for (auto i = blocks_.size(); i-- > 0;) {
            auto const dmlp = blocks_[i].mlp.backward(*kept[i].mlp, dx, gradients, arena);
            add(dx, rms_norm_backward(*kept[i].middle, dmlp, arena));
            auto const dattention = blocks_[i].attention.backward(i, *kept[i].attention, dx, first,
                                                                  backend, gradients, arena);
            add(dx, rms_norm_backward(*kept[i].x, dattention, arena));
            kept[i] = {};
        }
        for (std::int64_t i = 0; i < dx.rows(); ++i) {
            auto* const row =
                embedding_.gradient_row(gradients, tokens[static_cast<std::size_t>(i)]);
            for (std::int64_t c = 0; c < dx.columns(); ++c) row[c] += dx.row(i)[c];
        }
        return loss;
    }

    void descend(std::span<float const> gradients, float rate) {
        embedding_.descend(gradients, rate);
        logits_.descend(gradients, rate);
        for (auto& [attention, mlp] : blocks_) {
            attention.descend(gradients, rate);
            mlp.descend(gradients, rate);
        }
    }

   private:
    struct Block {
        AttentionLayer attention;
        Mlp mlp;
    };
    struct BlockKept {
        std::optional<Tensor> x, middle;
        std::optional<AttentionLayer::Kept> attention;
        std::optional<Mlp::Kept> mlp;
    };

    Decoder(Config config, Initializer start)
        : config_(std::move(config)),
          embedding_(vocabulary, config_.width, start),
          logits_(config_.width, vocabulary, start) {
        for (auto const& layer : config_.layers)
            blocks_.push_back({AttentionLayer(config_.width, layer, start),
                               Mlp(config_.width, config_.hidden, start)});
        parameters_ = start.parameters;
    }

    Tensor embedded(std::span<std::uint8_t const> tokens, Arena& arena) const {
        Tensor x(arena, static_cast<std::int64_t>(tokens.size()), config_.width);
        for (std::int64_t i = 0; i < x.rows(); ++i) {
            auto const* const from = embedding_.row(tokens[static_cast<std::size_t>(i)]);
            std::copy(from, from + config_.width, x.row(i));
        }
        return x;
    }

    static Tensor copied(Tensor const& x, Arena& arena) {
        Tensor y(arena, x.rows(), x.columns());
        std::copy(x.row(0), x.row(x.rows()), y.row(0));
        return y;
    }

    /// Turns logits into their gradient.
    static double cross_entropy(Tensor& logits, std::span<std::uint8_t const> targets) {
        double loss = 0;
        for (std::int64_t i = 0; i < logits.rows(); ++i) {
            auto* const row = logits.row(i);
            auto const target = targets[static_cast<std::size_t>(i)];
            auto const largest = *std::max_element(row, row + vocabulary);
            float sum = 0;
            for (std::int64_t c = 0; c < vocabulary; ++c) sum += std::exp(row[c] - largest);
            loss += std::log(sum) + largest - row[target];
            for (std::int64_t c = 0; c < vocabulary; ++c) row[c] = std::exp(row[c] - largest) / sum;
            row[target] -= 1;
        }
        return loss;
    }

    Config config_;
    Linear embedding_, logits_;
    std::vector<Block> blocks_;
    std::size_t parameters_ = 0;
};

}  // namespace engine
