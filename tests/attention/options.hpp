#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "../conformance/attention.hpp"
#include "../sanitizers.hpp"

#include <type_traits>

namespace attention_test {

/// How much of a functor over T is checked: all, but under a sanitizer, which takes its time, no cuts
/// where another T goes the same way through the code: double with float, half with bf16.
template <class T>
constexpr conformance::attention_options options_for() {
    return {.cuts = !TEST_UNDER_SANITIZER || std::is_same_v<T, float> ||
                    std::is_same_v<T, ulysses::bf16>};
}

}  // namespace attention_test
