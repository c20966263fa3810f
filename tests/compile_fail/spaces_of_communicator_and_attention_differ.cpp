// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: communicator, operands, attention and projection must live in the same space; two of their `space_type`s differ.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using attention = ulysses::reference_attention;
#else
using attention = archetypes::attention;
#endif

int main() {
    ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{}, attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
}
