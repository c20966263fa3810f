// SPDX-License-Identifier: Apache-2.0
// expect: only a packed tensor leaves it out.
// never: template constraint failure
// never: no matching

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

struct tensor {
    float* first;
    std::array<int, 3> sizes, steps;
    float* data() const { return first; }
    auto extents() const { return sizes; }
#if defined(ULYSSES_CONTROL)
    auto strides() const { return steps; }
#else
    int stride(int axis) const { return steps[axis]; }
#endif
};

void use(ulysses::sequence const& step, tensor const& t) {
    ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{},
                            ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
    layer.attend(step, t, t, t, t);
}
