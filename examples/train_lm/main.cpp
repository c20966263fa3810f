// SPDX-License-Identifier: Apache-2.0

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

namespace {

/// The options that are types.
auto chosen(lm::options const& given) {
    using blocked = ulysses::blocked_attention<lm::gemm>;
    using reference = ulysses::reference_attention;
    if (given.dtype == "float")
        return given.attention == "blocked" ? lm::train<float, blocked>
                                            : lm::train<float, reference>;
    return given.attention == "blocked" ? lm::train<double, blocked> : lm::train<double, reference>;
}

int run(lm::options const& given) {
    lm::text const source(given.text_file, given.tokens);
    std::optional<lm::trace_file> trace;
    if (!given.trace.empty()) trace.emplace(given.trace);
    std::optional<lm::model_file> saved;
    if (!given.save.empty()) saved.emplace(given.save);
    auto const traced = std::max_element(given.ranks.begin(), given.ranks.end());
    lm::print_head(given, source);
    std::vector<lm::run_report> runs;
    for (auto each = given.ranks.begin(); each != given.ranks.end(); ++each)
        runs.push_back(chosen(given)(*each, given, source, each + 1 == given.ranks.end(),
                                     trace && each == traced ? &*trace : nullptr,
                                     saved ? &*saved : nullptr));
    lm::print_report(given, runs);
    if (trace) trace->write(given);
    if (saved)
        std::printf("\nsaved    the model of P = %d: %s\n", given.ranks.back(),
                    given.save.c_str());
    auto const wrong = lm::complaint(given, runs);
    if (wrong.empty()) return 0;
    std::fprintf(stderr, "train_lm: %s\n", wrong.c_str());
    return 1;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        auto const given = lm::parse(argc, argv);
        return given ? run(*given) : 0;
    } catch (lm::bad_input const& e) {
        std::fprintf(stderr, "train_lm: %s\n", e.what());
        return 2;
    } catch (std::exception const& e) {
        std::fprintf(stderr, "train_lm: %s\n", e.what());
        return 1;
    }
}
