// SPDX-License-Identifier: Apache-2.0
// An engine's own tensor, adopted in ten lines: any strides, so that q, k and v may lie packed side
// by side in one matrix, as the projection wrote them.

#include <ulysses/ulysses.hpp>

#include <array>
#include <cstdio>
#include <vector>

// [snippet]
namespace engine {
struct tensor {  // does not own
    double* first;
    std::array<std::int64_t, 4> sizes, steps;  // batch, token, head, dim; steps in elements
};
}  // namespace engine

template <>
struct ulysses::tensor_traits<engine::tensor> {
    static double* data(engine::tensor const& x) { return x.first; }
    static std::array<std::int64_t, 4> extents(engine::tensor const& x) { return x.sizes; }
    static std::array<std::int64_t, 4> strides(engine::tensor const& x) { return x.steps; }
};
// [/snippet]

namespace {

constexpr std::int64_t tokens = 96, heads = 6, kv_heads = 3, dim = 8;
constexpr std::int64_t row = (heads + 2 * kv_heads) * dim;  // [q | k | v] of one token

/// o [S, H, D] of packed rows qkv [S, row] on `ranks` ranks.
std::vector<double> attention(int ranks, std::vector<double>& qkv) {
    std::vector<double> o(tokens * heads * dim);
    ulysses::threads::run(ranks, [&](ulysses::threads::communicator group) {
        ulysses::pipeline layer{group,
                                ulysses::sequence_local{},
                                ulysses::reference_attention{},
                                {.heads = heads, .kv_heads = kv_heads, .head_dim = dim}};
        auto const own = tokens / group.size(), begin = own * group.rank();
        auto const columns = [&](std::int64_t at, std::int64_t h) {
            return engine::tensor{&qkv[begin * row + at], {1, own, h, dim}, {0, row, dim, 1}};
        };
        auto const step = ulysses::sequence::agree(group, {.tokens = own});
        layer.attend(step, columns(0, heads), columns(heads * dim, kv_heads),
                     columns((heads + kv_heads) * dim, kv_heads),
                     engine::tensor{
                         &o[begin * heads * dim], {1, own, heads, dim}, {0, heads * dim, dim, 1}});
    });
    return o;
}

}  // namespace

int main() {
    std::vector<double> qkv(tokens * row);
    for (std::size_t i = 0; i < qkv.size(); ++i) qkv[i] = static_cast<double>(i * 7919 % 101) / 101;
    auto const same = attention(1, qkv) == attention(4, qkv);
    std::printf("packed q, k, v on 1 and 4 ranks: %s\n", same ? "equal" : "different");
    return same ? 0 : 1;
}
