// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/shape.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <vector>

namespace uly = ulysses;
using uly::shape;

namespace {

std::string refusal_of(shape const& s) {
    try {
        uly::checked(s);
    } catch (uly::invalid_shape const& e) {
        return e.what();
    }
    return "";
}

}  // namespace

TEST_CASE("shape: defaults are filled in") {
    auto const s = uly::checked({.heads = 6, .head_dim = 64});
    CHECK(s.kv_heads == 6);
    CHECK(s.value_dim == 64);
    CHECK(uly::softmax_scale(s) == doctest::Approx(0.125).epsilon(1e-15));
    auto const given =
        uly::checked({.heads = 6, .kv_heads = 2, .head_dim = 64, .value_dim = 32, .scale = -0.5});
    CHECK(given.kv_heads == 2);
    CHECK(given.value_dim == 32);
    CHECK(uly::softmax_scale(given) == -0.5);
}

TEST_CASE("shape: each rule is refused with all values") {
    constexpr auto big = std::int64_t{1} << 31;
    uly::window const three[] = {{1, 0}, {}, {}}, wrong[] = {{1, 0}, {}, {3, big}};
    struct {
        shape given;
        char const* rule;
    } const cases[] = {
        {{.heads = 0, .head_dim = 4}, "heads must lie in 1 .. 2^31 - 1"},
        {{.heads = -3, .head_dim = 4}, "heads must lie in 1 .. 2^31 - 1"},
        {{.heads = big, .head_dim = 4}, "heads must lie in 1 .. 2^31 - 1"},
        {{.heads = 4, .kv_heads = -1, .head_dim = 4}, "kv_heads must not be negative"},
        {{.heads = 4, .kv_heads = 3, .head_dim = 4}, "kv_heads must divide heads"},
        {{.heads = 4, .kv_heads = 8, .head_dim = 4}, "kv_heads must divide heads"},
        {{.heads = 4}, "head_dim must lie in 1 .. 2^31 - 1"},
        {{.heads = 4, .head_dim = big}, "head_dim must lie in 1 .. 2^31 - 1"},
        {{.heads = 4, .head_dim = 4, .value_dim = -1}, "value_dim must lie in 0 .. 2^31 - 1"},
        {{.heads = 4, .head_dim = 4, .scale = std::numeric_limits<double>::infinity()},
         "scale must be finite"},
        {{.heads = 4, .head_dim = 4, .scale = std::numeric_limits<double>::quiet_NaN()},
         "scale must be finite"},
        {{.heads = 4, .head_dim = 4, .head_windows = three},
         "head_windows must name one for each query head"},
        {{.heads = 3, .head_dim = 4, .window = {1, 1}, .head_windows = three},
         "windows come from window or from head_windows, not from both"},
        {{.heads = 3, .head_dim = 4, .head_windows = wrong},
         "both sides of a window must lie in -1 .. 2^31 - 1"},
        {{.heads = 3, .head_dim = 4, .window = {-2, 0}},
         "both sides of a window must lie in -1 .. 2^31 - 1"},
        {{.heads = 4, .head_dim = 4, .chunks = 0}, "chunks must lie in 1 .. kv_heads"},
        {{.heads = 4, .head_dim = 4, .chunks = 5}, "chunks must lie in 1 .. kv_heads"},
        {{.heads = 4, .kv_heads = 2, .head_dim = 4, .chunks = 3},
         "chunks must lie in 1 .. kv_heads"},
        {{.heads = 4, .head_dim = 4, .overlap = true}, "overlap needs at least 2 chunks"},
    };
    for (auto const& each : cases) {
        auto const text = refusal_of(each.given);
        INFO(text);
        CHECK(text.starts_with(std::string("ulysses: shape: ") + each.rule + ": heads "));
    }
    CHECK(refusal_of({.heads = 4, .head_dim = 4, .chunks = 4, .overlap = true}).empty());
    CHECK(refusal_of({.heads = 4, .head_dim = 4, .chunks = 9}).find(", chunks 9") !=
          std::string::npos);
    auto const text = refusal_of({.heads = 12, .kv_heads = 5, .head_dim = 7, .value_dim = 9});
    CHECK(text.find("heads 12, kv_heads 5, head_dim 7, value_dim 9") != std::string::npos);
    CHECK(text.find("shape_test.cpp:") != std::string::npos);
    CHECK(refusal_of({.heads = 3, .head_dim = 4, .head_windows = wrong})
              .find("window 3 and 2147483648, head_windows 3") != std::string::npos);
}

TEST_CASE("shape: windows are compared by what they are") {
    std::vector<uly::window> const a{{1, 0}, {}}, b = a, c{{}, {1, 0}};
    auto const of = [](auto const& windows) {
        return uly::checked({.heads = 2, .head_dim = 4, .head_windows = windows});
    };
    CHECK(of(a) == of(b));
    CHECK(of(a) != of(c));
    CHECK(of(std::span(a)) == of(a));
    CHECK(of(std::vector<uly::window>(2, {4, 4})) ==
          uly::checked({.heads = 2, .head_dim = 4, .window = {4, 4}}));
}

// A shape is a template argument, and its rules hold at compile time too.
static_assert(
    uly::fixed<shape{.heads = 8, .kv_heads = 2, .head_dim = 64, .scale = 0.5}>.value.kv_heads == 2);
static_assert(uly::detail::broken_rule({.heads = 8, .kv_heads = 3, .head_dim = 1}) ==
              "kv_heads must divide heads");
static_assert(uly::detail::broken_rule({.heads = 8, .head_dim = 1}).empty());
static_assert(uly::detail::is_fixed_shape<uly::fixed_shape<shape{.heads = 1}>>);
static_assert(!uly::detail::is_fixed_shape<shape>);
constexpr uly::window two_windows[] = {{1, 0}, {}};
static_assert(
    uly::fixed<shape{.heads = 2, .head_dim = 64, .head_windows = two_windows}>.value.head_windows[0].left ==
    1);
static_assert(
    !uly::detail::broken_rule({.heads = 3, .head_dim = 1, .head_windows = two_windows}).empty());
