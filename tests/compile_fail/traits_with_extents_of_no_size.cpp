// SPDX-License-Identifier: Apache-2.0
// expect: returns a list of integers with `size()` and `[]`, as std::array, std::span and std::vector are.
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
#if defined(ULYSSES_CONTROL)
    static auto extents(tensor const& t) { return t.sizes; }
#else
    static int const* extents(tensor const& t) { return t.sizes.data(); }
#endif
};

void use(ulysses::sequence const& step, tensor const& t) {
    ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{},
                            ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
    layer.attend(step, t, t, t, t);
}
