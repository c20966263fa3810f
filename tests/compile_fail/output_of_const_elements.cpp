// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: the elements of an output (o, y, dq, dk, dv, dx) must not be const.
#include <ulysses/ulysses.hpp>

namespace uly = ulysses;

#if defined(ULYSSES_CONTROL)
using output = uly::token_view<float>;
#else
using output = uly::token_view<float const>;
#endif

void attend(uly::token_view<float const> q, output o) {
    uly::pipeline layer{uly::serial{}, uly::sequence_local{}, uly::reference_attention{}, {.heads = 1, .head_dim = 8}};
    layer.attend(uly::sequence::split(1, 1, 4), q, q, q, o);
}
