// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/softmax.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <limits>

namespace {

/// One lane of exp2_pack, by way of memory.
template <class T>
T exp2_of(T t) {
    T lane[ulysses::detail::lanes<T>];
    ulysses::detail::store_pack<T>(lane,
                                   ulysses::detail::exp2_pack<T>(ulysses::detail::fill_pack<T>(t)));
    return lane[0];
}

}  // namespace

TEST_CASE_TEMPLATE("exp2_pack: within its bound on the whole range", T, float, double) {
    auto const bound = std::same_as<T, float> ? 2e-7L : 4e-16L;
    auto const least = std::same_as<T, float> ? T(-125) : T(-1021);
    long double worst = 0;
    for (int i = 0; i <= 200000; ++i) {
        auto const t = least * static_cast<T>(i) / T(200000);
        auto const exact = std::exp2(static_cast<long double>(t));
        worst = std::max(worst, std::fabs(static_cast<long double>(exp2_of(t)) - exact) / exact);
    }
    CHECK(worst <= bound);
}

TEST_CASE_TEMPLATE("exp2_pack: exact ends", T, float, double) {
    CHECK(exp2_of(T(0)) == T(1));
    CHECK(exp2_of(T(-1)) == T(0.5));
    CHECK(exp2_of(T(-1100)) == T(0));
    CHECK(exp2_of(std::numeric_limits<T>::lowest()) == T(0));
    CHECK(exp2_of(-std::numeric_limits<T>::infinity()) == T(0));
    CHECK(std::isnan(exp2_of(std::numeric_limits<T>::quiet_NaN())));
}

TEST_CASE("softmax rows: keys before and past those seen count for nothing, whatever the length") {
    constexpr std::int64_t length = 256;
    for (std::int64_t const begin : {0, 1, 63, 64, 100})
        for (std::int64_t const size : {0, 1, 15, 63, 64, 65, 150})
            for (auto const count : {begin + size, (begin + size + length) / 2, length}) {
                ulysses::index_range const seen{begin, begin + size};
                alignas(64) float scores[length];
                alignas(64) float sums[ulysses::detail::lanes<float>] = {};
                for (std::int64_t j = 0; j < length; ++j)
                    scores[j] = seen.begin <= j && j < seen.end ? -static_cast<float>(j - begin) / 8
                                                                : 1000.0f;
                auto const none = -std::numeric_limits<float>::infinity();
                auto const now = ulysses::detail::softmax_row_largest(scores, seen, count, none);
                CHECK(now == (size > 0 ? 0.0f : none));
                ulysses::detail::softmax_row_step<float>(scores, scores, seen, none, now, sums,
                                                         nullptr, 0);
                double expected = 0, sum = 0;
                for (std::int64_t j = 0; j < size; ++j)
                    expected += std::exp2(-static_cast<double>(j) / 8);
                for (auto part : sums) sum += static_cast<double>(part);
                CHECK(sum == doctest::Approx(expected).epsilon(1e-6));
                for (std::int64_t j = 0; j < count; ++j)
                    if (j < seen.begin || j >= seen.end) CHECK(scores[j] == 0.0f);
            }
}
