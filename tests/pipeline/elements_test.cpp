// SPDX-License-Identifier: Apache-2.0

#include "harness.hpp"

#include <doctest/doctest.h>

using namespace pipeline_test;
namespace uly = ulysses;

namespace {

constexpr uly::shape gqa{
    .heads = 6, .kv_heads = 2, .head_dim = 8, .value_dim = 5, .mask = uly::mask::causal};

}  // namespace

TEST_CASE_TEMPLATE("elements: 16-bit storage lies within its roundoff of the reference", T,
                   uly::bf16, uly::half) {
    for (std::uint64_t seed = 1; seed <= 6; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        auto const p = make_problem<T>(seed, gqa, 2, 1 + below(random, 40));
        auto const exact = compute_alone<uly::reference_attention>(converted<double>(p));
        auto const one = compute_alone<builtin_attention>(p);
        auto const bound = bounds_of(p, 4);
        for (int ranks : {3, 4}) {
            CAPTURE(ranks);
            auto const many = compute<builtin_attention>(p, random_orders(random, p.tokens, ranks));
            CHECK(same_bits(many.o, one.o));
            CHECK(same_bits(many.lse, one.lse));
            CHECK(same_bits(many.dq, one.dq));
            CHECK(largest_difference(many.o, exact.o) <= bound.o);
            CHECK(largest_difference(many.lse, exact.lse) <= bound.lse);
            CHECK(largest_difference(many.dq, exact.dq) <= bound.dq);
            CHECK(largest_difference(many.dk, exact.dk) <= bound.dk);
            CHECK(largest_difference(many.dv, exact.dv) <= bound.dv);
            // Parts of a shared head travel in float and are rounded once: at most one rounding
            // apart.
            double magnitude = 0;
            for (auto const x : exact.dv.memory) magnitude = std::max(magnitude, std::fabs(x));
            CHECK(largest_difference(many.dv, one.dv) <= 2 * magnitude * stored_roundoff<T>());
        }
    }
}

TEST_CASE_TEMPLATE("elements: odd rows of 16 bits, whose gradients are summed in wider ones", T,
                   uly::bf16, uly::half) {
    // For the sanitizer of undefined behaviour: every row of a message lies on its element's size.
    auto const p =
        make_problem<T>(3, {.heads = 5, .kv_heads = 1, .head_dim = 3, .value_dim = 5}, 1, 9);
    auto const deal = equal_shares(9, 3);
    auto const reached = compute<builtin_attention>(p, deal, {}, builtin_attention{}, reach::all);
    for (auto const way : {reach::none, reach::some})
        CHECK(
            same_bits(compute<builtin_attention>(p, deal, {}, builtin_attention{}, way), reached));
}

TEST_CASE("elements: one pipeline serves several element types, each as if alone") {
    auto const p = make_problem<float>(1, gqa, 1, 12);
    auto const wide = converted<double>(p);
    auto const narrow = converted<uly::bf16>(p);
    auto const order = zigzag(12, 3);
    auto const step = uly::sequence::of(1, order);
    results<float> f(p);
    results<double> d(wide);
    results<uly::bf16> h(narrow);
    run_ranks(3, [&](uly::threads::communicator c) {
        uly::pipeline layer{c, uly::sequence_local{}, builtin_attention{}, p.layer};
        auto a = layer.make_context(), b = layer.make_context(), e = layer.make_context();
        local_problem<float> lf(p, step, c.rank());
        local_problem<double> ld(wide, step, c.rank());
        local_problem<uly::bf16> lh(narrow, step, c.rank());
        for (int round = 0; round < 2; ++round) {
            layer.attend(step, a, lh.q, lh.k, lh.v, lh.o);
            layer.attend(step, b, ld.q, ld.k, ld.v, ld.o);
            layer.attend(step, e, lf.q, lf.k, lf.v, lf.o);
            attend_backward(layer, step, b, ld);
            attend_backward(layer, step, a, lh);
            attend_backward(layer, step, e, lf);
        }
        lf.put_back_into(f, step, c.rank());
        ld.put_back_into(d, step, c.rank());
        lh.put_back_into(h, step, c.rank());
    });
    auto const check = [&](auto const& seen, auto const& problem) {
        auto const right = compute<builtin_attention>(problem, order);
        CHECK(same_bits(seen.o, right.o));
        CHECK(same_bits(seen.dq, right.dq));
        CHECK(same_bits(seen.dk, right.dk));
        CHECK(same_bits(seen.dv, right.dv));
    };
    check(f, p);
    check(d, wide);
    check(h, narrow);
}

TEST_CASE("elements: a shape fixed at compile time gives the pipeline of the run-time one") {
    auto const p = make_problem<float>(2, gqa, 1, 12);
    auto const order = equal_shares(12, 4);
    auto const step = uly::sequence::of(1, order);
    results<float> whole(p);
    run_ranks(4, [&](uly::threads::communicator c) {
        uly::pipeline layer{c, uly::sequence_local{}, builtin_attention{}, uly::fixed<gqa>};
        CHECK(layer.layer() == uly::checked(gqa));
        uly::pipeline run_time{c, uly::sequence_local{}, builtin_attention{}, gqa};
        CHECK(layer.describe(step) == run_time.describe(step));
        auto saved = layer.make_context();
        local_problem<float> local(p, step, c.rank());
        layer.attend(step, saved, local.q, local.k, local.v, local.o);
        attend_backward(layer, step, saved, local);
        local.put_back_into(whole, step, c.rank());
    });
    auto const right = compute<builtin_attention>(p, order);
    CHECK(same_bits(whole.o, right.o));
    CHECK(same_bits(whole.dq, right.dq));
    CHECK(same_bits(whole.dk, right.dk));
    CHECK(same_bits(whole.dv, right.dv));
}

TEST_CASE(
    "elements: pipelines and their contexts may be moved, between a forward and its backward too") {
    auto const p = make_problem<float>(3, gqa, 1, 12);
    auto const order = zigzag(12, 2);
    auto const step = uly::sequence::of(1, order);
    results<float> whole(p);
    run_ranks(2, [&](uly::threads::communicator c) {
        using layer_type =
            uly::pipeline<uly::threads::communicator, uly::sequence_local, builtin_attention>;
        std::vector<layer_type> layers;
        std::vector<layer_type::context_type> saved;
        local_problem<float> local(p, step, c.rank());
        layers.emplace_back(c, uly::sequence_local{}, builtin_attention{}, p.layer);
        saved.push_back(layers[0].make_context());
        layers[0].attend(step, saved[0], local.q, local.k, local.v, local.o);
        for (int i = 0; i < 9; ++i) {  // the vectors grow, and move what they hold
            layers.emplace_back(c, uly::sequence_local{}, builtin_attention{}, p.layer);
            saved.push_back(layers.back().make_context());
        }
        attend_backward(layers[0], step, saved[0], local);
        std::swap(layers[0], layers[5]);
        layers[5].attend(step, saved[5], local.q, local.k, local.v, local.o);
        attend_backward(layers[5], step, saved[5], local);
        local.put_back_into(whole, step, c.rank());
    });
    auto const right = compute<builtin_attention>(p, order);
    CHECK(same_bits(whole.o, right.o));
    CHECK(same_bits(whole.dq, right.dq));
    CHECK(same_bits(whole.dk, right.dk));
}

TEST_CASE("describe: shapes, the rank's items, bytes and the way taken") {
    run_ranks(2, [&](uly::threads::communicator c) {
        uly::pipeline layer{c,
                            uly::sequence_local{},
                            builtin_attention{},
                            {.heads = 6, .kv_heads = 3, .head_dim = 8, .mask = uly::mask::causal}};
        auto const step = uly::sequence::split(2, 1, 16);
        if (c.rank() != 1) return;
        auto const text = layer.describe(step);
        for (auto const* part : {"attention layer, rank 1 of 2, sequence_local operands, float32",
                                 "heads 6 query, 3 key-value; dim 8, value dim 8; causal",
                                 "batch 1, 16 queries, 16 keys; this rank's tokens: 8",
                                 "2 project_in   q [1, 8, 6, 8], k [1, 8, 3, 8], v [1, 8, 3, 8]",
                                 "3 to_heads     written into the ranks' inboxes in final layout",
                                 "4 attend       2 work items",
                                 "heads 3-4 | key-value heads 1-2 | rows 0-16 | keys 0-16",
                                 "heads 4-6 | key-value heads 2-3 | rows 0-16 | keys 0-16",
                                 "5 to_tokens    read from the ranks' outboxes in final layout"}) {
            CAPTURE(part);
            CHECK(text.find(part) != std::string::npos);
        }
        auto const& moves = layer.planned(step);
        auto const forward = uly::forward_traffic(moves, 4),
                   backward = uly::backward_traffic(moves, 4, 4);
        CHECK(text.find(uly::concat("bytes sent     forward ", forward.sent, ", backward ",
                                    backward.sent, "\n")) != std::string::npos);
        CHECK(text.find(uly::concat("bytes received forward ", forward.received, ", backward ",
                                    backward.received, "\n")) != std::string::npos);
        // Two ranks, half of the tokens each: q, o of three heads; k, v of two heads.
        CHECK(forward.sent == 4 * (8 * 3 * 8 + 2 * 8 * 2 * 8 + 8 * 3 * 8));
    });
    uly::pipeline alone{
        uly::serial{}, uly::sequence_local{}, builtin_attention{}, {.heads = 2, .head_dim = 8}};
    auto const text = alone.describe(uly::sequence::split(1, 1, 4), uly::dtype::bf16);
    uly::shape const asks{
        .heads = 2, .head_dim = 8, .logits = {.softcap = 30.0, .sinks = true}, .dropout = 0.25};
    CHECK(uly::text_of_logits(asks) == ", softcap 30, sinks, dropout 0.25");
    CHECK(text.find("bfloat16") != std::string::npos);
    CHECK(text.find("nothing moves: this rank holds its heads") != std::string::npos);
    CHECK(text.find("bytes sent     forward 0, backward 0") != std::string::npos);
}
