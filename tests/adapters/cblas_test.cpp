// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cblas.hpp>

#include "../gemm/product.hpp"

#include <doctest/doctest.h>

#include <cstring>
#include <thread>

using namespace product_test;

static_assert(ulysses::gemm_for<ulysses::cblas, float>);
static_assert(ulysses::gemm_for<ulysses::cblas, double>);
static_assert(!ulysses::cblas::rows_independent);

TEST_CASE_TEMPLATE("cblas: equals the formula for any shape, stride and transposition", T, float,
                   double) {
    int64_t const sizes[] = {1, 2, 7, 8, 9, 31, 32, 33, 65, 100};
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        auto const k = seed % 10 == 0 ? 0 : sizes[random() % 10];
        auto const p = random_product<T>(random, sizes[random() % 10], sizes[random() % 10], k);
        INFO(p.text());
        CHECK(error_over_bound(p, ulysses::cblas{}) <= 1.0);
    }
}

TEST_CASE("cblas: bits do not depend on strides, alignment or the calling thread") {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        int64_t const sizes[] = {1, 40, 64, 128, 200, 256};
        auto const m = sizes[random() % 6], n = sizes[random() % 6], k = sizes[random() % 6];
        auto p = random_product<float>(random, m, n, k);
        p.batch = 1;
        auto expected = p.c;
        ulysses::cblas{}(p.call(expected.data()));
        auto const moved = [&](std::vector<float> const& from, int64_t rows, int64_t columns,
                               int64_t stride, int64_t wide, int64_t shift) {
            std::vector<float> to(at(rows * wide + shift), 7.0f);
            for (int64_t r = 0; r < rows; ++r)
                std::copy_n(from.data() + r * stride, columns, to.data() + shift + r * wide);
            return to;
        };
        for (int64_t shift : {0, 1, 3}) {
            auto const wide = [&](int64_t columns) { return columns * (1 + shift) + shift; };
            auto const a_columns = p.a_transposed ? m : k, b_columns = p.b_transposed ? k : n;
            auto const a = moved(p.a, p.a_rows(), a_columns, p.a_stride, wide(a_columns), shift);
            auto const b = moved(p.b, p.b_rows(), b_columns, p.b_stride, wide(b_columns), shift);
            auto c = moved(p.c, m, n, p.c_stride, wide(n), shift);
            auto call = p.call(c.data() + shift);
            call.a.data = a.data() + shift, call.a.stride = wide(a_columns);
            call.b.data = b.data() + shift, call.b.stride = wide(b_columns);
            call.c_stride = wide(n);
            std::thread{[&] { ulysses::cblas{}(call); }}.join();
            for (int64_t r = 0; r < m; ++r)
                CHECK(std::memcmp(c.data() + shift + r * wide(n), expected.data() + r * p.c_stride,
                                  at(n) * sizeof(float)) == 0);
        }
    }
}

TEST_CASE("cblas: sizes past the BLAS's integer and overlapping rows are refused") {
    float x = 1;
    ulysses::gemm_call<float> call{.m = std::int64_t{1} << 31,
                                   .n = 1,
                                   .k = 1,
                                   .a = {.data = &x, .stride = 1},
                                   .b = {.data = &x, .stride = 1},
                                   .c = &x,
                                   .c_stride = 1};
    if constexpr (sizeof(ulysses::detail::blas_integer) == 4)
        CHECK_THROWS_AS(ulysses::cblas{}(call), ulysses::unsupported);
    call.m = 2, call.k = 2;
    CHECK_THROWS_AS(ulysses::cblas{}(call), ulysses::invalid_tensor);
}
