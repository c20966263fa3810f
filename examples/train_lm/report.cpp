// SPDX-License-Identifier: Apache-2.0

#include "report.hpp"

#include "printable.hpp"

#include <cmath>
#include <cstdio>

namespace lm {

namespace {

constexpr double mebi = 1 << 20;

/// Unlike std::max, keeps what is not a number.
double larger(double a, double b) { return a >= b || std::isnan(a) ? a : b; }

/// The largest difference of step `i`'s losses from the first run's.
double difference(std::vector<run_report> const& runs, std::size_t i) {
    double largest = 0;
    for (auto const& run : runs)
        largest = larger(largest, std::abs(run.losses[i] - runs.front().losses[i]));
    return largest;
}

double largest_difference(std::vector<run_report> const& runs) {
    double largest = 0;
    for (std::size_t i = 0; i < runs.front().losses.size(); ++i)
        largest = larger(largest, difference(runs, i));
    return largest;
}

void print_losses(std::vector<run_report> const& runs) {
    std::printf("\nloss, nats a byte\n%8s", "step");
    for (auto const& run : runs) std::printf("%14s", ("P = " + std::to_string(run.ranks)).c_str());
    if (runs.size() > 1) std::printf("%14s", "difference");
    auto const steps = runs.front().losses.size();
    auto const stride = std::max<std::size_t>(1, steps / 10);
    for (std::size_t i = 0; i < steps; ++i) {
        if (i != 0 && (i + 1) % stride != 0 && i + 1 != steps) continue;
        std::printf("\n%8zu", i + 1);
        for (auto const& run : runs) std::printf("%14.8f", run.losses[i]);
        if (runs.size() > 1) std::printf("%14.1e", difference(runs, i));
    }
    if (runs.size() > 1)
        std::printf("\n%s%.1e\n", "largest difference of all steps: ", largest_difference(runs));
    else
        std::printf("\n");
}

/// One line of numbers, one for each run.
template <class Value>
void print_line(char const* what, char const* format, std::vector<run_report> const& runs,
                Value const& value) {
    std::printf("%-46s", what);
    for (auto const& run : runs) std::printf(format, value(run));
    std::printf("\n");
}

/// Bytes that all ranks exchange in a step when no key is spared.
std::int64_t closed_form(options const& given, int ranks) {
    auto const& model = given.model;
    auto const shape = ulysses::checked(
        {.heads = model.heads, .kv_heads = model.kv_heads, .head_dim = model.head_dim()});
    auto const elements = ulysses::closed_form_elements(shape, given.batch, given.tokens, ranks);
    auto const size = given.dtype == "double" ? sizeof(double) : sizeof(float);
    // The backward exchanges as many elements as the forward.
    return 2 * model.layers * elements * static_cast<std::int64_t>(size);
}

void print_bytes(options const& given, std::vector<run_report> const& runs) {
    auto const a_rank = [&](run_report const& run, std::int64_t bytes) {
        return static_cast<double>(bytes) / static_cast<double>(given.steps * run.ranks);
    };
    auto const form = [&](run_report const& run) {
        return a_rank(run, given.steps * closed_form(given, run.ranks));
    };
    print_line("exchanged bytes a step and rank, counted", "%14.0f", runs,
               [&](auto const& run) { return a_rank(run, run.moved_bytes); });
    print_line("  by the plan", "%14.0f", runs,
               [&](auto const& run) { return a_rank(run, run.planned_bytes); });
    print_line("  by the closed form", "%14.0f", runs, form);
    for (auto const& run : runs) {
        auto const counted = a_rank(run, run.moved_bytes);
        if (given.tokens % run.ranks != 0)
            std::printf("  P = %d: the closed form is for equal shares of the tokens\n", run.ranks);
        else if (counted < form(run))
            std::printf("  P = %d: cut heads need fewer keys, %.1f %% less than the closed form\n",
                        run.ranks, 100 * (1 - counted / form(run)));
    }
}

/// Bytes that would not print as text become dots.
}  // namespace

void print_head(options const& given, text const& source) {
    auto const& m = given.model;
    std::printf("text     %zu bytes to learn, %zu held out\n", source.training().size(),
                source.held_out().size());
    std::printf("model    %lld layers, width %lld, %lld query and %lld key-value heads of %lld\n",
                static_cast<long long>(m.layers), static_cast<long long>(m.width),
                static_cast<long long>(m.heads), static_cast<long long>(m.kv_heads),
                static_cast<long long>(m.head_dim()));
    std::printf("steps    %lld of %lld x %lld tokens, %s, %s attention over %s\n",
                static_cast<long long>(given.steps), static_cast<long long>(given.batch),
                static_cast<long long>(given.tokens), given.dtype.c_str(), given.attention.c_str(),
                std::string(gemm_name).c_str());
    std::fflush(stdout);
}

void print_report(options const& given, std::vector<run_report> const& runs) {
    print_losses(runs);
    std::printf("\n%-46s", "");
    for (auto const& run : runs) std::printf("%14s", ("P = " + std::to_string(run.ranks)).c_str());
    std::printf("\n");
    print_line("training seconds", "%14.1f", runs, [](auto const& run) { return run.seconds; });
    auto const tokens = static_cast<double>(given.steps * given.batch * given.tokens);
    print_line("tokens/s", "%14.0f", runs, [&](auto const& run) { return tokens / run.seconds; });
    print_line("weights, gradients, optimizer a rank, MiB", "%14.2f", runs, [&](auto const& run) {
        auto const size = given.dtype == "double" ? sizeof(double) : sizeof(float);
        return static_cast<double>(4 * run.parameters * size) / mebi;
    });
    print_line("peak activations a rank, MiB", "%14.2f", runs,
               [](auto const& run) { return static_cast<double>(run.activation_bytes) / mebi; });
    print_line("attention workspace a rank, MiB", "%14.2f", runs,
               [](auto const& run) { return static_cast<double>(run.workspace_bytes) / mebi; });
    print_bytes(given, runs);
    print_line("held-out bits a byte, before training", "%14.4f", runs,
               [](auto const& run) { return run.first_bits; });
    print_line("held-out bits a byte, after", "%14.4f", runs,
               [](auto const& run) { return run.final_bits; });
    auto const& last = runs.back();
    if (given.sample == 0) return;
    std::printf("\nThe model continues '%s':\n----\n%s\n----\n", printable(last.prompt).c_str(),
                printable(last.sample.substr(last.prompt.size())).c_str());
}

std::string complaint(options const& given, std::vector<run_report> const& runs) {
    using ulysses::concat;
    for (auto const& run : runs) {
        if (run.moved_bytes != run.planned_bytes)
            return concat("P = ", run.ranks,
                          " exchanged other bytes than planned: ", run.moved_bytes, " counted, ",
                          run.planned_bytes, " planned");
        auto const whole_heads = given.model.heads % run.ranks == 0;
        auto const form = given.steps * closed_form(given, run.ranks);
        if (whole_heads && given.tokens % run.ranks == 0 && run.moved_bytes != form)
            return concat("P = ", run.ranks,
                          " exchanged other bytes than the closed form: ", run.moved_bytes,
                          " counted, ", form, " expected");
        if (!(run.final_bits < run.first_bits - 0.5))
            return concat("P = ", run.ranks, " did not learn: ", run.final_bits,
                          " bits a byte on held-out text, ", run.first_bits, " before training");
    }
    if (given.tolerance && !(largest_difference(runs) <= *given.tolerance)) {
        char text[120];
        std::snprintf(text, sizeof text, "losses differ by %.3e, more than the tolerance %.3e",
                      largest_difference(runs), *given.tolerance);
        return text;
    }
    return {};
}

}  // namespace lm
