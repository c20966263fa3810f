// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: the operands of one call must have one element type.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

using tensor = archetypes::member_tensor<float, 4>;
#if defined(ULYSSES_CONTROL)
using other = archetypes::member_tensor<float const, 4>;
#else
using other = archetypes::member_tensor<double const, 4>;
#endif

void use(ulysses::sequence const& step, tensor const& t, other const& u) {
    ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{},
                            ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
    layer.attend(step, t, u, t, t);
}
