// SPDX-License-Identifier: Apache-2.0

#include "features.hpp"
#include "six_steps.hpp"

#include <doctest/doctest.h>

#include <limits>

using namespace pipeline_test;
namespace uly = ulysses;

namespace {

using communicator = uly::threads::communicator;

constexpr uly::shape gqa{.heads = 4, .kv_heads = 2, .head_dim = 8, .mask = uly::mask::causal};

}  // namespace

TEST_CASE("logits: every transform with every mask and every other, at any number of ranks") {
    std::uint64_t seed = 0;
    for (int one = 0; one < feature_count; ++one)
        for (int other = one; other < feature_count; ++other) {
            CAPTURE(++seed);
            auto const p = problem_with<float>(seed, feature{one}, feature{other});
            INFO(p.text());
            std::mt19937_64 random{seed};
            auto const exact = compute_alone<uly::reference_attention>(converted<double>(p));
            auto const alone = compute_alone<builtin_attention>(p);
            auto const allowed = bounds_of(p, 8);
            check_bounds(alone, exact, allowed);
            for (int ranks : {2 + static_cast<int>(seed % 3), 5 + static_cast<int>(seed % 4)}) {
                CAPTURE(ranks);
                // In chunks of heads as well, and under any keep policy.
                auto dealt = p;
                dealt.layer.chunks = 1 + below(random, p.layer.kv_heads);
                dealt.layer.overlap = dealt.layer.chunks > 1 && below(random, 2) == 0;
                dealt.layer.keep = uly::keep{static_cast<std::uint8_t>(below(random, 2))};
                CAPTURE(dealt.layer.chunks);
                auto const many =
                    compute<builtin_attention>(dealt, random_orders(random, p.tokens, ranks));
                CHECK(same_bits(many.o, alone.o));
                CHECK(same_bits(many.lse, alone.lse));
                CHECK(same_bits(many.dq, alone.dq));
                check_bounds(many, exact, allowed);
            }
        }
}

TEST_CASE(
    "logits: in double the functors agree far beyond a float, and keep policies in every bit") {
    for (std::uint64_t seed = 1; seed <= 12; ++seed) {
        CAPTURE(seed);
        auto p = problem_with<double>(seed, feature{static_cast<int>(seed % 5)}, feature::causal);
        INFO(p.text());
        std::mt19937_64 random{seed};
        auto const exact = compute_alone<uly::reference_attention>(p);
        auto const queries = random_orders(random, p.tokens, 3);
        auto const kept = compute<builtin_attention>(p, queries);
        check_bounds(kept, exact, bounds_of(p, 3));
        for (auto const policy : {uly::keep::local, uly::keep::nothing}) {
            p.layer.keep = policy;
            auto const again = compute<builtin_attention>(p, queries);
            CHECK(same_bits(again.o, kept.o));
            CHECK(same_bits(again.dq, kept.dq));
            CHECK(same_bits(again.dk, kept.dk));
            CHECK(same_bits(again.dv, kept.dv));
        }
    }
}

TEST_CASE("case 13: a sink logit of 20 on one head of 8 suppresses that head alone, P = 4") {
    auto const plain = make_problem<double>(13, {.heads = 8, .head_dim = 4}, 1, 12);
    auto const without = compute_alone<builtin_attention>(plain);
    auto p = plain;
    p.layer.logits.sinks = true;
    for (int64_t suppressed : {0, 3, 7}) {
        p.sinks.assign(8, -1e30);
        p.sinks[static_cast<std::size_t>(suppressed)] = 20;
        auto const one = compute_alone<builtin_attention>(p);
        auto const four = compute<builtin_attention>(p, equal_shares(12, 4));
        CHECK(same_bits(four.o, one.o));
        CHECK(same_bits(four.dq, one.dq));
        for (int64_t s = 0; s < 12; ++s)
            for (int64_t h = 0; h < 8; ++h)
                for (int64_t d = 0; d < 4; ++d)
                    if (h == suppressed)
                        CHECK(std::fabs(four.o(0, s, h, d)) < 12 * std::exp(-18.0));
                    else
                        CHECK(four.o(0, s, h, d) == without.o(0, s, h, d));
    }
}

namespace {

/// A sink of -inf is no sink; a bias of -inf hides its key, whatever the functor.
template <class Attention>
void check_infinities() {
    constexpr auto none = -std::numeric_limits<double>::infinity();
    auto const plain = make_problem<double>(31, gqa, 1, 12);
    auto const without = compute_alone<Attention>(plain);
    auto sunk = plain;
    sunk.layer.logits.sinks = true;
    sunk.sinks.assign(4, none);
    auto const seen = compute_alone<Attention>(sunk);
    CHECK(same_bits(seen, without));
    CHECK(seen.dsinks.memory == std::vector<double>(4, 0.0));
    // Row 0 sees key 0 only, and so nothing.
    auto masked = plain, biased = sunk;
    masked.present = {0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1};
    biased.layer.logits.bias = true;
    biased.bias = tensor<double>({1, 1, 1, 12}, 0);
    biased.bias(0, 0, 0, 0) = biased.bias(0, 0, 0, 5) = none;
    auto const expected = compute_alone<Attention>(masked);
    auto const hidden = compute_alone<Attention>(biased);
    CHECK(expected.lse(0, 0, 0, 0) == none);
    CHECK(largest_difference(hidden.o, expected.o) < 1e-14);
    CHECK(largest_difference(hidden.lse, expected.lse) < 1e-14);
    CHECK(largest_difference(hidden.dq, expected.dq) < 1e-14);
    CHECK(largest_difference(hidden.dk, expected.dk) < 1e-14);
    CHECK(largest_difference(hidden.dv, expected.dv) < 1e-14);
    CHECK(hidden.dsinks.memory == std::vector<double>(4, 0.0));
    CHECK(hidden.dbias(0, 0, 0, 5) == 0);
}

}  // namespace

TEST_CASE("logits: a sink of -inf is none, and a bias of -inf hides its key") {
    check_infinities<uly::reference_attention>();
    check_infinities<builtin_attention>();
}

TEST_CASE("logits: the reference is the formula, and its gradients are finite differences") {
    auto p = problem_with<double>(21, feature::softcap, feature::causal);
    std::mt19937_64 random{21};
    for (auto const what : {feature::alibi, feature::bias, feature::sinks, feature::dropout}) {
        add(random, p.layer, what, p.keys);
        bring(random, p, what);
    }
    INFO(p.text());
    uly::dropout_mask const dropped(p.layer.dropout.value(), *p.dropout);
    // o and lse by the documentation's formula.
    auto const loss = [&](problem<double> const& with, results<double>* o_and_lse) {
        double sum = 0;
        auto const& [b_of, h_of, i_of, j_of] = with.bias.sizes;
        for (int64_t b = 0; b < with.batch; ++b)
            for (int64_t h = 0; h < with.layer.heads; ++h)
                for (int64_t i = 0; i < with.tokens; ++i) {
                    auto const g = h / (with.layer.heads / with.layer.kv_heads);
                    auto const head = static_cast<std::size_t>(h);
                    std::vector<double> e(static_cast<std::size_t>(i + 1)), kept(e.size());
                    double denominator = std::exp(with.sinks[head]);
                    for (int64_t j = 0; j <= i; ++j) {
                        double s = 0;
                        for (int64_t d = 0; d < with.layer.head_dim; ++d)
                            s += with.q(b, i, h, d) * with.k(b, j, g, d);
                        s /= std::sqrt(static_cast<double>(with.layer.head_dim));
                        auto const cap = with.layer.logits.softcap.value();
                        s = cap * std::tanh(s / cap) +
                            with.bias(b_of == 1 ? 0 : b, h_of == 1 ? 0 : h, i_of == 1 ? 0 : i,
                                      j_of == 1 ? 0 : j) -
                            with.slopes[head] * static_cast<double>(i - j);
                        denominator += e[static_cast<std::size_t>(j)] = std::exp(s);
                    }
                    dropped.row(b, h, i, {0, i + 1}, kept.data());
                    if (o_and_lse != nullptr) o_and_lse->lse(b, i, h, 0) = std::log(denominator);
                    for (int64_t d = 0; d < with.layer.value_dim; ++d) {
                        double o = 0;
                        for (int64_t j = 0; j <= i; ++j)
                            o += e[static_cast<std::size_t>(j)] / denominator *
                                 kept[static_cast<std::size_t>(j)] * with.v(b, j, g, d);
                        if (o_and_lse != nullptr) o_and_lse->o(b, i, h, d) = o;
                        sum += o * with.dout(b, i, h, d);
                    }
                }
        return sum;
    };
    results<double> formula(p);
    loss(p, &formula);
    auto const seen = compute_alone<uly::reference_attention>(p);
    CHECK(largest_difference(seen.o, formula.o) < 1e-12);
    CHECK(largest_difference(seen.lse, formula.lse) < 1e-12);
    auto const compare = [&](std::vector<double> const& gradient, auto const& input_of) {
        for (std::size_t i = 0; i < gradient.size(); i += 1 + gradient.size() / 12) {
            auto more = p, less = p;
            input_of(more)[i] += 1e-5;
            input_of(less)[i] -= 1e-5;
            CHECK(gradient[i] == doctest::Approx((loss(more, nullptr) - loss(less, nullptr)) / 2e-5)
                                     .epsilon(1e-6)
                                     .scale(0.1));
        }
    };
    compare(
        seen.dq.memory, [](auto& with) -> auto& { return with.q.memory; });
    compare(
        seen.dk.memory, [](auto& with) -> auto& { return with.k.memory; });
    compare(
        seen.dv.memory, [](auto& with) -> auto& { return with.v.memory; });
    compare(
        seen.dsinks.memory, [](auto& with) -> auto& { return with.sinks; });
    compare(
        seen.dbias.memory, [](auto& with) -> auto& { return with.bias.memory; });
}

TEST_CASE(
    "logits: dropout drops others in every step, layer and sample, and nothing without a key") {
    auto p = make_problem<double>(5, gqa, 2, 20);
    for (int64_t s = 0; s < 20; ++s)
        for (int64_t h = 0; h < 4; ++h)
            for (int64_t d = 0; d < 8; ++d) {
                p.q(1, s, h, d) = p.q(0, s, h, d);
                if (h < 2) p.k(1, s, h, d) = p.k(0, s, h, d);
                if (h < 2) p.v(1, s, h, d) = p.v(0, s, h, d);
            }
    auto const kept = compute_alone<builtin_attention>(p);
    p.layer.dropout = 0.5;
    auto const at = [&](uly::dropout_key key) {
        p.dropout = key;
        return compute_alone<builtin_attention>(p);
    };
    auto const first = at({.seed = 1, .step = 2, .layer = 3});
    CHECK(same_bits(first.o, at({.seed = 1, .step = 2, .layer = 3}).o));
    for (auto const& other :
         {uly::dropout_key{.seed = 2, .step = 2, .layer = 3},
          uly::dropout_key{.seed = 1, .step = 3, .layer = 3},
          uly::dropout_key{.seed = 1, .step = 2, .layer = 4},
          uly::dropout_key{.seed = 1, .step = 2, .layer = 3, .first_sample = 9}})
        CHECK(!same_bits(first.o, at(other).o));
    // Samples alike are dropped apart; the global sample decides, not the place in the batch.
    auto const half = [](tensor<double> const& o, int64_t b) {
        auto const size = o.memory.size() / 2;
        auto const from = o.memory.begin() + static_cast<std::ptrdiff_t>(b ? size : 0);
        return std::vector<double>(from, from + static_cast<std::ptrdiff_t>(size));
    };
    CHECK(half(first.o, 0) != half(first.o, 1));
    auto const later = at({.seed = 1, .step = 2, .layer = 3, .first_sample = 1});
    CHECK(half(later.o, 0) == half(first.o, 1));
    // Evaluation: a call without a context needs no key, and drops nothing.
    uly::threads::run(2, [&](communicator c) {
        uly::pipeline layer{c, uly::sequence_local{}, builtin_attention{}, p.layer};
        auto const step = p.step(equal_shares(20, 2));
        local_problem<double> local(p, step, c.rank());
        layer.attend(step, local.q, local.k, local.v, local.o);
        auto const expected = own_part(step.queries(), c.rank(), kept.o);
        CHECK(same_bits(local.o, expected));
    });
}

TEST_CASE("logits: as the documentation shows them") {
    auto const p = make_problem<float>(8, gqa, 1, 12);
    uly::threads::run(3, [&](communicator ranks) {
        uly::builtin_gemm const gemm;
        auto const step = p.step(equal_shares(12, 3));
        local_problem<float> local(p, step, ranks.rank());
        auto const &q = local.q, &k = local.k, &v = local.v, &dout = local.dout;
        auto &o = local.o, &dq = local.dq, &dk = local.dk, &dv = local.dv;
        std::uint64_t const step_number = 7;
        // [snippet logits]
        uly::pipeline layer{ranks, uly::sequence_local{}, uly::blocked_attention{gemm},
                            uly::shape{.heads = 4,
                                       .kv_heads = 2,
                                       .head_dim = 8,
                                       .mask = uly::mask::causal,
                                       .logits = {.softcap = 30.0, .sinks = true},
                                       .dropout = 0.1}};
        std::vector<float> sinks(4), dsinks(4);  // of all heads, on every rank
        uly::logit_inputs const logits{
            .sinks = sinks,
            .dropout = uly::dropout_key{.seed = 1, .step = step_number, .layer = 3}};

        auto saved = layer.make_context();
        layer.attend(step, saved, q, k, v, o, logits);
        layer.attend_backward(step, saved, dout, dq, dk, dv, logits, {.sinks = dsinks});
        // [/snippet]
        CHECK(std::ranges::any_of(dsinks, [](float g) { return g != 0; }));
        CHECK(!std::isnan(dq(0, 0, 0, 0)));
    });
}

TEST_CASE("logits: six steps take them as well") {
    auto layer = gqa;
    layer.logits.sinks = true;
    six_problem<double> p(6, layer, 1, 11, 6);
    std::vector<double> const sinks{0.5, -1, 2, 0};
    p.logits.sinks = sinks;
    auto const one =
        six_steps<double, uly::reference_attention, uly::no_epilogue>(p, equal_shares(11, 1), true);
    auto const many =
        six_steps<double, uly::reference_attention, uly::no_epilogue>(p, equal_shares(11, 3), true);
    CHECK(largest_difference(many.y, one.y) < 1e-12);
    CHECK(largest_difference(many.dx, one.dx) < 1e-12);
}

#if ULYSSES_EXCEPTIONS
namespace {

/// A message without where it was raised.
std::string message(outcome const& seen) { return seen.text.substr(0, seen.text.rfind(" [")); }

}  // namespace

TEST_CASE("logits: what a call brings must be what its layer asks for, on every rank alike") {
    auto p = make_problem<double>(1, gqa, 1, 9);
    auto const seen_by_all = [&](uly::shape const& layer, auto const& inputs_of) {
        std::vector<outcome> seen(2);
        uly::threads::run(2, [&](communicator c) {
            uly::pipeline attention{c, uly::sequence_local{}, uly::reference_attention{}, layer};
            auto saved = attention.make_context();
            auto const step = p.step(equal_shares(9, 2));
            local_problem<double> local(p, step, c.rank());
            seen[static_cast<std::size_t>(c.rank())] = outcome_of([&] {
                attention.attend(step, saved, local.q, local.k, local.v, local.o,
                                 inputs_of(c.rank()));
            });
            CHECK(!saved.filled());
        });
        CHECK(seen[0].text == seen[1].text);
        CHECK(seen[0].code == seen[1].code);
        return seen[1];
    };
    std::vector<float> const four(4), three(3);
    auto const one_rank = [&](uly::logit_inputs good, uly::logit_inputs bad) {
        return [=](int rank) { return rank == 1 ? bad : good; };
    };
    auto layer = gqa;
    auto seen = seen_by_all(layer, one_rank({}, {.sinks = four}));
    CHECK(seen.code == uly::errc::invalid_call);
    CHECK(
        message(seen) ==
        "ulysses: attend: a call brings the logit inputs that its layer asks for: sinks: the call "
        "has it, the layer does not ask for it");
    layer.logits.sinks = true;
    CHECK(message(seen_by_all(layer, one_rank({.sinks = four}, {}))) ==
          "ulysses: attend: a call brings the logit inputs that its layer asks for: sinks: the "
          "layer asks for it, the call has none");
    seen = seen_by_all(layer, one_rank({.sinks = four}, {.sinks = three}));
    CHECK(seen.code == uly::errc::invalid_tensor);
    CHECK(message(seen) ==
          "ulysses: attend: slopes and sinks have one number a query head: sinks have 3, heads 4");
    layer = gqa;
    layer.logits.bias = true;
    std::vector<double> const numbers(81);
    seen = seen_by_all(layer, one_rank({.bias = {numbers.data(), {1, 1, 9, 9}}},
                                       {.bias = {numbers.data(), {1, 1, 9, 5}}}));
    CHECK(seen.code == uly::errc::invalid_tensor);
    CHECK(
        message(seen) ==
        "ulysses: attend: a bias has the whole sequence's extents [B, Hq, Sq, Sk], or 1: bias has "
        "[1, 1, 9, 5], the step [1, 4, 9, 9]");
    seen = seen_by_all(layer, one_rank({.bias = {numbers.data(), {1, 1, 9, 9}}},
                                       {.bias = {static_cast<double*>(nullptr), {1, 1, 9, 9}}}));
    CHECK(seen.code == uly::errc::invalid_tensor);
    CHECK(message(seen) == "ulysses: attend: bias: data must not be null: extents [1, 1, 9, 9]");
    layer = gqa;
    layer.dropout = 0.5;
    CHECK(message(seen_by_all(layer, one_rank({.dropout = uly::dropout_key{}}, {}))) ==
          "ulysses: attend: a call brings the logit inputs that its layer asks for: a dropout key: "
          "the layer asks for it, the call has none");
    seen = seen_by_all(layer, one_rank({.dropout = uly::dropout_key{.seed = 1}},
                                       {.dropout = uly::dropout_key{.seed = 2}}));
    CHECK(seen.code == uly::errc::disagreement);
    CHECK(seen.text.find("dropout key: rank 0 has ") != std::string::npos);
}

TEST_CASE("logits: layers that differ in a transform are an error that names it") {
    auto const p = make_problem<double>(1, gqa, 1, 9);
    auto const named = [&](uly::shape const& other, std::string_view expected) {
        std::vector<float> const four(4);
        std::vector<outcome> seen(2);
        uly::threads::run(2, [&](communicator c) {
            auto const& mine = c.rank() == 0 ? p.layer : other;
            uly::pipeline layer{c, uly::sequence_local{}, uly::reference_attention{}, mine};
            auto const step = p.step(equal_shares(9, 2));
            local_problem<double> local(p, step, c.rank());
            uly::logit_inputs inputs;
            if (mine.logits.sinks) inputs.sinks = four;
            seen[static_cast<std::size_t>(c.rank())] =
                outcome_of([&] { layer.attend(step, local.q, local.k, local.v, local.o, inputs); });
        });
        CHECK(seen[0].code == uly::errc::disagreement);
        CHECK(seen[0].text == seen[1].text);
        CHECK_MESSAGE(seen[0].text.find(expected) != std::string::npos, seen[0].text);
    };
    auto other = p.layer;
    other.logits.softcap = 30.0;
    named(other, "softcap: rank 0 has none, rank 1 has 30");
    other = p.layer;
    other.logits.sinks = true;
    named(other, "logits: rank 0 has none, rank 1 has sinks");
    other = p.layer;
    other.dropout = 0.5;
    named(other, "dropout: rank 0 has none, rank 1 has 0.5");
}

TEST_CASE("logits: a backward call takes the dropout key of its forward, and no stray gradient") {
    auto p = make_problem<double>(1, gqa, 1, 9);
    p.layer.dropout = 0.25;
    uly::threads::run(2, [&](communicator c) {
        uly::pipeline layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer};
        auto saved = layer.make_context();
        auto const step = p.step(equal_shares(9, 2));
        local_problem<double> l(p, step, c.rank());
        uly::logit_inputs const first{.dropout = uly::dropout_key{.seed = 1}},
            second{.dropout = uly::dropout_key{.seed = 1, .step = 1}};
        layer.attend(step, saved, l.q, l.k, l.v, l.o, first);
        auto seen = outcome_of(
            [&] { layer.attend_backward(step, saved, l.dout, l.dq, l.dk, l.dv, second); });
        CHECK(seen.code == uly::errc::invalid_call);
        CHECK(
            message(seen) ==
            "ulysses: context: a backward call takes the dropout key of its forward call: forward "
            "ran seed 1, step 0, layer 0, first sample 0, backward seed 1, step 1, layer 0, first "
            "sample 0");
        std::vector<double> four(4);
        seen = outcome_of([&] {
            layer.attend_backward(step, saved, l.dout, l.dq, l.dk, l.dv, first, {.sinks = four});
        });
        CHECK(seen.code == uly::errc::invalid_call);
        CHECK(saved.filled());
        layer.attend_backward(step, saved, l.dout, l.dq, l.dk, l.dv, first);
    });
}

namespace {

/// A functor with features of its own, that is only made, never called.
template <uly::attention_features Features>
struct with_features : uly::reference_attention {
    static constexpr auto features = Features;
};

}  // namespace

TEST_CASE("logits: what a functor lacks is named, and dropout by local indices is opted into") {
    auto const made_over = [](int ranks, auto const& attention, uly::shape const& layer) {
        outcome seen;
        uly::threads::run(ranks, [&](communicator c) {
            auto mine = outcome_of([&] {
                uly::pipeline{c, uly::sequence_local{}, attention, layer};
            });
            if (c.rank() == 0) seen = mine;
        });
        return seen;
    };
    static constexpr uly::attention_features only_full{.full = true};
    with_features<only_full> const plain;
    auto const lacks = [&](uly::shape layer, std::string_view feature) {
        layer.heads = layer.head_dim = 4;
        auto const seen = made_over(1, plain, layer);
        CHECK(seen.code == uly::errc::unsupported);
        CHECK(message(seen) ==
              uly::concat("ulysses: pipeline: the attention functor lacks a feature the layer asks "
                          "for: ",
                          feature));
    };
    lacks({.logits = {.softcap = 30.0}}, "softcap");
    lacks({.logits = {.alibi = true}}, "alibi");
    lacks({.logits = {.bias = true}}, "bias");
    lacks({.logits = {.sinks = true}}, "sinks");
    lacks({.dropout = 0.5}, "dropout");
    static constexpr uly::attention_features drops_itself{
        .full = true, .row_range = true, .local_dropout = true};
    with_features<drops_itself> const local;
    uly::shape layer{.heads = 4, .head_dim = 4, .dropout = 0.5};
    CHECK(made_over(1, local, layer).code == uly::errc::none);
    CHECK(made_over(2, local, layer).code == uly::errc::unsupported);
    layer.local_dropout_allowed = true;
    CHECK(made_over(2, local, layer).code == uly::errc::none);
}

TEST_CASE("case 27: a layer that carries a state along the sequence is refused, by name") {
    auto const refused = [](uly::shape const& layer) {
        return outcome_of([&] {
            uly::pipeline{uly::serial{}, uly::sequence_local{}, uly::reference_attention{}, layer};
        });
    };
    for (auto const& [kind, name] : {std::pair{uly::mixer::linear_attention, "linear_attention"},
                                     std::pair{uly::mixer::state_space, "state_space"},
                                     std::pair{uly::mixer::recurrence, "recurrence"},
                                     std::pair{uly::mixer::convolution, "convolution"}}) {
        auto layer = gqa;
        layer.kind = kind;
        auto const seen = refused(layer);
        CHECK(seen.code == uly::errc::unsupported);
        CHECK(message(seen) ==
              uly::concat("ulysses: pipeline: a layer must not carry a state along the sequence: ",
                          name));
    }
    CHECK(refused(gqa).code == uly::errc::none);
}
#endif
