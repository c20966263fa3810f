// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a type becomes an operand by a specialisation of ulysses::tensor_traits with `data` and `extents`, by members `data()` and `extents()`, or by the interface of std::mdspan.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

struct tensor {
    float* first;
};
using other = tensor;

#if defined(ULYSSES_CONTROL)
template <>
struct ulysses::tensor_traits<tensor> {
    static float* data(tensor const& t) { return t.first; }
    static std::array<int, 4> extents(tensor const&) { return {1, 2, 1, 1}; }
};
#endif

void use(ulysses::sequence const& step, tensor const& t, other const& u) {
    ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{},
                            ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
    layer.attend(step, t, u, t, t);
}
