// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a fixed shape must have heads and head_dim of at least 1, and kv_heads that divide heads.

#include <ulysses/ulysses.hpp>

#if defined(ULYSSES_CONTROL)
constexpr ulysses::shape layer_shape{.heads = 6, .kv_heads = 3, .head_dim = 8};
#else
constexpr ulysses::shape layer_shape{.heads = 6, .kv_heads = 4, .head_dim = 8};
#endif

int main() {
    ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{},
                            ulysses::reference_attention{}, ulysses::fixed<layer_shape>};
}
