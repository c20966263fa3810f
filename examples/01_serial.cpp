// SPDX-License-Identifier: Apache-2.0
// One rank: the pipeline runs on the caller's tensors, nothing moves.

#include <ulysses/ulysses.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
    // [snippet]
    namespace uly = ulysses;
    std::int64_t const tokens = 256, heads = 8, kv_heads = 2, dim = 64;

    uly::pipeline layer{
        uly::serial{},                                // who: a group of one rank
        uly::sequence_local{},                        // how the operands lie
        uly::blocked_attention{uly::builtin_gemm{}},  // what runs on the heads
        uly::shape{
            .heads = heads, .kv_heads = kv_heads, .head_dim = dim, .mask = uly::mask::causal}};

    std::vector<float> q(tokens * heads * dim, 0.5f), k(tokens * kv_heads * dim, 0.25f);
    std::vector<float> v(tokens * kv_heads * dim, 2.0f), o(tokens * heads * dim);
    auto const view = [&](std::vector<float>& x, std::int64_t h) {  // [B, s, H, D]
        return uly::token_view<float>(x.data(), {1, tokens, h, dim});
    };

    auto const step = uly::sequence::agree(layer.ranks(), {.batch = 1, .tokens = tokens});
    layer.attend(step, view(q, heads), view(k, kv_heads), view(v, kv_heads), view(o, heads));
    // [/snippet]
    std::fputs(layer.describe(step).c_str(), stdout);

    // Attention is a mean of values, and these are all 2.
    for (auto const x : o)
        if (std::abs(x - 2) > 1e-5f) return 1;
    std::printf("every output is %g\n", static_cast<double>(o.front()));
}
