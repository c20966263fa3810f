// SPDX-License-Identifier: Apache-2.0

#include "six_steps.hpp"

#include <doctest/doctest.h>

using namespace pipeline_test;
using ulysses::projection_call;
using ulysses::token_view;

namespace {

/// Rotates the first two dims of every head by the token's global position, as RoPE does.
struct rotate_by_position {
    static void turn(token_view<double> x, ulysses::token_positions const& position, double sign) {
        for (int64_t b = 0; b < x.batch(); ++b)
            for (int64_t s = 0; s < x.tokens(); ++s)
                for (int64_t h = 0; h < x.heads(); ++h) {
                    auto const angle = sign * 0.3 * static_cast<double>(position(s));
                    auto* const row = x.row(b, s, h);
                    auto const a = row[0], c = row[1];
                    row[0] = a * std::cos(angle) - c * std::sin(angle);
                    row[1] = a * std::sin(angle) + c * std::cos(angle);
                }
    }
    static void forward(projection_call const& call, token_view<double> q, token_view<double> k) {
        turn(q, call.query_positions, 1);
        turn(k, call.key_positions, 1);
    }
    static void backward(projection_call const& call, token_view<double> dq,
                         token_view<double> dk) {
        turn(dq, call.query_positions, -1);
        turn(dk, call.key_positions, -1);
    }
};

template <class T>
double difference(std::vector<T> const& a, std::vector<T> const& b) {
    if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
    double largest = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        auto const d = std::fabs(static_cast<double>(a[i] - b[i]));
        if (!(d <= largest)) largest = std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
    }
    return largest;
}

/// The sums of these small problems have fewer than 1000 terms of magnitude below 100.
constexpr double tolerance = 1000 * 100 * 0x1p-53;

void check_close(six_results<double> const& a, six_results<double> const& b) {
    CHECK(difference(a.y.memory, b.y.memory) < tolerance);
    CHECK(difference(a.dx.memory, b.dx.memory) < tolerance);
    CHECK(difference(a.gradients, b.gradients) < tolerance);
}

ulysses::shape const small{
    .heads = 6, .kv_heads = 2, .head_dim = 4, .value_dim = 3, .mask = ulysses::mask::causal};

}  // namespace

TEST_CASE("six steps: any number of ranks and any token order gives the result of one rank") {
    constexpr std::uint64_t first_seed = 1, count = 12;
    MESSAGE("seeds " << first_seed << " .. " << first_seed + count - 1);
    for (auto seed = first_seed; seed < first_seed + count; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        six_problem<double> const p(seed, small, 1 + below(random, 2), 1 + below(random, 24), 9);
        auto const one = six_steps(p, equal_shares(p.tokens, 1));
        CHECK(difference(one.y.memory, one.y.memory) == 0);  // no NaN left
        for (int ranks : {1, 2, 3, 4, 8}) {
            CAPTURE(ranks);
            check_close(six_steps(p, random_orders(random, p.tokens, ranks)), one);
        }
    }
}

TEST_CASE("six steps: keep::nothing with ranks that hold no token") {
    for (auto const& order :
         {contiguous({6, 0, 7}), contiguous({0, 0, 13}), contiguous({0, 13, 0})}) {
        six_problem<double> p(11, {.heads = 5, .head_dim = 4, .keep = ulysses::keep::nothing}, 2,
                              13, 6);
        auto const many = six_steps<double>(p, order);
        p.layer.keep = ulysses::keep::exchanged;
        auto const kept = six_steps<double>(p, order);
        CHECK(same_bits(many.y, kept.y));
        CHECK(same_bits(many.dx, kept.dx));
        CHECK(many.gradients == kept.gradients);
    }
}

TEST_CASE("six steps: an epilogue sees global positions under every order") {
    six_problem<double> const p(3, small, 2, 17, 9);
    auto const run = [&](orders const& order) {
        return six_steps<double, ulysses::reference_attention>(p, order, true, {},
                                                               rotate_by_position{});
    };
    auto const one = run(equal_shares(17, 1));
    // It does something: without it the result is another.
    CHECK(difference(one.y.memory, six_steps(p, equal_shares(17, 1)).y.memory) > 1e-3);
    check_close(run(zigzag(17, 4)), one);
    check_close(run(striped(17, 3)), one);
    check_close(run(contiguous({0, 11, 6})), one);
}

TEST_CASE("six steps: transposed weights and missing biases") {
    six_problem<double> plain(5, small, 1, 11, 9);
    // The same matrices stored as [out, in].
    auto turned = plain;
    turned.transposed = true;
    auto const from = plain.places().weights(plain.parameters.data());
    auto const to = turned.places().gradients(turned.parameters.data());
    auto const transpose = [](auto const& a, auto const& b, int64_t rows, int64_t columns) {
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j)
                b.data[j * b.stride + i] = a.data[i * a.stride + j];
    };
    auto const places = plain.places();
    transpose(from.q, to.q, 9, places.q);
    transpose(from.k, to.k, 9, places.k);
    transpose(from.v, to.v, 9, places.v);
    transpose(from.o, to.o, places.o, 9);
    auto const a = six_steps(plain, zigzag(11, 3)), b = six_steps(turned, zigzag(11, 3));
    CHECK(difference(a.y.memory, b.y.memory) < tolerance);
    CHECK(difference(a.dx.memory, b.dx.memory) < tolerance);
    auto untransposed = plain.parameters;
    auto const gradients = turned.places().weights(b.gradients.data());
    auto const back = places.gradients(untransposed.data());
    for (auto const& [g, to_view, rows, columns] :
         {std::tuple{gradients.q, back.q, int64_t{9}, places.q},
          {gradients.k, back.k, 9, places.k},
          {gradients.v, back.v, 9, places.v},
          {gradients.o, back.o, places.o, 9}})
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < columns; ++j)
                to_view.data[i * to_view.stride + j] = g.data[j * g.stride + i];
    std::copy(b.gradients.begin() + places.matrices(), b.gradients.end(),
              untransposed.begin() + places.matrices());
    CHECK(difference(a.gradients, untransposed) < tolerance);

    // Zero biases are no biases.
    auto zero = plain, none = plain;
    std::fill(zero.parameters.begin() + places.matrices(), zero.parameters.end(), 0.0);
    none.biased = false;
    check_close(six_steps(zero, zigzag(11, 3)), [&] {
        auto result = six_steps(none, zigzag(11, 3));
        // Gradients of biases that are not there stay as they were.
        for (auto i = places.matrices(); i < places.count(); ++i)
            CHECK(result.gradients[static_cast<std::size_t>(i)] == 0);
        auto const with = six_steps(zero, zigzag(11, 3));
        std::copy(with.gradients.begin() + places.matrices(), with.gradients.end(),
                  result.gradients.begin() + places.matrices());
        return result;
    }());
}

TEST_CASE("six steps: gradients are added to, so that micro-batches sum") {
    six_problem<double> const p(9, small, 1, 8, 9);
    auto const order = equal_shares(8, 2);
    auto const once = six_steps(p, order);
    auto const step = ulysses::sequence::of(1, order);
    std::vector<std::vector<double>> twice(2, std::vector<double>(p.parameters.size(), 0.0));
    run_ranks(2, [&](ulysses::threads::communicator ranks) {
        ulysses::pipeline layer{ranks, ulysses::sequence_local{}, ulysses::reference_attention{},
                                p.layer, ulysses::dense{ulysses::builtin_gemm{}}};
        auto saved = layer.make_context();
        auto const me = ranks.rank();
        auto const x = own_part(step.queries(), me, p.x), dy = own_part(step.queries(), me, p.dy);
        tensor<double> y(x.sizes), dx(x.sizes);
        auto const weights = p.places().weights(p.parameters.data());
        for (int i = 0; i < 2; ++i) {
            layer.forward(step, saved, token_operand(x), weights, token_operand(y));
            layer.backward(step, saved, token_operand(x), weights, token_operand(dy),
                           token_operand(dx),
                           p.places().gradients(twice[static_cast<std::size_t>(me)].data()));
        }
    });
    for (std::size_t i = 0; i < p.parameters.size(); ++i)
        CHECK(std::fabs(twice[0][i] + twice[1][i] - 2 * once.gradients[i]) < tolerance);
}
