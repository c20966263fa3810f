// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a projection must name the memory it reads as its member type `space_type`.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using projection = archetypes::projection;
#else
using projection = archetypes::projection_without_space;
#endif

int main() {
    ulysses::pipeline layer{archetypes::reaching_communicator{}, ulysses::sequence_local{}, archetypes::attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}, projection{}};
}
