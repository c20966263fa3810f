#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "bad_input.hpp"
#include "train.hpp"

#include <cerrno>
#include <cstddef>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

namespace lm {

/// What --losses asks for: a line for each step, the losses of the runs in it with all their digits.
class losses_file {
   public:
    /// *Throws* `bad_input` when the file cannot be written.
    explicit losses_file(std::string const& path) : path_(path), file_(path, std::ios::binary) {
        if (!file_)
            throw bad_input("cannot write the losses file '" + path +
                            "': " + std::generic_category().message(errno));
    }

    void write(std::vector<run_report> const& runs) {
        file_.precision(std::numeric_limits<double>::max_digits10);
        for (std::size_t i = 0; i < runs.front().losses.size(); ++i)
            for (auto const& run : runs)
                file_ << run.losses[i] << (&run == &runs.back() ? '\n' : '\t');
        file_.close();
        if (!file_) throw std::runtime_error("cannot write the losses file '" + path_ + "'");
    }

   private:
    std::string path_;
    std::ofstream file_;
};

}  // namespace lm
