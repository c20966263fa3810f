// SPDX-License-Identifier: Apache-2.0

#include "options.hpp"
#include "report.hpp"
#include "text.hpp"
#include "train.hpp"

#include <cstdio>
#include <exception>
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
    lm::print_head(given, source);
    std::vector<lm::run_report> runs;
    for (auto const ranks : given.ranks)
        runs.push_back(chosen(given)(ranks, given, source, runs.size() + 1 == given.ranks.size()));
    lm::print_report(given, runs);
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
