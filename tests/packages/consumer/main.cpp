// SPDX-License-Identifier: Apache-2.0
// A program of somebody else's that uses the library: causal attention over three ranks, with queries
// of zero, so that each token gets the mean of the values up to its own.

#include <ulysses/ulysses.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

namespace uly = ulysses;

int main() {
    std::int64_t const tokens = 7, heads = 4, dim = 2;
    auto const at = [&](std::int64_t token, std::int64_t i) {
        return static_cast<std::size_t>(token * heads * dim + i);
    };
    std::vector<float> q(at(tokens, 0)), k(q.size(), 1), v(q.size()), o(q.size(), -1);
    for (std::int64_t token = 0; token < tokens; ++token)
        for (std::int64_t i = 0; i < heads * dim; ++i)
            v[at(token, i)] = static_cast<float>(token * (i + 1));

    uly::threads::run(3, [&](uly::threads::communicator ranks) {
        uly::pipeline layer{ranks, uly::sequence_local{}, uly::reference_attention{},
                            uly::shape{.heads = heads, .head_dim = dim, .mask = uly::mask::causal}};
        auto const step = uly::sequence::split(ranks.size(), 1, tokens);
        auto const begin = step.queries().position(ranks.rank(), 0);
        auto const own = [&](std::vector<float>& x) {  // [B, s, H, D]
            return uly::token_view<float>(&x[at(begin, 0)],
                                          {1, step.queries().count(ranks.rank()), heads, dim});
        };
        layer.attend(step, own(q), own(k), own(v), own(o));
    });

    for (std::int64_t token = 0; token < tokens; ++token)
        for (std::int64_t i = 0; i < heads * dim; ++i) {
            auto const right = 0.5 * static_cast<double>(token * (i + 1));
            if (!(std::fabs(static_cast<double>(o[at(token, i)]) - right) <= 1e-5)) {
                std::printf("token %d, column %d: %g instead of %g\n", static_cast<int>(token),
                            static_cast<int>(i), static_cast<double>(o[at(token, i)]), right);
                return 1;
            }
        }
    std::printf("ulysses %d.%d.%d attends\n", ULYSSES_VERSION_MAJOR, ULYSSES_VERSION_MINOR,
                ULYSSES_VERSION_PATCH);
}
