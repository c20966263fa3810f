// SPDX-License-Identifier: Apache-2.0

#include "foreign.hpp"
#include "mdspan.hpp"

#include <ulysses/ulysses.hpp>

#include <doctest/doctest.h>

#include <array>
#include <type_traits>
#include <vector>
#if __has_include(<mdspan>)
#include <mdspan>
#endif

using namespace foreign;

namespace {

using matrix4 = mds::dextents<int, 4>;
template <class T>
using strided = mds::mdspan<T, matrix4, mds::layout_stride>;
template <class T>
using right = mds::mdspan<T, mds::dextents<std::size_t, 4>>;

std::array<int, 4> ints(uly::extents4 const& x) {
    return {static_cast<int>(x[0]), static_cast<int>(x[1]), static_cast<int>(x[2]),
            static_cast<int>(x[3])};
}
matrix4 extents(uly::extents4 const& x) { return matrix4(x[0], x[1], x[2], x[3]); }

auto const as_strided = []<class T>(slot<T> const& x) {
    return strided<T>(x.first, {extents(x.sizes), ints(x.steps)});
};

/// Axes in another order than [B, S, H, D], said by a type of its own.
template <class T>
struct heads_first : strided<T> {
    using strided<T>::strided;
    static constexpr uly::axes order = uly::axes::bhsd;
};

/// The rules for strides, on one rank and one token of work.
struct one_layer {
    static constexpr uly::shape shape{.heads = 2, .head_dim = 3};
    std::vector<float> memory = std::vector<float>(512, 0.25f);
    uly::sequence step = uly::sequence::split(1, 2, 4);
    uly::extents4 sizes{2, 4, 2, 3}, packed = uly::packed_strides(sizes);

    auto operand(int64_t begin, uly::extents4 const& steps) {
        return as_strided(slot<float>{memory.data() + begin, sizes, steps});
    }
    template <class K, class O>
    void attend(K const& key, O const& out) {
        uly::pipeline layer{uly::serial{}, uly::sequence_local{}, uly::reference_attention{},
                            shape};
        layer.attend(step, operand(0, packed), key, operand(64, packed), out);
    }
};

// A scaled view, as std::linalg::scaled gives: its elements are not what lies in memory.
struct scaled_accessor : mds::default_accessor<float> {
    using reference = float;
};
struct device_handle {
    float* memory;
    float& operator*() const { return *memory; }
};
struct device_accessor : mds::default_accessor<float> {
    using data_handle_type = device_handle;
};
static_assert(uly::tensor_like<strided<double>> && uly::tensor_like<right<float const>>);
static_assert(uly::tensor_like<mds::mdspan<float, mds::extents<int, 8, mds::dynamic_extent, 2>>>);
static_assert(std::is_same_v<uly::element_of_t<right<float const>>, float const>);
static_assert(!uly::tensor_like<strided<int>>);
static_assert(!uly::tensor_like<mds::mdspan<float, matrix4, mds::layout_right, scaled_accessor>>);
static_assert(!uly::tensor_like<mds::mdspan<float, matrix4, mds::layout_right, device_accessor>>);

}  // namespace

TEST_CASE("mdspan: strided and packed operands are adopted as they are") {
    check<float>(bshd, []<class T>(slot<T> const& x) {
        auto const& e = x.sizes;
        return right<T>(x.first, mds::dextents<std::size_t, 4>(e[0], e[1], e[2], e[3]));
    });
    for (auto const& lay : {bshd, sbhd, bhsd, padded}) check<float>(lay, as_strided);
    check<double>(padded, as_strided);
    check<float>(packed_qkv{}, as_strided);
}

TEST_CASE("mdspan: a derived type says the order of its axes") {
    auto const turned = []<class T>(slot<T> const& x) {
        auto const [b, s, h, d] = x.sizes;
        auto const [batch, token, head, dim] = ints(x.steps);
        return heads_first<T>(x.first, {matrix4(b, h, s, d), {batch, head, token, dim}});
    };
    for (auto const& lay : {bshd, bhsd}) check<float>(lay, turned);
}

TEST_CASE("mdspan: extents known at compile time") {
    check<float>(bhsd, []<class T>(slot<T> const& x) {
        return mds::mdspan<T, mds::extents<int, 2, mds::dynamic_extent, mds::dynamic_extent, 4>,
                           mds::layout_stride>(
            x.first, {mds::extents<int, 2, mds::dynamic_extent, mds::dynamic_extent, 4>(
                          2, x.sizes[1], x.sizes[2], 4),
                      ints(x.steps)});
    });
}

TEST_CASE("mdspan: three axes are a batch of one") {
    check<float>(
        padded,
        []<class T>(slot<T> const& x) {
            auto const [batch, tokens, heads, dim] = ints(x.sizes);
            auto const steps = ints(x.steps);
            // [snippet]
            using rows = mds::dextents<int, 3>;  // token, head, dim
            using operand = mds::mdspan<T, rows, mds::layout_stride>;
            operand const as_it_is(x.first,
                                   {rows(tokens, heads, dim), {steps[1], steps[2], steps[3]}});
            // [/snippet]
            return as_it_is;
        },
        1);
}

TEST_CASE("mdspan: a stride of zero repeats an input") { check<float>(one_key{}, as_strided); }

TEST_CASE("mdspan: a stride of zero is refused of an output, a negative one of any operand") {
    one_layer layer;
    auto const& [b, s, h, d] = layer.packed;
    CHECK_NOTHROW(layer.attend(layer.operand(128, {b, 0, h, d}), layer.operand(192, {b, s, h, d})));
    auto const message = [&](uly::extents4 const& key, uly::extents4 const& out) {
        return message_of<uly::invalid_tensor>(
            [&] { layer.attend(layer.operand(256, key), layer.operand(384, out)); });
    };
    auto const zero = message({b, s, h, d}, {b, 0, h, d});
    CAPTURE(zero);
    CHECK(contains(zero, "ulysses: attend: o: elements of an output must not overlap: extents [2, "
                         "4, 2, 3], strides [24, 0, 3, 1]"));
    for (std::size_t axis = 0; axis < 3; ++axis) {
        auto turned = layer.packed;
        turned[axis] = -turned[axis];
        for (auto const& text : {message(turned, layer.packed), message(layer.packed, turned)}) {
            CAPTURE(text);
            CHECK(contains(text, ": strides must not be negative: strides ["));
        }
    }
    CHECK(contains(message({b, s, h, -1}, layer.packed),
                   "k: the dim axis must be contiguous: stride -1, expected 1"));
    CHECK(contains(message({b, s, h, 0}, layer.packed), "the dim axis must be contiguous"));
}

TEST_CASE("mdspan: one and two axes are no per-head operand") {
    one_layer layer;
    mds::mdspan<float, mds::dextents<int, 2>> const flat(layer.memory.data(),
                                                         mds::dextents<int, 2>(8, 6));
    auto const message = message_of<uly::invalid_tensor>(
        [&] { layer.attend(flat, layer.operand(192, layer.packed)); });
    CAPTURE(message);
    CHECK(
        contains(message, "ulysses: k: a per-head operand has 3 or 4 axes, [B, S, H, D]: 2 axes"));
}

#if defined(__cpp_lib_mdspan)
TEST_CASE("mdspan: the standard's own") {
    using sizes = std::dextents<int64_t, 4>;
    static_assert(uly::tensor_like<std::mdspan<float, sizes>>);
    auto const standard = []<class T>(slot<T> const& x) {
        sizes const all(x.sizes);
        return std::mdspan<T, sizes, std::layout_stride>(
            x.first, std::layout_stride::mapping<sizes>(all, x.steps));
    };
    for (auto const& lay : {bshd, sbhd, bhsd, padded}) check<float>(lay, standard);
    check<float>(packed_qkv{}, standard);
}
#endif
