// SPDX-License-Identifier: Apache-2.0

#include "options.hpp"

#include <CLI/CLI.hpp>

#include <cstdio>

namespace lm {

namespace {

constexpr auto with_threads =
    R"(Trains a small language model on a text, once for each rank count, with
the same weights and batches: each sequence is spread over the ranks, which
are threads of this process. Prints the losses side by side, speed, memory,
exchanged bytes, and a text that the model writes.

Exit status: 0 the model has learnt and the rank counts agree, 1 it has not
or they do not, 2 bad input.
)";

constexpr auto with_processes =
    R"(Trains a small language model on a text: each sequence is spread over the
ranks, which are the processes that mpiexec has started, with the weights and
batches of train_lm. Each reads the text. Prints the losses, speed, memory,
exchanged bytes, and a text that the model writes.

Exit status: 0 the model has learnt, 1 it has not, 2 bad input.
)";

/// Rules between the options. *Throws* `bad_input`.
void check(options const& given) {
    auto const& shape = given.model;
    if (shape.width % shape.heads != 0 || shape.head_dim() % 2 != 0)
        throw bad_input("--width must be an even multiple of --heads: width " +
                        std::to_string(shape.width) + ", heads " + std::to_string(shape.heads));
    if (shape.heads % shape.kv_heads != 0)
        throw bad_input("--kv-heads must divide --heads: heads " + std::to_string(shape.heads) +
                        ", kv-heads " + std::to_string(shape.kv_heads));
}

}  // namespace

std::optional<options> parse(int argc, char** argv, int processes) {
    options given;
    auto const threads = processes == 0;
    CLI::App app(threads ? with_threads : with_processes, threads ? "train_lm" : "train_lm_mpi");
    // Without a description, help shows no range.
    auto const count = CLI::Range(1, 1 << 20).description("");
    app.add_option("TEXT_FILE", given.text_file,
                   "the text to learn, UTF-8; its last 5 % are held out. examples/run takes one of "
                   "its own when none is given")
        ->required();
    if (threads)
        app.add_option("--ranks", given.ranks, "rank counts to train with, one after the other")
            ->delimiter(',')
            ->allow_extra_args(false)  // what follows may be TEXT_FILE
            ->check(CLI::Range(1, 64).description(""))
            ->capture_default_str();
    else
        given.ranks = {processes};
    app.add_option("--heads", given.model.heads, "query heads; any number on any number of ranks")
        ->check(count)
        ->capture_default_str();
    app.add_option("--kv-heads", given.model.kv_heads, "key-value heads; divides --heads")
        ->check(count)
        ->capture_default_str();
    app.add_option("--layers", given.model.layers, "decoder layers")
        ->check(count)
        ->capture_default_str();
    app.add_option("--width", given.model.width, "model width, an even multiple of --heads")
        ->check(count)
        ->capture_default_str();
    app.add_option("--tokens", given.tokens, "tokens (bytes) of a sequence")
        ->check(count)
        ->capture_default_str();
    app.add_option("--batch", given.batch, "sequences of a step")
        ->check(count)
        ->capture_default_str();
    app.add_option("--steps", given.steps, "training steps")->check(count)->capture_default_str();
    app.add_option("--dtype", given.dtype, "element type: float or double")
        ->check(CLI::IsMember({"float", "double"}))
        ->capture_default_str();
    app.add_option("--attention", given.attention, "blocked, or reference (by the formula, slow)")
        ->check(CLI::IsMember({"blocked", "reference"}))
        ->capture_default_str();
    app.add_option("--seed", given.seed, "of weights, batches and the sample")
        ->capture_default_str();
    app.add_option("--learning-rate", given.learning_rate, "its largest value")
        ->check(CLI::Range(0.0, 1.0).description(""))
        ->capture_default_str();
    app.add_option("--sample", given.sample, "bytes that the model writes at the end")
        ->check(CLI::Range(0, 1 << 20).description(""))
        ->capture_default_str();
    if (threads) {
        app.add_option("--tolerance", given.tolerance,
                       "fail when a loss differs by more from the first rank count's")
            ->check(CLI::NonNegativeNumber.description(""));
        app.add_option("--trace", given.trace,
                       "file for a trace of attention in the last 2 steps on the most ranks");
    }
    app.add_option("--losses", given.losses,
                   "file for the loss of every step with all its digits, a column a run");
    app.add_option("--save", given.save,
                   "file for the parameters of the last run, which the program generate reads");
    try {
        app.parse(argc, argv);
        check(given);
    } catch (CLI::CallForHelp const&) {
        std::fputs(app.help().c_str(), stdout);
        return {};
    } catch (CLI::ParseError const& e) {
        throw bad_input(e.what());
    }
    return given;
}

}  // namespace lm
