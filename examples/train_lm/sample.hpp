#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "model.hpp"
#include "text.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace lm {

/// A byte drawn from softmax(logits / temperature). The same logits and generator draw the same
/// byte.
template <class T>
std::uint8_t draw(std::span<T const> logits, double temperature, std::mt19937_64& generator) {
    auto const largest = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
    std::array<double, vocabulary> upto{};
    double total = 0;
    for (std::size_t v = 0; v < upto.size(); ++v)
        upto[v] = total += std::exp((static_cast<double>(logits[v]) - largest) / temperature);
    auto const point = std::uniform_real_distribution<double>(0, total)(generator);
    auto const found = std::lower_bound(upto.begin(), upto.end() - 1, point);
    return static_cast<std::uint8_t>(found - upto.begin());
}

/// How the next byte is chosen from the logits: the likeliest one at temperature 0, else drawn. On every
/// rank alike.
class sampler {
   public:
    sampler(double temperature, std::uint64_t seed) : temperature_(temperature), generator_(seed) {}

    template <class T>
    std::uint8_t operator()(std::span<T const> logits) {
        if (temperature_ > 0) return draw(logits, temperature_, generator_);
        return static_cast<std::uint8_t>(std::max_element(logits.begin(), logits.end()) -
                                         logits.begin());
    }

   private:
    double temperature_;
    std::mt19937_64 generator_;
};

/// The logits of the step's last token, on every rank, from the rank that holds it.
template <class Ranks, class T>
std::array<T, vocabulary> last_logits(Ranks const& ranks, ulysses::sequence const& step,
                                      tensor<T> const& logits) {
    std::array<T, vocabulary> last{};
    for (std::int64_t i = 0; i < logits.rows(); ++i)
        if (step.queries().position(ranks.rank(), i) == step.queries().total() - 1)
            std::copy_n(logits.row(i), vocabulary, last.begin());
    ranks.all_reduce(std::span<T>(last), ulysses::reduction::sum);
    return last;
}

/// This rank's bytes of a text whose tokens `step` deals to the ranks.
inline std::vector<std::uint8_t> own_bytes(ulysses::sequence const& step, int rank,
                                           std::string_view text) {
    std::vector<std::uint8_t> bytes;
    for (std::int64_t i = 0; i < step.queries().count(rank); ++i)
        bytes.push_back(static_cast<std::uint8_t>(
            text[static_cast<std::size_t>(step.queries().position(rank, i))]));
    return bytes;
}

/// Lets the model continue `prompt` by `count` bytes. Every step runs the text so far, at most
/// `tokens` bytes of it, spread over the ranks; every rank returns the same text.
template <class T, class Attention, class Ranks>
std::string continued(model<T, Attention, Ranks>& model, weights<T> const& w, std::string text,
                      std::int64_t tokens, std::int64_t count, sampler choose) {
    auto const& ranks = model.attention().ranks();
    for (std::int64_t n = 0; n < count; ++n) {
        auto const seen = std::min(tokens, static_cast<std::int64_t>(text.size()));
        auto const step = ulysses::sequence::split(ranks.size(), 1, seen);
        auto const bytes =
            own_bytes(step, ranks.rank(),
                      std::string_view(text).substr(text.size() - static_cast<std::size_t>(seen)));
        auto const next = last_logits(ranks, step, model.infer(step, w, bytes));
        text += static_cast<char>(choose(std::span<T const>(next)));
    }
    return text;
}

}  // namespace lm
