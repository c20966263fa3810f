// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/row_sums.hpp>
#include <ulysses/space/host.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <random>
#include <vector>

namespace {

namespace uly = ulysses;
using std::int64_t;

/// Whole numbers, so that every order of additions gives the same bits.
template <class T>
void check_sum(uly::extents4 const& sizes, int64_t padding, uly::buffer<uly::host_space>& scratch) {
    auto const& [batch, tokens, heads, dim] = sizes;
    uly::extents4 const strides{tokens * (heads * (dim + padding) + padding),
                                heads * (dim + padding) + padding, dim + padding, 1};
    std::vector<T> rows(static_cast<std::size_t>(batch * strides[0] + 1), T(-1000.f));
    uly::tensor_view<T, uly::sequence_local> const view(rows.data(), sizes, strides);
    std::mt19937_64 random{static_cast<std::uint64_t>(tokens)};
    std::vector<int64_t> expected(static_cast<std::size_t>(dim), 3);
    std::vector<T> to(expected.size(), T(3.f));
    for (int64_t b = 0; b < batch; ++b)
        for (int64_t s = 0; s < tokens; ++s)
            for (int64_t h = 0; h < heads; ++h)
                for (int64_t d = 0; d < dim; ++d) {
                    auto const value = static_cast<int64_t>(random() % 7) - 3;
                    view(b, s, h, d) = T(static_cast<float>(value));
                    expected[static_cast<std::size_t>(d)] += value;
                }
    uly::add_rows<uly::host_space, T, uly::sequence_local>({}, scratch, to.data(), view);
    for (std::size_t d = 0; d < to.size(); ++d)
        CHECK(static_cast<float>(to[d]) == static_cast<float>(expected[d]));
}

}  // namespace

TEST_CASE("add_rows: every row once, whatever the extents and strides") {
    uly::buffer<uly::host_space> scratch;
    for (auto const& sizes : std::vector<uly::extents4>{{1, 1, 1, 1},
                                                        {1, 0, 3, 4},
                                                        {2, 1, 3, 4},
                                                        {1, 30, 1, 5},
                                                        {1, 31, 1, 5},
                                                        {3, 32, 1, 2},
                                                        {2, 61, 2, 3},
                                                        {2, 62, 2, 3},
                                                        {1, 63, 1, 300},
                                                        {1, 961, 1, 2},
                                                        {1, 962, 1, 2},
                                                        {2, 993, 7, 2},
                                                        {40, 1, 40, 3}}) {
        CAPTURE(sizes[1]);
        check_sum<double>(sizes, 0, scratch);
        check_sum<float>(sizes, 3, scratch);
        check_sum<uly::half>(sizes, 1, scratch);
    }
}

TEST_CASE("add_rows: elements of 16 bits are summed in 32 and rounded once") {
    // A sum kept in half would stop at 2048, where 2048 + 1 is rounded to 2048.
    constexpr int64_t count = 5000;
    std::vector<uly::half> const rows(count, uly::half(1.f));
    uly::half to(3.f);
    uly::buffer<uly::host_space> scratch;
    uly::add_rows<uly::host_space, uly::half, uly::sequence_local>(
        {}, scratch, &to, uly::token_view<uly::half const>(rows.data(), {1, count, 1, 1}));
    CHECK(static_cast<float>(to) == 5004.f);  // 5003, of which half has every fourth
}
