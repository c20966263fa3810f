// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: the attention functor has no causal mask.
// expect: ulysses: the attention functor has no full (bidirectional) attention.
// expect: ulysses: the attention functor has no grouped key-value heads.
// expect: ulysses: the attention functor has no value_dim other than head_dim.

#include <ulysses/ulysses.hpp>

template <bool Causal, bool Full>
struct attention : ulysses::reference_attention {
#if defined(ULYSSES_CONTROL)
    static constexpr ulysses::attention_features features{
        .causal = true, .full = true, .grouped = true, .value_dim = true, .row_range = true};
#else
    static constexpr ulysses::attention_features features{.causal = Causal, .full = Full};
#endif
};

template <ulysses::shape Shape, class Attention>
void make(Attention const& functor) {
    ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{}, functor,
                            ulysses::fixed<Shape>};
}

int main() {
    using ulysses::mask;
    using ulysses::shape;
    make<shape{.heads = 2, .head_dim = 8, .mask = mask::causal}>(attention<false, true>{});
    make<shape{.heads = 2, .head_dim = 8}>(attention<true, false>{});
    make<shape{.heads = 2, .kv_heads = 1, .head_dim = 8}>(attention<true, true>{});
    make<shape{.heads = 2, .head_dim = 8, .value_dim = 4}>(attention<true, true>{});
}
