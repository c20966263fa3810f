#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "losses_file.hpp"
#include "options.hpp"
#include "report.hpp"
#include "text.hpp"
#include "trace.hpp"
#include "train.hpp"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

/// The program but for its ranks, which are threads in main.cpp and processes in mpi_main.cpp.
namespace lm {

/// The options that are types.
template <class Ranks>
auto chosen(options const& given) {
    using blocked = ulysses::blocked_attention<gemm>;
    using reference = ulysses::reference_attention;
    if (given.dtype == "float")
        return given.attention == "blocked" ? train<float, blocked, Ranks>
                                            : train<float, reference, Ranks>;
    return given.attention == "blocked" ? train<double, blocked, Ranks>
                                        : train<double, reference, Ranks>;
}

/// Trains once for each rank count. `on_ranks(count, rank)` calls `rank(handle)` for each rank of this
/// process and returns what one of them returns. *Returns* the program's exit status.
template <class Ranks, class OnRanks>
int run(options const& given, OnRanks const& on_ranks) {
    text const source(given.text_file, given.tokens);
    std::optional<trace_file> trace;
    if (!given.trace.empty()) trace.emplace(given.trace);
    std::optional<model_file> saved;
    if (!given.save.empty()) saved.emplace(given.save);
    std::optional<losses_file> losses;
    if (!given.losses.empty()) losses.emplace(given.losses);
    auto const traced = std::max_element(given.ranks.begin(), given.ranks.end());
    print_head(given, source);
    std::vector<run_report> runs;
    for (auto each = given.ranks.begin(); each != given.ranks.end(); ++each) {
        auto* const recorded = trace && each == traced ? &*trace : nullptr;
        if (recorded != nullptr) recorded->prepare(*each, given);
        runs.push_back(on_ranks(*each, [&](Ranks ranks) {
            return chosen<Ranks>(given)(ranks, given, source, each + 1 == given.ranks.end(),
                                        recorded != nullptr ? &recorded->of(ranks.rank()) : nullptr,
                                        saved ? &*saved : nullptr);
        }));
    }
    print_report(given, runs);
    if (trace) trace->write(given);
    if (losses) losses->write(runs);
    if (saved)
        std::printf("\nsaved    the model of P = %d: %s\n", given.ranks.back(), given.save.c_str());
    auto const wrong = complaint(given, runs);
    if (wrong.empty()) return 0;
    std::fprintf(stderr, "train_lm: %s\n", wrong.c_str());
    return 1;
}

/// The exit status of `body`, or, after its message, that of what it throws.
template <class Body>
int exit_status(Body const& body) {
    try {
        return body();
    } catch (bad_input const& e) {
        std::fprintf(stderr, "train_lm: %s\n", e.what());
        return 2;
    } catch (std::exception const& e) {
        std::fprintf(stderr, "train_lm: %s\n", e.what());
        return 1;
    }
}

}  // namespace lm
