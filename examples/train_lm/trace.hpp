#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "options.hpp"

#include <ulysses/ulysses.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <fstream>
#include <stdexcept>
#include <string>
#include <system_error>

namespace lm {

/// Training steps that a trace shows, the last ones: the first ones grow memory.
inline std::int64_t traced_steps(options const& given) {
    return std::min<std::int64_t>(2, given.steps);
}

/// What --trace asks for: a recorder for each rank of one run, and the file they are written to.
class trace_file {
   public:
    /// *Throws* `bad_input` when the file cannot be written.
    explicit trace_file(std::string const& path) : path_(path), file_(path, std::ios::binary) {
        if (!file_)
            throw bad_input("cannot write the trace file '" + path +
                            "': " + std::generic_category().message(errno));
    }

    /// Makes paused recorders, with room for all that the traced steps do.
    void prepare(int ranks, options const& given) {
        recorders_.clear();
        // Step 1, and a layer's forward and backward: each a call, five steps, two fences.
        auto const events = traced_steps(given) * (1 + given.model.layers * 2 * 8);
        for (int r = 0; r < ranks; ++r)
            recorders_.emplace_back(
                r, ranks,
                ulysses::trace_options{.events = static_cast<std::size_t>(events),
                                       .recording = false});
    }
    ulysses::trace_recorder& of(int rank) { return recorders_[static_cast<std::size_t>(rank)]; }

    /// Writes the file and says so.
    void write(options const& given) {
        ulysses::write_trace(file_, recorders_);
        file_.close();
        if (!file_) throw std::runtime_error("cannot write the trace file '" + path_ + "'");
        auto const steps = static_cast<long long>(traced_steps(given));
        auto const last =
            steps == 1 ? "the last step" : ulysses::concat("the last ", steps, " steps");
        std::printf("\ntrace    %s on %zu ranks: %s, to be opened in ui.perfetto.dev\n",
                    last.c_str(), recorders_.size(), path_.c_str());
    }

   private:
    std::string path_;
    std::ofstream file_;
    std::deque<ulysses::trace_recorder> recorders_;
};

}  // namespace lm
