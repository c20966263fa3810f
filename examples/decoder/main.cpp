// SPDX-License-Identifier: Apache-2.0
// A decoder engine as it was, and with its prompt sharded over its workers: the same logits.
//
//     decoder [FILE]      the prompt is the start of FILE, else a text of its own

#include "arena_space.hpp"
#include "engine/decoder.hpp"
#include "engine/thread_pool.hpp"
#include "sharded.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using bytes = std::vector<std::uint8_t>;

constexpr std::int64_t prompt_tokens = 350;  // divisible by 1 and 2, not by 3 and 4
constexpr int most_workers = 4;
constexpr std::int64_t learnt_tokens = prompt_tokens - 1;  // the last one is a target only
constexpr int training_steps = 3;
constexpr unsigned seed = 2026;

// 4 workers cut heads of the first, second and third layer; 3 of the first, third and last.
engine::Config const config{
    .width = 96, .hidden = 256, .layers = {{5, 1, 16}, {6, 3, 16}, {10, 2, 8}, {4, 4, 24}}};

bytes prompt_of(char const* path) {
    std::string text =
        "A ship that sails alone carries its whole cargo in one hold, and the size of that hold "
        "is the size of the largest thing it can carry. A convoy divides the cargo. Each ship "
        "takes a part, all sail at one speed, and at two points of the voyage they come alongside "
        "and pass goods from deck to deck: once to sort them by kind, so that each may be weighed "
        "whole, and once to put every piece back where it was. Nothing else of the voyage changes.";
    if (path != nullptr) {
        std::ifstream file(path, std::ios::binary);
        text.assign(std::istreambuf_iterator<char>(file), {});
    }
    if (static_cast<std::int64_t>(text.size()) < prompt_tokens)
        throw std::runtime_error("the prompt is too short");
    return {text.begin(), text.begin() + prompt_tokens};
}

struct Result {
    std::vector<float> logits;  // [tokens, 256]
    double milliseconds = 0;
    std::size_t arena_bytes = 0;    // largest of any worker, activations and what else is there
    std::size_t library_bytes = 0;  // and what the library holds beside
};

void put(Result& result, std::int64_t begin, engine::Tensor const& logits) {
    std::copy(logits.row(0), logits.row(logits.rows()),
              result.logits.begin() + begin * engine::Decoder::vocabulary);
}

template <class Body>
Result measured(std::deque<engine::Arena>& arenas, Body const& body) {
    Result result;
    result.logits.assign(prompt_tokens * engine::Decoder::vocabulary,
                         std::numeric_limits<float>::quiet_NaN());
    auto const start = std::chrono::steady_clock::now();
    body(result);
    result.milliseconds =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    for (auto const& arena : arenas)
        result.arena_bytes = std::max(result.arena_bytes, arena.peak());
    return result;
}

/// One worker, without the library.
Result alone(engine::Decoder const& decoder, bytes const& prompt) {
    std::deque<engine::Arena> arenas(1);
    return measured(arenas, [&](Result& result) {
        // [snippet alone]
        engine::LocalAttention attention(arenas[0]);
        auto const logits = decoder.prefill(prompt, 0, attention, arenas[0]);
        // [/snippet]
        put(result, 0, logits);
    });
}

/// All workers of a pool, with the library.
template <class Kernel>
Result on_workers(int workers, engine::Decoder const& decoder, bytes const& prompt) {
    std::deque<engine::Arena> arenas(static_cast<std::size_t>(workers));
    engine::ThreadPool pool(workers);
    std::vector<std::size_t> held(arenas.size());
    auto result = measured(arenas, [&](Result& whole) {
        // [snippet sharded]
        sharded::on_every_worker(
            pool, prompt_tokens,
            [&](auto const& ranks, auto const& step, std::int64_t begin, std::int64_t count) {
                auto& arena = arenas[static_cast<std::size_t>(ranks.rank())];
                sharded::Attention<Kernel> attention(ranks, decoder.config(), step);
                auto const logits =
                    decoder.prefill(std::span(prompt).subspan(static_cast<std::size_t>(begin),
                                                              static_cast<std::size_t>(count)),
                                    begin, attention, arena);
                // [/snippet]
                put(whole, begin, logits);
                held[static_cast<std::size_t>(ranks.rank())] =
                    attention.bytes() + ranks.shared_window_bytes(ulysses::arena::inbox) +
                    ranks.shared_window_bytes(ulysses::arena::outbox);
            });
    });
    result.library_bytes = *std::max_element(held.begin(), held.end());
    return result;
}

/// The same, with the library's memory in the workers' arenas.
Result in_arenas(int workers, engine::Decoder const& decoder, bytes const& prompt) {
    std::deque<engine::Arena> arenas(static_cast<std::size_t>(workers));
    engine::ThreadPool pool(workers);
    auto result = measured(arenas, [&](Result& whole) {
        sharded::on_every_worker(
            pool, prompt_tokens,
            [&](auto const& ranks, auto const& step, std::int64_t begin, std::int64_t count) {
                auto& arena = arenas[static_cast<std::size_t>(ranks.rank())];
                // [snippet in_arena]
                sharded::Attention<sharded::EngineKernel, sharded::ArenaRanks> attention(
                    sharded::ArenaRanks(ranks, arena), decoder.config(), step);
                // [/snippet]
                auto const logits =
                    decoder.prefill(std::span(prompt).subspan(static_cast<std::size_t>(begin),
                                                              static_cast<std::size_t>(count)),
                                    begin, attention, arena);
                put(whole, begin, logits);
            });
    });
    for (auto const& arena : arenas)
        if (arena.in_use() != 0) throw std::runtime_error("memory was not given back to an arena");
    return result;
}

/// Losses of some steps of training on the prompt, and the gradients of the first.
struct Training {
    std::vector<double> losses;
    std::vector<float> gradients;
};

/// `learn(decoder, gradients)` returns the loss and adds to the gradients.
template <class Learn>
Training trained(Learn const& learn) {
    Training training;
    engine::Decoder decoder(config, seed);
    for (int i = 0; i < training_steps; ++i) {
        std::vector<float> gradients(decoder.parameters());
        training.losses.push_back(learn(decoder, gradients) / learnt_tokens);
        decoder.descend(gradients, 0.1f / learnt_tokens);
        if (i == 0) training.gradients = std::move(gradients);
    }
    return training;
}

Training trained_alone(bytes const& prompt) {
    return trained([&](engine::Decoder const& decoder, std::vector<float>& gradients) {
        engine::Arena arena;
        engine::LocalAttention attention(arena);
        return decoder.learn(std::span(prompt).first(learnt_tokens), std::span(prompt).subspan(1),
                             0, attention, gradients, arena);
    });
}

/// The gradient of a sum over tokens is the sum of the workers' gradients.
Training trained_on_workers(int workers, bytes const& prompt) {
    engine::ThreadPool pool(workers);
    return trained([&](engine::Decoder const& decoder, std::vector<float>& gradients) {
        std::vector<std::vector<float>> parts(static_cast<std::size_t>(workers),
                                              std::vector<float>(gradients.size()));
        std::vector<double> losses(parts.size());
        // [snippet learn]
        sharded::on_every_worker(
            pool, learnt_tokens,
            [&](auto const& ranks, auto const& step, std::int64_t begin, std::int64_t count) {
                engine::Arena arena;
                sharded::TrainingAttention<sharded::EngineKernel> attention(ranks, decoder.config(),
                                                                            step);
                auto const tokens = std::span(prompt).subspan(static_cast<std::size_t>(begin));
                auto const worker = static_cast<std::size_t>(ranks.rank());
                losses[worker] =
                    decoder.learn(tokens.first(static_cast<std::size_t>(count)), tokens.subspan(1),
                                  begin, attention, parts[worker], arena);
            });
        // [/snippet]
        for (auto const& part : parts)
            for (std::size_t i = 0; i < part.size(); ++i) gradients[i] += part[i];
        return std::accumulate(losses.begin(), losses.end(), 0.0);
    });
}

/// A worker that throws between two layers: the pool gets an error that says so, nobody hangs.
std::string error_of_failing_worker(int workers, engine::Decoder const& decoder,
                                    bytes const& prompt) {
    struct Failing : sharded::Attention<sharded::EngineKernel> {
        using Attention::Attention;
        bool fails = false;
        void attend(std::size_t layer, engine::Heads q, engine::Heads k, engine::Heads v,
                    engine::Heads o) override {
            if (fails && layer == 1) throw std::runtime_error("out of paper");
            Attention::attend(layer, q, k, v, o);
        }
    };
    engine::ThreadPool pool(workers);
    try {
        sharded::on_every_worker(
            pool, prompt_tokens,
            [&](auto const& ranks, auto const& step, std::int64_t begin, std::int64_t count) {
                engine::Arena arena;
                Failing attention(ranks, decoder.config(), step);
                attention.fails = ranks.rank() == workers - 1;
                decoder.prefill(std::span(prompt).subspan(static_cast<std::size_t>(begin),
                                                          static_cast<std::size_t>(count)),
                                begin, attention, arena);
            });
    } catch (std::exception const& e) {
        return e.what();
    }
    return "nothing was thrown";
}

bool same_bits(std::vector<float> const& a, std::vector<float> const& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

double largest_difference(std::vector<float> const& a, std::vector<float> const& b) {
    double largest = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        auto const difference = std::abs(static_cast<double>(a[i]) - b[i]);
        if (!(difference <= largest)) largest = std::isnan(difference) ? HUGE_VAL : difference;
    }
    return largest;
}

/// What two orders of summation may differ by, relative to the largest value: a sum of n terms has
/// n roundings, which are independent, so that they add up to no more than a few times sqrt(n).
double tolerance(std::vector<float> const& expected, double passes) {
    double largest = 0, roundings = static_cast<double>(config.width);
    for (auto const x : expected) largest = std::max(largest, std::abs(double{x}));
    for (auto const& layer : config.layers)
        roundings += static_cast<double>(layer.dim + prompt_tokens + layer.heads * layer.dim +
                                         2 * config.width + config.hidden);
    return 4 * passes * std::sqrt(roundings) * std::numeric_limits<float>::epsilon() * largest;
}

void print(char const* attention, int workers, Result const& result, char const* verdict) {
    auto const kib = [](std::size_t n) { return static_cast<double>(n) / 1024; };
    std::printf("%-28s %7d %7.1f ms %8.0f KiB %8.0f KiB   %s\n", attention, workers,
                result.milliseconds, kib(result.arena_bytes), kib(result.library_bytes), verdict);
}

}  // namespace

int main(int count, char** arguments) try {
    engine::Decoder const decoder(config, seed);
    auto const prompt = prompt_of(count > 1 ? arguments[1] : nullptr);
    auto failures = 0;
    auto const verdict = [&](bool holds, char const* yes, char const* no) {
        failures += holds ? 0 : 1;
        return holds ? yes : no;
    };

    std::printf("%-28s %7s %10s %12s %12s   logits\n", "attention", "workers", "time", "arena peak",
                "beside it");
    auto const expected = alone(decoder, prompt);
    print("engine, without the library", 1, expected, "");

    for (int workers = 1; workers <= most_workers; ++workers) {
        auto const result = on_workers<sharded::EngineKernel>(workers, decoder, prompt);
        print("engine's kernel", workers, result,
              verdict(same_bits(result.logits, expected.logits), "the same bits", "DIFFERENT"));
    }
    for (int workers = 1; workers <= most_workers; ++workers) {
        auto const result = in_arenas(workers, decoder, prompt);
        print("engine's kernel and memory", workers, result,
              verdict(same_bits(result.logits, expected.logits), "the same bits", "DIFFERENT"));
    }

    using blocked = ulysses::blocked_attention<ulysses::builtin_gemm>;
    auto const first = on_workers<blocked>(1, decoder, prompt);
    auto const difference = largest_difference(first.logits, expected.logits),
               allowed = tolerance(expected.logits, 1);
    print("blocked_attention", 1, first,
          verdict(difference <= allowed, "within tolerance", "TOO FAR OFF"));
    for (int workers = 2; workers <= most_workers; ++workers) {
        auto const result = on_workers<blocked>(workers, decoder, prompt);
        print("blocked_attention", workers, result,
              verdict(same_bits(result.logits, first.logits), "the bits of 1 worker", "DIFFERENT"));
    }
    std::printf("blocked_attention against the engine's: largest difference %.1e, allowed %.1e\n",
                difference, allowed);

    std::printf("\ntraining, mean loss of each step\n");
    auto const show = [](char const* who, Training const& training, char const* gradients) {
        std::printf("%-28s", who);
        for (auto const loss : training.losses) std::printf(" %.6f", loss);
        std::printf("   %s\n", gradients);
    };
    auto const learnt = trained_alone(prompt);
    show("engine, without the library", learnt,
         verdict(learnt.losses.back() < learnt.losses.front(), "", "DOES NOT LEARN"));
    for (int workers = 1; workers <= most_workers; ++workers) {
        auto const training = trained_on_workers(workers, prompt);
        auto const bound = workers == 1 ? 0.0 : tolerance(learnt.gradients, 2);
        auto const off = largest_difference(training.gradients, learnt.gradients);
        show(ulysses::concat(workers, workers == 1 ? " worker" : " workers").c_str(), training,
             verdict(off <= bound,
                     workers == 1 ? "the same gradients" : "gradients within tolerance",
                     "OTHER GRADIENTS"));
        std::printf("%28s gradients: largest difference %.1e, allowed %.1e\n", "", off, bound);
    }

    auto const text = error_of_failing_worker(3, decoder, prompt);
    std::printf("\na worker that throws: %s\n",
                verdict(text.find("out of paper") != std::string::npos, text.c_str(), "LOST"));
    return failures == 0 ? 0 : 1;
} catch (std::exception const& e) {
    std::fprintf(stderr, "decoder: %s\n", e.what());
    return 1;
}
