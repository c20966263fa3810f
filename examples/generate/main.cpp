// SPDX-License-Identifier: Apache-2.0

#include "generate.hpp"

#include "../train_lm/printable.hpp"

#include <CLI/CLI.hpp>

#include <cstdio>
#include <exception>
#include <optional>
#include <string>
#include <vector>

namespace {

constexpr auto what_it_does =
    R"(Lets a language model that train_lm has saved continue a text, once for each
rank count, with a key-value cache: the prompt goes into it in chunks that are
spread over the ranks, then one token follows the other. The ranks are threads
of this process. Prints the text, and how fast it came.

Exit status: 0 the text is the same at every rank count, 1 it is not, 2 bad
input.
)";

struct options {
    std::string model_file;
    std::vector<int> ranks{1, 4};
    lm::generation asked{.prompt = "The ", .tokens = 200};
    std::string dtype = "float";
    std::string attention = "blocked";
};

/// *Returns* nothing when the user only asked for help. *Throws* `bad_input`.
std::optional<options> parse(int argc, char** argv) {
    options given;
    auto& asked = given.asked;
    CLI::App app(what_it_does, "generate");
    auto const count = CLI::Range(1, 1 << 20).description("");
    app.add_option("MODEL_FILE", given.model_file, "a model that train_lm --save has written")
        ->required();
    app.add_option("--ranks", given.ranks, "rank counts to generate with, one after the other")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(CLI::Range(1, 64).description(""))
        ->capture_default_str();
    app.add_option("--prompt", asked.prompt, "the text to continue")->capture_default_str();
    app.add_option("--tokens", asked.tokens, "tokens (bytes) to add")
        ->check(count)
        ->capture_default_str();
    app.add_option("--chunk", asked.chunk, "prompt tokens of one prefill step (all)")->check(count);
    app.add_flag("--head-parallel", asked.by_heads,
                 "decode with every rank's own heads: attention exchanges nothing");
    app.add_flag("!--no-cache", asked.cached, "run the whole text for each token, to compare");
    app.add_option("--temperature", asked.temperature, "0: the likeliest token, else drawn")
        ->check(CLI::Range(0.0, 100.0).description(""))
        ->capture_default_str();
    app.add_option("--seed", asked.seed, "of what is drawn")->capture_default_str();
    app.add_option("--dtype", given.dtype, "element type: float or double")
        ->check(CLI::IsMember({"float", "double"}))
        ->capture_default_str();
    app.add_option("--attention", given.attention, "blocked, or reference (by the formula, slow)")
        ->check(CLI::IsMember({"blocked", "reference"}))
        ->capture_default_str();
    try {
        app.parse(argc, argv);
    } catch (CLI::CallForHelp const&) {
        std::fputs(app.help().c_str(), stdout);
        return {};
    } catch (CLI::ParseError const& e) {
        throw lm::bad_input(e.what());
    }
    if (asked.prompt.empty()) throw lm::bad_input("--prompt must not be empty");
    return given;
}

/// The options that are types.
auto chosen(options const& given) {
    using blocked = ulysses::blocked_attention<lm::gemm>;
    using reference = ulysses::reference_attention;
    if (given.dtype == "float")
        return given.attention == "blocked" ? lm::generate<float, blocked>
                                            : lm::generate<float, reference>;
    return given.attention == "blocked" ? lm::generate<double, blocked>
                                        : lm::generate<double, reference>;
}

void print(options const& given, lm::generated const& run) {
    auto const tokens = static_cast<double>(given.asked.tokens);
    std::printf("P = %-3d", run.ranks);
    if (given.asked.cached)
        std::printf("prefill %.0f tokens/s, decode %.0f tokens/s, cache of a rank %.2f MiB\n",
                    static_cast<double>(given.asked.prompt.size()) / run.prefill_seconds,
                    (tokens - 1) / run.decode_seconds,
                    static_cast<double>(run.cache_bytes) / (1 << 20));
    else
        std::printf("without a cache %.0f tokens/s\n", tokens / run.decode_seconds);
    std::fflush(stdout);
}

int run(options const& given) {
    lm::stored_model const stored(given.model_file);
    std::vector<lm::generated> runs;
    for (auto const ranks : given.ranks) {
        runs.push_back(chosen(given)(ranks, stored, given.asked));
        print(given, runs.back());
    }
    std::printf("\nThe model continues '%s':\n----\n%s\n----\n",
                lm::printable(given.asked.prompt).c_str(), lm::printable(runs[0].text).c_str());
    for (auto const& each : runs)
        if (each.text != runs[0].text) {
            std::fprintf(stderr, "generate: P = %d wrote another text than P = %d: '%s'\n",
                         each.ranks, runs[0].ranks, lm::printable(each.text).c_str());
            return 1;
        }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        auto const given = parse(argc, argv);
        return given ? run(*given) : 0;
    } catch (lm::bad_input const& e) {
        std::fprintf(stderr, "generate: %s\n", e.what());
        return 2;
    } catch (std::exception const& e) {
        std::fprintf(stderr, "generate: %s\n", e.what());
        return 1;
    }
}
