// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: `data` of an operand (in its tensor_traits, or its member) takes the tensor as const and returns a pointer to its elements, not to void.
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
#if defined(ULYSSES_CONTROL)
    static float* data(tensor const& t) { return t.first; }
#else
    static void* data(tensor const& t) { return t.first; }
#endif
    static auto extents(tensor const& t) { return t.sizes; }
};

void use(ulysses::sequence const& step, tensor const& t) {
    ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{},
                            ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
    layer.attend(step, t, t, t, t);
}
