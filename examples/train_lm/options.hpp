#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "bad_input.hpp"
#include "weights.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace lm {

struct options {
    std::string text_file;
    std::vector<int> ranks{1, 4};
    model_shape model{.layers = 2, .width = 96, .heads = 6, .kv_heads = 2};
    std::int64_t tokens = 1024;
    std::int64_t batch = 1;
    std::int64_t steps = 1000;
    std::string dtype = "float";
    std::string attention = "blocked";
    std::uint64_t seed = 1;
    double learning_rate = 3e-3;
    std::int64_t sample = 320;
    std::optional<double> tolerance;
    std::string trace;   ///< file to write; empty: none
    std::string save;    ///< likewise
    std::string losses;  ///< likewise
};

/// Of a program whose ranks are its `processes`, or, when that is 0, threads in any number.
/// *Returns* nothing when the user only asked for help, which is then printed.
/// *Throws* `bad_input`.
std::optional<options> parse(int argc, char** argv, int processes = 0);

}  // namespace lm
