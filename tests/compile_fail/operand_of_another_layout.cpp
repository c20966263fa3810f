// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a view that names a layout policy must name the pipeline's own
#include <ulysses/ulysses.hpp>

namespace uly = ulysses;

#if defined(ULYSSES_CONTROL)
using view = uly::token_view<float>;
#else
using view = uly::head_view<float>;
#endif

void attend(view q, view k, view v, view o) {
    uly::pipeline layer{uly::serial{}, uly::sequence_local{}, uly::reference_attention{}, {.heads = 1, .head_dim = 8}};
    layer.attend(uly::sequence::split(1, 1, 4), q, k, v, o);
}
