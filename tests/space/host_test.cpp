// SPDX-License-Identifier: Apache-2.0

#include <ulysses/space/host.hpp>

#include "../sanitizers.hpp"
#include "scenes.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <span>
#include <vector>

namespace {

namespace uly = ulysses;
using uly::block_copy;
using uly::host_space;
namespace detail = uly::detail;

using space_test::axes;
using space_test::copy_naively;
using space_test::drawn;
using space_test::drawn_scene;
using space_test::noise;

template <class From>
struct sources {
    std::vector<std::vector<From>> values;
    std::vector<std::byte const*> pointers;

    sources(std::size_t count, std::size_t size, std::mt19937& random) {
        std::uniform_real_distribution<uly::accumulator_t<From>> uniform{-3, 3};
        values.resize(count, std::vector<From>(size));
        for (auto& list : values) {
            for (auto& value : list) value = From(uniform(random));
            pointers.push_back(reinterpret_cast<std::byte const*>(list.data()));
        }
    }
};

/// The number of type To nearest to `value`, ties to even, by searching its finite neighbours.
template <class To>
std::uint16_t nearest_bits(double value, std::uint16_t guess) {
    auto best = guess;
    auto least = std::numeric_limits<double>::infinity();
    for (int step = -2; step <= 2; ++step) {
        To candidate;
        candidate.bits = static_cast<std::uint16_t>(guess + step);
        auto const distance = std::abs(static_cast<double>(static_cast<float>(candidate)) - value);
        if (distance < least || (distance == least && candidate.bits % 2 == 0)) {
            least = distance;
            best = candidate.bits;
        }
    }
    return best;
}

template <class To>
void check_rounded_once(std::mt19937& random) {
    std::uniform_real_distribution<double> uniform{-2, 2};
    for (int i = 0; i < 20000; ++i) {
        // Near a tie of To, on either side, where rounding by way of float would lose the side.
        To below{static_cast<float>(uniform(random))};
        To above;
        above.bits = static_cast<std::uint16_t>(below.bits + 1);
        auto const tie = (static_cast<double>(static_cast<float>(below)) +
                          static_cast<double>(static_cast<float>(above))) /
                         2;
        auto const value = tie * (1 + static_cast<double>(i % 3 - 1) * 0x1p-40);
        REQUIRE(detail::rounded<To>(value).bits == nearest_bits<To>(value, below.bits));
    }
    CHECK(std::isnan(
        static_cast<float>(detail::rounded<To>(std::numeric_limits<double>::quiet_NaN()))));
    CHECK(std::isinf(static_cast<float>(detail::rounded<To>(1e300))));
    CHECK(static_cast<float>(detail::rounded<To>(-1e300)) < 0);
    CHECK(static_cast<float>(detail::rounded<To>(1e-300)) == 0);
    CHECK(std::isinf(
        static_cast<float>(detail::rounded<To>(std::numeric_limits<double>::infinity()))));
}

/// Sums of 3 sources over strided rows against the same sum taken one element at a time.
template <class To, class From>
void check_sum(std::size_t count, std::mt19937& random) {
    axes const extents{2, 3, 2};
    std::int64_t const elements = drawn(random, 1, 700);
    std::int64_t const from_row = elements + 3;
    std::int64_t const to_row = elements + 5;
    auto const bytes_of = [](std::int64_t row, std::size_t size) {
        auto const bytes = row * static_cast<std::int64_t>(size);
        return axes{6 * bytes, bytes, 3 * bytes};  // [batch][head][token]
    };
    sources<From> from{count, static_cast<std::size_t>(12 * from_row), random};
    To const guard{7.0f};
    std::vector<To> to(static_cast<std::size_t>(12 * to_row), guard);
    std::vector<uly::sum_source> parts;
    for (auto const* const rows : from.pointers)
        parts.push_back({rows, bytes_of(from_row, sizeof(From))});
    uly::block_sum const sum{.to = reinterpret_cast<std::byte*>(to.data()),
                             .from = parts,
                             .extents = extents,
                             .to_strides = bytes_of(to_row, sizeof(To)),
                             .elements = elements};
    host_space::add<To, From>({}, {&sum, 1});
    for (std::int64_t row = 0; row < 12; ++row)
        for (std::int64_t i = 0; i < to_row; ++i) {
            auto expected = guard;
            if (i < elements) {
                auto const at = static_cast<std::size_t>(row * from_row + i);
                using wide = uly::accumulator_t<From>;
                wide total = count == 0 ? wide{0} : static_cast<wide>(from.values[0][at]);
                for (std::size_t s = 1; s < count; ++s)
                    total += static_cast<wide>(from.values[s][at]);
                expected = detail::rounded<To>(total);
            }
            auto const& actual = to[static_cast<std::size_t>(row * to_row + i)];
            REQUIRE(std::memcmp(&actual, &expected, sizeof(To)) == 0);
        }
}

}  // namespace

TEST_CASE("host copy equals a naive loop and touches nothing else") {
    unsigned const seed = 20240611;
    INFO("seed ", seed);
    std::mt19937 random{seed};
    for (int round = 0; round < 1500; ++round) {
        CAPTURE(round);
        auto scene = drawn_scene(random);
        auto const poisoned = scene.target;
        copy_naively(scene.blocks);
        auto const expected = scene.target;
        for (auto const way : {detail::store::plain, detail::store::streamed}) {
            std::copy(poisoned.begin(), poisoned.end(), scene.target.begin());
            detail::copy_blocks(scene.blocks, way);
            REQUIRE(scene.target == expected);
        }
        for (auto const bytes : {std::size_t{0}, std::size_t{1} << 40}) {
            std::copy(poisoned.begin(), poisoned.end(), scene.target.begin());
            host_space::copy({}, scene.blocks, bytes);
            REQUIRE(scene.target == expected);
        }
    }
}

TEST_CASE("host copy takes blocks of unlike lengths, merged or not") {
    // A rank's exchange in small: tokens [B, s, H, D] to head-major windows with padded rows.
    constexpr std::int64_t samples = 2, tokens = 37, heads = 5, row = 40, pitch = 64;
    std::mt19937 random{7};
    auto const source = noise(static_cast<std::size_t>(samples * tokens * heads * row), random);
    auto target = noise(static_cast<std::size_t>(samples * heads * tokens * pitch), random);
    auto const window = [&](std::int64_t head, std::int64_t count, std::int64_t first) {
        return block_copy{.to = target.data() + head * tokens * pitch + first * pitch,
                          .from = source.data() + first * heads * row + head * row,
                          .extents = {samples, count, 1},
                          .to_strides = {heads * tokens * pitch, pitch, tokens * pitch},
                          .from_strides = {tokens * heads * row, heads * row, row},
                          .row_bytes = row};
    };
    std::vector<block_copy> blocks{window(0, tokens, 0), window(1, 3, 0), window(1, tokens - 3, 3),
                                   window(3, 0, 5), window(4, 1, 36)};
    blocks[0].extents[2] = 1;
    for (auto const way : {detail::store::plain, detail::store::streamed}) {
        auto const before = target;
        copy_naively(blocks);
        auto const expected = target;
        target.assign(before.begin(), before.end());
        detail::copy_blocks(blocks, way);
        CHECK(target == expected);
        for (auto& block : blocks) block = merged(block);
    }

    // The whole tensor back in one block: rows of a token lie back to back, so they are staged.
    std::vector<std::byte> back(source.size() + 2 * 64);
    block_copy const pull{.to = back.data() + 64,
                          .from = target.data(),
                          .extents = {samples, tokens, heads},
                          .to_strides = {tokens * heads * row, heads * row, row},
                          .from_strides = {heads * tokens * pitch, pitch, tokens * pitch},
                          .row_bytes = row};
    auto reference = back;
    auto naive = pull;
    naive.to = reference.data() + 64;
    copy_naively({&naive, 1});
    for (auto const way : {detail::store::plain, detail::store::streamed}) {
        std::fill(back.begin(), back.end(), std::byte{0});
        detail::copy_blocks({&pull, 1}, way);
        CHECK(back == reference);
    }
}

TEST_CASE("host copy may fill the padding it is given, and no more") {
    constexpr std::int64_t tokens = 9, row = 144, pitch = 192;
    std::mt19937 random{11};
    auto const source = noise(tokens * row, random);
    for (std::int64_t const padding : {0, 1, 47, 48})
        for (std::size_t const offset : {std::size_t{0}, std::size_t{8}})
            for (auto const way : {detail::store::plain, detail::store::streamed}) {
                CAPTURE(padding);
                CAPTURE(offset);
                std::vector<std::byte> memory(tokens * pitch + 256, std::byte{0x5a});
                auto const misaligned = std::bit_cast<std::uintptr_t>(memory.data()) % 64;
                auto* const target = memory.data() + 64 + (64 - misaligned) % 64 + offset;
                block_copy const block{.to = target,
                                       .from = source.data(),
                                       .extents = {1, tokens, 1},
                                       .to_strides = {0, pitch, row},
                                       .from_strides = {0, row, row},
                                       .row_bytes = row,
                                       .to_padding = padding};
                detail::copy_blocks({&block, 1}, way);
                std::size_t foreign = 0;
                for (auto* at = memory.data(); at != memory.data() + memory.size(); ++at) {
                    auto const distance = at - target;
                    auto const token = distance / pitch;
                    auto const inside = distance % pitch;
                    if (distance >= 0 && token < tokens && inside < row)
                        REQUIRE(*at == source[static_cast<std::size_t>(token * row + inside)]);
                    else if (distance < 0 || token >= tokens || inside >= row + padding)
                        foreign += *at != std::byte{0x5a};
                }
                CHECK(foreign == 0);
            }
}

TEST_CASE("merged folds heads that lie back to back on both sides") {
    block_copy const block{.to = nullptr,
                           .from = nullptr,
                           .extents = {2, 3, 4},
                           .to_strides = {1000, 100, 20},
                           .from_strides = {2000, 200, 20},
                           .row_bytes = 20};
    CHECK(merged(block).row_bytes == 80);
    CHECK(merged(block).extents == axes{2, 3, 1});
    CHECK(merged(block).bytes() == block.bytes());
    auto apart = block;
    apart.to_strides[2] = 24;
    CHECK(merged(apart).row_bytes == 20);
}

TEST_CASE("host copy does nothing for blocks without extent") {
    for (std::size_t axis = 0; axis < 4; ++axis) {
        block_copy block{.to = nullptr,
                         .from = nullptr,
                         .extents = {1, 1, 1},
                         .to_strides = {64, 64, 64},
                         .from_strides = {64, 64, 64},
                         .row_bytes = 64};
        if (axis < 3)
            block.extents[axis] = 0;
        else
            block.row_bytes = 0;
        for (auto const way : {detail::store::plain, detail::store::streamed})
            detail::copy_blocks({&block, 1}, way);
    }
    host_space::copy({}, {}, 1);
}

TEST_CASE("host add sums in the order given and rounds once") {
    unsigned const seed = 99;
    INFO("seed ", seed);
    std::mt19937 random{seed};
    for (std::size_t count = 0; count <= 5; ++count)
        for (int round = 0; round < 8; ++round) {
            check_sum<float, float>(count, random);
            check_sum<double, double>(count, random);
            check_sum<float, double>(count, random);
            check_sum<double, float>(count, random);
            check_sum<uly::bf16, float>(count, random);
            check_sum<uly::half, float>(count, random);
            check_sum<uly::bf16, double>(count, random);
            check_sum<uly::half, double>(count, random);
            check_sum<uly::bf16, uly::bf16>(count, random);
            check_sum<uly::half, uly::half>(count, random);
        }
}

TEST_CASE("host add keeps the sign of a lone zero and writes zeros when there is no source") {
    std::array<float, 2> const zeros{-0.0f, 0.0f};
    auto const* const from = reinterpret_cast<std::byte const*>(zeros.data());
    std::array<float, 3> to{1, 1, 1};
    uly::sum_source const part{from, {8, 8, 8}};
    uly::block_sum sum{.to = reinterpret_cast<std::byte*>(to.data()),
                       .from = {&part, 1},
                       .extents = {1, 1, 1},
                       .to_strides = {8, 8, 8},
                       .elements = 2};
    host_space::add<float, float>({}, {&sum, 1});
    CHECK(std::signbit(to[0]));
    CHECK_FALSE(std::signbit(to[1]));
    CHECK(to[2] == 1);
    to = {1, 1, 1};
    sum.from = {};
    host_space::add<float, float>({}, {&sum, 1});
    CHECK(to == std::array<float, 3>{0, 0, 1});
    sum.extents[1] = 0;
    sum.to = nullptr;
    host_space::add<float, float>({}, {&sum, 1});
}

TEST_CASE("sums in double are rounded once to 16 bits") {
    std::mt19937 random{5};
    check_rounded_once<uly::bf16>(random);
    check_rounded_once<uly::half>(random);
}

TEST_CASE("host memory is aligned, and its absence is a typed error") {
    for (std::size_t const bytes : {std::size_t{0}, std::size_t{1}, std::size_t{63},
                                    std::size_t{4097}, std::size_t{9} << 20}) {
        void* const memory = host_space::allocate({}, bytes);
        REQUIRE(memory != nullptr);
        CHECK(std::bit_cast<std::uintptr_t>(memory) % 64 == 0);
        std::memset(memory, 1, bytes);
        host_space::deallocate({}, memory, bytes);
    }
    host_space::deallocate({}, nullptr, 0);
#if ULYSSES_EXCEPTIONS && !TEST_UNDER_SANITIZER
    auto const most = std::numeric_limits<std::size_t>::max() / 4;
    CHECK_THROWS_AS(host_space::deallocate({}, host_space::allocate({}, most), most),
                    uly::out_of_memory);
#endif
}
