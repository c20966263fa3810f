// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: backward needs an attention functor with a const member `backward(attention_call, attention_backward_views<T>)`.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using attention = archetypes::differentiable_attention;
#else
using attention = archetypes::attention;
#endif

void use(ulysses::sequence const& step, archetypes::foreign_tensor<float, 4> const& t) {
    ulysses::pipeline layer{archetypes::reaching_communicator{}, ulysses::sequence_local{},
                            attention{}, ulysses::shape{.heads = 1, .head_dim = 1},
                            archetypes::projection{}};
    auto saved = layer.make_context();
    layer.attend_backward(step, saved, t, t, t, t);
}
