// SPDX-License-Identifier: Apache-2.0
// Eigen's matrices as operands: rows of tokens, q, k and v side by side in the columns of one
// matrix, as one product of Eigen's wrote them.

#include <ulysses/ulysses.hpp>

#include <Eigen/Core>

#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>

// [snippet]
namespace engine {
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
struct by_head {  // some rows and columns of a matrix, [s, H * D]
    Eigen::Ref<matrix> block;
    Eigen::Index heads;
};
}  // namespace engine

template <>
struct ulysses::tensor_traits<engine::by_head> {
    using three = std::array<Eigen::Index, 3>;
    static float* data(engine::by_head x) { return x.block.data(); }
    static three extents(engine::by_head const& x) {
        return {x.block.rows(), x.heads, x.block.cols() / x.heads};
    }
    static three strides(engine::by_head const& x) {
        return {x.block.outerStride(), x.block.cols() / x.heads, 1};
    }
};
// [/snippet]

namespace {

constexpr Eigen::Index tokens = 100, width = 32, heads = 6, kv_heads = 2, dim = 8;

/// o [S, H * D] of rows qkv [S, (H + 2 Hkv) * D] on `ranks` ranks.
engine::matrix attention(int ranks, engine::matrix& qkv) {
    engine::matrix o(tokens, heads * dim);
    ulysses::threads::run(ranks, [&](ulysses::threads::communicator group) {
        ulysses::pipeline layer{
            group,
            ulysses::sequence_local{},
            ulysses::blocked_attention{ulysses::builtin_gemm{}},
            {.heads = heads, .kv_heads = kv_heads, .head_dim = dim, .mask = ulysses::mask::causal}};
        auto const step = ulysses::sequence::split(group.size(), 1, tokens);
        auto const own = step.queries().count(group.rank());
        auto const begin = step.queries().position(group.rank(), 0);
        // [snippet call]
        auto mine = qkv.middleRows(begin, own);
        layer.attend(step, engine::by_head{mine.leftCols(heads * dim), heads},
                     engine::by_head{mine.middleCols(heads * dim, kv_heads * dim), kv_heads},
                     engine::by_head{mine.rightCols(kv_heads * dim), kv_heads},
                     engine::by_head{o.middleRows(begin, own), heads});
        // [/snippet]
    });
    return o;
}

/// The same by Eigen alone, a head at a time.
engine::matrix by_eigen(engine::matrix const& qkv) {
    engine::matrix o(tokens, heads * dim);
    for (Eigen::Index h = 0; h < heads; ++h) {
        auto const g = h / (heads / kv_heads);
        engine::matrix weights = qkv.middleCols(h * dim, dim) *
                                 qkv.middleCols((heads + g) * dim, dim).transpose() /
                                 std::sqrt(static_cast<float>(dim));
        for (Eigen::Index i = 0; i < tokens; ++i) {
            auto seen = weights.row(i).head(i + 1).array();
            seen = (seen - seen.maxCoeff()).exp();
            seen /= seen.sum();
            weights.row(i).tail(tokens - i - 1).setZero();
        }
        o.middleCols(h * dim, dim) = weights * qkv.middleCols((heads + kv_heads + g) * dim, dim);
    }
    return o;
}

}  // namespace

int main() {
    std::srand(1);  // Eigen's Random uses it
    engine::matrix const x = engine::matrix::Random(tokens, width);
    engine::matrix qkv = x * engine::matrix::Random(width, (heads + 2 * kv_heads) * dim);
    auto const one = attention(1, qkv), four = attention(4, qkv);
    auto const off = (one - by_eigen(qkv)).cwiseAbs().maxCoeff();
    std::printf("Eigen's matrices on 1 and 4 ranks: %s; off Eigen's own attention by %.1e\n",
                one == four ? "equal" : "different", static_cast<double>(off));
    // Means of values below 32 or so: tokens + 2 dims of roundings.
    return one == four && off < 32 * 2e-7f * (tokens + 2 * dim) ? 0 : 1;
}
