// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: forward needs a projection with project_in and project_out for these weights (see ulysses::dense); pipelines without one have `attend`.

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
