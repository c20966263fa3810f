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

/// Lets the model continue `prompt` by `count` bytes. Every step runs the text so far, at most
/// `tokens` bytes of it, spread over the ranks; every rank returns the same text.
template <class T, class Attention>
std::string continued(model<T, Attention>& model, weights<T> const& w, std::string text,
                      std::int64_t tokens, std::int64_t count, std::uint64_t seed) {
    constexpr double temperature = 0.6;
    auto const& ranks = model.attention().ranks();
    auto const rank = ranks.rank();
    std::mt19937_64 generator(seed);
    for (std::int64_t n = 0; n < count; ++n) {
        auto const seen = std::min(tokens, static_cast<std::int64_t>(text.size()));
        auto const begin = text.size() - static_cast<std::size_t>(seen);
        auto const step = ulysses::sequence::split(ranks.size(), 1, seen);
        auto const own = step.queries().count(rank);
        std::vector<std::uint8_t> bytes;
        std::int64_t last = -1;  // this rank's index of the last token, if it holds it
        for (std::int64_t i = 0; i < own; ++i) {
            auto const position = step.queries().position(rank, i);
            bytes.push_back(
                static_cast<std::uint8_t>(text[begin + static_cast<std::size_t>(position)]));
            if (position == seen - 1) last = i;
        }
        auto const& logits = model.infer(step, w, bytes);
        std::array<T, vocabulary> next{};
        if (last >= 0) std::copy_n(logits.row(last), vocabulary, next.begin());
        ranks.all_reduce(std::span<T>(next), ulysses::reduction::sum);
        text += static_cast<char>(draw<T>(next, temperature, generator));
    }
    return text;
}

}  // namespace lm
