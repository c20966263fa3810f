// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: the elements of an operand must be double, float, ulysses::half or ulysses::bf16

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using tensor = archetypes::member_tensor<float, 4>;
#else
using tensor = archetypes::member_tensor<int, 4>;
#endif
using other = tensor;

void use(ulysses::sequence const& step, tensor const& t, other const& u) {
    ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{},
                            ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
    layer.attend(step, t, u, t, t);
}
