// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a pipeline's operands are sequence_local or head_local.

#include <ulysses/ulysses.hpp>

#if defined(ULYSSES_CONTROL)
using layout = ulysses::sequence_local;
#else
using layout = ulysses::replicated;
#endif

int main() {
    ulysses::pipeline layer{ulysses::serial{}, layout{}, ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
}
