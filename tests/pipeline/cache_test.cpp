// SPDX-License-Identifier: Apache-2.0

#include <ulysses/projection/rope.hpp>

#include "six_steps.hpp"

#include <doctest/doctest.h>

#include <numeric>
#include <stdexcept>

using namespace pipeline_test;
namespace uly = ulysses;

namespace {

using list = std::vector<int64_t>;
using reference = uly::reference_attention;
using group = uly::threads::communicator;

uly::shape layer_of(int64_t heads, int64_t kv_heads, uly::window window = {}) {
    return {.heads = heads,
            .kv_heads = kv_heads,
            .head_dim = 4,
            .value_dim = 3,
            .mask = uly::mask::causal,
            .window = window,
            .assignment = uly::assignment::whole_heads};
}

/// One call over a cache: so many new tokens, the next of those that there are.
struct call {
    int64_t tokens = 1;
    list lengths{};              ///< of each sample how many of them count; empty: all
    list cut{};                  ///< what samples are truncated to before; empty: nothing
    bool head_parallel = false;  ///< by a head_local pipeline
};

std::size_t at(int64_t i) { return static_cast<std::size_t>(i); }

int64_t counted(call const& each, int64_t b) {
    return each.lengths.empty() ? each.tokens : each.lengths[at(b)];
}

/// Tokens [begin, begin + count) of heads [head, head + heads).
template <class T>
tensor<T> part_of(tensor<T> const& whole, int64_t begin, int64_t count, int64_t head,
                  int64_t heads) {
    tensor<T> part({whole.sizes[0], count, heads, whole.sizes[3]});
    for (int64_t b = 0; b < part.sizes[0]; ++b)
        for (int64_t s = 0; s < count; ++s)
            for (int64_t h = 0; h < heads; ++h)
                for (int64_t d = 0; d < part.sizes[3]; ++d)
                    part(b, s, h, d) = whole(b, begin + s, head + h, d);
    return part;
}
template <class T>
tensor<T> part_of(tensor<T> const& whole, int64_t begin, int64_t count) {
    return part_of(whole, begin, count, 0, whole.sizes[2]);
}

/// The given tokens of one sample.
template <class T>
tensor<T> rows_of(tensor<T> const& whole, int64_t sample, list const& rows) {
    tensor<T> part({1, static_cast<int64_t>(rows.size()), whole.sizes[2], whole.sizes[3]});
    for (int64_t s = 0; s < part.sizes[1]; ++s)
        for (int64_t h = 0; h < part.sizes[2]; ++h)
            for (int64_t d = 0; d < part.sizes[3]; ++d)
                part(0, s, h, d) = whole(sample, rows[at(s)], h, d);
    return part;
}

template <class T>
problem<T> supply_of(std::uint64_t seed, uly::shape const& layer, int64_t batch,
                     std::vector<call> const& script) {
    int64_t tokens = 0;
    for (auto const& each : script) tokens += each.tokens;
    return make_problem<T>(seed, layer, batch, tokens);
}

/// Outputs [B, n, Hq, Dv] of all calls, and what the cache holds after each.
template <class T>
struct played {
    std::vector<tensor<T>> o;
    std::vector<list> lengths;
};

/// What each call must give: for each sample the last rows of attention over all that it then holds,
/// at once, on one rank. Rows that do not count stay NaN.
template <class Attention, class T>
played<T> expected(problem<T> const& supply, std::vector<call> const& script) {
    played<T> all;
    std::vector<list> held(at(supply.batch));
    int64_t begin = 0;
    for (auto const& each : script) {
        tensor<T> o({supply.batch, each.tokens, supply.layer.heads, supply.layer.value_dim});
        list lengths;
        for (int64_t b = 0; b < supply.batch; ++b) {
            auto& rows = held[at(b)];
            if (!each.cut.empty()) rows.resize(at(each.cut[at(b)]));
            auto const past = static_cast<int64_t>(rows.size());
            for (int64_t i = 0; i < counted(each, b); ++i) rows.push_back(begin + i);
            lengths.push_back(static_cast<int64_t>(rows.size()));
            if (lengths.back() == past) continue;
            problem<T> const alone{supply.layer,
                                   1,
                                   lengths.back(),
                                   lengths.back(),
                                   rows_of(supply.q, b, rows),
                                   rows_of(supply.k, b, rows),
                                   rows_of(supply.v, b, rows),
                                   rows_of(supply.dout, b, rows)};
            auto const whole = compute_alone<Attention>(alone);
            for (int64_t i = 0; past + i < lengths.back(); ++i)
                for (int64_t h = 0; h < o.sizes[2]; ++h)
                    for (int64_t d = 0; d < o.sizes[3]; ++d)
                        o(b, i, h, d) = whole.o(0, past + i, h, d);
        }
        begin += each.tokens;
        all.o.push_back(o);
        all.lengths.push_back(lengths);
    }
    return all;
}

/// The same over a cache on several ranks; the tokens of each call are dealt by a random order.
template <class Attention, class T>
played<T> play(problem<T> const& supply, std::vector<call> const& script, int ranks,
               std::uint64_t seed = 1) {
    played<T> all;
    int64_t most = 0;
    for (auto const& each : script) {
        all.o.emplace_back(
            uly::extents4{supply.batch, each.tokens, supply.layer.heads, supply.layer.value_dim});
        most += each.tokens;
    }
    all.lengths.resize(script.size());
    run_ranks(ranks, [&](group c) {
        std::mt19937_64 random{seed};
        uly::pipeline layer{c, uly::sequence_local{}, Attention{}, supply.layer};
        uly::pipeline decode{c, uly::head_local{}, Attention{}, supply.layer};
        auto cache = layer.template make_cache<T>(supply.batch, most);
        int64_t begin = 0;
        for (std::size_t i = 0; i < script.size(); ++i) {
            auto const& each = script[i];
            for (std::size_t b = 0; b < each.cut.size(); ++b)
                cache.truncate(static_cast<int64_t>(b), each.cut[b]);
            auto step = uly::sequence::of(supply.batch, random_orders(random, each.tokens, ranks));
            step.pack({.lengths = each.lengths, .past = cache.lengths()});
            if (each.head_parallel) {
                auto const share = cache.share();
                auto const head = share.head_begin, heads = share.heads();
                auto const kv = share.kv_begin, kv_heads = share.kv_heads();
                tensor<T> const o({supply.batch, each.tokens, heads, supply.layer.value_dim});
                decode.attend(step, cache, part_of(supply.q, begin, each.tokens, head, heads),
                              part_of(supply.k, begin, each.tokens, kv, kv_heads),
                              part_of(supply.v, begin, each.tokens, kv, kv_heads), o);
                for (int64_t b = 0; b < o.sizes[0]; ++b)
                    for (int64_t s = 0; s < o.sizes[1]; ++s)
                        for (int64_t h = 0; h < heads; ++h)
                            for (int64_t d = 0; d < o.sizes[3]; ++d)
                                all.o[i](b, s, head + h, d) = o(b, s, h, d);
            } else {
                auto const mine = [&](tensor<T> const& x) {
                    return own_part(step.queries(), c.rank(), part_of(x, begin, each.tokens));
                };
                auto const q = mine(supply.q);
                tensor<T> const o({q.sizes[0], q.sizes[1], q.sizes[2], supply.layer.value_dim});
                layer.attend(step, cache, q, mine(supply.k), mine(supply.v), o);
                put_back(step.queries(), c.rank(), o, all.o[i]);
            }
            begin += each.tokens;
            auto const lengths = cache.lengths();
            if (c.rank() == 0) all.lengths[i].assign(lengths.begin(), lengths.end());
        }
    });
    return all;
}

/// The first call whose rows have other bits, or whose cache other lengths; "" when none has.
template <class T>
std::string fault_of(played<T> const& got, played<T> const& wanted,
                     std::vector<call> const& script) {
    for (std::size_t i = 0; i < script.size(); ++i) {
        if (got.lengths[i] != wanted.lengths[i]) return uly::concat("lengths after call ", i);
        auto const& o = wanted.o[i];
        for (int64_t b = 0; b < o.sizes[0]; ++b) {
            auto const row = [&](tensor<T> const& x) {
                return &x.memory[at(b * o.sizes[1] * o.sizes[2] * o.sizes[3])];
            };
            auto const count = at(counted(script[i], b) * o.sizes[2] * o.sizes[3]);
            if (count > 0 && std::memcmp(row(got.o[i]), row(o), count * sizeof(T)) != 0)
                return uly::concat("call ", i, ", sample ", b);
        }
    }
    return {};
}

template <class Attention, class T>
void check_script(uly::shape const& layer, int64_t batch, std::vector<call> const& script,
                  std::vector<int> const& ranks) {
    auto const supply = supply_of<T>(7, layer, batch, script);
    auto const wanted = expected<Attention>(supply, script);
    for (auto const p : ranks) {
        CAPTURE(supply.text());
        CAPTURE(p);
        CHECK(fault_of(play<Attention>(supply, script, p), wanted, script) == "");
    }
}

std::vector<call> calls(list const& tokens) {
    std::vector<call> script;
    for (auto const n : tokens) script.push_back({.tokens = n});
    return script;
}

template <class Attention, class T>
void check_chunks() {
    auto const one_by_one = calls(list(13, 1));
    for (auto const& layer : {layer_of(6, 2), layer_of(3, 1), layer_of(4, 4, {.left = 3})})
        for (auto const& script : {calls({13}), calls({5, 1, 4, 3}), one_by_one})
            check_script<Attention, T>(layer, 2, script, {1, 2, 3, 4, 5, 6, 7, 8});
}

}  // namespace

TEST_CASE("cache: one shot, uneven chunks and one token at a time have the same bits") {
    check_chunks<reference, double>();
    check_chunks<builtin_attention, float>();
}

TEST_CASE("cache: past the tiles of blocked attention") {
    for (auto const& layer : {layer_of(2, 1), layer_of(2, 1, {.left = 100})})
        check_script<builtin_attention, float>(layer, 1, calls({300, 1, 1, 230, 1}), {1, 3});
}

TEST_CASE("cache: samples of different length, cut and continued") {
    std::vector<call> const script{
        {.tokens = 6, .lengths = {6, 2, 0, 2}},
        {.tokens = 1},                           // pasts 6, 2, 0, 2
        {.tokens = 3, .lengths = {1, 3, 3, 0}},  // 7, 3, 1, 3
        {.tokens = 2, .cut = {8, 4, 0, 3}},      // sample 2 begins again
        {.tokens = 1, .lengths = {1, 0, 1, 1}, .cut = {2, 6, 2, 0}},
        {.tokens = 1},
    };
    check_script<reference, double>(layer_of(6, 2), 4, script, {1, 2, 4, 7});
    check_script<builtin_attention, float>(layer_of(6, 2, {.left = 4}), 4, script, {1, 2, 4, 7});
}

TEST_CASE("cache: one cache for prefill by tokens and decode by heads, in turn") {
    std::vector<call> const script{
        {.tokens = 5},
        {.tokens = 1, .head_parallel = true},
        {.tokens = 1, .head_parallel = true},
        {.tokens = 4, .lengths = {4, 1}},
        {.tokens = 2, .lengths = {0, 2}, .cut = {3, 8}, .head_parallel = true},
        {.tokens = 3, .cut = {1, 4}},
        {.tokens = 1, .head_parallel = true},
    };
    check_script<reference, double>(layer_of(6, 2), 2, script, {1, 2, 3, 4, 8});
    check_script<builtin_attention, float>(layer_of(4, 2), 2, script, {1, 2, 4});
}

TEST_CASE("cache: any history") {
    auto const seed = std::uint64_t{20261130};
    CAPTURE(seed);
    std::mt19937_64 random{seed};
    for (int i = 0; i < 30; ++i) {
        auto const kv_heads = 1 + below(random, 3), batch = 1 + below(random, 4);
        auto const layer = layer_of(kv_heads * (1 + below(random, 3)), kv_heads,
                                    {.left = below(random, 2) == 0 ? -1 : below(random, 6)});
        std::vector<call> script;
        list held(at(batch), 0);
        for (auto left = 1 + below(random, 8); left > 0; --left) {
            call each{.tokens = 1 + below(random, 2) * below(random, 7),
                      .head_parallel = below(random, 3) == 0};
            if (below(random, 3) == 0)
                for (auto const length : held) each.cut.push_back(below(random, length + 1));
            if (!each.cut.empty()) held = each.cut;
            if (below(random, 2) == 0)
                for (int64_t b = 0; b < batch; ++b)
                    each.lengths.push_back(below(random, each.tokens + 1));
            for (int64_t b = 0; b < batch; ++b) held[at(b)] += counted(each, b);
            script.push_back(each);
        }
        auto const ranks = static_cast<int>(1 + below(random, 8));
        CAPTURE(i);
        check_script<reference, double>(layer, batch, script, {ranks});
    }
}

TEST_CASE("cache: a layer in chunks, which exchange at once over a cache, has the same bits") {
    auto layer = layer_of(8, 4);
    layer.chunks = 4;
    for (bool const overlap : {false, true}) {
        layer.overlap = overlap;
        check_script<reference, double>(layer, 2, calls({5, 1, 3}), {1, 3, 4});
    }
    run_ranks(2, [&](group c) {
        uly::pipeline attention{c, uly::sequence_local{}, reference{}, layer};
        auto step = uly::sequence::split(2, 1, 4);
        if (attention.chunks(step) != 4) throw std::runtime_error("without a cache: other chunks");
        auto const in_chunks = attention.workspace_bytes(step, uly::dtype::f64);
        list const past{0};
        step.pack({.past = past});
        if (attention.chunks(step) != 1) throw std::runtime_error("over a cache: other chunks");
        if (attention.workspace_bytes(step, uly::dtype::f64) <= in_chunks)
            throw std::runtime_error("all heads at once in the memory of a part");
    });
}

TEST_CASE("cache: the six steps turn new keys where they stand") {
    // The reference's bits, those of the projections here, and rope's do not depend on the chunk.
    six_problem<double> const p(3, layer_of(4, 2), 2, 11, 6);
    auto const places = p.places();
    auto const weights = places.weights(p.parameters.data());
    auto const wanted = six_steps<double, reference, uly::rope>(
        p, equal_shares(11, 1), false, reference{}, uly::rope(p.layer.head_dim));
    for (int const ranks : {1, 3, 6}) {
        tensor<double> y(p.x.sizes);
        run_ranks(ranks, [&](group c) {
            uly::pipeline layer{c, uly::sequence_local{}, reference{}, p.layer,
                                uly::dense{uly::builtin_gemm{}, uly::rope(p.layer.head_dim)}};
            auto cache = layer.make_cache<double>(2, 11);
            int64_t begin = 0;
            for (int64_t const tokens : {4, 1, 5, 1}) {
                auto step = uly::sequence::split(ranks, 2, tokens);
                step.pack({.past = cache.lengths()});
                auto const x = own_part(step.queries(), c.rank(), part_of(p.x, begin, tokens));
                tensor<double> const own(x.sizes);
                layer.forward(step, cache, token_operand(x), weights, token_operand(own));
                for (int64_t b = 0; b < 2; ++b)
                    for (int64_t s = 0; s < own.sizes[1]; ++s)
                        for (int64_t d = 0; d < own.sizes[3]; ++d)
                            y(b, begin + step.queries().position(c.rank(), s), 0, d) =
                                own(b, s, 0, d);
                begin += tokens;
            }
        });
        CAPTURE(ranks);
        CHECK(same_bits(y, wanted.y));
    }
}

TEST_CASE("cache: memory") {
    run_ranks(3, [&](group c) {
        // Key-value head 0 is read by ranks 0 and 1, head 1 by ranks 1 and 2: two at most.
        uly::pipeline layer{c, uly::sequence_local{}, builtin_attention{}, layer_of(6, 2)};
        auto const cache = layer.make_cache<float>(2, 10);
        if (cache.bytes() != 2 * (2 * 2 * 10) * 64 || cache.capacity() != 10 || cache.batch() != 2)
            throw std::runtime_error("other sizes");
    });
}

#if ULYSSES_EXCEPTIONS

namespace {

/// Runs `body(rank's handle)` on every rank and checks that all end with one error that holds `text`.
template <class Body>
void check_refused(int ranks, std::string const& text, Body const& body) {
    std::vector<outcome> seen(at(ranks));
    run_ranks(ranks, [&](group c) {
        seen[at(c.rank())] = outcome_of([&] { body(c); });
        c.fence({});  // the group can go on
    });
    for (auto const& each : seen) {
        CHECK_MESSAGE(each.text.find(text) != std::string::npos, each.text);
        CHECK(each.text == seen[0].text);
        CHECK(each.code == seen[0].code);
    }
}

/// A rank's operands of a step, of `layer`; o is NaN.
template <class T>
struct operands {
    tensor<T> q, k, v, o;
    operands(uly::shape const& given, uly::sequence const& step, int rank)
        : operands(uly::checked(given), step.batch(), step.queries().count(rank)) {}

   private:
    operands(uly::shape const& s, int64_t batch, int64_t own)
        : q({batch, own, s.heads, s.head_dim}, T(1)),
          k({batch, own, s.kv_heads, s.head_dim}, T(1)),
          v({batch, own, s.kv_heads, s.value_dim}, T(1)),
          o({batch, own, s.heads, s.value_dim}) {}
};

uly::sequence step_of(int ranks, int64_t batch, int64_t tokens, list const& past,
                      list const& lengths = {}) {
    auto step = uly::sequence::split(ranks, batch, tokens);
    step.pack({.lengths = lengths, .past = past});
    return step;
}

/// Attends over `cache` with operands of ones.
template <class T, class Layer, class Cache>
void attend_ones(Layer& layer, uly::sequence const& step, Cache& cache) {
    operands<T> const x(layer.layer(), step, layer.ranks().rank());
    layer.attend(step, cache, x.q, x.k, x.v, x.o);
}

auto pipeline_on(group c, uly::shape const& layer = layer_of(6, 2)) {
    return uly::pipeline{c, uly::sequence_local{}, reference{}, layer};
}

}  // namespace

TEST_CASE("cache: what does not continue it is refused on every rank, and it is as it was") {
    struct refusal {
        char const* text;
        uly::sequence step;
    };
    list const four{4, 4};
    std::vector<refusal> const refusals{
        {"ulysses: kv_cache: a step's past must be what the cache holds: sample 0 has past 3, the "
         "cache holds 4",
         step_of(3, 2, 2, {3, 4})},
        {"sample 1 has past 5, the cache holds 4", step_of(3, 2, 2, {4, 5})},
        {"sample 0 has past 0, the cache holds 4", uly::sequence::split(3, 2, 2)},
        {"ulysses: kv_cache: a cache must have room for the step's keys: sample 1 has 4 and gets "
         "5, "
         "capacity 8",
         step_of(3, 2, 5, {4, 4}, {4, 5})},
        {"ulysses: kv_cache: a step must have the cache's batch: step of 3, cache of 2",
         step_of(3, 3, 1, {4, 4, 4})},
        {"a step over a cache has one document a sample, and no keys of its own: 0 documents, 2 "
         "queries, 3 keys",
         uly::sequence::of(2, equal_shares(2, 3), equal_shares(3, 3))},
    };
    for (auto const& each : refusals)
        check_refused(3, each.text, [&](group c) {
            auto layer = pipeline_on(c);
            auto cache = layer.make_cache<double>(2, 8);
            attend_ones<double>(layer, step_of(3, 2, 4, {0, 0}), cache);
            auto const seen = outcome_of([&] { attend_ones<double>(layer, each.step, cache); });
            auto const held = cache.lengths();
            if (list(held.begin(), held.end()) != four) throw std::runtime_error("other lengths");
            attend_ones<double>(layer, step_of(3, 2, 1, four), cache);  // all goes on
            uly::throw_error(seen.code, seen.text, seen.rank);
        });
}

TEST_CASE("cache: one rank's own cache that differs is an error on every rank, and nothing moves") {
    check_refused(3, "sample 0 has past 2, the cache holds 4 [", [](group c) {
        auto layer = pipeline_on(c);
        auto cache = layer.make_cache<double>(1, 8);
        attend_ones<double>(layer, step_of(3, 1, 4, {0}), cache);
        std::vector<std::byte> const before(cache.own_part(), cache.own_part() + cache.bytes());
        if (c.rank() != 1) cache.truncate(0, 2);
        auto const seen =
            outcome_of([&] { attend_ones<double>(layer, step_of(3, 1, 3, {2}), cache); });
        if (std::memcmp(before.data(), cache.own_part(), before.size()) != 0)
            throw std::runtime_error("keys were written");
        if (seen.rank != 1) throw std::runtime_error("another rank");
        uly::throw_error(seen.code, seen.text, seen.rank);
    });
    check_refused(3, "every rank must pass the same cache: rank 0 has ", [](group c) {
        auto layer = pipeline_on(c);
        auto one = layer.make_cache<double>(1, 8), other = layer.make_cache<double>(1, 8);
        attend_ones<double>(layer, step_of(3, 1, 1, {0}), c.rank() == 1 ? one : other);
    });
    check_refused(2, "every rank must pass the same capacity: rank 0 has 8, rank 1 has 9",
                  [](group c) {
                      auto const layer = pipeline_on(c);
                      layer.make_cache<double>(1, 8 + c.rank());
                  });
}

TEST_CASE("cache: padding before other keys is refused, also where nothing is cached yet") {
    std::vector<std::uint8_t> const left{1, 1, 1, 0, 1, 1}, hole{1, 0, 1, 1, 1, 1},
        right{1, 1, 0, 1, 1, 1};
    auto const attend = [](group c, uly::packing_options const& packed) {
        auto layer = pipeline_on(c);
        auto cache = layer.make_cache<double>(2, 8);
        auto step = uly::sequence::split(2, 2, 3);
        attend_ones<double>(layer, step.pack(packed), cache);
        return cache.lengths()[0] * 10 + cache.lengths()[1];
    };
    auto const rule = std::string(
        "ulysses: kv_cache: a step over a cache brings a sample's first keys, as many as its "
        "length: sample ");
    check_refused(2, rule + "1 brings 1 .. 3 of 3 [",
                  [&](group c) { attend(c, {.present = left}); });
    check_refused(2, rule + "0 brings 0 .. 3 of 3, with holes [",
                  [&](group c) { attend(c, {.present = hole}); });
    run_ranks(2, [&](group c) {
        if (attend(c, {.present = right}) != 23) throw std::runtime_error("other lengths");
    });
    list const positions{0, 2};
    check_refused(2, "sample 1 has past 2, the cache holds 0 [",
                  [&](group c) { attend(c, {.query_positions = positions}); });
}

TEST_CASE("cache: truncating on one rank alone is an error on all, unless it changes nothing") {
    check_refused(3, "or whose cache was truncated, needs one more", [](group c) {
        auto layer = pipeline_on(c);
        auto cache = layer.make_cache<double>(2, 8);
        attend_ones<double>(layer, step_of(3, 2, 4, {0, 0}), cache);
        if (c.rank() == 1) cache.truncate(0, 4);
        attend_ones<double>(layer, step_of(3, 2, 1, {4, 4}), cache);
        if (c.rank() == 1) cache.truncate(0, 2);
        attend_ones<double>(layer, step_of(3, 2, 1, {cache.lengths()[0], 5}), cache);
    });
}

TEST_CASE("cache: it belongs to its layer, element type and group") {
    check_refused(
        4, "a cache needs whole heads on every rank (assignment::whole_heads): 6 heads on 4 ranks",
        [](group c) {
            auto layer = layer_of(6, 2);
            layer.assignment = uly::assignment::balanced;
            pipeline_on(c, layer).make_cache<double>(1, 8);
        });
    check_refused(4, "a cache needs whole heads", [](group c) {
        auto shape = layer_of(6, 2);
        auto cache = pipeline_on(c, shape).make_cache<double>(1, 8);
        shape.assignment = uly::assignment::balanced;
        auto layer = pipeline_on(c, shape);
        attend_ones<double>(layer, step_of(4, 1, 2, {0}), cache);
    });
    check_refused(2,
                  "a cache takes the element type it was made for: made for float64, the operands "
                  "are float32",
                  [](group c) {
                      auto layer = pipeline_on(c);
                      auto cache = layer.make_cache<double>(1, 8);
                      attend_ones<float>(layer, step_of(2, 1, 2, {0}), cache);
                  });
    check_refused(2, "made for 6 / 2 heads of 4 and 3, the layer has 6 / 3 of 4 and 3",
                  [](group c) {
                      auto cache = pipeline_on(c).make_cache<double>(1, 8);
                      auto layer = pipeline_on(c, layer_of(6, 3));
                      attend_ones<double>(layer, step_of(2, 1, 2, {0}), cache);
                  });
    check_refused(2, "a cache must be made by make_cache", [](group c) {
        auto layer = pipeline_on(c);
        uly::kv_cache<group> cache;
        attend_ones<double>(layer, step_of(2, 1, 2, {0}), cache);
    });
    check_refused(2, "a cache belongs to the group it was made on", [](group c) {
        auto cache = pipeline_on(c.split(0, c.rank())).make_cache<double>(1, 8);
        auto layer = pipeline_on(c);
        attend_ones<double>(layer, step_of(2, 1, 2, {0}), cache);
    });
    check_refused(2, "ulysses: pipeline: a step with past needs its cache", [](group c) {
        auto layer = pipeline_on(c);
        auto const step = step_of(2, 1, 2, {3});
        operands<double> const x(layer.layer(), step, c.rank());
        layer.attend(step, x.q, x.k, x.v, x.o);
    });
    check_refused(2, "a cache has 1 .. 2^31 - 1 samples, of as many keys: batch 1, capacity 0",
                  [](group c) { pipeline_on(c).make_cache<double>(1, 0); });
    check_refused(2, "a cache must stay below 2^62 rows", [](group c) {
        pipeline_on(c, layer_of(6, 6)).make_cache<double>(int64_t{1} << 30, (int64_t{1} << 31) - 1);
    });
    check_refused(2, "truncate shortens a sample of the cache: sample 0 of 1 to 3 keys, it has 2",
                  [](group c) {
                      auto layer = pipeline_on(c);
                      auto cache = layer.make_cache<double>(1, 8);
                      attend_ones<double>(layer, step_of(2, 1, 2, {0}), cache);
                      cache.truncate(0, 3);
                  });
    check_refused(2, "sample 1 of 1 to 0 keys",
                  [](group c) { pipeline_on(c).make_cache<double>(1, 8).truncate(1, 0); });
}

namespace {

/// The reference, but on the ranks and in the calls that are chosen it throws.
struct failing {
    using space_type = uly::host_space;
    static constexpr auto features = reference::features;
    bool const* fails;

    static constexpr int64_t row_multiple() { return 1; }
    template <class T>
    static std::size_t workspace_bytes(uly::attention_extents const& extents) {
        return reference::workspace_bytes<T>(extents);
    }
    template <class... Views>
    void forward(uly::attention_call const& call, Views const&... views) const {
        if (*fails) throw std::runtime_error("the functor fails");
        reference{}.forward(call, views...);
    }
};

}  // namespace

TEST_CASE("cache: a functor that throws on one rank leaves the cache as it was") {
    check_refused(3, "a functor threw: the functor fails", [](group c) {
        bool fails = false;
        uly::pipeline layer{c, uly::sequence_local{}, failing{&fails}, layer_of(6, 2)};
        auto cache = layer.make_cache<double>(1, 8);
        attend_ones<double>(layer, step_of(3, 1, 4, {0}), cache);
        fails = c.rank() == 2;
        auto const seen =
            outcome_of([&] { attend_ones<double>(layer, step_of(3, 1, 2, {4}), cache); });
        fails = false;
        attend_ones<double>(layer, step_of(3, 1, 1, {4}), cache);
        if (cache.lengths()[0] != 5) throw std::runtime_error("another length");
        uly::throw_error(seen.code, seen.text, seen.rank);
    });
}

#endif
