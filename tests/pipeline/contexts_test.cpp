// SPDX-License-Identifier: Apache-2.0

#include "six_steps.hpp"

#include <doctest/doctest.h>

using namespace pipeline_test;
namespace uly = ulysses;

namespace {

using communicator = uly::threads::communicator;
using layer_type = uly::pipeline<communicator, uly::sequence_local, uly::reference_attention>;
using context = layer_type::context_type;

constexpr uly::keep policies[] = {uly::keep::exchanged, uly::keep::local, uly::keep::nothing};

uly::shape with(uly::keep keep) {
    return {.heads = 6,
            .kv_heads = 2,
            .head_dim = 4,
            .value_dim = 3,
            .mask = uly::mask::causal,
            .keep = keep};
}

layer_type layer_on(communicator c, uly::shape const& layer) {
    return {c, uly::sequence_local{}, uly::reference_attention{}, layer};
}

/// Runs `body(ranks, outcomes of this rank)` and checks that all ranks saw the same outcomes.
template <class Body>
std::vector<outcome> same_on_all(int ranks, Body const& body) {
    std::vector<std::vector<outcome>> all(static_cast<std::size_t>(ranks));
    run_ranks(ranks, [&](communicator c) { body(c, all[static_cast<std::size_t>(c.rank())]); });
    for (auto const& rank : all) {
        REQUIRE(rank.size() == all[0].size());
        for (std::size_t i = 0; i < rank.size(); ++i) {
            CHECK(rank[i].code == all[0][i].code);
            CHECK(rank[i].text == all[0][i].text);
        }
    }
    return all[0];
}

void check_error(outcome const& seen, std::string const& text) {
    CHECK(seen.code == uly::errc::invalid_call);
    CHECK(seen.text.find(text) != std::string::npos);
    if (seen.text.find(text) == std::string::npos) MESSAGE(seen.text);
}

void forward(layer_type& layer, uly::sequence const& step, context& saved,
             local_problem<double>& l) {
    layer.attend(step, saved, l.q, l.k, l.v, l.o);
}

}  // namespace

TEST_CASE("contexts: the keep policies give the same bits") {
    for (int ranks : {1, 3, 4}) {
        CAPTURE(ranks);
        auto p = make_problem<double>(1, with(uly::keep::exchanged), 2, 15);
        auto const kept = compute<uly::reference_attention>(p, zigzag(15, ranks));
        six_problem<double> six(2, with(uly::keep::exchanged), 2, 15, 7);
        auto const six_kept = six_steps(six, zigzag(15, ranks));
        for (auto const policy : policies) {
            p.layer.keep = six.layer.keep = policy;
            auto const again = compute<uly::reference_attention>(p, zigzag(15, ranks));
            CHECK(same_bits(again.o, kept.o));
            CHECK(same_bits(again.dq, kept.dq));
            CHECK(same_bits(again.dk, kept.dk));
            CHECK(same_bits(again.dv, kept.dv));
            auto const six_again = six_steps(six, zigzag(15, ranks));
            CHECK(same_bits(six_again.y, six_kept.y));
            CHECK(same_bits(six_again.dx, six_kept.dx));
            CHECK(six_again.gradients == six_kept.gradients);
        }
    }
}

TEST_CASE("contexts: a second forward into an unconsumed one is refused, the first one's backward "
          "is right") {
    for (auto const policy : policies)
        for (int ranks : {1, 4}) {
            CAPTURE(static_cast<int>(policy));
            CAPTURE(ranks);
            auto const p = make_problem<double>(1, with(policy), 1, 9);
            auto const longer = make_problem<double>(2, with(policy), 2, 40);
            auto const right = compute<uly::reference_attention>(p, equal_shares(9, ranks));
            results<double> whole(p);
            auto const seen = same_on_all(ranks, [&](communicator c,
                                                     std::vector<outcome>& outcomes) {
                auto layer = layer_on(c, p.layer);
                auto saved = layer.make_context();
                CHECK(!saved.filled());
                auto const step = uly::sequence::split(ranks, 1, 9);
                auto const long_step = uly::sequence::split(ranks, 2, 40);
                local_problem<double> local(p, step, c.rank()), other(longer, long_step, c.rank());
                forward(layer, step, saved, local);
                CHECK(saved.filled());
                outcomes.push_back(outcome_of([&] { forward(layer, step, saved, local); }));
                // One that needs more memory must not cost what the context holds.
                outcomes.push_back(outcome_of([&] { forward(layer, long_step, saved, other); }));
                CHECK(saved.filled());
                attend_backward(layer, step, saved, local);
                CHECK(!saved.filled());
                local.put_back_into(whole, step, c.rank());
            });
            for (auto const& each : seen)
                check_error(
                    each,
                    "ulysses: context: a forward call needs a consumed context: the last forward "
                    "still waits for its backward (or discard)");
            CHECK(same_bits(whole.o, right.o));
            CHECK(same_bits(whole.dq, right.dq));
            CHECK(same_bits(whole.dk, right.dk));
            CHECK(same_bits(whole.dv, right.dv));
        }
}

TEST_CASE("contexts: backward without its forward is refused, and says why") {
    for (int ranks : {1, 3}) {
        CAPTURE(ranks);
        auto const p = make_problem<double>(1, with(uly::keep::exchanged), 1, 9);
        auto const floats = converted<float>(p);
        auto const seen = same_on_all(ranks, [&](communicator c, std::vector<outcome>& outcomes) {
            auto layer = layer_on(c, p.layer);
            auto saved = layer.make_context();
            auto const step = uly::sequence::split(ranks, 1, 9);
            auto const other = ranks == 1 ? uly::sequence::of(1, orders{{{4, 5}, {0, 4}}})
                                          : uly::sequence::of(1, zigzag(9, ranks));
            local_problem<double> local(p, step, c.rank()), local_other(p, other, c.rank());
            local_problem<float> narrow(floats, step, c.rank());
            auto const caught = [&](auto const& body) { outcomes.push_back(outcome_of(body)); };
            caught([&] { attend_backward(layer, step, saved, local); });  // 0: empty
            forward(layer, step, saved, local);
            caught([&] { attend_backward(layer, other, saved, local_other); });  // 1: another step
            caught([&] { attend_backward(layer, step, saved, narrow); });        // 2: another type
            caught([&] {  // 3: operands again
                layer.attend_backward(step, saved, local.q, local.k, local.v, local.o, local.dout,
                                      local.dq, local.dk, local.dv);
            });
            caught([&] { attend_backward(layer, step, saved, local); });  // 4: right
            caught([&] { attend_backward(layer, step, saved, local); });  // 5: a second time
            forward(layer, step, saved, local);
            saved.discard();
            caught([&] { attend_backward(layer, step, saved, local); });  // 6: discarded
            caught([&] { forward(layer, step, saved, local); });          // 7: right
            caught([&] { attend_backward(layer, step, saved, local); });  // 8: right
        });
        std::string const empty = "ulysses: context: a backward call needs a forward call before "
                                  "it: the context is empty";
        check_error(seen[0], empty);
        check_error(seen[1],
                    "a backward call takes the step of its forward call: forward ran plan ");
        check_error(
            seen[2],
            "a backward call takes the element type of its forward call: forward ran float64, "
            "backward float32");
        check_error(seen[3], "ulysses: attend_backward: keep::exchanged has kept q, k, v and o: "
                             "they were given again");
        check_error(seen[5], empty);
        check_error(seen[6], empty);
        for (auto const i : {4u, 7u, 8u}) CHECK(seen[i].code == uly::errc::none);
    }
}

TEST_CASE("contexts: backward operands that the policy needs must be given") {
    for (auto const policy : {uly::keep::local, uly::keep::nothing}) {
        auto const p = make_problem<double>(1, with(policy), 1, 9);
        auto const seen = same_on_all(2, [&](communicator c, std::vector<outcome>& outcomes) {
            auto layer = layer_on(c, p.layer);
            auto saved = layer.make_context();
            auto const step = uly::sequence::split(2, 1, 9);
            local_problem<double> local(p, step, c.rank());
            forward(layer, step, saved, local);
            outcomes.push_back(outcome_of([&] {
                layer.attend_backward(step, saved, local.dout, local.dq, local.dk, local.dv);
            }));
        });
        check_error(seen[0],
                    "keep::local and keep::nothing need q, k, v and o again: they were not given");
    }
}

TEST_CASE("contexts: attend and forward, and their backwards, do not mix") {
    for (int ranks : {1, 2}) {
        six_problem<double> const p(1, with(uly::keep::exchanged), 1, 8, 7);
        auto const attended = make_problem<double>(1, p.layer, 1, 8);
        auto const seen = same_on_all(ranks, [&](communicator c, std::vector<outcome>& outcomes) {
            uly::pipeline layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer,
                                uly::dense{uly::builtin_gemm{}}};
            auto a = layer.make_context(), b = layer.make_context();
            auto const step = uly::sequence::split(ranks, 1, 8);
            auto const x = own_part(step.queries(), c.rank(), p.x);
            tensor<double> y(x.sizes), dx(x.sizes);
            auto gradients = p.parameters;
            local_problem<double> local(attended, step, c.rank());
            auto const weights = p.places().weights(p.parameters.data());
            layer.forward(step, a, token_operand(x), weights, token_operand(y));
            layer.attend(step, b, local.q, local.k, local.v, local.o);
            outcomes.push_back(outcome_of(
                [&] { layer.attend_backward(step, a, local.dout, local.dq, local.dk, local.dv); }));
            outcomes.push_back(outcome_of([&] {
                layer.backward(step, b, token_operand(x), weights, token_operand(y),
                               token_operand(dx), p.places().gradients(gradients.data()));
            }));
            CHECK(gradients == p.parameters);  // a refused backward adds nothing
        });
        check_error(
            seen[0],
            "backward belongs to forward, attend_backward to attend: forward was `forward`");
        check_error(seen[1],
                    "backward belongs to forward, attend_backward to attend: forward was `attend`");
    }
}

TEST_CASE("contexts: one that differs on one rank alone is the same error on all, and the group "
          "goes on") {
    auto const p = make_problem<double>(1, with(uly::keep::exchanged), 1, 9);
    auto const right = compute<uly::reference_attention>(p, equal_shares(9, 3));
    results<double> whole(p);
    auto const seen = same_on_all(3, [&](communicator c, std::vector<outcome>& outcomes) {
        auto layer = layer_on(c, p.layer);
        auto saved = layer.make_context(), second = layer.make_context();
        auto const step = uly::sequence::split(3, 1, 9);
        local_problem<double> local(p, step, c.rank());
        forward(layer, step, saved, local);
        if (c.rank() == 1) saved.discard();
        outcomes.push_back(outcome_of([&] { attend_backward(layer, step, saved, local); }));
        saved.discard();
        forward(layer, step, second, local);
        if (c.rank() != 1) second.discard();
        outcomes.push_back(outcome_of([&] { forward(layer, step, second, local); }));
        second.discard();
        forward(layer, step, saved, local);
        attend_backward(layer, step, saved, local);
        local.put_back_into(whole, step, c.rank());
    });
    check_error(seen[0], "the context is empty");
    CHECK(seen[0].rank == 1);
    check_error(seen[1], "still waits for its backward");
    CHECK(seen[1].rank == 1);
    CHECK(same_bits(whole.dq, right.dq));
    CHECK(same_bits(whole.dk, right.dk));
}

TEST_CASE("contexts: log_sum_exp is there while filled, and refused otherwise") {
    auto const p = make_problem<double>(1, with(uly::keep::nothing), 1, 9);
    run_ranks(1, [&](communicator c) {
        auto layer = layer_on(c, p.layer);
        auto saved = layer.make_context();
        auto const step = uly::sequence::split(1, 1, 9);
        local_problem<double> local(p, step, 0);
        auto const& moves = layer.planned(step);
        CHECK_THROWS_AS(static_cast<void>(saved.log_sum_exp<double>(moves, 0)), uly::invalid_call);
        forward(layer, step, saved, local);
        CHECK_THROWS_AS(static_cast<void>(saved.log_sum_exp<double>(moves, 0)), uly::invalid_call);
    });
}

TEST_CASE("contexts: one is reused over 20 steps whose lengths and orders grow and shrink") {
    constexpr std::uint64_t seed = 20;
    MESSAGE("seed " << seed);
    for (auto const policy : policies)
        for (int ranks : {1, 3}) {
            std::mt19937_64 random{seed};
            std::vector<problem<double>> problems;
            std::vector<uly::sequence> steps;
            std::vector<results<double>> right, whole;
            for (int i = 0; i < 20; ++i) {
                auto const length = 1 + below(random, i % 2 == 0 ? 40 : 10);
                problems.push_back(make_problem<double>(static_cast<std::uint64_t>(i), with(policy),
                                                        1 + below(random, 2), length));
                auto const order = random_orders(random, length, ranks);
                steps.push_back(uly::sequence::of(problems.back().batch, order));
                right.push_back(compute<uly::reference_attention>(problems.back(), order));
                whole.emplace_back(problems.back());
            }
            run_ranks(ranks, [&](communicator c) {
                auto layer = layer_on(c, problems[0].layer);
                auto saved = layer.make_context();
                for (std::size_t i = 0; i < steps.size(); ++i) {
                    local_problem<double> local(problems[i], steps[i], c.rank());
                    forward(layer, steps[i], saved, local);
                    attend_backward(layer, steps[i], saved, local);
                    local.put_back_into(whole[i], steps[i], c.rank());
                }
            });
            for (std::size_t i = 0; i < steps.size(); ++i) {
                CAPTURE(i);
                CHECK(same_bits(whole[i].o, right[i].o));
                CHECK(same_bits(whole[i].dq, right[i].dq));
                CHECK(same_bits(whole[i].dk, right[i].dk));
                CHECK(same_bits(whole[i].dv, right[i].dv));
            }
        }
}

TEST_CASE("contexts: two layers with two micro-batches each in flight, backward in any order") {
    for (auto const policy : policies)
        for (int ranks : {1, 4}) {
            std::vector<problem<double>> problems;
            std::vector<results<double>> right, whole;
            // Layer 0: problems 0 and 1; layer 1, of other heads: 2 and 3.
            for (std::uint64_t i = 0; i < 4; ++i) {
                auto layer = with(policy);
                if (i >= 2) layer.heads = 2;
                problems.push_back(make_problem<double>(i, layer, 1, i % 2 == 0 ? 12 : 7));
                right.push_back(compute<uly::reference_attention>(
                    problems.back(), equal_shares(problems.back().tokens, ranks)));
                whole.emplace_back(problems.back());
            }
            run_ranks(ranks, [&](communicator c) {
                std::vector<layer_type> layers;
                layers.push_back(layer_on(c, problems[0].layer));
                layers.push_back(layer_on(c, problems[2].layer));
                std::vector<context> saved(4);
                std::vector<uly::sequence> steps;
                std::vector<local_problem<double>> local;
                for (std::size_t i = 0; i < 4; ++i) {
                    steps.push_back(uly::sequence::split(ranks, 1, problems[i].tokens));
                    local.emplace_back(problems[i], steps[i], c.rank());
                }
                std::size_t const backward_orders[][4] = {{3, 1, 2, 0}, {0, 1, 2, 3}, {2, 0, 3, 1}};
                for (auto const& order : backward_orders) {
                    for (std::size_t i : {0u, 2u, 1u, 3u})
                        forward(layers[i / 2], steps[i], saved[i], local[i]);
                    for (auto const i : order) {
                        for (auto* x : {&local[i].dq, &local[i].dk, &local[i].dv}) x->poison();
                        attend_backward(layers[i / 2], steps[i], saved[i], local[i]);
                    }
                }
                for (std::size_t i = 0; i < 4; ++i)
                    local[i].put_back_into(whole[i], steps[i], c.rank());
            });
            for (std::size_t i = 0; i < 4; ++i) {
                CAPTURE(i);
                CHECK(same_bits(whole[i].o, right[i].o));
                CHECK(same_bits(whole[i].dq, right[i].dq));
                CHECK(same_bits(whole[i].dk, right[i].dk));
                CHECK(same_bits(whole[i].dv, right[i].dv));
            }
        }
}

TEST_CASE("contexts: the caller's tensors are free after a forward that keeps its own copy") {
    for (int ranks : {1, 2}) {
        auto const p = make_problem<double>(1, with(uly::keep::exchanged), 1, 9);
        auto const right = compute<uly::reference_attention>(p, equal_shares(9, ranks));
        results<double> whole(p);
        run_ranks(ranks, [&](communicator c) {
            auto layer = layer_on(c, p.layer);
            auto saved = layer.make_context();
            auto const step = uly::sequence::split(ranks, 1, 9);
            local_problem<double> local(p, step, c.rank());
            forward(layer, step, saved, local);
            for (auto* x : {&local.q, &local.k, &local.v, &local.o}) x->poison();
            attend_backward(layer, step, saved, local);
            local.put_back_into(whole, step, c.rank());
        });
        CHECK(same_bits(whole.dq, right.dq));
        CHECK(same_bits(whole.dk, right.dk));
        CHECK(same_bits(whole.dv, right.dv));
    }
}

TEST_CASE("contexts: ranks that use different contexts in one call get the same disagreement") {
    auto const p = make_problem<double>(1, with(uly::keep::exchanged), 1, 12);
    auto const seen = same_on_all(2, [&](communicator c, std::vector<outcome>& outcomes) {
        auto layer = layer_on(c, p.layer);
        auto const step = uly::sequence::split(2, 1, 12);
        local_problem<double> local(p, step, c.rank());
        auto one = layer.make_context(), other = layer.make_context();
        for (auto* saved : {&one, &other}) {
            forward(layer, step, *saved, local);
            saved->discard();
        }
        layer.attend(step, local.q, local.k, local.v, local.o);
        auto& mine = c.rank() == 0 ? one : other;
        outcomes.push_back(outcome_of([&] { forward(layer, step, mine, local); }));
        outcomes.push_back(outcome_of([&] {
            if (c.rank() == 0)
                layer.attend(step, local.q, local.k, local.v, local.o);
            else
                forward(layer, step, other, local);
        }));
        forward(layer, step, one, local);
    });
    for (auto const& each : seen) {
        CHECK(each.code == uly::errc::disagreement);
        CHECK(each.text.starts_with("ulysses: fence: every rank must pass the same context"));
    }
}

TEST_CASE("contexts: a pipeline made anew on one rank fits the others") {
    auto const p = make_problem<double>(1, with(uly::keep::exchanged), 1, 12);
    auto const right = compute<uly::reference_attention>(p, equal_shares(12, 2));
    results<double> whole(p);
    run_ranks(2, [&](communicator c) {
        auto const step = uly::sequence::split(2, 1, 12);
        local_problem<double> local(p, step, c.rank());
        auto layer = layer_on(c, p.layer);
        layer.attend(step, local.q, local.k, local.v, local.o);
        if (c.rank() == 0) layer = layer_on(c, p.layer);
        auto saved = layer.make_context();
        layer.attend(step, local.q, local.k, local.v, local.o);
        forward(layer, step, saved, local);
        attend_backward(layer, step, saved, local);
        local.put_back_into(whole, step, c.rank());
    });
    CHECK(same_bits(whole.o, right.o));
    CHECK(same_bits(whole.dq, right.dq));
}

TEST_CASE("contexts: one of another group is refused, moved ones go on") {
    auto const p = make_problem<double>(1, with(uly::keep::exchanged), 1, 12);
    auto const seen = same_on_all(2, [&](communicator c, std::vector<outcome>& outcomes) {
        auto const step = uly::sequence::split(2, 1, 12);
        local_problem<double> local(p, step, c.rank());
        auto layer = layer_on(c, p.layer), elsewhere = layer_on(c.split(0, c.rank()), p.layer);
        auto saved = layer.make_context();
        forward(layer, step, saved, local);
        outcomes.push_back(outcome_of([&] { attend_backward(elsewhere, step, saved, local); }));
        auto moved = std::move(saved);
        CHECK(moved.filled());
        CHECK(!saved.filled());
        attend_backward(layer, step, moved, local);
        outcomes.push_back(outcome_of([&] { forward(elsewhere, step, moved, local); }));
        forward(layer, step, saved, local);
    });
    for (auto const& each : seen)
        check_error(each, "a context belongs to the group of its first call");
}
