// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: `strides` of an operand (in its tensor_traits, or its member `strides()`) returns a list of integers with `[]`
// never: template constraint failure
// never: no matching

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

struct tensor {
    float* first;
    std::array<int, 3> sizes, steps;
};

template <>
struct ulysses::tensor_traits<tensor> {
    static float* data(tensor const& t) { return t.first; }
    static auto extents(tensor const& t) { return t.sizes; }
#if defined(ULYSSES_CONTROL)
    static auto strides(tensor const& t) { return t.steps; }
#else
    static int strides(tensor const& t) { return t.steps[0]; }
#endif
};

void use(ulysses::sequence const& step, tensor const& t) {
    ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{},
                            ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
    layer.attend(step, t, t, t, t);
}
