#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/block.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

/// Strided copies drawn at random, for the tests of spaces.
namespace space_test {

using ulysses::block_copy;

using axes = std::array<std::int64_t, 3>;

inline void copy_naively(std::span<block_copy const> blocks) {
    for (auto const& block : blocks)
        for (std::int64_t b = 0; b < block.extents[0]; ++b)
            for (std::int64_t t = 0; t < block.extents[1]; ++t)
                for (std::int64_t h = 0; h < block.extents[2]; ++h)
                    for (std::int64_t i = 0; i < block.row_bytes; ++i)
                        block.to[b * block.to_strides[0] + t * block.to_strides[1] +
                                 h * block.to_strides[2] + i] =
                            block.from[b * block.from_strides[0] + t * block.from_strides[1] +
                                       h * block.from_strides[2] + i];
}

inline std::vector<std::byte> noise(std::size_t bytes, std::mt19937& random) {
    std::vector<std::byte> data(bytes);
    for (auto& value : data) value = static_cast<std::byte>(random());
    return data;
}

inline std::int64_t drawn(std::mt19937& random, std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>{least, most}(random);
}

/// Strides under which the three axes nest in a random order, with random gaps; and their span.
struct placement {
    axes strides;
    std::int64_t bytes;
};

inline placement placed(axes extents, std::int64_t row_bytes, std::mt19937& random) {
    std::array<std::size_t, 3> order{0, 1, 2};
    std::shuffle(order.begin(), order.end(), random);
    placement result{{}, row_bytes};
    for (auto const axis : order) {
        auto gap = std::int64_t{0};
        if (drawn(random, 0, 2) == 0) gap = drawn(random, 1, 70);
        if (drawn(random, 0, 3) == 0) gap = (64 - result.bytes % 64) % 64;
        result.strides[axis] = result.bytes + gap;
        result.bytes = result.strides[axis] * std::max<std::int64_t>(extents[axis], 1);
    }
    return result;
}

inline std::int64_t drawn_row(std::mt19937& random) {
    constexpr std::array<std::int64_t, 12> common{1,   2,   63,  64,  65,   128,
                                                  160, 192, 512, 513, 2049, 5000};
    if (drawn(random, 0, 1) == 0) return drawn(random, 1, 300);
    return common[static_cast<std::size_t>(drawn(random, 0, 11))];
}

/// Blocks into disjoint parts of one destination, with bytes that belong to none around each.
struct scene {
    std::vector<std::byte> source;
    std::vector<std::byte> target;
    std::vector<block_copy> blocks;
};

inline scene drawn_scene(std::mt19937& random) {
    scene result;
    auto const count = drawn(random, 0, 5);
    std::vector<std::int64_t> to, from;
    std::int64_t to_bytes = 0;
    std::int64_t from_bytes = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        block_copy block;
        block.extents = {drawn(random, 0, 3), drawn(random, 0, 40), drawn(random, 0, 5)};
        block.row_bytes = drawn_row(random);
        auto const target = placed(block.extents, block.row_bytes, random);
        auto const source = placed(block.extents, block.row_bytes, random);
        block.to_strides = target.strides;
        block.from_strides = source.strides;
        to.push_back(to_bytes + drawn(random, 0, 130));
        from.push_back(from_bytes + drawn(random, 0, 130));
        to_bytes = to.back() + target.bytes;
        from_bytes = from.back() + source.bytes;
        result.blocks.push_back(block);
    }
    result.source = noise(static_cast<std::size_t>(from_bytes) + 130, random);
    result.target = noise(static_cast<std::size_t>(to_bytes) + 130, random);
    for (std::size_t i = 0; i < result.blocks.size(); ++i) {
        result.blocks[i].to = result.target.data() + to[i];
        result.blocks[i].from = result.source.data() + from[i];
    }
    return result;
}

}  // namespace space_test
