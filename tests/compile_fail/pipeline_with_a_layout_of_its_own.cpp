// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a layout policy is ulysses::sequence_local, ulysses::head_local or ulysses::replicated; each is a move that the plan knows.

#include <ulysses/ulysses.hpp>

#if defined(ULYSSES_CONTROL)
using layout = ulysses::head_local;
#else
struct layout {};
#endif

int main() {
    ulysses::pipeline layer{ulysses::serial{}, layout{}, ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
}
