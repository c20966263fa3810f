// SPDX-License-Identifier: Apache-2.0
// expect: must name its window handle as the default-constructible, copyable member type `window_type`.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using ranks = archetypes::reaching_communicator;
#else
using ranks =
    archetypes::communicator;  // sends messages, perhaps; a pipeline needs one that reaches
#endif

int main() {
    ulysses::pipeline layer{ranks{}, ulysses::sequence_local{}, archetypes::attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}, archetypes::projection{}};
}
