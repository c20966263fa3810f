// SPDX-License-Identifier: Apache-2.0

#include <ulysses/projection/epilogues.hpp>
#include <ulysses/projection/qk_norm.hpp>
#include <ulysses/projection/rope.hpp>

#include "../pipeline/six_steps.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>

namespace uly = ulysses;
using namespace pipeline_test;

namespace {

uly::shape const small{
    .heads = 6, .kv_heads = 2, .head_dim = 6, .value_dim = 3, .mask = uly::mask::causal};
constexpr std::int64_t documents[] = {0, 5, 17, 20, 29};

/// Six steps over packed documents; the norms' weights lie behind the other parameters.
struct trial {
    six_problem<double> p{7, small, 2, 17, 9};

    explicit trial(uly::keep keep = uly::keep::exchanged) {
        p.layer.keep = keep;
        std::mt19937_64 random{8};
        tensor<double> norms({1, 1, 1, 2 * small.head_dim});
        fill_uniform(random, norms);
        for (auto const each : norms.memory) p.parameters.push_back(1.5 + each);
    }

    uly::sequence step(orders const& order) const {
        auto made = uly::sequence::of(p.batch, order);
        made.pack({.documents = documents});
        return made;
    }

    /// `views`: dense_weights or dense_gradients.
    template <class Views, class Pointer>
    Views with_norms(Views views, Pointer parameters) const {
        views.q_norm = parameters + p.places().count();
        views.k_norm = views.q_norm + small.head_dim;
        return views;
    }

    template <class Epilogue>
    six_results<double> run(orders const& order, Epilogue const& epilogue) const {
        auto const made = step(order);
        six_results<double> whole(p, made.ranks());
        run_ranks(made.ranks(), [&](uly::threads::communicator ranks) {
            auto const me = ranks.rank();
            uly::pipeline layer{ranks, uly::sequence_local{}, uly::reference_attention{}, p.layer,
                                uly::dense{uly::builtin_gemm{}, epilogue}};
            auto const x = own_part(made.queries(), me, p.x),
                       dy = own_part(made.queries(), me, p.dy);
            tensor<double> y(x.sizes), dx(x.sizes);
            auto const* const parameters = p.parameters.data();
            auto const weights = with_norms(p.places().weights(parameters), parameters);
            auto saved = layer.make_context();
            layer.forward(made, saved, token_operand(x), weights, token_operand(y));
            auto& gradients = whole.rank_gradients[static_cast<std::size_t>(me)];
            gradients.assign(p.parameters.size(), 0.0);
            layer.backward(made, saved, token_operand(x), weights, token_operand(dy),
                           token_operand(dx),
                           with_norms(p.places().gradients(gradients.data()), gradients.data()));
            put_back(made.queries(), me, y, whole.y);
            put_back(made.queries(), me, dx, whole.dx);
        });
        whole.gradients.assign(p.parameters.size(), 0.0);
        for (auto const& part : whole.rank_gradients)
            for (std::size_t i = 0; i < part.size(); ++i) whole.gradients[i] += part[i];
        return whole;
    }

    template <class Epilogue>
    double loss(orders const& order, Epilogue const& epilogue) const {
        auto const y = run(order, epilogue).y;
        double sum = 0;
        for (std::size_t i = 0; i < y.memory.size(); ++i) sum += y.memory[i] * p.dy.memory[i];
        return sum;
    }
};

double difference(std::vector<double> const& a, std::vector<double> const& b) {
    if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
    double largest = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        auto const d = std::fabs(a[i] - b[i]);
        if (!(d <= largest)) largest = std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
    }
    return largest;
}

/// The sums of these small problems have fewer than 1000 terms of magnitude below 100.
constexpr double tolerance = 1000 * 100 * 0x1p-53;

/// Rounding of a loss below 1000 over the step, and the step's square, stay below this.
constexpr double small_step = 1e-5, quotient_tolerance = 1e-6;

template <class Epilogue>
void check_epilogue(Epilogue const& epilogue) {
    trial t;
    std::mt19937_64 random{9};
    auto const one_rank = equal_shares(17, 1);
    auto const one = t.run(one_rank, epilogue);
    // It does something.
    CHECK(difference(one.y.memory, t.run(one_rank, uly::no_epilogue{}).y.memory) > 1e-3);
    for (auto const& order : {one_rank, zigzag(17, 3), striped(17, 3)}) {
        auto const many = t.run(order, epilogue);
        CHECK(difference(many.y.memory, one.y.memory) < tolerance);
        CHECK(difference(many.dx.memory, one.dx.memory) < tolerance);
        CHECK(difference(many.gradients, one.gradients) < tolerance);
        auto const check = [&](double& parameter, double gradient) {
            auto const kept = parameter;
            parameter = kept + small_step;
            auto const above = t.loss(order, epilogue);
            parameter = kept - small_step;
            auto const below_it = t.loss(order, epilogue);
            parameter = kept;
            auto const quotient = (above - below_it) / (2 * small_step);
            CHECK(std::fabs(quotient - gradient) < quotient_tolerance * (1 + std::fabs(quotient)));
        };
        // Some of x, of q's and k's weights, and of all; then every weight of the norms.
        auto const places = t.p.places();
        for (int i = 0; i < 8; ++i) {
            auto const at = [&](int64_t limit) {
                return static_cast<std::size_t>(below(random, limit));
            };
            auto const in_x = at(std::ssize(t.p.x.memory));
            check(t.p.x.memory[in_x], many.dx.memory[in_x]);
            auto const in_qk = at(places.channels * (places.q + places.k));
            check(t.p.parameters[in_qk], many.gradients[in_qk]);
            auto const in_all = at(places.count());
            check(t.p.parameters[in_all], many.gradients[in_all]);
        }
        for (auto i = static_cast<std::size_t>(places.count()); i < t.p.parameters.size(); ++i)
            check(t.p.parameters[i], many.gradients[i]);
    }
    for (auto const keep : {uly::keep::local, uly::keep::nothing}) {
        auto const other = trial(keep).run(zigzag(17, 3), epilogue);
        CHECK(difference(other.dx.memory, one.dx.memory) < tolerance);
        CHECK(difference(other.gradients, one.gradients) < tolerance);
    }
}

/// Multiplies by a number, and adds one: the order of two of them shows.
struct affine {
    double factor;
    template <class T>
    void forward(uly::projection_call const&, uly::token_view<T> q, uly::token_view<T> k) const {
        *q.data = *q.data * T(factor) + T(1);
        *k.data = *k.data * T(factor) + T(2);
    }
    template <class T>
    void backward(uly::projection_call const&, uly::token_view<T> dq, uly::token_view<T> dk) const {
        *dq.data = *dq.data * T(factor) + T(3);
        *dk.data = *dk.data * T(factor) + T(4);
    }
};

uly::projection_call no_call() {
    auto const position = [](void const*, int, std::int64_t token) { return token; };
    return {.query_positions = {nullptr, 0, position}, .key_positions = {nullptr, 0, position}};
}

}  // namespace

TEST_CASE("epilogues: rope through six steps, at any ranks and orders, with its gradients") {
    check_epilogue(uly::rope{small.head_dim});
    check_epilogue(uly::rope{small.head_dim,
                             {.dims = 4,
                              .pairs = uly::rope_pairs::interleaved,
                              .base = 50,
                              .position_scale = 0.5,
                              .restart_in_documents = false}});
}

TEST_CASE("epilogues: qk_norm through six steps, alone and before rope, with its gradients") {
    check_epilogue(uly::qk_norm{});
    check_epilogue(uly::epilogues{uly::qk_norm{{.epsilon = 0.1}}, uly::rope{small.head_dim}});
}

TEST_CASE("epilogues: positions that restart leave attention within documents as it is") {
    trial const t;
    auto const run = [&](bool restarts) {
        return t.run(zigzag(17, 3), uly::rope{small.head_dim, {.restart_in_documents = restarts}});
    };
    auto const a = run(true), b = run(false);
    CHECK(difference(a.y.memory, b.y.memory) < tolerance);
    CHECK(difference(a.dx.memory, b.dx.memory) < tolerance);
}

TEST_CASE("epilogues: forward in the order given, backward from the last") {
    double q = 1, k = 1;
    auto const view = [](double& x) { return uly::token_view<double>(&x, {1, 1, 1, 1}); };
    uly::epilogues const three{affine{2}, affine{3}, affine{5}};
    three.forward(no_call(), view(q), view(k));
    CHECK(q == ((1 * 2 + 1) * 3 + 1) * 5 + 1);
    CHECK(k == ((1 * 2 + 2) * 3 + 2) * 5 + 2);
    q = k = 1;
    three.backward(no_call(), view(q), view(k));
    CHECK(q == ((1 * 5 + 3) * 3 + 3) * 2 + 3);
    CHECK(k == ((1 * 5 + 4) * 3 + 4) * 2 + 4);
}

TEST_CASE_TEMPLATE("qk_norm: the values of the formula", T, double, float, uly::half, uly::bf16) {
    auto const number = [](double x) {
        if constexpr (std::is_same_v<T, double>)
            return x;
        else
            return static_cast<T>(static_cast<float>(x));
    };
    std::vector<T> q, k, q_norm, k_norm;
    for (int i = 0; i < 2 * 3 * 4; ++i) q.push_back(number(0.25 * (i % 7) - 0.5));
    for (int i = 0; i < 2 * 1 * 4; ++i) k.push_back(number(0.5 * (i % 3) + 0.25));
    for (int i = 0; i < 4; ++i) q_norm.push_back(number(1 + 0.5 * i));
    auto const old_q = q, old_k = k;
    uly::dense_weights<T> weights;
    weights.q_norm = q_norm.data();  // k's are ones
    constexpr double epsilon = 0.125;
    uly::qk_norm{{.epsilon = epsilon}}.forward(no_call(), weights,
                                               uly::token_view<T>(q.data(), {1, 2, 3, 4}),
                                               uly::token_view<T>(k.data(), {1, 2, 1, 4}));
    auto const digits = std::is_same_v<T, double>      ? 53
                        : std::is_same_v<T, float>     ? 24
                        : std::is_same_v<T, uly::half> ? 11
                                                       : 8;
    auto const check = [&](std::vector<T> const& now, std::vector<T> const& before, auto weight) {
        for (std::size_t i = 0; i < now.size(); ++i) {
            double squares = 0;
            for (std::size_t d = 0; d < 4; ++d) {
                auto const x = static_cast<double>(before[i / 4 * 4 + d]);
                squares += x * x;
            }
            auto const should =
                static_cast<double>(before[i]) / std::sqrt(squares / 4 + epsilon) * weight(i % 4);
            CHECK(std::fabs(static_cast<double>(now[i]) - should) <=
                  10 * std::fabs(should) * std::ldexp(1, -digits));
        }
    };
    check(q, old_q, [](std::size_t d) { return 1 + 0.5 * static_cast<double>(d); });
    check(k, old_k, [](std::size_t) { return 1.0; });
}

TEST_CASE("qk_norm: weights that are not given, and an epsilon that is none") {
    double q[] = {1, 2}, k[] = {3, 4}, dq[] = {1, 0}, dk[] = {0, 1};
    auto const view = [](double* x) { return uly::token_view<double>(x, {1, 1, 1, 2}); };
    uly::qk_norm{{.epsilon = 0}}.backward(no_call(), uly::dense_weights<double>{}, view(q), view(k),
                                          view(dq), view(dk));
    // The gradient has no part along the row, as the row's length does not matter.
    CHECK(std::fabs(dq[0] * 1 + dq[1] * 2) < 1e-15);
    CHECK(std::fabs(dk[0] * 3 + dk[1] * 4) < 1e-15);
    CHECK(std::fabs(dq[0]) > 0.1);
    // What the rows add to the weights' gradients: dy x / rms, of rms sqrt(2.5) and sqrt(12.5).
    CHECK(std::fabs(q[0] - 1 / std::sqrt(2.5)) < 1e-15);
    CHECK(q[1] == 0);
    CHECK(k[0] == 0);
    CHECK(std::fabs(k[1] - 4 / std::sqrt(12.5)) < 1e-15);
    for (double const epsilon :
         {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
        CHECK_THROWS_WITH_AS(uly::qk_norm({.epsilon = epsilon}),
                             doctest::Contains("qk_norm: epsilon must be finite and not negative"),
                             uly::invalid_shape);
}

TEST_CASE("epilogues: a copy of a projection has a workspace of its own") {
    uly::dense const a{uly::builtin_gemm{}, uly::qk_norm{}};
    auto const b = a;
    double x[] = {1, 2}, eye[] = {1, 0.5, 0, 1}, dx[2];
    auto const view = [](auto* p) {
        return uly::token_view<std::remove_pointer_t<decltype(p)>>(p, {1, 1, 1, 2});
    };
    uly::dense_weights<double> weights;
    weights.q = weights.k = weights.v = {eye, 2};
    std::vector<double> seen;
    for (auto const* each : {&a, &b, &a}) {
        double dq[] = {1, 0}, dk[] = {0, 1}, dv[] = {0, 0};
        each->project_in_backward<double>(no_call(), view(static_cast<double const*>(x)), weights,
                                          view(dq), view(dk), view(dv), view(dx), {});
        seen.push_back(dx[0]);
    }
    CHECK(std::fabs(seen[0]) > 0);
    CHECK(seen == std::vector<double>(3, seen[0]));
}
