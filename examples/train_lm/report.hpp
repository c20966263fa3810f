#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "options.hpp"
#include "train.hpp"

#include <string>
#include <vector>

namespace lm {

/// Prints what the runs were given.
void print_head(options const& given, text const& source);

/// Prints losses, speed, memory, bytes, held-out bits and the sample.
void print_report(options const& given, std::vector<run_report> const& runs);

/// What is wrong with the runs: nothing learnt, losses apart, bytes other than planned. Empty if
/// all is well.
std::string complaint(options const& given, std::vector<run_report> const& runs);

}  // namespace lm
