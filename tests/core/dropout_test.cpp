// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/dropout.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

namespace uly = ulysses;

namespace {

std::array<std::uint32_t, 4> philox_of(std::array<std::uint32_t, 4> const& counter,
                                       std::uint32_t key0, std::uint32_t key1) {
    uly::detail::philox<2>::words words{};
    for (std::size_t w = 0; w < 4; ++w) words[w][1] = counter[w];
    uly::detail::philox<2>::apply(words, key0, key1);
    return {words[0][1], words[1][1], words[2][1], words[3][1]};
}

}  // namespace

TEST_CASE("dropout: Philox-4x32-10 gives the published answers") {
    // Random123, kat_vectors.
    CHECK(philox_of({0, 0, 0, 0}, 0, 0) ==
          std::array<std::uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
    CHECK(philox_of({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffff, 0xffffffff) ==
          std::array<std::uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
    CHECK(philox_of({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0) ==
          std::array<std::uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("dropout: a key's factor does not depend on which others are asked for") {
    uly::dropout_mask const mask(0.3, {.seed = 5, .step = 1});
    std::vector<float> whole(300);
    mask.row(1, 2, 3, {0, 300}, whole.data());
    for (std::int64_t begin = 0; begin < 90; begin += 7)
        for (std::int64_t end : {begin, begin + 1, begin + 4, begin + 65, begin + 200}) {
            std::vector<float> part(static_cast<std::size_t>(end - begin));
            mask.row(1, 2, 3, {begin, end}, part.data());
            for (std::size_t j = 0; j < part.size(); ++j)
                CHECK(part[j] == whole[j + static_cast<std::size_t>(begin)]);
        }
}

TEST_CASE("dropout: drops the asked share, keeps the mean, and neighbours independently") {
    for (double rate : {0.1, 0.5, 0.9}) {
        uly::dropout_mask const mask(rate, {.seed = 11});
        constexpr std::int64_t keys = 1000, rows = 400;
        std::int64_t dropped = 0, both_in_row = 0, both_in_column = 0, wrong = 0;
        std::vector<double> now(keys), before(keys, 1);
        for (std::int64_t i = 0; i < rows; ++i) {
            mask.row(0, 0, i, {0, keys}, now.data());
            for (std::size_t j = 0; j < now.size(); ++j) {
                wrong += now[j] != 0 && std::fabs(now[j] * (1 - rate) - 1) > 1e-9;
                dropped += now[j] == 0;
                both_in_row += j > 0 && now[j] == 0 && now[j - 1] == 0;
                both_in_column += i > 0 && now[j] == 0 && before[j] == 0;
            }
            before = now;
        }
        auto const near = [&](std::int64_t count, std::int64_t of, double probability) {
            auto const n = static_cast<double>(of);
            // Five standard deviations.
            return std::fabs(static_cast<double>(count) - n * probability) <
                   5 * std::sqrt(n * probability * (1 - probability)) * 1.5;
        };
        CHECK(wrong == 0);
        CHECK(near(dropped, keys * rows, rate));
        CHECK(near(both_in_row, (keys - 1) * rows, rate * rate));
        CHECK(near(both_in_column, keys * (rows - 1), rate * rate));
    }
    CHECK(uly::dropout_mask(0.0, {}).empty());
    CHECK(std::isfinite(uly::dropout_mask(0.99999999999, {}).scale()));
}
