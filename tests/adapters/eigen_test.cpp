// SPDX-License-Identifier: Apache-2.0

#include "foreign.hpp"

#include <ulysses/ulysses.hpp>

#include <Eigen/Core>

#include <doctest/doctest.h>

#include <array>

using namespace foreign;

// [snippet]
namespace engine {
using matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
struct by_head {  // rows [S, H * D], or a block of columns of longer ones
    Eigen::Ref<matrix> rows;
    Eigen::Index heads;
};
}  // namespace engine

template <>
struct ulysses::tensor_traits<engine::by_head> {
    using three = std::array<Eigen::Index, 3>;
    static float* data(engine::by_head x) { return x.rows.data(); }
    static three extents(engine::by_head const& x) {
        return {x.rows.rows(), x.heads, x.rows.cols() / x.heads};
    }
    static three strides(engine::by_head const& x) {
        return {x.rows.outerStride(), x.rows.cols() / x.heads, 1};
    }
};
// [/snippet]

namespace {

auto const as_map = []<class T>(slot<T> const& x) {
    auto const& [batch, tokens, heads, dim] = x.sizes;
    Eigen::Map<engine::matrix, Eigen::Unaligned, Eigen::OuterStride<>> map(
        const_cast<float*>(x.first), tokens, heads * dim, Eigen::OuterStride<>(x.steps[1]));
    return engine::by_head{map, heads};
};

}  // namespace

TEST_CASE("eigen: maps and blocks of columns") {
    check<float>(bshd, as_map, 1);
    check<float>(packed_qkv{}, as_map, 1);
}

TEST_CASE("eigen: columns of a matrix are adopted without a copy") {
    engine::matrix qkv = engine::matrix::Random(5, 24);
    auto const view =
        uly::view_of_heads<uly::sequence_local>(engine::by_head{qkv.middleCols(8, 12), 3}, "k");
    CHECK(view.data == qkv.data() + 8);
    CHECK(view.extents == uly::extents4{1, 5, 3, 4});
    CHECK(view.strides[1] == 24);
    CHECK(view.strides[2] == 4);
}
