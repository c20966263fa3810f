// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: an observer must have a noexcept member `fence()`.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using observer = archetypes::observer;
#else
using observer = archetypes::observer_without_fence;
#endif

int main() {
    ulysses::pipeline layer{ulysses::serial{},
                            ulysses::sequence_local{},
                            ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1},
                            ulysses::no_projection{},
                            observer{}};
}
