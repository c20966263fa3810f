#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "../train_lm/model.hpp"
#include "../train_lm/model_file.hpp"
#include "../train_lm/sample.hpp"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace lm {

/// How a text is generated.
struct generation {
    std::string prompt;
    std::int64_t tokens = 0;  ///< bytes to add
    std::int64_t chunk = 0;   ///< prompt bytes of a prefill step; 0: all at once
    bool cached = true;       ///< false: every step runs the whole text
    bool by_heads = false;    ///< decode without an exchange in attention
    double temperature = 0;   ///< 0: greedy
    std::uint64_t seed = 1;
};

struct generated {
    int ranks = 0;
    std::string text;  ///< without the prompt
    double prefill_seconds = 0, decode_seconds = 0;
    std::size_t cache_bytes = 0;  ///< of all layers, on rank 0
};

/// One rank's part. Every rank returns the same text.
template <class T, class Attention>
class generator {
   public:
    generator(ulysses::threads::communicator ranks, stored_model const& stored)
        : ranks_(ranks),
          model_(ranks, stored.shape, Attention{}, nullptr, ulysses::assignment::whole_heads),
          weights_(stored.shape) {
        stored.copy_to(weights_);
    }

    generated run(generation const& asked) {
        generated result;
        result.ranks = ranks_.size();
        auto const begin = std::chrono::steady_clock::now();
        auto const length = static_cast<std::int64_t>(asked.prompt.size());
        if (!asked.cached) {
            auto const text = continued(model_, weights_, asked.prompt, length + asked.tokens,
                                        asked.tokens, sampler(asked.temperature, asked.seed));
            result.text = text.substr(asked.prompt.size());
            result.decode_seconds = since(begin);
            return result;
        }
        sampler choose(asked.temperature, asked.seed);
        model_.make_caches(length + asked.tokens);
        auto next = prefill(asked.prompt, asked.chunk > 0 ? asked.chunk : length);
        result.prefill_seconds = since(begin);
        auto const prefilled = std::chrono::steady_clock::now();
        while (true) {
            result.text += static_cast<char>(choose(std::span<T const>(next)));
            if (static_cast<std::int64_t>(result.text.size()) == asked.tokens) break;
            next = decode(result.text.back(), asked.by_heads);
        }
        result.decode_seconds = since(prefilled);
        result.cache_bytes = model_.cache_bytes();
        return result;
    }

   private:
    using logits = std::array<T, vocabulary>;

    static double since(std::chrono::steady_clock::time_point begin) {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }

    // [snippet prefill]
    /// Puts the prompt into the caches, `chunk` tokens at a time, each chunk spread over the ranks.
    logits prefill(std::string_view prompt, std::int64_t chunk) {
        logits last{};
        for (; !prompt.empty(); prompt.remove_prefix(step_.queries().total())) {
            auto const tokens = std::min<std::int64_t>(chunk, std::ssize(prompt));
            last = extended(prompt.substr(0, tokens));
        }
        return last;
    }
    // [/snippet]

    // [snippet extended]
    /// One step of all layers over the caches, and its last logits.
    logits extended(std::string_view text) {
        auto const share = std::ssize(text) / ranks_.size() +
                           (ranks_.rank() < std::ssize(text) % ranks_.size() ? 1 : 0);
        step_.renew(ranks_, {.tokens = share, .packing = {.past = model_.cached()}});
        auto const bytes = own_bytes(step_, ranks_.rank(), text);
        return last_logits(ranks_, step_, model_.extend(step_, weights_, bytes));
    }
    // [/snippet]

    logits decode(char byte, bool by_heads) {
        if (!by_heads) return extended({&byte, 1});
        // Every rank has the byte, and knows the step without asking the others.
        step_ = ulysses::sequence::split(ranks_.size(), 1, 1);
        step_.pack({.past = model_.cached()});
        auto const token = static_cast<std::uint8_t>(byte);
        auto const& all = model_.extend_by_heads(step_, weights_, {&token, 1});
        logits last{};
        std::copy_n(all.row(0), vocabulary, last.begin());
        return last;
    }

    ulysses::threads::communicator ranks_;
    model<T, Attention, ulysses::threads::communicator> model_;
    weights<T> weights_;
    ulysses::sequence step_;
};

/// Generates with `ranks` ranks, each a thread of this process.
template <class T, class Attention>
generated generate(int ranks, stored_model const& stored, generation const& asked) {
    generated result;
    ulysses::threads::run(ranks, [&](ulysses::threads::communicator handle) {
        auto mine = generator<T, Attention>(handle, stored).run(asked);
        if (handle.rank() == 0) result = std::move(mine);
    });
    return result;
}

}  // namespace lm
