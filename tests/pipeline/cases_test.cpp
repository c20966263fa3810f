// SPDX-License-Identifier: Apache-2.0

#include "harness.hpp"

#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <thread>

using namespace pipeline_test;
namespace uly = ulysses;

/// Cases from users' reports of other libraries. The numbers are theirs; each stands for a kind,
/// which the property test covers at random.
namespace {

template <class T>
void check_as_one_rank(problem<T> const& p, orders const& order) {
    INFO(p.text());
    auto const one = compute_alone<builtin_attention>(p);
    auto const many = compute<builtin_attention>(p, order);
    auto const exact = compute_alone<uly::reference_attention>(converted<double>(p));
    auto const bound = bounds_of(p, static_cast<int>(order.size()));
    CHECK(same_bits(many.o, one.o));
    CHECK(same_bits(many.lse, one.lse));
    CHECK(same_bits(many.dq, one.dq));
    CHECK(largest_difference(many.o, exact.o) <= bound.o);
    CHECK(largest_difference(many.dk, exact.dk) <= bound.dk);
    CHECK(largest_difference(many.dv, exact.dv) <= bound.dv);
}

constexpr auto causal = uly::mask::causal;

}  // namespace

TEST_CASE("case 4: lengths that ranks do not divide, ranks without tokens") {
    uly::shape const layer{.heads = 4, .kv_heads = 2, .head_dim = 8, .mask = causal};
    check_as_one_rank(make_problem<float>(4, layer, 2, 5), equal_shares(5, 2));
    check_as_one_rank(make_problem<float>(4, layer, 2, 1), equal_shares(1, 4));
    check_as_one_rank(make_problem<float>(4, {.heads = 2, .head_dim = 4, .mask = causal}, 1, 1009),
                      equal_shares(1009, 8));
    check_as_one_rank(make_problem<float>(4, layer, 2, 9), contiguous({4, 0, 5}));
    check_as_one_rank(make_problem<float>(4, layer, 2, 9), contiguous({0, 0, 9}));
}

TEST_CASE("case 6: heads that ranks do not divide") {
    check_as_one_rank(make_problem<float>(6, {.heads = 3, .head_dim = 8, .mask = causal}, 2, 12),
                      equal_shares(12, 2));
    check_as_one_rank(
        make_problem<float>(6, {.heads = 6, .kv_heads = 3, .head_dim = 8, .mask = causal}, 2, 12),
        equal_shares(12, 2));
}

TEST_CASE("case 7: the gradient of one key-value head on four ranks is their sum, once") {
    auto p = make_problem<double>(7, {.heads = 4, .kv_heads = 1, .head_dim = 8}, 1, 16);
    std::fill(p.dout.memory.begin(), p.dout.memory.end(), 1.0);
    check_as_one_rank(p, equal_shares(16, 4));
    // With dO of ones, each row hands out a gradient of one: dv sums to Hq S in every dim.
    auto const many = compute<builtin_attention>(p, equal_shares(16, 4));
    double sum = 0;
    for (int64_t s = 0; s < 16; ++s) sum += many.dv(0, s, 0, 0);
    CHECK(sum == doctest::Approx(4 * 16).epsilon(1e-12));
}

TEST_CASE("case 8: fewer key-value heads than ranks") {
    check_as_one_rank(
        make_problem<float>(8, {.heads = 40, .kv_heads = 8, .head_dim = 4, .mask = causal}, 1, 32),
        equal_shares(32, 16));
    check_as_one_rank(
        make_problem<float>(8, {.heads = 16, .kv_heads = 2, .head_dim = 4, .mask = causal}, 1, 32),
        equal_shares(32, 8));
}

TEST_CASE("case 12: a window of 6 over 16 tokens on 4 ranks") {
    for (auto const mask : {uly::mask::full, causal})
        check_as_one_rank(
            make_problem<float>(12, {.heads = 4, .head_dim = 8, .mask = mask, .window = {6, 6}}, 1,
                                16),
            equal_shares(16, 4));
    // Gated on the global length: a window longer than a rank's share, and than the sequence.
    for (int64_t const left : {0, 5, 15, 100})
        check_as_one_rank(
            make_problem<float>(
                12, {.heads = 3, .head_dim = 8, .mask = causal, .window = {.left = left}}, 2, 16),
            equal_shares(16, 4));
}

TEST_CASE("case 14: packed documents do not see each other") {
    auto p =
        make_problem<float>(14, {.heads = 4, .kv_heads = 2, .head_dim = 8, .mask = causal}, 1, 8);
    p.documents = {0, 3};
    check_as_one_rank(p, equal_shares(8, 2));
    auto changed = p;
    for (int64_t s = 0; s < 3; ++s)
        for (auto* x : {&changed.q, &changed.k, &changed.v})
            for (int64_t h = 0; h < x->sizes[2]; ++h) (*x)(0, s, h, 1) += 0.5f;
    auto const before = compute<builtin_attention>(p, equal_shares(8, 2));
    auto const after = compute<builtin_attention>(changed, equal_shares(8, 2));
    auto const row = static_cast<std::size_t>(p.layer.heads * p.layer.value_dim);
    CHECK(std::memcmp(before.o.memory.data() + 3 * row, after.o.memory.data() + 3 * row,
                      5 * row * sizeof(float)) == 0);
    CHECK(std::memcmp(before.o.memory.data(), after.o.memory.data(), 3 * row * sizeof(float)) != 0);
}

TEST_CASE("case 15: documents of 7, 3 and 1 tokens on 2 ranks, without padding") {
    for (auto const mask : {uly::mask::full, causal}) {
        auto p = make_problem<float>(15, {.heads = 2, .head_dim = 8, .mask = mask}, 1, 11);
        p.documents = {0, 7, 10, 11};
        check_as_one_rank(p, equal_shares(11, 2));
        // Each document has the bits that it has alone.
        auto const packed = compute<builtin_attention>(p, equal_shares(11, 2));
        int64_t const ends[] = {0, 7, 10, 11};
        for (int d = 0; d < 3; ++d) {
            auto alone = make_problem<float>(15, p.layer, 1, ends[d + 1] - ends[d]);
            for (auto const& [to, from] :
                 {std::pair{&alone.q, &p.q}, {&alone.k, &p.k}, {&alone.v, &p.v}})
                for (int64_t s = 0; s < alone.tokens; ++s)
                    for (int64_t h = 0; h < 2; ++h)
                        for (int64_t i = 0; i < 8; ++i)
                            (*to)(0, s, h, i) = (*from)(0, ends[d] + s, h, i);
            auto const exact = compute_alone<uly::reference_attention>(converted<double>(alone));
            auto const bound = bounds_of(p, 2);
            double off = 0;
            for (int64_t s = 0; s < alone.tokens; ++s)
                for (int64_t h = 0; h < 2; ++h)
                    for (int64_t i = 0; i < 8; ++i)
                        off = std::max(
                            off, std::fabs(static_cast<double>(packed.o(0, ends[d] + s, h, i)) -
                                           exact.o(0, s, h, i)));
            CHECK(off <= bound.o);
        }
    }
}

TEST_CASE("case 20: samples of other lengths, bidirectional, 7 keys on 4 ranks") {
    auto p = make_problem<float>(20, {.heads = 4, .head_dim = 8}, 3, 7);
    p.lengths = {7, 3, 0};
    check_as_one_rank(p, equal_shares(7, 4));
    // What is padding may hold anything finite.
    auto changed = p;
    for (int64_t s = 3; s < 7; ++s)
        for (int64_t h = 0; h < 4; ++h) changed.k(1, s, h, 0) = changed.v(1, s, h, 0) = 1e30f;
    CHECK(same_bits(compute<builtin_attention>(changed, equal_shares(7, 4)).o,
                    compute<builtin_attention>(p, equal_shares(7, 4)).o));
}

TEST_CASE("case 20: key padding [B,S], bidirectional, S=7, P=4") {
    auto p = make_problem<float>(20, {.heads = 4, .head_dim = 8}, 3, 7);
    p.present = {1, 0, 1, 1, 0, 0, 1,   // holes
                 0, 0, 1, 1, 1, 0, 0,   // padding on both sides
                 0, 0, 0, 0, 0, 0, 0};  // nothing
    check_as_one_rank(p, equal_shares(7, 4));
    auto const before = compute<builtin_attention>(p, equal_shares(7, 4));
    // What is not there may hold anything finite, and has no gradient.
    auto changed = p;
    for (int64_t b = 0; b < 3; ++b)
        for (int64_t s = 0; s < 7; ++s)
            if (p.present[static_cast<std::size_t>(b * 7 + s)] == 0)
                for (int64_t h = 0; h < 4; ++h)
                    for (int64_t d = 0; d < 8; ++d) {
                        changed.k(b, s, h, d) = 3e38f;  // products of it overflow
                        changed.v(b, s, h, d) = 1e30f;
                        CHECK(before.dk(b, s, h, d) == 0);
                        CHECK(before.dv(b, s, h, d) == 0);
                    }
    auto const after = compute<builtin_attention>(changed, equal_shares(7, 4));
    CHECK(same_bits(after.o, before.o));
    CHECK(same_bits(after.dq, before.dq));
    CHECK(same_bits(after.dk, before.dk));
    // A sample has the rows that it has over the keys that are there alone.
    auto few = make_problem<float>(20, p.layer, 1, 7, 4);
    int64_t const there[] = {0, 2, 3, 6};
    for (int64_t s = 0; s < 7; ++s)
        for (int64_t h = 0; h < 4; ++h)
            for (int64_t d = 0; d < 8; ++d) {
                few.q(0, s, h, d) = p.q(0, s, h, d);
                if (s < 4) few.k(0, s, h, d) = p.k(0, there[s], h, d);
                if (s < 4) few.v(0, s, h, d) = p.v(0, there[s], h, d);
            }
    auto const exact = compute_alone<ulysses::reference_attention>(converted<double>(few));
    double off = 0, most = 0;
    for (int64_t s = 0; s < 7; ++s)
        for (int64_t h = 0; h < 4; ++h)
            for (int64_t d = 0; d < 8; ++d) {
                off = std::max(off, std::fabs(static_cast<double>(before.o(0, s, h, d)) -
                                              exact.o(0, s, h, d)));
                most = std::max(most, std::fabs(static_cast<double>(before.o(2, s, h, d))));
            }
    CHECK(off <= bounds_of(few, 4).o);
    CHECK(most == 0);
}

TEST_CASE("queries that stand at the end of the keys, as in chunked prefill") {
    // The last 5 of 12 queries alone have the rows that they have among all.
    auto const whole =
        make_problem<float>(17, {.heads = 4, .kv_heads = 2, .head_dim = 8, .mask = causal}, 2, 12);
    auto part = make_problem<float>(17, whole.layer, 2, 5, 12);
    part.k = whole.k;
    part.v = whole.v;
    for (int64_t b = 0; b < 2; ++b)
        for (int64_t s = 0; s < 5; ++s)
            for (int64_t h = 0; h < 4; ++h)
                for (int64_t d = 0; d < 8; ++d) part.q(b, s, h, d) = whole.q(b, 7 + s, h, d);
    auto const all = compute_alone<builtin_attention>(whole);
    for (int ranks : {1, 2, 3, 8}) {
        auto const some =
            compute<builtin_attention>(part, equal_shares(5, ranks), equal_shares(12, ranks));
        double off = 0;
        for (int64_t b = 0; b < 2; ++b)
            for (int64_t s = 0; s < 5; ++s)
                for (int64_t h = 0; h < 4; ++h)
                    for (int64_t d = 0; d < 8; ++d)
                        off = std::max(off, std::fabs(static_cast<double>(some.o(b, s, h, d)) -
                                                      all.o(b, 7 + s, h, d)));
        CHECK(off <= 2 * bounds_of(whole, ranks).o);
    }
}

TEST_CASE("case 16: dims of keys and values that differ") {
    check_as_one_rank(
        make_problem<float>(
            16, {.heads = 4, .kv_heads = 1, .head_dim = 192, .value_dim = 128, .mask = causal}, 1,
            24),
        equal_shares(24, 2));
}

TEST_CASE("evaluation: alone over the whole sequence and over ranks give the same output") {
    // One sample a rank: each evaluates its own by itself, then all of them all together. No
    // context, and a layer with dropout is given no key.
    for (int ranks : {2, 3, 4}) {
        CAPTURE(ranks);
        auto p = make_problem<float>(
            21, {.heads = 4, .kv_heads = 2, .head_dim = 8, .mask = causal, .dropout = 0.5}, ranks,
            270);
        auto const order = zigzag(p.tokens, ranks);
        auto const together = p.step(order);
        results<float> alone(p), shared(p);
        run_ranks(ranks, [&](uly::threads::communicator c) {
            auto const own = [&](tensor<float> const& x) {  // [1, S, H, D]
                auto const& [b, s, h, d] = x.sizes;
                return uly::token_view<float>(x.data() + c.rank() * s * h * d, {1, s, h, d});
            };
            uly::pipeline bypass{uly::serial{}, uly::sequence_local{}, builtin_attention{},
                                 p.layer};
            bypass.attend(uly::sequence::split(1, 1, p.tokens), own(p.q), own(p.k), own(p.v),
                          own(alone.o));
            uly::pipeline layer{c, uly::sequence_local{}, builtin_attention{}, p.layer};
            local_problem<float> l(p, together, c.rank());
            layer.attend(together, l.q, l.k, l.v, l.o);
            put_back(together.queries(), c.rank(), l.o, shared.o);
        });
        CHECK(same_bits(shared.o, alone.o));
        // Nothing was dropped, as in a layer without dropout; training drops.
        auto kept = p;
        kept.layer.dropout = 0.0;
        CHECK(same_bits(compute_alone<builtin_attention>(kept).o, alone.o));
        p.dropout = uly::dropout_key{.seed = 1};
        CHECK_FALSE(same_bits(compute<builtin_attention>(p, order).o, alone.o));
    }
}

TEST_CASE("one rank whose tokens are out of order: exchanged with itself, not attended in place") {
    // Attending in place would apply the causal mask to local indices.
    auto const p = make_problem<double>(1, {.heads = 2, .head_dim = 4, .mask = causal}, 2, 10);
    for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing}) {
        auto kept = p;
        kept.layer.keep = keep;
        auto const one = compute_alone<builtin_attention>(kept);
        auto const turned = compute<builtin_attention>(kept, orders{{{6, 4}, {1, 5}, {0, 1}}});
        CHECK(same_bits(turned.o, one.o));
        CHECK(same_bits(turned.dq, one.dq));
        CHECK(same_bits(turned.dk, one.dk));
        CHECK(same_bits(turned.dv, one.dv));
    }
}

namespace {

/// The reference, that overwrites what it has read: a peer's late write, or a read of what was left
/// from the call before, then shows. Only where nobody needs the inputs again.
struct poisoning_attention {
    using space_type = uly::host_space;
    static constexpr auto features = uly::reference_attention::features;
    static constexpr int64_t row_multiple() { return 1; }
    template <uly::element T>
    static std::size_t workspace_bytes(uly::attention_extents const& e) {
        return uly::reference_attention::workspace_bytes<T>(e);
    }
    static void poison(uly::head_view<double const> const& view) {
        for (int64_t b = 0; b < view.batch(); ++b)
            for (int64_t s = 0; s < view.tokens(); ++s)
                for (int64_t h = 0; h < view.heads(); ++h)
                    std::fill_n(const_cast<double*>(view.row(b, s, h)), view.dim(),
                                not_a_number<double>());
    }
    template <class Views>
    void forward(uly::attention_call const& call, Views q, Views k, Views v,
                 uly::head_view<double> o, uly::head_view<double> lse) const {
        std::this_thread::sleep_for(std::chrono::microseconds(below(*random, 100)));
        uly::reference_attention{}.forward<double>(call, q, k, v, o, lse);
        poison(q);
        std::this_thread::sleep_for(std::chrono::microseconds(below(*random, 100)));
        // Items of one rank share keys, so that those are poisoned after its last.
        if (call.query_head + q.heads() == *last_head &&
            call.query_begin + q.tokens() == *last_row) {
            poison(k);
            poison(v);
        }
    }
    std::mt19937_64* random;
    int64_t const *last_head, *last_row;
};

}  // namespace

TEST_CASE("case 29: inference calls over poisoned windows with random delays, 100 rounds") {
    constexpr std::uint64_t seed = 29;
    MESSAGE("seed " << seed);
    auto const small =
        make_problem<double>(1, {.heads = 5, .kv_heads = 5, .head_dim = 3, .mask = causal}, 1, 11);
    auto const large = make_problem<double>(2, {.heads = 3, .kv_heads = 1, .head_dim = 8}, 2, 19);
    problem<double> const* const problems[] = {&small, &large};
    std::vector<results<double>> right;
    for (auto const* p : problems) right.push_back(compute_alone<uly::reference_attention>(*p));
    for (int ranks : {2, 4}) {
        std::vector<int> wrong(static_cast<std::size_t>(ranks));
        run_ranks(ranks, [&](uly::threads::communicator c) {
            auto const me = c.rank();
            std::mt19937_64 random{seed + static_cast<std::uint64_t>(me)}, same{seed};
            int64_t last_head = 0, last_row = 0;
            poisoning_attention const attention{&random, &last_head, &last_row};
            uly::pipeline first{c, uly::sequence_local{}, attention, small.layer};
            uly::pipeline second{c, uly::sequence_local{}, attention, large.layer};
            for (int round = 0; round < 100; ++round) {
                auto const which = static_cast<std::size_t>(below(same, 2));
                auto const& p = *problems[which];
                auto& layer = which == 0 ? first : second;
                auto const step = uly::sequence::of(p.batch, random_orders(same, p.tokens, ranks));
                auto const& items = layer.planned(step).items();
                last_head = items.empty() ? 0 : items.back().work.head_end;
                last_row = items.empty() ? 0 : items.back().work.row_end;
                local_problem<double> local(p, step, me);
                layer.attend(step, local.q, local.k, local.v, local.o);
                wrong[static_cast<std::size_t>(me)] +=
                    same_bits(local.o, own_part(step.queries(), me, right[which].o)) ? 0 : 1;
            }
        });
        CHECK(wrong == std::vector<int>(static_cast<std::size_t>(ranks)));
    }
}

TEST_CASE("case 5, case 28: layers of different heads and dims, interleaved on one communicator") {
    // Plan A 3 heads, plan B 12 heads, and a third with fewer key-value heads and another value
    // dim; training, inference and another micro-batch of the same layer in any order.
    std::vector<problem<double>> problems;
    problems.push_back(make_problem<double>(1, {.heads = 3, .head_dim = 4, .mask = causal}, 1, 13));
    problems.push_back(
        make_problem<double>(2, {.heads = 12, .head_dim = 2, .keep = uly::keep::local}, 2, 9));
    problems.push_back(make_problem<double>(3,
                                            {.heads = 4,
                                             .kv_heads = 1,
                                             .head_dim = 5,
                                             .value_dim = 7,
                                             .mask = causal,
                                             .keep = uly::keep::nothing},
                                            1, 21));
    std::vector<results<double>> one;
    for (auto const& p : problems) one.push_back(compute_alone<uly::reference_attention>(p));
    for (int ranks : {2, 4}) {
        CAPTURE(ranks);
        std::vector<results<double>> many(problems.begin(), problems.end());
        std::vector<int> wrong(static_cast<std::size_t>(ranks));
        run_ranks(ranks, [&](uly::threads::communicator c) {
            using layer_type = uly::pipeline<uly::threads::communicator, uly::sequence_local,
                                             uly::reference_attention>;
            std::vector<layer_type> layers;
            std::vector<layer_type::context_type> saved;
            std::vector<uly::sequence> steps;
            std::vector<local_problem<double>> local;
            for (auto const& p : problems) {
                layers.emplace_back(c, uly::sequence_local{}, uly::reference_attention{}, p.layer);
                saved.push_back(layers.back().make_context());
                steps.push_back(uly::sequence::of(p.batch, zigzag(p.tokens, ranks)));
                local.emplace_back(p, steps.back(), c.rank());
            }
            for (int round = 0; round < 5; ++round) {
                for (auto& l : local)
                    for (auto* x : {&l.o, &l.dq, &l.dk, &l.dv}) x->poison();
                for (std::size_t i = 0; i < 3; ++i)
                    layers[i].attend(steps[i], saved[i], local[i].q, local[i].k, local[i].v,
                                     local[i].o);
                // Inference in between writes the shared windows.
                for (std::size_t i : {1u, 0u, 2u}) {
                    tensor<double> o(local[i].o.sizes);
                    layers[i].attend(steps[i], local[i].q, local[i].k, local[i].v, o);
                    wrong[static_cast<std::size_t>(c.rank())] += same_bits(o, local[i].o) ? 0 : 1;
                }
                for (std::size_t i : {2u, 0u, 1u})
                    attend_backward(layers[i], steps[i], saved[i], local[i]);
            }
            for (std::size_t i = 0; i < 3; ++i) local[i].put_back_into(many[i], steps[i], c.rank());
        });
        CHECK(wrong == std::vector<int>(static_cast<std::size_t>(ranks)));
        for (std::size_t i = 0; i < 3; ++i) {
            CAPTURE(i);
            auto const bound = bounds_of(problems[i], ranks);
            CHECK(same_bits(many[i].o, one[i].o));
            CHECK(same_bits(many[i].dq, one[i].dq));
            CHECK(largest_difference(many[i].dk, one[i].dk) <= bound.dk);
            CHECK(largest_difference(many[i].dv, one[i].dv) <= bound.dv);
        }
    }
    // "B shares 3, 3, 3, 3" on four ranks, whatever came before.
    uly::plan moves;
    moves.rebuild(problems[1].layer, uly::sequence::split(4, 2, 9), 4, 2, 1);
    for (int r = 0; r < 4; ++r) {
        REQUIRE(moves.items(r).size() == 1);
        CHECK(moves.items(r)[0].heads() == 3);
    }
}
