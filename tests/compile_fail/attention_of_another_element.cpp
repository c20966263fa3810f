// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: an attention functor must have a const member `forward(attention_call, q, k, v, o, lse)` over head_local views of the operands' element type; where its space has queues it is given a `queued<attention_call, space_type>`.

// A functor for one element type makes a pipeline; a call with another is what is refused.
#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using element = float;
#else
using element = double;
#endif

void use(ulysses::sequence const& step, archetypes::foreign_tensor<element, 4> const& t) {
    ulysses::pipeline layer{archetypes::reaching_communicator{}, ulysses::sequence_local{},
                            archetypes::attention{}, ulysses::shape{.heads = 1, .head_dim = 1},
                            archetypes::projection{}};
    layer.attend(step, t, t, t, t);
}
