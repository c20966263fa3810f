// SPDX-License-Identifier: Apache-2.0

#include <ulysses/projection/rope.hpp>
#include <ulysses/space/host.hpp>
#include <ulysses/stage/project_in.hpp>

#include "../pipeline/orders.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace uly = ulysses;
using namespace pipeline_test;

namespace {

template <class T>
struct heads_of_tokens {
    uly::extents4 sizes;
    std::vector<T> memory;

    heads_of_tokens(std::uint64_t seed, uly::extents4 const& extents)
        : sizes(extents),
          memory(static_cast<std::size_t>(extents[0] * extents[1] * extents[2] * extents[3])) {
        std::mt19937_64 random{seed};
        for (auto& each : memory) {
            auto const uniform = static_cast<double>(random() >> 11) * 0x1p-52 - 1;
            if constexpr (std::is_same_v<T, double>)
                each = uniform;
            else
                each = static_cast<T>(static_cast<float>(uniform));
        }
    }
    uly::token_view<T> view() { return {memory.data(), sizes}; }
};

/// Half a unit in the last place of 1.
template <class T>
constexpr double roundoff() {
    if constexpr (std::is_same_v<T, double>) return 0x1p-53;
    if constexpr (std::is_same_v<T, float>) return 0x1p-24;
    if constexpr (std::is_same_v<T, uly::half>) return 0x1p-11;
    return 0x1p-8;
}

/// Two samples of 7 queries among 9 keys, with documents, on two ranks with the stripes of a token.
struct packed_step {
    static constexpr std::int64_t documents[] = {0, 4, 9, 11, 15};
    static constexpr std::int64_t query_positions[] = {2, -1};
    uly::sequence step = uly::sequence::of(2, striped(7, 2), striped(9, 2));

    packed_step() { step.pack({.documents = documents, .query_positions = query_positions}); }

    static std::int64_t position(bool query, std::int64_t sample, std::int64_t global,
                                 bool restarts) {
        auto const p = query ? global + query_positions[sample] : global;
        std::int64_t start = 0;
        for (auto const first : documents)
            if (first >= 9 * sample && first - 9 * sample <= p && first < 9 * (sample + 1))
                start = first - 9 * sample;
        return restarts ? p - start : p;
    }
};

/// The formula, in double and in the words of the paper.
template <class T>
double expected(uly::token_view<T> const& x, uly::rope_options const& o, double position,
                std::int64_t b, std::int64_t s, std::int64_t h, std::int64_t d) {
    auto const dims = o.dims == 0 ? x.dim() : o.dims;
    auto const at = [&](std::int64_t place) { return static_cast<double>(x(b, s, h, place)); };
    if (d >= dims) return at(d);
    auto const interleaved = o.pairs == uly::rope_pairs::interleaved;
    auto const pair = interleaved ? d / 2 : d % (dims / 2);
    auto const first = interleaved ? 2 * pair : pair;
    auto const second = interleaved ? first + 1 : pair + dims / 2;
    auto const frequency =
        o.frequencies.empty()
            ? 1 / std::pow(o.base, 2.0 * static_cast<double>(pair) / static_cast<double>(dims))
            : o.frequencies[static_cast<std::size_t>(pair)];
    auto const angle = position * o.position_scale * frequency;
    return d == first ? at(first) * std::cos(angle) - at(second) * std::sin(angle)
                      : at(first) * std::sin(angle) + at(second) * std::cos(angle);
}

template <class T>
void check_values(uly::rope_options const& options, std::int64_t head_dim) {
    packed_step const packed;
    // Two products and a sum of rounded sines, then a rounding to T; angles stay below 16, and a
    // few roundings of double move them.
    auto const tolerance = 6 * roundoff<T>() + 16 * 8 * 0x1p-53;
    for (int rank : {0, 1}) {
        CAPTURE(rank);
        auto const call = uly::projection_call_of(packed.step, rank);
        heads_of_tokens<T> q(1, {2, 4 - rank, 3, head_dim}), k(2, {2, 5 - rank, 2, head_dim});
        auto old_q = q, old_k = k;
        uly::rope const rope(head_dim, options);
        rope.forward(call, q.view(), k.view());
        double largest = 0, moved = 0;
        auto const compare = [&](bool query, auto const& now, auto const& before) {
            for (std::int64_t b = 0; b < 2; ++b)
                for (std::int64_t s = 0; s < now.tokens(); ++s) {
                    auto const position =
                        packed_step::position(query, b, 2 * s + rank, options.restart_in_documents);
                    for (std::int64_t h = 0; h < now.heads(); ++h)
                        for (std::int64_t d = 0; d < head_dim; ++d) {
                            auto const is = static_cast<double>(now(b, s, h, d));
                            auto const was = static_cast<double>(before(b, s, h, d));
                            auto const should = expected(before, options,
                                                         static_cast<double>(position), b, s, h, d);
                            largest = std::max(largest, std::fabs(is - should));
                            moved = std::max(moved, std::fabs(is - was));
                            if (options.dims != 0 && d >= options.dims) CHECK(is == was);
                        }
                }
        };
        compare(true, q.view(), old_q.view());
        compare(false, k.view(), old_k.view());
        CHECK(largest <= tolerance);
        CHECK(moved > 0.1);
        // Backward is the inverse.
        rope.backward(call, q.view(), k.view());
        for (std::size_t i = 0; i < q.memory.size(); ++i)
            CHECK(std::fabs(static_cast<double>(q.memory[i]) -
                            static_cast<double>(old_q.memory[i])) <= 2 * tolerance);
        for (std::size_t i = 0; i < k.memory.size(); ++i)
            CHECK(std::fabs(static_cast<double>(k.memory[i]) -
                            static_cast<double>(old_k.memory[i])) <= 2 * tolerance);
    }
}

std::string text_of(std::int64_t head_dim, uly::rope_options const& options) {
    try {
        uly::rope{head_dim, options, {}};
    } catch (uly::invalid_shape const& e) {
        return e.what();
    }
    return "nothing";
}

}  // namespace

TEST_CASE_TEMPLATE("rope: the values of the formula, and back", T, double, float, uly::half,
                   uly::bf16) {
    constexpr double table[] = {1, 0.5, 0.3};
    using enum uly::rope_pairs;
    for (auto const pairs : {halves, interleaved})
        for (bool const restarts : {true, false}) {
            CAPTURE(static_cast<int>(pairs));
            CAPTURE(restarts);
            check_values<T>({.pairs = pairs, .restart_in_documents = restarts}, 8);
            check_values<T>({.dims = 6, .pairs = pairs, .restart_in_documents = restarts}, 9);
            check_values<T>({.pairs = pairs,
                             .base = 100,
                             .position_scale = 0.25,
                             .restart_in_documents = restarts},
                            10);
            check_values<T>(
                {.dims = 6, .pairs = pairs, .frequencies = table, .restart_in_documents = restarts},
                8);
            // More pairs than have their sines at hand at once.
            check_values<T>({.pairs = pairs, .restart_in_documents = restarts}, 2 * 128 + 6);
        }
}

TEST_CASE("rope: without packing a token's position is its global one, in any order") {
    auto const step = uly::sequence::of(1, zigzag(12, 2));
    auto const call = uly::projection_call_of(step, 1);
    heads_of_tokens<double> q(1, {1, 6, 2, 4}), k(2, {1, 6, 1, 4});
    auto before = q;
    uly::rope const rope(4);
    rope.forward(call, q.view(), k.view());
    for (std::int64_t s = 0; s < 6; ++s)  // rank 1 of the zigzag holds 3 .. 8
        CHECK(q.view()(0, s, 1, 3) ==
              doctest::Approx(expected(before.view(), {}, static_cast<double>(3 + s), 0, s, 1, 3))
                  .epsilon(1e-14));
}

TEST_CASE("rope: queries that end at the last key stand where masks place them") {
    auto const step = uly::sequence::of(1, contiguous({2}), contiguous({5}));
    auto const call = uly::projection_call_of(step, 0);
    CHECK(call.query_position(0, 0) == 3);
    CHECK(call.in_document(0, 3) == 3);
}

TEST_CASE("rope: a pair's product depends on the distance of two tokens alone") {
    auto const product = [](std::int64_t query, std::int64_t key) {
        auto const step = uly::sequence::of(1, contiguous({40}));
        auto const call = uly::projection_call_of(step, 0);
        heads_of_tokens<double> q(1, {1, 40, 1, 8}), k(2, {1, 40, 1, 8});
        for (std::int64_t s = 1; s < 40; ++s)
            for (std::int64_t d = 0; d < 8; ++d) {
                q.view()(0, s, 0, d) = q.view()(0, 0, 0, d);
                k.view()(0, s, 0, d) = k.view()(0, 0, 0, d);
            }
        uly::rope{8}.forward(call, q.view(), k.view());
        double sum = 0;
        for (std::int64_t d = 0; d < 8; ++d)
            sum += q.view()(0, query, 0, d) * k.view()(0, key, 0, d);
        return sum;
    };
    CHECK(std::fabs(product(9, 4) - product(35, 30)) < 1e-13);
    CHECK(std::fabs(product(9, 4) - product(35, 31)) > 1e-3);
}

TEST_CASE("rope: options that do not fit are refused with their values") {
    CHECK(text_of(8, {.dims = 10}) ==
          "ulysses: rope: dims must lie in 2 .. head_dim: 10 dims of 8");
    CHECK(text_of(8, {.dims = -2}) ==
          "ulysses: rope: dims must lie in 2 .. head_dim: -2 dims of 8");
    CHECK(text_of(0, {}) == "ulysses: rope: dims must lie in 2 .. head_dim: 0 dims of 0");
    CHECK(text_of(8, {.dims = 3}) == "ulysses: rope: dims must be even: 3 dims of 8");
    CHECK(text_of(7, {}) == "ulysses: rope: dims must be even: 7 dims of 7");
    constexpr double table[] = {1, 0.5, 0.3};
    CHECK(text_of(8, {.frequencies = table}) ==
          "ulysses: rope: frequencies must name one for each pair: 3 frequencies, 4 pairs");
    constexpr auto rule = "base must be positive, and it and position_scale finite";
    for (double const base : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(),
                              std::numeric_limits<double>::infinity()})
        CHECK(text_of(8, {.base = base}).find(rule) != std::string::npos);
    CHECK(text_of(8, {.position_scale = std::numeric_limits<double>::infinity()}).find(rule) !=
          std::string::npos);
    CHECK(text_of(8, {.dims = 6, .frequencies = table}) == "nothing");

    auto const step = uly::sequence::of(1, contiguous({3}));
    auto const call = uly::projection_call_of(step, 0);
    heads_of_tokens<float> q(1, {1, 3, 1, 4}), k(2, {1, 3, 1, 6});
    uly::rope const rope(4);
    CHECK_THROWS_WITH_AS(
        rope.forward(call, q.view(), k.view()),
        doctest::Contains("rope: q and k must have rope's head_dim: q has 4, k has 6, rope has 4"),
        uly::invalid_shape);
}
