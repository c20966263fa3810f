// SPDX-License-Identifier: Apache-2.0

#include "six_steps.hpp"

#include <doctest/doctest.h>

#include <chrono>
#include <functional>

using namespace pipeline_test;
namespace uly = ulysses;

/// Wrong input never hangs a group, moves nothing, and is the same typed error on every rank; the
/// group works afterwards.
namespace {

using communicator = uly::threads::communicator;
using layer_type = uly::pipeline<communicator, uly::sequence_local, uly::reference_attention>;
using view = uly::token_view<double>;

constexpr uly::shape gqa{
    .heads = 6, .kv_heads = 2, .head_dim = 4, .value_dim = 3, .mask = uly::mask::causal};

/// Operands as views, for a test to break.
struct views {
    view q, k, v, o, dout, dq, dk, dv;
    explicit views(local_problem<double> const& l) {
        auto const of = [](tensor<double> const& x) { return view{x.data(), x.sizes}; };
        q = of(l.q), k = of(l.k), v = of(l.v), o = of(l.o);
        dout = of(l.dout), dq = of(l.dq), dk = of(l.dk), dv = of(l.dv);
    }
};

struct broken_call {
    char const* name;
    std::function<void(views&)> spoil;
    char const* text;
    bool backward = false;
};

void call(layer_type& layer, uly::sequence const& step, layer_type::context_type& saved,
          views const& x, bool backward) {
    if (backward)
        layer.attend_backward(step, saved, x.dout, x.dq, x.dk, x.dv, {}, {}, uly::where{});
    else
        layer.attend(step, x.q, x.k, x.v, x.o, {}, uly::where{});
}

/// Spoils the operands of rank 1 (or of the only one), expects `text` on every rank, then runs
/// rightly.
void check_broken(broken_call const& test, int ranks) {
    CAPTURE(test.name);
    CAPTURE(ranks);
    auto const p = make_problem<double>(1, gqa, 2, 12);
    auto const deal = equal_shares(12, ranks);
    auto const step = uly::sequence::of(2, deal);
    results<double> whole(p);
    std::vector<outcome> seen(static_cast<std::size_t>(ranks));
    run_ranks(ranks, [&](communicator c) {
        layer_type layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer};
        auto saved = layer.make_context();
        local_problem<double> local(p, step, c.rank());
        if (test.backward) layer.attend(step, saved, local.q, local.k, local.v, local.o);
        auto const untouched = local;
        views x(local);
        if (c.rank() == ranks - 1) test.spoil(x);
        seen[static_cast<std::size_t>(c.rank())] =
            outcome_of([&] { call(layer, step, saved, x, test.backward); });
        for (auto const& [now, before] : {std::pair{&local.o, &untouched.o},
                                          {&local.dq, &untouched.dq},
                                          {&local.dk, &untouched.dk},
                                          {&local.dv, &untouched.dv},
                                          {&local.q, &untouched.q},
                                          {&local.dout, &untouched.dout}})
            if (!same_bits(*now, *before))
                seen[static_cast<std::size_t>(c.rank())].text += " (something moved)";
        if (!test.backward) layer.attend(step, saved, local.q, local.k, local.v, local.o);
        attend_backward(layer, step, saved, local);
        local.put_back_into(whole, step, c.rank());
    });
    for (auto const& each : seen) {
        CHECK(each.code == uly::errc::invalid_tensor);
        CHECK(each.text ==
              test.text + (ranks == 1 ? std::string() : uly::concat(" (rank ", ranks - 1, ")")));
        CHECK(each.rank == ranks - 1);
    }
    auto const right = compute<uly::reference_attention>(p, deal);
    CHECK(same_bits(whole.o, right.o));
    CHECK(same_bits(whole.dq, right.dq));
    CHECK(same_bits(whole.dk, right.dk));
    CHECK(same_bits(whole.dv, right.dv));
}

#define FIT "extents [batch, tokens, heads, dim] must fit the step and shape: got "

}  // namespace

TEST_CASE("bad input: extents of every operand") {
    // Rank 2 of 3 holds 4 of the 12 tokens.
    broken_call const tests[] = {
        {"q tokens", [](views& x) { x.q.extents[1] = 12; },
         "ulysses: attend: q: " FIT "[2, 12, 6, 4], expected [2, 4, 6, 4]"},
        {"q heads", [](views& x) { x.q.extents[2] = 2; },
         "ulysses: attend: q: " FIT "[2, 4, 2, 4], expected [2, 4, 6, 4]"},
        {"k heads", [](views& x) { x.k.extents[2] = 6; },
         "ulysses: attend: k: " FIT "[2, 4, 6, 4], expected [2, 4, 2, 4]"},
        {"k dim", [](views& x) { x.k.extents[3] = 3; },
         "ulysses: attend: k: " FIT "[2, 4, 2, 3], expected [2, 4, 2, 4]"},
        {"v batch", [](views& x) { x.v.extents[0] = 1; },
         "ulysses: attend: v: " FIT "[1, 4, 2, 3], expected [2, 4, 2, 3]"},
        {"o dim", [](views& x) { x.o.extents[3] = 4; },
         "ulysses: attend: o: " FIT "[2, 4, 6, 4], expected [2, 4, 6, 3]"},
        {"dout", [](views& x) { x.dout.extents[1] = 3; },
         "ulysses: attend_backward: dout: " FIT "[2, 3, 6, 3], expected [2, 4, 6, 3]", true},
        {"dq", [](views& x) { x.dq.extents[1] = 3; },
         "ulysses: attend_backward: dq: " FIT "[2, 3, 6, 4], expected [2, 4, 6, 4]", true},
        {"dk", [](views& x) { x.dk.extents[2] = 6; },
         "ulysses: attend_backward: dk: " FIT "[2, 4, 6, 4], expected [2, 4, 2, 4]", true},
        {"dv", [](views& x) { x.dv.extents[3] = 4; },
         "ulysses: attend_backward: dv: " FIT "[2, 4, 2, 4], expected [2, 4, 2, 3]", true},
    };
    for (auto const& test : tests) check_broken(test, 3);
}

TEST_CASE("bad input: null data, strides, overlaps") {
    broken_call const tests[] = {
        {"null q", [](views& x) { x.q.data = nullptr; },
         "ulysses: attend: q: data must not be null: extents [2, 4, 6, 4]"},
        {"null o", [](views& x) { x.o.data = nullptr; },
         "ulysses: attend: o: data must not be null: extents [2, 4, 6, 3]"},
        {"inner stride", [](views& x) { x.k.strides[3] = 2; },
         "ulysses: attend: k: the dim axis must be contiguous: stride 2, expected 1"},
        {"negative stride", [](views& x) { x.v.strides[1] = -6; },
         "ulysses: attend: v: strides must not be negative: strides [24, -6, 3, 1]"},
        {"o overlaps itself", [](views& x) { x.o.strides[1] = 17; },
         "ulysses: attend: o: elements of an output must not overlap: extents [2, 4, 6, 3], "
         "strides "
         "[72, 17, 3, 1]"},
        {"o broadcast", [](views& x) { x.o.strides[0] = 0; },
         "ulysses: attend: o: elements of an output must not overlap: extents [2, 4, 6, 3], "
         "strides "
         "[0, 18, 3, 1]"},
        {"o on q", [](views& x) { x.o.data = x.q.data; },
         "ulysses: attend: o: an output must not overlap another operand: o overlaps q"},
        {"o in the middle of q", [](views& x) { x.o.data = x.q.data + 50; },
         "ulysses: attend: o: an output must not overlap another operand: o overlaps q"},
        {"o on v", [](views& x) { x.v.data = x.o.data; },
         "ulysses: attend: o: an output must not overlap another operand: o overlaps v"},
        {"dq on dk", [](views& x) { x.dk.data = x.dq.data + 3; },
         "ulysses: attend_backward: dq: an output must not overlap another operand: dq overlaps dk",
         true},
        {"dk on dv", [](views& x) { x.dv.data = x.dk.data; },
         "ulysses: attend_backward: dk: an output must not overlap another operand: dk overlaps dv",
         true},
        {"dq on dout", [](views& x) { x.dq.data = x.dout.data; },
         "ulysses: attend_backward: dq: an output must not overlap another operand: dq overlaps "
         "dout",
         true},
        {"null dout", [](views& x) { x.dout.data = nullptr; },
         "ulysses: attend_backward: dout: data must not be null: extents [2, 4, 6, 3]", true},
        {"dv overlaps itself", [](views& x) { x.dv.strides[2] = 0; },
         "ulysses: attend_backward: dv: elements of an output must not overlap: extents [2, 4, 2, "
         "3], "
         "strides [24, 6, 0, 1]",
         true},
    };
    for (auto const& test : tests) check_broken(test, 3);
}

TEST_CASE("bad input: on one rank as on many") {
    check_broken({"q tokens", [](views& x) { x.q.extents[1] = 11; },
                  "ulysses: attend: q: " FIT "[2, 11, 6, 4], expected [2, 12, 6, 4]"},
                 1);
    check_broken({"dq on dout", [](views& x) { x.dq.data = x.dout.data; },
                  "ulysses: attend_backward: dq: an output must not overlap another operand: dq "
                  "overlaps dout",
                  true},
                 1);
}

TEST_CASE("bad input: gradients over operands that backward reads again") {
    // Under keep::local o is read while dq is written, when nothing is exchanged.
    auto const with_keep = [] {
        auto layer = gqa;
        layer.keep = uly::keep::local;
        layer.value_dim = 4;
        return layer;
    }();
    auto const p = make_problem<double>(1, with_keep, 1, 6);
    run_ranks(1, [&](communicator c) {
        layer_type layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer};
        auto saved = layer.make_context();
        auto const step = uly::sequence::split(1, 1, 6);
        local_problem<double> l(p, step, 0);
        layer.attend(step, saved, l.q, l.k, l.v, l.o);
        struct overlap {
            tensor<double>*output, *input;
            char const* text;
        };
        for (auto const& [output, input, text] :
             {overlap{&l.dq, &l.o, "dq overlaps o"}, {&l.dq, &l.q, "dq overlaps q"}}) {
            view const on{input->data(), output->sizes};
            auto const seen = outcome_of([&] {
                layer.attend_backward(step, saved, l.q, l.k, l.v, l.o, l.dout, on, l.dk, l.dv);
            });
            CHECK(seen.code == uly::errc::invalid_tensor);
            CHECK(seen.text.find(text) != std::string::npos);
        }
    });
}

TEST_CASE("bad input: a rank that passes S tokens instead of its share (case 19)") {
    std::vector<outcome> seen(4);
    auto const p = make_problem<double>(1, gqa, 1, 16);
    results<double> whole(p);
    auto const start = std::chrono::steady_clock::now();
    run_ranks(4, [&](communicator c) {
        layer_type layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer};
        auto const step = uly::sequence::agree(c, {.batch = 1, .tokens = 4});
        local_problem<double> local(p, step, c.rank());
        auto saved = layer.make_context();
        // All of q, as an engine that forgot to shard would.
        auto const& q = c.rank() == 2 ? p.q : local.q;
        seen[static_cast<std::size_t>(c.rank())] =
            outcome_of([&] { layer.attend(step, saved, q, local.k, local.v, local.o); });
        layer.attend(step, saved, local.q, local.k, local.v, local.o);
        attend_backward(layer, step, saved, local);
        local.put_back_into(whole, step, c.rank());
    });
    for (auto const& each : seen) {
        CHECK(each.code == uly::errc::invalid_tensor);
        CHECK(each.text == seen[0].text);
        CHECK(each.text.find("ulysses: attend: q: " FIT "[1, 16, 6, 4], expected [1, 4, 6, 4] [") ==
              0);
        CHECK(each.text.find("(rank 2)") != std::string::npos);
        CHECK(each.rank == 2);
    }
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(60));
    CHECK(same_bits(whole.o, compute_alone<uly::reference_attention>(p).o));
}

TEST_CASE("bad input: six steps check x, y, dy and dx") {
    six_problem<double> const p(1, gqa, 1, 8, 5);
    auto const right = six_steps(p, equal_shares(8, 2));
    six_results<double> whole(p, 2);
    struct broken_six {
        std::size_t operand;
        std::function<void(token_operand<double>&)> spoil;
        char const* text;
    };
    broken_six const tests[] = {
        {0, [](auto& x) { x.sizes[1] = 8; },
         "ulysses: forward: x: " FIT "[1, 8, 1, 5], expected [1, 4, 1, 5]"},
        {0, [](auto& x) { x.memory = nullptr; }, "ulysses: forward: x: data must not be null"},
        {1, [](auto& x) { x.sizes[2] = 4; },
         "ulysses: forward: y: " FIT "[1, 4, 1, 4], expected [1, 4, 1, 5]"},
        {2, [](auto& x) { x.sizes[0] = 2; },
         "ulysses: backward: dy: " FIT "[2, 4, 1, 5], expected [1, 4, 1, 5]"},
        {3, [](auto& x) { x.sizes[1] = 3; },
         "ulysses: backward: dx: " FIT "[1, 3, 1, 5], expected [1, 4, 1, 5]"},
    };
    for (auto const& test : tests) {
        CAPTURE(test.text);
        std::vector<outcome> seen(2);
        run_ranks(2, [&](communicator c) {
            uly::pipeline layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer,
                                uly::dense{uly::builtin_gemm{}}};
            auto const step = uly::sequence::split(2, 1, 8);
            auto const x = own_part(step.queries(), c.rank(), p.x),
                       dy = own_part(step.queries(), c.rank(), p.dy);
            tensor<double> y(x.sizes), dx(x.sizes);
            auto const weights = p.places().weights(p.parameters.data());
            std::vector<double> gradients(p.parameters.size());
            auto saved = layer.make_context();
            token_operand<double> all[] = {token_operand(x), token_operand(y), token_operand(dy),
                                           token_operand(dx)};
            auto const good = std::to_array(all);
            if (c.rank() == 1) test.spoil(all[test.operand]);
            auto const forward = [&](auto const& t) {
                layer.forward(step, saved, t[0], weights, t[1]);
            };
            auto const backward = [&](auto const& t) {
                layer.backward(step, saved, t[0], weights, t[2], t[3],
                               p.places().gradients(gradients.data()));
            };
            auto& mine = seen[static_cast<std::size_t>(c.rank())];
            if (test.operand < 2) mine = outcome_of([&] { forward(all); });
            forward(good);
            if (test.operand >= 2) mine = outcome_of([&] { backward(all); });
            backward(good);
            put_back(step.queries(), c.rank(), y, whole.y);
            put_back(step.queries(), c.rank(), dx, whole.dx);
        });
        for (auto const& each : seen) {
            CHECK(each.code == uly::errc::invalid_tensor);
            CHECK(each.text.find(test.text) == 0);
            CHECK(each.text == seen[0].text);
        }
        CHECK(same_bits(whole.y, right.y));
        CHECK(same_bits(whole.dx, right.dx));
    }
}

TEST_CASE("bad input: shapes and features, when the pipeline is made") {
    auto const made = [](uly::shape const& layer) {
        return outcome_of([&] {
            uly::pipeline{uly::serial{}, uly::sequence_local{}, uly::reference_attention{}, layer};
        });
    };
    auto const check = [](outcome const& seen, uly::errc code, char const* text) {
        CHECK(seen.code == code);
        CHECK(seen.text.find(text) == 0);
        if (seen.text.find(text) != 0) MESSAGE(seen.text);
    };
    check(
        made({.heads = 6, .kv_heads = 4, .head_dim = 8}), uly::errc::invalid_shape,
        "ulysses: shape: kv_heads must divide heads: heads 6, kv_heads 4, head_dim 8, value_dim 0");
    check(made({.heads = 0, .head_dim = 8}), uly::errc::invalid_shape,
          "ulysses: shape: heads must lie in 1 .. 2^31 - 1: heads 0");
    check(made({.heads = 2}), uly::errc::invalid_shape,
          "ulysses: shape: head_dim must lie in 1 .. 2^31 - 1");
}

namespace {

/// The reference with some features taken away.
template <uly::attention_features Has>
struct limited_attention : uly::reference_attention {
    static constexpr auto features = Has;
};

template <uly::attention_features Has>
outcome made_with(uly::shape const& layer, int ranks) {
    outcome seen;
    run_ranks(ranks, [&](communicator c) {
        auto const mine = outcome_of([&] {
            uly::pipeline{c, uly::sequence_local{}, limited_attention<Has>{}, layer};
        });
        if (c.rank() == 0) seen = mine;
    });
    return seen;
}

constexpr auto all_features = uly::reference_attention::features;
constexpr auto without(bool uly::attention_features::*feature) {
    auto has = all_features;
    has.*feature = false;
    return has;
}

}  // namespace

TEST_CASE("bad input: a feature that the functor lacks is named") {
    auto const check = [](outcome const& seen, std::string const& feature) {
        CHECK(seen.code == uly::errc::unsupported);
        auto const text =
            "ulysses: pipeline: the attention functor lacks a feature the layer asks for: " +
            feature + " [";
        CHECK(seen.text.substr(0, text.size()) == text);
    };
    using features = uly::attention_features;
    check(made_with<without(&features::causal)>(
              {.heads = 2, .head_dim = 4, .mask = uly::mask::causal}, 1),
          "causal");
    check(made_with<without(&features::full)>({.heads = 2, .head_dim = 4}, 1), "full");
    check(made_with<without(&features::grouped)>({.heads = 2, .kv_heads = 1, .head_dim = 4}, 1),
          "grouped");
    check(made_with<without(&features::value_dim)>({.heads = 2, .head_dim = 4, .value_dim = 5}, 1),
          "value_dim");
    check(made_with<without(&features::row_range)>({.heads = 3, .head_dim = 4}, 2),
          "row_range (or use assignment::whole_heads)");
    // What it says helps; and so does a number of ranks that divides the heads.
    CHECK(made_with<without(&features::row_range)>(
              {.heads = 3, .head_dim = 4, .assignment = uly::assignment::whole_heads}, 2)
              .code == uly::errc::none);
    CHECK(made_with<without(&features::row_range)>({.heads = 4, .head_dim = 4}, 2).code ==
          uly::errc::none);
}

TEST_CASE("bad input: token orders that do not cover the sequence once") {
    auto const agreed = [](int ranks, std::function<uly::sequence_options(int)> const& options) {
        std::vector<outcome> seen(static_cast<std::size_t>(ranks));
        run_ranks(ranks, [&](communicator c) {
            seen[static_cast<std::size_t>(c.rank())] = outcome_of([&] {
                static_cast<void>(uly::sequence::agree(c, options(c.rank()), uly::where{}));
            });
        });
        for (auto const& each : seen) CHECK(each.text == seen[0].text);
        return seen[0];
    };
    static constexpr uly::token_run low{0, 4}, high{4, 4}, middle{3, 4}, late{5, 4};
    auto const order = [](uly::token_run const& run) {
        return uly::sequence_options{.batch = 1, .tokens = run.count, .order = {&run, 1}};
    };
    auto seen = agreed(2, [&](int r) { return order(r == 0 ? low : middle); });
    CHECK(seen.code == uly::errc::invalid_sequence);
    CHECK(
        seen.text ==
        "ulysses: sequence: ranks must cover the sequence exactly once: token held twice: 3 of 8");
    seen = agreed(2, [&](int r) { return order(r == 0 ? low : late); });
    CHECK(seen.code == uly::errc::invalid_sequence);
    CHECK(seen.text == "ulysses: sequence: runs must lie within the sequence: rank 1 has run "
                       "{begin 5, count 4, stride 1} of 8 "
                       "tokens");
    seen = agreed(2, [&](int r) {
        auto mine = order(r == 0 ? low : high);
        mine.tokens += r;
        return mine;
    });
    CHECK(seen.text ==
          "ulysses: sequence: an order must list the rank's tokens: rank 1 has 5 tokens, its order "
          "lists 4");
    seen = agreed(
        3, [&](int r) { return uly::sequence_options{.batch = r == 2 ? 2 : 1, .tokens = 4}; });
    CHECK(seen.code == uly::errc::disagreement);
    CHECK(seen.text ==
          "ulysses: sequence: batch must be equal on every rank: rank 0 has 1, rank 2 has 2");
}

TEST_CASE("bad input: a step of another number of ranks") {
    auto const p = make_problem<double>(1, gqa, 1, 9);
    auto const right = compute<uly::reference_attention>(p, equal_shares(9, 3));
    // On every rank, and on one alone: the others must not wait for it in another place.
    for (int culprit : {-1, 0, 2}) {
        CAPTURE(culprit);
        results<double> whole(p);
        std::vector<outcome> seen(3);
        run_ranks(3, [&](communicator c) {
            layer_type layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer};
            auto saved = layer.make_context();
            auto const step = uly::sequence::split(3, 1, 9);
            auto const wrong = uly::sequence::split(4, 1, 9);
            local_problem<double> local(p, step, c.rank());
            auto const& mine = culprit < 0 || culprit == c.rank() ? wrong : step;
            for (int again = 0; again < 2; ++again)
                seen[static_cast<std::size_t>(c.rank())] = outcome_of(
                    [&] { layer.attend(mine, saved, local.q, local.k, local.v, local.o); });
            layer.attend(step, saved, local.q, local.k, local.v, local.o);
            attend_backward(layer, step, saved, local);
            local.put_back_into(whole, step, c.rank());
        });
        for (auto const& each : seen) {
            CHECK(each.code == uly::errc::invalid_sequence);
            CHECK(each.text == seen[0].text);
            CHECK(each.rank == std::max(culprit, 0));
            CHECK(each.text.find("ulysses: plan: the sequence must name the group's ranks: "
                                 "sequence of 4 ranks, group of 3") == 0);
        }
        CHECK(same_bits(whole.o, right.o));
        CHECK(same_bits(whole.dk, right.dk));
    }
}

TEST_CASE(
    "bad input: ranks that disagree about step, shape or call get the same error, and go on") {
    auto const p = make_problem<double>(1, gqa, 1, 9);
    auto const right = compute<uly::reference_attention>(p, equal_shares(9, 3));
    enum class fault { step, longer_step, shape, kind, type };
    auto const named = [](fault what) -> std::string_view {
        switch (what) {
            case fault::step: return "token orders and packing: plan of rank 0 is ";
            case fault::longer_step: return "queries: rank 0 has 9, rank 1 has 90";
            case fault::shape: return "scale: rank 0 has 1 / sqrt(head_dim), rank 1 has 0.125";
            case fault::kind: return "call: rank 0 has attend, rank 1 has attend_backward";
            case fault::type: return "element type: rank 0 has float64, rank 1 has float32";
        }
        return {};
    };
    for (auto const what :
         {fault::step, fault::longer_step, fault::shape, fault::kind, fault::type})
        for (bool const warm : {false, true}) {
            CAPTURE(static_cast<int>(what));
            CAPTURE(warm);
            if (!plans_may_differ && warm && (what == fault::step || what == fault::type)) continue;
            results<double> whole(p);
            std::vector<outcome> seen(3);
            run_ranks(3, [&](communicator c) {
                layer_type layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer};
                auto scaled = p.layer;
                scaled.scale = 0.125;
                layer_type other{c, uly::sequence_local{}, uly::reference_attention{}, scaled};
                auto saved = layer.make_context(), other_saved = layer.make_context();
                auto const step = uly::sequence::split(3, 1, 9);
                local_problem<double> local(p, step, c.rank());
                // Warm: windows exist. Cold: they are to be made in the very call that goes wrong.
                if (warm)
                    for (auto* context : {&saved, &other_saved}) {
                        layer.attend(step, *context, local.q, local.k, local.v, local.o);
                        if (context == &saved) attend_backward(layer, step, saved, local);
                    }
                auto& mine = seen[static_cast<std::size_t>(c.rank())];
                auto const attend = [&](auto& pipeline, uly::sequence const& with, auto const& l) {
                    mine = outcome_of([&] { pipeline.attend(with, saved, l.q, l.k, l.v, l.o); });
                };
                if (c.rank() != 1) {
                    attend(layer, step, local);
                } else if (what == fault::step || what == fault::longer_step) {
                    auto const tokens = what == fault::step ? 9 : 90;
                    auto const longer = make_problem<double>(2, gqa, 1, tokens);
                    auto const wrong = uly::sequence::of(1, zigzag(tokens, 3));
                    attend(layer, wrong, local_problem<double>(longer, wrong, 1));
                } else if (what == fault::shape) {
                    attend(other, step, local);
                } else if (what == fault::kind) {
                    mine = outcome_of(
                        [&] { attend_backward(layer, step, warm ? other_saved : saved, local); });
                } else {
                    local_problem<float> const narrow(converted<float>(p), step, 1);
                    mine = outcome_of(
                        [&] { layer.attend(step, saved, narrow.q, narrow.k, narrow.v, narrow.o); });
                }
                layer.attend(step, saved, local.q, local.k, local.v, local.o);
                attend_backward(layer, step, saved, local);
                local.put_back_into(whole, step, c.rank());
            });
            auto const empty_context = what == fault::kind && !warm;
            for (auto const& each : seen) {
                CHECK(each.code ==
                      (empty_context ? uly::errc::invalid_call : uly::errc::disagreement));
                CHECK(each.text == seen[0].text);
                CHECK(each.rank == 1);
                if (!empty_context) {
                    CAPTURE(each.text);
                    CHECK(each.text.starts_with("ulysses: fence: every rank must pass the same "));
                    CHECK(each.text.find(named(what)) != std::string::npos);
                }
            }
            CHECK(same_bits(whole.o, right.o));
            CHECK(same_bits(whole.dq, right.dq));
            CHECK(same_bits(whole.dk, right.dk));
        }
}

TEST_CASE("bad input: ranks out of step in calls get the same error") {
    auto const p = make_problem<double>(1, gqa, 1, 9);
    std::vector<outcome> seen(2);
    run_ranks(2, [&](communicator c) {
        layer_type layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer};
        auto const step = uly::sequence::split(2, 1, 9);
        local_problem<double> local(p, step, c.rank());
        layer.attend(step, local.q, local.k, local.v, local.o);
        if (c.rank() == 1) static_cast<void>(c.begin_call());  // a call that rank 0 did not make
        seen[static_cast<std::size_t>(c.rank())] =
            outcome_of([&] { layer.attend(step, local.q, local.k, local.v, local.o); });
        layer.attend(step, local.q, local.k, local.v, local.o);  // in step again
    });
    for (auto const& each : seen) {
        CHECK(each.code == uly::errc::disagreement);
        CHECK(each.text == "ulysses: fence: ranks must make the same calls in the same order: rank "
                           "0 is in call 2, "
                           "rank 1 in call 3");
    }
}

namespace {

/// The reference, that throws on one rank when told to.
struct throwing_attention : uly::reference_attention {
    int const* rank = nullptr;
    int const* mode =
        nullptr;  // 0: never, 1: forward, 2: backward, 3: something that is no exception

    template <class T>
    void forward(uly::attention_call const& call, uly::head_view<T const> q,
                 uly::head_view<T const> k, uly::head_view<T const> v, uly::head_view<T> o,
                 uly::head_view<uly::accumulator_t<T>> lse) const {
        if (*rank == 1 && *mode == 1) throw std::runtime_error("no kernel for this shape");
        if (*rank == 1 && *mode == 3) throw 42;
        uly::reference_attention::forward<T>(call, q, k, v, o, lse);
    }
    template <class T>
    void backward(uly::attention_call const& call,
                  uly::attention_backward_views<T> const& views) const {
        if (*rank == 1 && *mode == 2) throw std::runtime_error("no kernel for this shape");
        uly::reference_attention::backward<T>(call, views);
    }
};

}  // namespace

TEST_CASE(
    "bad input: an exception in a functor on one rank is functor_failed on all, who then go on") {
    auto const p = make_problem<double>(1, gqa, 1, 9);
    for (int ranks : {1, 3}) {
        auto const right = compute<uly::reference_attention>(p, equal_shares(9, ranks));
        results<double> whole(p);
        std::vector<std::vector<outcome>> seen(static_cast<std::size_t>(ranks));
        run_ranks(ranks, [&](communicator c) {
            int const rank = ranks == 1 ? 1 : c.rank();
            int mode = 0;
            throwing_attention attention;
            attention.rank = &rank;
            attention.mode = &mode;
            uly::pipeline layer{c, uly::sequence_local{}, attention, p.layer};
            auto saved = layer.make_context();
            auto const step = uly::sequence::split(ranks, 1, 9);
            local_problem<double> local(p, step, c.rank());
            auto& mine = seen[static_cast<std::size_t>(c.rank())];
            auto const forward = [&] {
                layer.attend(step, saved, local.q, local.k, local.v, local.o);
            };
            for (int const now : {1, 3}) {
                mode = now;
                mine.push_back(outcome_of(forward));
            }
            mode = 0;
            forward();
            mode = 2;
            mine.push_back(outcome_of([&] { attend_backward(layer, step, saved, local); }));
            mode = 0;
            // The context is still there to try again, and what failed is forgotten: nothing more is
            // written to its gradients.
            local_problem<double> again(p, step, c.rank());
            auto const untouched = local;
            attend_backward(layer, step, saved, again);
            for (auto const& [now, before] : {std::pair{&local.dq, &untouched.dq},
                                              {&local.dk, &untouched.dk},
                                              {&local.dv, &untouched.dv}})
                if (!same_bits(*now, *before)) mine.push_back({{}, "written to again", -1});
            again.o = local.o;
            again.put_back_into(whole, step, c.rank());
        });
        std::string const suffix = ranks == 1 ? "" : " (rank 1)";
        for (auto const& each : seen) {
            REQUIRE(each.size() == 3);
            for (auto const i : {0u, 2u}) {
                CHECK(each[i].code == uly::errc::functor_failed);
                // The call by which it was made, and where.
                auto const call = i == 0 ? "attend" : "attend_backward";
                CHECK(each[i].text.find(uly::concat(
                          "ulysses: ", call, ": a functor threw: no kernel for this shape [")) ==
                      0);
                if (i == 0) CHECK(each[i].text.find(__FILE__) != std::string::npos);
                CHECK(each[i].text.ends_with("]" + suffix));
            }
            CHECK(each[1].text.find(
                      "ulysses: attend: a functor threw: what is of unknown type [") == 0);
        }
        CHECK(same_bits(whole.o, right.o));
        CHECK(same_bits(whole.dq, right.dq));
        CHECK(same_bits(whole.dk, right.dk));
        CHECK(same_bits(whole.dv, right.dv));
    }
}

TEST_CASE(
    "bad input: whatever one rank passes otherwise is named, with both values, on every rank") {
    struct difference {
        char const* name;
        uly::shape layer;
        int64_t batch = 2, tokens = 12;
        std::string values;
    };
    uly::shape const usual{.heads = 4, .kv_heads = 2, .head_dim = 4, .value_dim = 6, .scale = 0.5};
    auto const with = [&](auto const& change) {
        auto layer = usual;
        change(layer);
        return layer;
    };
    for (auto const& test : {
             difference{"heads", with([](auto& l) { l.heads = 8; }), 2, 12,
                        "rank 0 has 4, rank 1 has 8"},
             difference{"kv_heads", with([](auto& l) { l.kv_heads = 4; }), 2, 12,
                        "rank 0 has 2, rank 1 has 4"},
             difference{"head_dim", with([](auto& l) { l.head_dim = 5; }), 2, 12,
                        "rank 0 has 4, rank 1 has 5"},
             difference{"value_dim", with([](auto& l) { l.value_dim = 7; }), 2, 12,
                        "rank 0 has 6, rank 1 has 7"},
             difference{"mask", with([](auto& l) { l.mask = uly::mask::causal; }), 2, 12,
                        "rank 0 has full, rank 1 has causal"},
             difference{"assignment",
                        with([](auto& l) { l.assignment = uly::assignment::whole_heads; }), 2, 12,
                        "rank 0 has balanced, rank 1 has whole_heads"},
             difference{"keep", with([](auto& l) { l.keep = uly::keep::local; }), 2, 12,
                        "rank 0 has exchanged, rank 1 has local"},
             difference{"scale", with([](auto& l) { l.scale = 0.5000000000000001; }), 2, 12,
                        "rank 0 has 0.5, rank 1 has 0.50000000000000011"},
             difference{"scale", with([](auto& l) { l.scale = {}; }), 2, 12,
                        "rank 0 has 0.5, rank 1 has 1 / sqrt(head_dim)"},
             difference{"batch", usual, 3, 12, "rank 0 has 2, rank 1 has 3"},
             difference{"queries", usual, 2, 15, "rank 0 has 12, rank 1 has 15"},
         }) {
        CAPTURE(test.name);
        std::vector<outcome> seen(3);
        run_ranks(3, [&](communicator c) {
            auto const odd = c.rank() == 1;
            auto const p = odd ? make_problem<double>(1, test.layer, test.batch, test.tokens)
                               : make_problem<double>(1, usual, 2, 12);
            layer_type layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer};
            auto saved = layer.make_context();
            auto const step = uly::sequence::split(3, p.batch, p.tokens);
            local_problem<double> local(p, step, c.rank());
            seen[static_cast<std::size_t>(c.rank())] =
                outcome_of([&] { layer.attend(step, saved, local.q, local.k, local.v, local.o); });
        });
        for (auto const& each : seen) {
            CHECK(each.code == uly::errc::disagreement);
            CHECK(each.rank == 1);
            CHECK(each.text == uly::concat("ulysses: fence: every rank must pass the same ",
                                           test.name, ": ", test.values));
        }
    }
}

TEST_CASE("bad input: an exception in an epilogue before the fence is everybody's") {
    struct throwing_epilogue {
        int rank;
        bool const* armed;
        void forward(uly::projection_call const&, view, view) const {
            if (rank == 1 && *armed) throw std::runtime_error("no table for this position");
        }
        static void backward(uly::projection_call const&, view, view) {}
    };
    six_problem<double> const p(1, gqa, 1, 8, 5);
    std::vector<outcome> seen(2);
    std::vector<int> done(2);
    run_ranks(2, [&](communicator c) {
        bool armed = true;
        uly::pipeline layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer,
                            uly::dense{uly::builtin_gemm{}, throwing_epilogue{c.rank(), &armed}}};
        auto const step = uly::sequence::split(2, 1, 8);
        auto const x = own_part(step.queries(), c.rank(), p.x);
        tensor<double> y(x.sizes);
        auto const forward = [&] {
            layer.forward(step, token_operand(x), p.places().weights(p.parameters.data()),
                          token_operand(y));
        };
        seen[static_cast<std::size_t>(c.rank())] = outcome_of(forward);
        armed = false;
        forward();
        done[static_cast<std::size_t>(c.rank())] = 1;
    });
    for (auto const& each : seen) {
        CHECK(each.code == uly::errc::functor_failed);
        CHECK(each.text.find("ulysses: forward: a functor threw: no table for this position [") ==
              0);
    }
    CHECK(done == std::vector<int>{1, 1});
}

TEST_CASE("bad input: a rank that throws outside a call releases the others at once") {
    auto const p = make_problem<double>(1, gqa, 1, 9);
    std::vector<outcome> seen(3);
    auto const start = std::chrono::steady_clock::now();
    auto const thrown = outcome_of([&] {
        run_ranks(3, [&](communicator c) {
            layer_type layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer};
            auto const step = uly::sequence::split(3, 1, 9);
            local_problem<double> local(p, step, c.rank());
            layer.attend(step, local.q, local.k, local.v, local.o);
            c.fence({});  // a rank that leaves takes messages that are still under way with it
            if (c.rank() == 1) throw std::runtime_error("out of luck");
            seen[static_cast<std::size_t>(c.rank())] =
                outcome_of([&] { layer.attend(step, local.q, local.k, local.v, local.o); });
        });
    });
    CHECK(std::chrono::steady_clock::now() - start <
          std::chrono::seconds(60));  // of a deadline of 600
    for (std::size_t r : {0u, 2u}) {
        CHECK(seen[r].code == uly::errc::peer_failed);
        CHECK(seen[r].rank == 1);
        CHECK(seen[r].text == "ulysses: fence: a rank left the group: rank 1: out of luck");
    }
    CHECK(thrown.code == uly::errc::peer_failed);
    CHECK(thrown.text == "ulysses: run: a rank threw: rank 1: out of luck");
}
