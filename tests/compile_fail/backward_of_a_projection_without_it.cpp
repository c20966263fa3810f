// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: backward needs a projection with a const member `project_in_backward(projection_call, x, weights, dq, dk, dv, dx, gradients)` for these weights and gradients (see ulysses::dense).
// expect: ulysses: backward needs a projection with a const member `project_out_backward(projection_call, weights, dy, dout)` for these weights (see ulysses::dense).
// expect: ulysses: backward needs a projection with a const member `project_out_gradients(projection_call, o, dy, gradients)` for these gradients (see ulysses::dense).

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using layout = ulysses::sequence_local;
using projection = archetypes::differentiable_projection;
#else
using layout = ulysses::sequence_local;
using projection = archetypes::projection;
#endif

void use(ulysses::sequence const& step, archetypes::foreign_tensor<float, 3> const& t) {
    ulysses::pipeline layer{archetypes::reaching_communicator{}, layout{},
                            archetypes::differentiable_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}, projection{}};
    auto saved = layer.make_context();
    layer.backward(step, saved, t, archetypes::weights{}, t, t, archetypes::gradients{});
}
