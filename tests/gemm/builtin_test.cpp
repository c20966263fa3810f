// SPDX-License-Identifier: Apache-2.0

#include <ulysses/gemm/builtin.hpp>

#include "product.hpp"

#include <doctest/doctest.h>

#include <cstring>

using namespace product_test;

static_assert(ulysses::gemm_for<ulysses::builtin_gemm, float>);
static_assert(ulysses::gemm_for<ulysses::builtin_gemm, double>);
static_assert(ulysses::builtin_gemm::rows_independent);

TEST_CASE_TEMPLATE("builtin_gemm: equals the formula for any shape, stride and transposition", T,
                   float, double) {
    int64_t const sizes[] = {1, 2, 7, 8, 9, 31, 32, 33, 65, 100};
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        auto const k = seed % 10 == 0 ? 0 : seed % 10 == 1 ? 530 : sizes[random() % 10];
        auto const p = random_product<T>(random, sizes[random() % 10],
                                         seed % 8 == 0 ? 300 : sizes[random() % 10], k);
        INFO(p.text());
        CHECK(error_over_bound(p, ulysses::builtin_gemm{}) <= 1.0);
    }
}

TEST_CASE_TEMPLATE("builtin_gemm: bits of an element do not depend on m, n or zeros ending k", T,
                   float, double) {
    for (std::uint64_t seed = 1; seed <= 12; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        auto whole = random_product<T>(random, 45, 70, 300);
        for (int64_t i = 0; i < whole.batch; ++i)  // products of zeros at the end of k
            for (int64_t q = 290; q < 300; ++q)
                for (int64_t r = 0; r < whole.m; ++r)
                    whole.a[at(i * whole.a_rows() * whole.a_stride +
                               (whole.a_transposed ? q * whole.a_stride + r
                                                   : r * whole.a_stride + q))] = 0;
        auto expected = whole.c;
        ulysses::builtin_gemm{}(whole.call(expected.data()));
        for (int64_t m0 : {0, 1, 13, 44})
            for (int64_t m : {1, 8, 32})
                for (int64_t n : {1, 37, 70}) {
                    if (m0 + m > whole.m) continue;
                    auto out = whole.c;
                    auto call = whole.call(out.data());
                    call.a.data += whole.a_transposed ? m0 : m0 * whole.a_stride;
                    call.c += m0 * whole.c_stride;
                    call.m = m, call.n = n, call.k = 290;
                    ulysses::builtin_gemm{}(call);
                    for (int64_t r = m0; r < m0 + m; ++r) {
                        auto const row = at(r * whole.c_stride);
                        CHECK(std::memcmp(out.data() + row, expected.data() + row,
                                          at(n) * sizeof(T)) == 0);
                    }
                }
    }
}

TEST_CASE("builtin_gemm: empty products") {
    float c[] = {1, 2, 3, 4};
    ulysses::gemm_call<float> call{.m = 2, .n = 2, .k = 0, .beta = 2, .c = c, .c_stride = 2};
    ulysses::builtin_gemm{}(call);
    CHECK(c[0] == 2);
    CHECK(c[3] == 8);
    call.m = 0;
    ulysses::builtin_gemm{}(call);
    call.m = 2, call.n = 0;
    ulysses::builtin_gemm{}(call);
    CHECK(c[3] == 8);
}
