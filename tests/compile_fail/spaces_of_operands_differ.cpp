// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: communicator, operands, attention and projection must live in the same space; two of their `space_type`s differ.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

using tensor = archetypes::member_tensor<float, 4>;
#if defined(ULYSSES_CONTROL)
using other = tensor;
#else
using other = archetypes::foreign_tensor<float, 4>;  // its traits name another space
#endif

void use(ulysses::sequence const& step, tensor const& t, other const& u) {
    ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{},
                            ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
    layer.attend(step, t, u, t, t);
}
