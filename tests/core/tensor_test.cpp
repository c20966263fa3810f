// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/tensor.hpp>
#include <ulysses/space/host.hpp>

#include "../archetypes.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <numeric>
#include <type_traits>
#include <vector>

namespace uly = ulysses;
using archetypes::foreign_tensor;
using archetypes::member_tensor;
using archetypes::span_tensor;
using uly::extents4;

namespace {

/// With strides and an order, by members; the order is the type's.
template <uly::axes Order, std::size_t Rank>
struct ordered_tensor {
    static constexpr uly::axes order = Order;
    float* first;
    std::array<std::int64_t, Rank> sizes, steps;
    float* data() const { return first; }
    std::array<std::int64_t, Rank> extents() const { return sizes; }
    std::array<std::int64_t, Rank> strides() const { return steps; }
};

/// Has members that would make it a tensor, but its traits say otherwise: those win.
struct misleading_tensor {
    float* wrong;
    float* right;
    float* data() const { return wrong; }
    std::array<int, 3> extents() const { return {9, 9, 9}; }
    [[maybe_unused]] static constexpr uly::axes order = uly::axes::bhsd;
};

/// Members win over the mdspan's interface.
struct both_tensor {
    float* first;
    float* data() const { return first; }
    std::vector<int> extents() const { return {2, 3, 4}; }
    std::vector<int> strides() const { return {100, 10, 1}; }
    float* data_handle() const { return nullptr; }
    std::size_t rank() const { return 4; }
    std::size_t extent(std::size_t) const { return 9; }
    std::size_t stride(std::size_t) const { return 9; }
};

/// The message of the error that `body` throws.
template <class Error, class Body>
std::string message_of(Body const& body) {
    try {
        body();
    } catch (Error const& e) {
        return e.what();
    }
    return "nothing was thrown";
}

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

float* place(std::size_t offset = 0) {
    static std::vector<float> memory(4096);
    return memory.data() + offset;
}

}  // namespace

template <>
struct ulysses::tensor_traits<misleading_tensor> {
    static float* data(misleading_tensor const& t) { return t.right; }
    static std::array<int, 3> extents(misleading_tensor const&) { return {2, 3, 4}; }
    static std::array<int, 3> strides(misleading_tensor const&) { return {50, 7, 1}; }
    static constexpr axes order = axes::sbhd;
};

TEST_CASE("tensor: packed operands by each tier") {
    auto const check = [](auto const& view) {
        CHECK(view.data == place());
        CHECK(view.extents == extents4{2, 3, 4, 5});
        CHECK(view.strides == extents4{60, 20, 5, 1});
        CHECK(view.packed());
    };
    check(uly::view_of_heads<uly::sequence_local>(foreign_tensor<float, 4>{place(), {2, 3, 4, 5}},
                                                  "q"));
    check(uly::view_of_heads<uly::sequence_local>(member_tensor<float, 4>{place(), {2, 3, 4, 5}},
                                                  "q"));
    check(uly::view_of_heads<uly::sequence_local>(
        span_tensor<float, 4>{place(), {2, 3, 4, 5}, {60, 20, 5, 1}}, "q"));
    check(
        uly::view_of_heads<uly::sequence_local>(uly::head_view<float>{place(), {2, 3, 4, 5}}, "q"));
}

TEST_CASE("tensor: traits win over members, members over an mdspan") {
    misleading_tensor const first{place(), place(8)};
    auto const by_traits = uly::view_of_heads<uly::sequence_local>(first, "q");
    CHECK(by_traits.data == place(8));
    CHECK(by_traits.extents == extents4{1, 2, 3, 4});
    CHECK(by_traits.strides == extents4{0, 50, 7, 1});
    auto const by_members = uly::view_of_heads<uly::sequence_local>(both_tensor{place(3)}, "q");
    CHECK(by_members.data == place(3));
    CHECK(by_members.extents == extents4{1, 2, 3, 4});
    CHECK(by_members.strides == extents4{0, 100, 10, 1});
}

TEST_CASE("tensor: axis orders of per-head operands") {
    using uly::axes;
    using uly::sequence_local;
    using uly::view_of_heads;
    SUBCASE("bshd") {
        auto const four = view_of_heads<sequence_local>(
            ordered_tensor<axes::bshd, 4>{place(), {2, 3, 4, 5}, {700, 70, 7, 1}}, "q");
        CHECK(four.extents == extents4{2, 3, 4, 5});
        CHECK(four.strides == extents4{700, 70, 7, 1});
        auto const three = view_of_heads<sequence_local>(
            ordered_tensor<axes::bshd, 3>{place(), {3, 4, 5}, {70, 7, 1}}, "q");
        CHECK(three.extents == extents4{1, 3, 4, 5});
        CHECK(three.strides == extents4{0, 70, 7, 1});
    }
    SUBCASE("sbhd") {
        auto const four = view_of_heads<sequence_local>(
            ordered_tensor<axes::sbhd, 4>{place(), {3, 2, 4, 5}, {700, 70, 7, 1}}, "q");
        CHECK(four.extents == extents4{2, 3, 4, 5});
        CHECK(four.strides == extents4{70, 700, 7, 1});
        auto const three = view_of_heads<sequence_local>(
            ordered_tensor<axes::sbhd, 3>{place(), {3, 4, 5}, {70, 7, 1}}, "q");
        CHECK(three.extents == extents4{1, 3, 4, 5});
        CHECK(three.strides == extents4{0, 70, 7, 1});
    }
    SUBCASE("bhsd") {
        auto const four = view_of_heads<sequence_local>(
            ordered_tensor<axes::bhsd, 4>{place(), {2, 4, 3, 5}, {700, 70, 7, 1}}, "q");
        CHECK(four.extents == extents4{2, 3, 4, 5});
        CHECK(four.strides == extents4{700, 7, 70, 1});
        auto const three = view_of_heads<sequence_local>(
            ordered_tensor<axes::bhsd, 3>{place(), {4, 3, 5}, {70, 7, 1}}, "q");
        CHECK(three.extents == extents4{1, 3, 4, 5});
        CHECK(three.strides == extents4{0, 7, 70, 1});
    }
}

TEST_CASE("tensor: operands of whole tokens") {
    using uly::axes;
    using uly::sequence_local;
    using uly::view_of_tokens;
    SUBCASE("[S, C]") {
        auto const check = [](auto const& view) {
            CHECK(view.extents == extents4{1, 3, 1, 5});
            CHECK(view.strides[1] == 70);
            CHECK(view.strides[3] == 1);
        };
        check(view_of_tokens<sequence_local>(
            ordered_tensor<axes::bshd, 2>{place(), {3, 5}, {70, 1}}, "x"));
        check(view_of_tokens<sequence_local>(
            ordered_tensor<axes::sbhd, 2>{place(), {3, 5}, {70, 1}}, "x"));
        check(view_of_tokens<sequence_local>(
            ordered_tensor<axes::bhsd, 2>{place(), {3, 5}, {70, 1}}, "x"));
    }
    SUBCASE("three axes, batch first or sequence first") {
        auto const batch_first = view_of_tokens<sequence_local>(
            ordered_tensor<axes::bshd, 3>{place(), {2, 3, 5}, {700, 70, 1}}, "x");
        CHECK(batch_first.extents == extents4{2, 3, 1, 5});
        CHECK(batch_first.strides == extents4{700, 70, 0, 1});
        auto const also_batch_first = view_of_tokens<sequence_local>(
            ordered_tensor<axes::bhsd, 3>{place(), {2, 3, 5}, {700, 70, 1}}, "x");
        CHECK(also_batch_first.extents == extents4{2, 3, 1, 5});
        CHECK(also_batch_first.strides == extents4{700, 70, 0, 1});
        auto const sequence_first = view_of_tokens<sequence_local>(
            ordered_tensor<axes::sbhd, 3>{place(), {3, 2, 5}, {700, 70, 1}}, "x");
        CHECK(sequence_first.extents == extents4{2, 3, 1, 5});
        CHECK(sequence_first.strides == extents4{70, 700, 0, 1});
    }
    SUBCASE("four axes whose heads are one, in each order") {
        auto const bshd = view_of_tokens<sequence_local>(
            ordered_tensor<axes::bshd, 4>{place(), {2, 3, 1, 5}, {700, 70, 9, 1}}, "x");
        CHECK(bshd.extents == extents4{2, 3, 1, 5});
        CHECK(bshd.strides == extents4{700, 70, 0, 1});
        auto const sbhd = view_of_tokens<sequence_local>(
            ordered_tensor<axes::sbhd, 4>{place(), {3, 2, 1, 5}, {700, 70, 9, 1}}, "x");
        CHECK(sbhd.extents == extents4{2, 3, 1, 5});
        CHECK(sbhd.strides == extents4{70, 700, 0, 1});
        auto const bhsd = view_of_tokens<sequence_local>(
            ordered_tensor<axes::bhsd, 4>{place(), {2, 1, 3, 5}, {700, 600, 70, 1}}, "x");
        CHECK(bhsd.extents == extents4{2, 3, 1, 5});
        CHECK(bhsd.strides == extents4{700, 70, 0, 1});
    }
}

TEST_CASE("tensor: a wrong number of axes is refused with the number") {
    using uly::axes;
    using uly::invalid_tensor;
    using uly::sequence_local;
    auto const heads = [](auto const& x) {
        return message_of<invalid_tensor>([&] { uly::view_of_heads<sequence_local>(x, "the q"); });
    };
    auto const tokens = [](auto const& x) {
        return message_of<invalid_tensor>([&] { uly::view_of_tokens<sequence_local>(x, "the x"); });
    };
    for (auto const& text : {heads(foreign_tensor<float, 1>{place(), {6}}),
                             heads(foreign_tensor<float, 2>{place(), {2, 3}}),
                             heads(foreign_tensor<float, 5>{place(), {1, 1, 2, 3, 4}})}) {
        INFO(text);
        CHECK(contains(text, "ulysses: the q: a per-head operand has 3 or 4 axes"));
    }
    CHECK(contains(heads(foreign_tensor<float, 2>{place(), {2, 3}}), ": 2 axes"));
    CHECK(contains(heads(foreign_tensor<float, 5>{place(), {1, 1, 2, 3, 4}}), ": 5 axes"));
    for (auto const& text :
         {tokens(foreign_tensor<float, 1>{place(), {6}}),
          tokens(foreign_tensor<float, 5>{place(), {1, 1, 2, 3, 4}}),
          tokens(foreign_tensor<float, 4>{place(), {2, 3, 2, 5}}),
          // One token of four heads is no head axis of one.
          tokens(ordered_tensor<axes::bhsd, 4>{place(), {2, 4, 1, 5}, {20, 5, 5, 1}})}) {
        INFO(text);
        CHECK(contains(text, "ulysses: the x: an operand of whole tokens has 2 or 3 axes"));
    }
}

TEST_CASE("tensor: const elements and spaces are the type's") {
    std::vector<float> const values(60);
    auto const view = uly::view_of_heads<uly::head_local>(
        member_tensor<float const, 3>{values.data(), {3, 4, 5}}, "q");
    static_assert(std::is_same_v<decltype(view), uly::head_view<float const> const>);
    CHECK(view.data == values.data());
    static_assert(std::is_same_v<uly::element_of_t<foreign_tensor<uly::half, 4>>, uly::half>);
    static_assert(std::is_same_v<uly::space_of_t<foreign_tensor<float, 4>>, archetypes::space>);
    static_assert(std::is_same_v<uly::space_of_t<member_tensor<float, 4>>, uly::host_space>);
}

TEST_CASE("tensor_view: elements, slices, const views") {
    std::vector<float> values(2 * 3 * 4 * 5);
    std::iota(values.begin(), values.end(), 0.0f);
    uly::token_view<float> const view{values.data(), {2, 3, 4, 5}};
    CHECK(view.size() == 120);
    CHECK(view(1, 2, 3, 4) == 119.0f);
    CHECK(view(1, 0, 2, 3) == 60.0f + 10.0f + 3.0f);
    auto const tokens = view.slice_tokens(1, 2);
    CHECK(tokens.extents == extents4{2, 2, 4, 5});
    CHECK(tokens(1, 0, 0, 0) == view(1, 1, 0, 0));
    CHECK(!tokens.packed());
    auto const heads = view.slice_heads(2, 1);
    CHECK(heads(1, 2, 0, 4) == view(1, 2, 2, 4));
    uly::token_view<float const> const reading = view;
    CHECK(reading.data == view.data);
    // A const view does not become a mutable one, nor one layout another.
    static_assert(!std::is_convertible_v<uly::token_view<float const>, uly::token_view<float>>);
    static_assert(!std::is_convertible_v<uly::token_view<float>, uly::head_view<float>>);
}
