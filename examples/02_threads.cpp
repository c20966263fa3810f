// SPDX-License-Identifier: Apache-2.0
// Four ranks as threads, each with its own share of the tokens; five heads, so that heads are cut.

#include <ulysses/ulysses.hpp>

#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

// [snippet]
namespace uly = ulysses;
constexpr uly::shape heads5{.heads = 5, .head_dim = 32, .mask = uly::mask::causal};

/// Attention over the whole sequence q, k, v [S, H, D] on `ranks` ranks, into o.
void attend(int ranks, std::int64_t tokens, std::vector<float>& q, std::vector<float>& k,
            std::vector<float>& v, std::vector<float>& o) {
    uly::threads::run(ranks, [&](uly::threads::communicator group) {
        uly::pipeline layer{group, uly::sequence_local{},
                            uly::blocked_attention{uly::builtin_gemm{}}, uly::fixed<heads5>};
        auto const begin = tokens * group.rank() / group.size();
        auto const own = tokens * (group.rank() + 1) / group.size() - begin;
        auto const step = uly::sequence::agree(group, {.batch = 1, .tokens = own});
        auto const mine = [&](std::vector<float>& x) {  // [B, s, H, D]
            return uly::token_view<float>(x.data() + begin * heads5.heads * heads5.head_dim,
                                          {1, own, heads5.heads, heads5.head_dim});
        };
        layer.attend(step, mine(q), mine(k), mine(v), mine(o));
    });
}
// [/snippet]

int main() {
    std::int64_t const tokens = 300;
    auto const size = static_cast<std::size_t>(tokens * heads5.heads * heads5.head_dim);
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<float> q(size), k(size), v(size), alone(size), together(size);
    for (auto* each : {&q, &k, &v})
        for (auto& x : *each) x = normal(generator);

    attend(1, tokens, q, k, v, alone);
    attend(4, tokens, q, k, v, together);
    auto const same = std::memcmp(alone.data(), together.data(), size * sizeof(float)) == 0;
    std::printf("%lld heads on 4 ranks: %s\n", static_cast<long long>(heads5.heads),
                same ? "the bits of one rank" : "other bits than on one rank");
    return same ? 0 : 1;
}
