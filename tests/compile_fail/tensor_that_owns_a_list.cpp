// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a type becomes an operand by a specialisation of ulysses::tensor_traits
// never: template constraint failure
// never: no matching

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using tensor = archetypes::member_tensor<float, 4>;
#else
using tensor = std::vector<float>;
#endif

void use(ulysses::sequence const& step, tensor const& t) {
    ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{},
                            ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
    layer.attend(step, t, t, t, t);
}
