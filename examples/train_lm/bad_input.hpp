#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <stdexcept>

namespace lm {

/// What the user gave cannot be run; the text says why, with the values.
struct bad_input : std::runtime_error {
    using runtime_error::runtime_error;
};

}  // namespace lm
