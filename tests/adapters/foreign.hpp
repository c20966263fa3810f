#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/ulysses.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

/// Runs a layer forward and backward with operands of a foreign type, and once more with
/// tensor_views of the same data in the same places: every byte of memory must be the same after.
namespace foreign {

namespace uly = ulysses;
using std::int64_t;

/// One operand where it lies: canonical extents [B, s, H, D] and any strides.
template <class T>
struct slot {
    T* first;
    uly::extents4 sizes, steps;
};

/// The same as the operand that the library knows.
struct as_view {
    template <class T>
    auto operator()(slot<T> const& x) const {
        return uly::token_view<T>(x.first, x.sizes, x.steps);
    }
};

inline constexpr std::size_t q = 0, k = 1, v = 2, o = 3, dout = 4, dq = 5, dk = 6, dv = 7;
inline constexpr bool written(std::size_t which) { return which == o || which >= dq; }

/// Where the operands of a call lie in one memory, in elements.
struct places {
    std::array<int64_t, 8> begin{};
    std::array<uly::extents4, 8> steps{};
    int64_t size = 0;
};

/// Extents of the eight operands.
using all_extents = std::array<uly::extents4, 8>;

/// Each operand after the other, its axes in memory order, `gap` elements after each row of dims.
struct in_order {
    std::array<std::size_t, 3> outer;  // batch, token and head, the slowest first
    int64_t gap = 0;

    places operator()(all_extents const& sizes) const {
        places p;
        for (std::size_t i = 0; i < 8; ++i) {
            p.begin[i] = p.size;
            auto step = sizes[i][3] + gap;
            p.steps[i][3] = 1;
            for (std::size_t a = 3; a-- > 0; step *= sizes[i][outer[a]])
                p.steps[i][outer[a]] = step;
            p.size += step;
        }
        return p;
    }
};
inline constexpr in_order bshd{{0, 1, 2}}, sbhd{{1, 0, 2}}, bhsd{{0, 2, 1}}, padded{{0, 1, 2}, 3};

/// Rows [q | k | v] of one token, as one product writes them, and their gradients alike.
struct packed_qkv {
    places operator()(all_extents const& sizes) const {
        auto p = in_order{{0, 1, 2}}({{{}, {}, {}, sizes[o], sizes[dout], {}, {}, {}}});
        for (auto const first : {q, dq}) {
            int64_t row = 0;
            for (auto i = first; i < first + 3; ++i) {
                p.begin[i] = p.size + row;
                row += sizes[i][2] * sizes[i][3];
            }
            for (auto i = first; i < first + 3; ++i)
                p.steps[i] = {sizes[i][1] * row, row, sizes[i][3], 1};
            p.size += sizes[first][0] * sizes[first][1] * row;
        }
        return p;
    }
};

/// One key and value row for all tokens of a sample: stride 0 on the token axis.
struct one_key {
    places operator()(all_extents const& sizes) const {
        auto p = in_order{{0, 1, 2}}(sizes);
        for (auto const i : {k, v}) p.steps[i] = {sizes[i][2] * sizes[i][3], 0, sizes[i][3], 1};
        return p;
    }
};

inline constexpr uly::shape grouped{
    .heads = 6, .kv_heads = 2, .head_dim = 4, .mask = uly::mask::causal};

/// The memory of all ranks after forward and backward of a layer, operands made by `wrap`.
template <class T, class Lay, class Wrap>
std::vector<T> run(int ranks, int64_t batch, int64_t tokens, Lay const& lay, Wrap const& wrap) {
    std::vector<std::vector<T>> memory(static_cast<std::size_t>(ranks));
    std::mutex asserting;
    uly::threads::run(ranks, [&](uly::threads::communicator group) {
        auto const step = uly::sequence::split(ranks, batch, tokens);
        auto const own = step.queries().count(group.rank());
        uly::extents4 const query{batch, own, grouped.heads, grouped.head_dim};
        uly::extents4 const key{batch, own, grouped.kv_heads, grouped.head_dim};
        all_extents const sizes{query, key, key, query, query, query, key, key};
        auto const p = lay(sizes);
        auto& mine = memory[static_cast<std::size_t>(group.rank())];
        mine.assign(static_cast<std::size_t>(p.size), T(std::numeric_limits<float>::quiet_NaN()));
        auto const out = [&](std::size_t i) {
            return slot<T>{mine.data() + p.begin[i], sizes[i], p.steps[i]};
        };
        auto const in = [&](std::size_t i) {
            return slot<T const>{mine.data() + p.begin[i], sizes[i], p.steps[i]};
        };
        auto seed = static_cast<unsigned>(group.rank()) + 1;
        for (std::size_t i = 0; i < 8; ++i)
            if (!written(i))
                for_each(as_view{}(out(i)), [&](T& x) {
                    seed = seed * 1664525 + 1013904223;
                    x = T(static_cast<float>(seed >> 16) / 65536.0f - 0.5f);
                });

        uly::pipeline layer{group, uly::sequence_local{},
                            uly::blocked_attention{uly::builtin_gemm{}}, grouped};
        // [snippet call]
        auto saved = layer.make_context();
        layer.attend(step, saved, wrap(in(q)), wrap(in(k)), wrap(in(v)), wrap(out(o)));
        layer.attend_backward(step, saved, wrap(in(dout)), wrap(out(dq)), wrap(out(dk)),
                              wrap(out(dv)));
        // [/snippet]

        std::lock_guard lock(asserting);
        for (std::size_t i = 0; i < 8; ++i) {
            auto finite = true;
            for_each(as_view{}(out(i)),
                     [&](T& x) { finite = finite && std::isfinite(static_cast<float>(x)); });
            CHECK(finite);
        }
    });
    std::vector<T> all;
    for (auto const& each : memory) all.insert(all.end(), each.begin(), each.end());
    return all;
}

template <class View, class Body>
void for_each(View const& x, Body const& body) {
    for (int64_t b = 0; b < x.batch(); ++b)
        for (int64_t s = 0; s < x.tokens(); ++s)
            for (int64_t h = 0; h < x.heads(); ++h)
                for (int64_t d = 0; d < x.dim(); ++d) body(x(b, s, h, d));
}

template <class T, class U>
bool same_bits(std::vector<T> const& a, std::vector<U> const& b) {
    static_assert(sizeof(T) == sizeof(U));
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

/// Operands made by `wrap` give what tensor_views of `Known` give, on 1, 3 and 4 ranks; 4 cut
/// heads.
template <class T, class Known = T, class Lay, class Wrap>
void check(Lay const& lay, Wrap const& wrap, int64_t batch = 2) {
    for (int const ranks : {1, 3, 4}) {
        CAPTURE(ranks);
        auto const expected = run<Known>(ranks, batch, 13, lay, as_view{});
        CHECK(same_bits(run<T>(ranks, batch, 13, lay, wrap), expected));
    }
}

/// The text of the error of that type that `body` throws.
template <class Error, class Body>
std::string message_of(Body const& body) {
    try {
        body();
    } catch (Error const& e) {
        return e.what();
    }
    return "nothing was thrown";
}

inline bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace foreign
