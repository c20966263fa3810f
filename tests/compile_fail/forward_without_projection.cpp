// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a projection must have a const member `project_in(projection_call, x, weights, q, k, v)` for these weights and token_views of the operands' element type (see ulysses::dense); a pipeline without a projection has `attend`.
// expect: ulysses: a projection must have a const member `project_out(projection_call, o, weights, y)` for these weights and token_views of the operands' element type (see ulysses::dense); a pipeline without a projection has `attend`.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using layout = ulysses::sequence_local;
using projection = archetypes::differentiable_projection;
#else
using layout = ulysses::sequence_local;
struct projection {
    using space_type = archetypes::space;
};
#endif

void use(ulysses::sequence const& step, archetypes::foreign_tensor<float, 3> const& t) {
    ulysses::pipeline layer{archetypes::reaching_communicator{}, layout{},
                            archetypes::differentiable_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}, projection{}};
    layer.forward(step, t, archetypes::weights{}, t);
}
