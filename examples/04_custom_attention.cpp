// SPDX-License-Identifier: Apache-2.0
// Your own kernel as step 4: here plain loops, with values weighted by how near a key is.

#include <ulysses/ulysses.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

// [snippet]
/// Linear bias by distance (ALiBi): scores fall with the distance between query and key, and every
/// head falls at its own rate. It needs global indices, which the call has.
struct alibi_attention {
    using space_type = ulysses::host_space;
    static constexpr ulysses::attention_features features{
        .causal = true, .grouped = true, .value_dim = true, .row_range = true};
    static constexpr std::int64_t row_multiple() { return 1; }
    template <class T>
    static std::size_t workspace_bytes(ulysses::attention_extents const& e) {
        return static_cast<std::size_t>(e.keys) * sizeof(T);
    }

    template <class T>
    void forward(ulysses::attention_call const& call, ulysses::head_view<T const> q,
                 ulysses::head_view<T const> k, ulysses::head_view<T const> v,
                 ulysses::head_view<T> o, ulysses::head_view<ulysses::accumulator_t<T>> lse) const {
        auto* const p = reinterpret_cast<T*>(call.workspace.data());  // one row of weights
        for (std::int64_t b = 0; b < q.batch(); ++b)
            for (std::int64_t h = 0; h < q.heads(); ++h)
                for (std::int64_t i = 0; i < q.tokens(); ++i) {
                    auto const g = h / (q.heads() / k.heads());
                    auto const slope = std::exp2(-T(call.query_head + h + 1));
                    auto const seen = call.query_begin + i + 1 - call.key_begin;  // causal
                    T sum = 0;
                    for (std::int64_t j = 0; j < seen; ++j) {
                        T score = -slope * T(seen - 1 - j);
                        for (std::int64_t d = 0; d < q.dim(); ++d)
                            score += T(call.scale) * q(b, i, h, d) * k(b, j, g, d);
                        sum += p[j] = std::exp(score);
                    }
                    for (std::int64_t d = 0; d < v.dim(); ++d) {
                        T value = 0;
                        for (std::int64_t j = 0; j < seen; ++j) value += p[j] * v(b, j, g, d);
                        o(b, i, h, d) = value / sum;
                    }
                    lse(b, i, h, 0) = std::log(sum);
                }
    }
};
static_assert(ulysses::attention_for<alibi_attention, float>);
// [/snippet]

namespace {

constexpr std::int64_t tokens = 60, heads = 4, dim = 8, size = tokens * heads * dim;

std::vector<float> attention(int ranks, std::vector<float>& x) {
    std::vector<float> o(size);
    ulysses::threads::run(ranks, [&](ulysses::threads::communicator group) {
        ulysses::pipeline layer{group,
                                ulysses::sequence_local{},
                                alibi_attention{},
                                {.heads = heads, .head_dim = dim, .mask = ulysses::mask::causal}};
        auto const step = ulysses::sequence::split(group.size(), 1, tokens);
        auto const begin = step.queries().position(group.rank(), 0);
        auto const mine = [&](std::vector<float>& whole) {
            return ulysses::token_view<float>(&whole[begin * heads * dim],
                                              {1, step.queries().count(group.rank()), heads, dim});
        };
        layer.attend(step, mine(x), mine(x), mine(x), mine(o));
    });
    return o;
}

}  // namespace

int main() {
    std::vector<float> x(size);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 7919 % 101) / 101;
    auto const same = attention(1, x) == attention(3, x);
    std::printf("own attention on 1 and 3 ranks: %s\n", same ? "equal" : "different");
    return same ? 0 : 1;
}
