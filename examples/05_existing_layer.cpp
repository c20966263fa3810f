// SPDX-License-Identifier: Apache-2.0
// A decoder layer that exists already, with projections and key-value grouping of its own. Its one
// call of attention is replaced by steps 3 to 5; all else stays, and runs on a rank's own tokens.

#include <ulysses/ulysses.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <vector>

namespace {

using matrix = std::vector<double>;  // row-major
constexpr std::int64_t width = 24, heads = 6, kv_heads = 2, dim = 4, tokens = 50;

/// x [n, rows of w] times w
matrix times(matrix const& x, matrix const& w, std::int64_t in, std::int64_t out) {
    matrix y(x.size() / in * out);
    for (std::size_t i = 0; i < y.size(); ++i)
        for (std::int64_t c = 0; c < in; ++c) y[i] += x[i / out * in + c] * w[c * out + i % out];
    return y;
}

/// The engine's layer: x + attention(x Wq, x Wk, x Wv) Wo, for any attention of whole rows.
struct decoder_layer {
    matrix wq, wk, wv, wo;
    using attention_type = std::function<void(matrix& q, matrix& k, matrix& v, matrix& o)>;

    matrix operator()(matrix const& x, attention_type const& attention) const {
        auto q = times(x, wq, width, heads * dim);
        auto k = times(x, wk, width, kv_heads * dim), v = times(x, wv, width, kv_heads * dim);
        matrix o(q.size());
        attention(q, k, v, o);
        auto y = times(o, wo, heads * dim, width);
        for (std::size_t i = 0; i < y.size(); ++i) y[i] += x[i];
        return y;
    }
};

/// The attention it has had so far: causal, over all tokens.
void own_attention(matrix& q, matrix& k, matrix& v, matrix& o) {
    for (std::int64_t h = 0; h < heads; ++h)
        for (std::int64_t i = 0; i < tokens; ++i) {
            auto const g = h / (heads / kv_heads);
            double sum = 0;
            for (std::int64_t j = 0; j <= i; ++j) {
                double score = 0;
                for (std::int64_t d = 0; d < dim; ++d)
                    score += q[(i * heads + h) * dim + d] * k[(j * kv_heads + g) * dim + d];
                auto const p = std::exp(score / std::sqrt(dim));
                sum += p;
                for (std::int64_t d = 0; d < dim; ++d)
                    o[(i * heads + h) * dim + d] += p * v[(j * kv_heads + g) * dim + d];
            }
            for (std::int64_t d = 0; d < dim; ++d) o[(i * heads + h) * dim + d] /= sum;
        }
}

matrix filled(std::int64_t size, unsigned seed) {
    matrix x(static_cast<std::size_t>(size));
    for (auto& each : x)
        each = static_cast<double>((seed = seed * 1664525 + 1013904223) >> 16) / 65536 - 0.5;
    return x;
}

}  // namespace

int main() {
    decoder_layer const layer{filled(width * heads * dim, 1), filled(width * kv_heads * dim, 2),
                              filled(width * kv_heads * dim, 3), filled(heads * dim * width, 4)};
    auto const x = filled(tokens * width, 5);
    auto const expected = layer(x, own_attention);

    matrix y(x.size());
    ulysses::threads::run(4, [&](ulysses::threads::communicator group) {
        auto const step = ulysses::sequence::split(group.size(), 1, tokens);
        auto const own = step.queries().count(group.rank());
        auto const begin = step.queries().position(group.rank(), 0) * width;
        matrix const mine(x.begin() + begin, x.begin() + begin + own * width);  // [s, C]
        // [snippet]
        ulysses::pipeline steps{
            group,
            ulysses::sequence_local{},
            ulysses::reference_attention{},
            {.heads = heads, .kv_heads = kv_heads, .head_dim = dim, .mask = ulysses::mask::causal}};
        auto const view = [&](matrix& rows, std::int64_t h) {  // [B, s, H, D]
            return ulysses::token_view<double>(rows.data(), {1, own, h, dim});
        };
        auto const out = layer(mine, [&](matrix& q, matrix& k, matrix& v, matrix& o) {
            steps.attend(step, view(q, heads), view(k, kv_heads), view(v, kv_heads),
                         view(o, heads));
        });
        // [/snippet]
        std::copy(out.begin(), out.end(), y.begin() + begin);
    });

    double largest = 0;
    for (std::size_t i = 0; i < y.size(); ++i)
        largest = std::max(largest, std::abs(y[i] - expected[i]));
    std::printf("layer on 4 ranks against the layer alone: largest difference %.1e\n", largest);
    return largest < 1e-12 ? 0 : 1;
}
