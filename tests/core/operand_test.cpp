// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/number.hpp>
#include <ulysses/core/operand.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace uly = ulysses;
using uly::extents4;
using view = uly::token_view<float>;

namespace {

template <class Body>
std::string refusal_of(Body const& body) {
    try {
        body();
    } catch (uly::invalid_tensor const& e) {
        return e.what();
    }
    return "";
}

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

std::vector<float>& memory() {
    static std::vector<float> floats(1 << 16);
    return floats;
}

/// Byte addresses of all elements, in order, as offsets from the memory's start.
template <class T, class Layout>
std::vector<std::int64_t> bytes_of(uly::tensor_view<T, Layout> const& v) {
    std::vector<std::int64_t> bytes;
    auto const base = reinterpret_cast<std::byte const*>(memory().data());
    for (std::int64_t b = 0; b < v.batch(); ++b)
        for (std::int64_t s = 0; s < v.tokens(); ++s)
            for (std::int64_t h = 0; h < v.heads(); ++h)
                for (std::int64_t d = 0; d < v.dim(); ++d)
                    for (std::size_t i = 0; i < sizeof(T); ++i)
                        bytes.push_back(reinterpret_cast<std::byte const*>(&v(b, s, h, d)) - base +
                                        static_cast<std::int64_t>(i));
    std::sort(bytes.begin(), bytes.end());
    return bytes;
}

template <class A, class B>
bool truly_overlap(A const& a, B const& b) {
    auto const x = bytes_of(a), y = bytes_of(b);
    std::vector<std::int64_t> both;
    std::set_intersection(x.begin(), x.end(), y.begin(), y.end(), std::back_inserter(both));
    return !both.empty();
}

template <class A>
bool truly_overlaps_itself(A const& a) {
    auto const x = bytes_of(a);
    return std::adjacent_find(x.begin(), x.end()) != x.end();
}

/// A small view somewhere in the first elements of memory; strides often those of packed rows that
/// several operands share, sometimes anything.
template <class T>
uly::token_view<T> random_view(std::mt19937_64& random, std::int64_t period) {
    auto const below = [&](std::int64_t limit) {
        return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
    };
    uly::token_view<T> v;
    v.extents = {1 + below(3), 1 + below(4), 1 + below(3), 1 + below(4)};
    if (below(20) == 0) v.extents[static_cast<std::size_t>(below(4))] = 0;
    auto const dim = v.extents[3];
    switch (below(4)) {
        case 0:  // inside rows of `period`
            v.strides = {period * (v.extents[1] + below(2)), period, dim + below(2), 1};
            break;
        case 1:  // heads of a period, tokens outside
            v.strides = {period * 12, period * (v.extents[2] + below(2)), period, 1};
            break;
        case 2:  // heads outermost
            v.strides = {dim * v.extents[1], dim, dim * v.extents[1] * v.extents[0], 1};
            break;
        default: v.strides = {below(30), below(30), below(12), 1 + below(2)};
    }
    v.data = reinterpret_cast<T*>(memory().data()) + below(60);
    return v;
}

}  // namespace

TEST_CASE("check_operand: extents are refused with the values of both sides") {
    view const q{memory().data(), {2, 3, 4, 5}};
    CHECK_NOTHROW(uly::check_operand("attend", "q", q, {2, 3, 4, 5}));
    auto const text = refusal_of([&] { uly::check_operand("attend", "q", q, {2, 6, 4, 5}); });
    CHECK(text.starts_with(
        "ulysses: attend: q: extents [batch, tokens, heads, dim] must fit the step and "
        "shape: got [2, 3, 4, 5], expected [2, 6, 4, 5] ["));
    CHECK(contains(text, "operand_test.cpp:"));
    // Each axis counts.
    for (std::size_t axis = 0; axis < 4; ++axis) {
        extents4 expected{2, 3, 4, 5};
        ++expected[axis];
        CHECK_THROWS_AS(uly::check_operand("attend", "q", q, expected), uly::invalid_tensor);
    }
}

TEST_CASE("check_operand: data must not be null, unless there is none") {
    view const q{nullptr, {2, 3, 4, 5}};
    CHECK(contains(refusal_of([&] {
                       uly::check_operand("attend", "q", q, {2, 3, 4, 5});
                   }),
                   "ulysses: attend: q: data must not be null: extents [2, 3, 4, 5]"));
    view const nothing{nullptr, {2, 0, 4, 5}};  // a rank without tokens
    CHECK_NOTHROW(uly::check_output("attend", "o", nothing, {2, 0, 4, 5}));
}

TEST_CASE("check_operand: what 64 bits cannot address is refused") {
    constexpr auto huge = int64_t{1} << 40;
    // 2^80 elements; fewer, but far apart.
    for (auto const& q : {view{memory().data(), {huge, huge, 1, 1}},
                          view{memory().data(), {huge, huge, 1, 1}, {0, 0, 0, 1}},
                          view{memory().data(), {2, 3, 4, 5}, {int64_t{1} << 61, 20, 5, 1}},
                          view{memory().data(), {2, 3, 4, 5}, {INT64_MIN, 20, 5, 1}}})
        CHECK(contains(refusal_of([&] { uly::check_output("attend", "q", q, q.extents); }),
                       "ulysses: attend: q: an operand must span less than 2^62 bytes: extents ["));
    view const near{memory().data(), {2, 3, 4, 5}, {int64_t{1} << 58, 20, 5, 1}};
    CHECK_NOTHROW(uly::check_output("attend", "q", near, near.extents));
    view const nothing{memory().data(), {huge, huge, 0, huge}};
    CHECK_NOTHROW(uly::check_output("attend", "q", nothing, nothing.extents));
    view const far_from_nothing{
        memory().data(), {2, 0, 4, 5}, {int64_t{1} << 61, int64_t{1} << 61, 5, 1}};
    CHECK_NOTHROW(uly::check_output("attend", "q", far_from_nothing, far_from_nothing.extents));
}

TEST_CASE("check_operand: the inner stride is 1, and no stride is negative") {
    view q{memory().data(), {2, 3, 4, 5}, {120, 40, 10, 2}};
    CHECK(contains(refusal_of([&] {
                       uly::check_operand("attend", "k", q, {2, 3, 4, 5});
                   }),
                   "ulysses: attend: k: the dim axis must be contiguous: stride 2, expected 1"));
    view const one{memory().data(), {2, 3, 4, 1}, {120, 40, 10, 2}};  // of one element: any stride
    CHECK_NOTHROW(uly::check_operand("attend", "k", one, {2, 3, 4, 1}));
    for (std::size_t axis = 0; axis < 3; ++axis) {
        view backwards{memory().data() + 4000, {2, 3, 4, 5}};
        backwards.strides[axis] = -backwards.strides[axis];
        CHECK(contains(refusal_of([&] {
                           uly::check_operand("attend", "k", backwards, {2, 3, 4, 5});
                       }),
                       "strides must not be negative: strides ["));
        backwards.extents[axis] = 1;  // never taken
        CHECK_NOTHROW(uly::check_operand("attend", "k", backwards, backwards.extents));
    }
}

TEST_CASE("check_output: elements that share an address are refused") {
    extents4 const extents{2, 3, 4, 5};
    CHECK_NOTHROW(uly::check_output("attend", "o", view{memory().data(), extents}, extents));
    // Expanded (stride 0), rows shorter than the dim, two axes of one stride.
    for (auto const& strides :
         {extents4{0, 20, 5, 1}, extents4{60, 0, 5, 1}, extents4{60, 20, 0, 1},
          extents4{60, 20, 4, 1}, extents4{60, 19, 5, 1}, extents4{20, 20, 5, 1}}) {
        view const o{memory().data(), extents, strides};
        auto const text = refusal_of([&] { uly::check_output("attend", "o", o, extents); });
        INFO(text);
        CHECK(
            contains(text, "ulysses: attend: o: elements of an output must not overlap: extents "));
        CHECK_NOTHROW(uly::check_operand("attend", "q", o, extents));  // reading is fine
    }
}

TEST_CASE("overlaps_itself: never says no when two elements share an address") {
    std::uint64_t const seed = 20240611;
    CAPTURE(seed);
    std::mt19937_64 random{seed};
    int overlapping = 0, said = 0;
    for (int i = 0; i < 20000; ++i) {
        auto const v = random_view<float>(random, 8 + static_cast<std::int64_t>(random() % 8));
        if (v.size() == 0) continue;
        auto const truth = truly_overlaps_itself(v);
        auto const answer = uly::detail::overlaps_itself(v.extents, v.strides);
        if (truth && !answer)
            FAIL("view " << i << ": extents " << uly::detail::text_of(v.extents) << ", strides "
                         << uly::detail::text_of(v.strides));
        overlapping += truth;
        said += answer;
    }
    CHECK(overlapping > 1000);
    CHECK(said < 2 * overlapping);  // and rarely without need
}

TEST_CASE_TEMPLATE("may_overlap: never says disjoint when two views share a byte", B, float, double,
                   uly::half) {
    std::uint64_t const seed = 20240612;
    CAPTURE(seed);
    std::mt19937_64 random{seed};
    int apart = 0, seen_apart = 0, interleaved = 0;
    for (int i = 0; i < 20000; ++i) {
        auto const period = 8 + static_cast<std::int64_t>(random() % 8);
        auto const a = random_view<float>(random, period);
        auto const b = random_view<B>(random, period);
        auto const truth = truly_overlap(a, b);
        auto const answer = uly::detail::may_overlap(a, b);
        CHECK(answer == uly::detail::may_overlap(b, a));
        if (truth && !answer)
            FAIL("views " << i << ": "
                          << (reinterpret_cast<std::byte*>(b.data) -
                              reinterpret_cast<std::byte*>(a.data))
                          << " bytes apart, extents " << uly::detail::text_of(a.extents) << " and "
                          << uly::detail::text_of(b.extents) << ", strides "
                          << uly::detail::text_of(a.strides) << " and "
                          << uly::detail::text_of(b.strides));
        apart += !truth;
        seen_apart += !answer;
        if (!answer && a.size() != 0 && b.size() != 0) {
            auto const x = bytes_of(a), y = bytes_of(b);
            interleaved += x.front() < y.back() && y.front() < x.back();
        }
    }
    CHECK(apart > 1000);
    CHECK(seen_apart * 4 > apart);
    // The search is worth something only if it meets views that lie inside each other.
    if (sizeof(B) == sizeof(float)) CHECK(interleaved > 100);
}

TEST_CASE("may_overlap: operands packed side by side are apart") {
    auto* const m = memory().data();
    using uly::detail::may_overlap;
    SUBCASE("q, k and v in rows of one token: [B, S, (Hq + 2 Hkv) D]") {
        extents4 const steps{3 * 80, 80, 8, 1};  // 6 query heads, 2 key-value heads, D = 8
        view const q{m, {2, 3, 6, 8}, steps}, k{m + 48, {2, 3, 2, 8}, steps},
            v{m + 64, {2, 3, 2, 8}, steps};
        CHECK(!may_overlap(q, k));
        CHECK(!may_overlap(q, v));
        CHECK(!may_overlap(k, v));
        CHECK(!may_overlap(v, k));
        CHECK(may_overlap(view{m + 47, {2, 3, 2, 8}, steps}, q));  // one element too early
        CHECK(may_overlap(q, view{m + 1, {2, 3, 6, 8}, steps}));
    }
    SUBCASE("q, k and v interleaved head by head: [B, S, H, 3, D]") {
        extents4 const steps{3 * 96, 96, 24, 1};
        view const q{m, {2, 3, 4, 8}, steps}, k{m + 8, {2, 3, 4, 8}, steps},
            v{m + 16, {2, 3, 4, 8}, steps};
        CHECK(!may_overlap(q, k));
        CHECK(!may_overlap(k, v));
        CHECK(!may_overlap(q, v));
        CHECK(may_overlap(q, view{m + 7, {2, 3, 4, 8}, steps}));
    }
    SUBCASE("sequence first: [S, B, 3, H, D]") {
        extents4 const steps{96, 192, 8, 1};
        view const q{m, {2, 3, 4, 8}, steps}, k{m + 32, {2, 3, 4, 8}, steps};
        CHECK(!may_overlap(q, k));
        CHECK(!may_overlap(k, q));
    }
    SUBCASE("one behind the other, and one and the same") {
        view const q{m, {2, 3, 4, 8}}, next{m + 192, {2, 3, 4, 8}}, last{m + 191, {2, 3, 4, 8}};
        CHECK(!may_overlap(q, next));
        CHECK(may_overlap(q, last));
        CHECK(may_overlap(q, q));
        CHECK(!may_overlap(q, view{m, {2, 0, 4, 8}}));
    }
}

TEST_CASE("check_apart: names both operands") {
    view const q{memory().data(), {2, 3, 4, 5}};
    auto const text = refusal_of([&] { uly::check_apart("attend", "o", q, "k", q); });
    CHECK(text.starts_with(
        "ulysses: attend: o: an output must not overlap another operand: o overlaps k ["));
    CHECK_NOTHROW(
        uly::check_apart("attend", "o", q, "k", view{memory().data() + 120, {2, 3, 4, 5}}));
}
