// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/serial.hpp>
#include <ulysses/comm/threads.hpp>
#include <ulysses/plan/sequence.hpp>

#include "cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>
#include <string>
#include <vector>

namespace {

thread_local std::size_t allocations = 0;

}  // namespace

// Every allocation of this program is counted on its thread, so that a steady state can be seen to
// make none. Sanitizers bring allocation functions of their own.
#if !TEST_UNDER_SANITIZER
[[gnu::noinline]] void* operator new(std::size_t bytes) {
    ++allocations;
    if (auto* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
    throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
#endif

namespace uly = ulysses;
using namespace plan_cases;
using uly::sequence;
using uly::token_run;

namespace {

template <class Body>
std::string refusal_of(Body const& body) {
    try {
        body();
    } catch (uly::invalid_sequence const& e) {
        return e.what();
    }
    return "";
}

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

std::vector<int64_t> positions_of(uly::token_orders const& orders, int rank) {
    std::vector<int64_t> positions;
    for (int64_t i = 0; i < orders.count(rank); ++i) positions.push_back(orders.position(rank, i));
    return positions;
}

using list = std::vector<int64_t>;

int64_t tokens_in(runs const& of) {
    int64_t sum = 0;
    for (auto const& run : of) sum += run.count;
    return sum;
}

/// What each rank of a group is told by the error its `body(ranks)` throws.
template <class Error, class Body>
std::vector<std::string> messages_over(int ranks, Body const& body) {
    std::vector<std::string> texts(at(ranks), "nothing was thrown");
    uly::threads::run(ranks, [&](uly::threads::communicator group) {
        try {
            body(group);
        } catch (Error const& e) {
            texts[at(group.rank())] = e.what();
        }
    });
    return texts;
}

}  // namespace

TEST_CASE("token_run: the part within a range") {
    struct {
        token_run run;
        int64_t from, to, begin, end;
    } const cases[] = {
        {{4, 3, 1}, 0, 10, 0, 3}, {{4, 3, 1}, 5, 6, 1, 2},  {{4, 3, 1}, 0, 4, 0, 0},
        {{4, 3, 1}, 7, 9, 3, 3},  {{4, 3, 5}, 4, 15, 0, 3}, {{4, 3, 5}, 5, 14, 1, 2},
        {{4, 3, 5}, 5, 9, 1, 1},  {{4, 3, 5}, 9, 10, 1, 2}, {{4, 3, 5}, 10, 14, 2, 2},
        {{4, 3, 5}, 6, 6, 1, 1},  {{0, 1, 1}, 0, 1, 0, 1},
    };
    for (auto const& each : cases) {
        CAPTURE(each.from);
        CAPTURE(each.to);
        auto const part = each.run.within(each.from, each.to);
        CHECK(part.begin == each.begin);
        CHECK(part.end == each.end);
    }
}

TEST_CASE("sequence::split: contiguous shares, the first ones longer") {
    auto const step = sequence::split(4, 3, 10);
    CHECK(step.ranks() == 4);
    CHECK(step.batch() == 3);
    CHECK(!step.cross());
    CHECK(step.queries().total() == 10);
    CHECK(positions_of(step.queries(), 0) == list{0, 1, 2});
    CHECK(positions_of(step.queries(), 1) == list{3, 4, 5});
    CHECK(positions_of(step.queries(), 2) == list{6, 7});
    CHECK(positions_of(step.keys(), 3) == list{8, 9});
    auto const few = sequence::split(4, 1, 1);
    CHECK(few.queries().count(0) == 1);
    CHECK(few.queries().count(3) == 0);
    CHECK(few.queries().runs(3).empty());
    CHECK(step.queries().position(2, 2) == -1);
}

TEST_CASE("sequence::of: any order; runs that continue each other are one") {
    std::vector<runs> const orders{{{6, 2}, {0, 2}, {2, 1}, {3, 0}}, {{3, 2, 2}}, {{4, 1}}};
    auto const step = sequence::of(2, orders);
    CHECK(positions_of(step.queries(), 0) == list{6, 7, 0, 1, 2});
    CHECK(positions_of(step.queries(), 1) == list{3, 5});
    CHECK(step.queries().runs(0).size() == 2);
    CHECK(step.queries().total() == 8);
}

TEST_CASE("sequence::of: tokens that are not covered once are refused, naming them") {
    auto const of = [](std::vector<runs> const& orders) {
        return refusal_of([&] { sequence::of(1, orders); });
    };
    CHECK(of({{{0, 3}}, {{3, 2}}}) == "");
    CHECK(contains(of({{{0, 3}}, {{2, 2}}}), "token held twice: 2 of 5"));
    CHECK(contains(of({{{0, 3}}, {{0, 3}}}), "token held twice: 0 of 6"));
    CHECK(contains(of({{{0, 2}}, {{3, 2}, {1, 1}}}), "held twice: 1"));
    CHECK(contains(of({{{0, 2}}, {{3, 2}}}),
                   "runs must lie within the sequence: rank 1 has run {begin 3, count 2"));
    CHECK(contains(of({{{0, 1}}, {{2, 2}, {1, 1}, {2, 1}}}), "token held twice: 2 of 5"));
    CHECK(contains(of({{{1, 2}}, {{1, 1}}}), "token held by no rank: 0 of 3"));
    CHECK(contains(of({{{0, 2, 2}}, {{1, 2, 1}}}), "token held twice: 2 of 4"));  // strided
    CHECK(contains(of({{{0, 2, 3}}, {{1, 1}}}), "runs must lie within"));
    CHECK(contains(of({{{-1, 2}}, {{1, 1}}}), "rank 0 has {begin -1, count 2, stride 1}"));
    CHECK(contains(of({{{0, 2}}, {{2, -1}}}), "rank 1 has {begin 2, count -1, stride 1}"));
    CHECK(contains(of({{{0, 2, 0}}}), "stride of at least 1"));
    CHECK(contains(of({{{0, int64_t{1} << 31}}}), "count in 0 .. 2^31 - 1"));
    CHECK(contains(of({{}, {}}), "a sequence has 1 .. 2^31 - 1 tokens: 0 queries, 0 keys"));
    // Too long in all, and refused for that before a list of its tokens is made.
    CHECK(contains(of({{{0, (int64_t{1} << 31) - 1}}, {{0, (int64_t{1} << 31) - 1, 2}}}),
                   "a sequence has 1 .. 2^31 - 1 tokens"));
    CHECK(contains(of({{{0, 2, 0}}}), "sequence_test.cpp:"));  // the place of the call
    CHECK(contains(refusal_of([] { sequence::split(2, 0, 4); }), "batch must be at least 1: 0"));
    CHECK(contains(refusal_of([] { sequence::split(0, 1, 4); }),
                   "a split has ranks and tokens: 0 ranks, 4 tokens"));
    CHECK(contains(refusal_of([] { sequence::split(2, 1, -4); }), "a split has ranks and tokens"));
}

TEST_CASE("sequence::of: keys of their own") {
    std::vector<runs> const queries{{{0, 3}}, {}}, keys{{{1, 1}}, {{0, 1}}},
        three{{{0, 1}}, {}, {}};
    auto const step = sequence::of(1, queries, keys);
    CHECK(step.cross());
    CHECK(step.queries().total() == 3);
    CHECK(step.keys().total() == 2);
    CHECK(positions_of(step.keys(), 0) == list{1});
    CHECK(contains(refusal_of([&] { sequence::of(1, queries, three); }),
                   "must name as many ranks: 2 and 3"));
    std::vector<runs> const twice{{{0, 1}}, {{0, 1}}};
    CHECK(contains(refusal_of([&] { sequence::of(1, queries, twice); }),
                   "ulysses: sequence: keys: "));
}

TEST_CASE("sequence: the hash tells steps apart") {
    std::vector<runs> const ab{{{0, 3}}, {{3, 2}}}, ba{{{3, 2}}, {{0, 3}}}, aa{{{0, 2}}, {{2, 3}}},
        split_run{{{0, 1}, {1, 2}}, {{3, 2}}}, striped{{{0, 3, 2}}, {{1, 2, 2}}};
    std::vector<std::uint64_t> const hashes{sequence::of(1, ab).hash(),
                                            sequence::of(2, ab).hash(),
                                            sequence::of(1, ba).hash(),
                                            sequence::of(1, aa).hash(),
                                            sequence::of(1, striped).hash(),
                                            sequence::of(1, ab, ab).hash(),
                                            sequence::of(1, ab, ba).hash(),
                                            sequence::of(1, ba, ab).hash(),
                                            sequence::split(3, 1, 5).hash(),
                                            sequence::split(1, 1, 5).hash(),
                                            sequence{}.hash()};
    for (std::size_t i = 0; i < hashes.size(); ++i)
        for (std::size_t j = 0; j < i; ++j) {
            CAPTURE(i);
            CAPTURE(j);
            CHECK(hashes[i] != hashes[j]);
        }
    CHECK(sequence::of(1, split_run).hash() == hashes[0]);  // the same order, spelt otherwise
    CHECK(sequence::split(2, 1, 5).hash() == hashes[0]);
    CHECK(sequence{}.hash() == 0);
}

TEST_CASE("sequence::agree: one rank") {
    auto const step = sequence::agree(uly::serial{}, {.batch = 2, .tokens = 5});
    CHECK(step.ranks() == 1);
    CHECK(step.hash() == sequence::split(1, 2, 5).hash());
    runs const order{{2, 2}, {0, 2}};
    CHECK(positions_of(sequence::agree(uly::serial{}, {.tokens = 4, .order = order}).queries(),
                       0) == list{2, 3, 0, 1});
}

TEST_CASE("sequence::agree: contiguous shares of any sizes, in rank order") {
    // Zero-token ranks first, last and between.
    for (auto const& tokens : {list{5, 3}, list{3, 5}, list{0, 4}, list{4, 0}, list{0, 0, 7, 0},
                               list{1, 2, 3, 4, 5, 6, 7, 8}}) {
        auto const ranks = static_cast<int>(tokens.size());
        uly::threads::run(ranks, [&](uly::threads::communicator group) {
            auto const step =
                sequence::agree(group, {.batch = 2, .tokens = tokens[at(group.rank())]});
            std::vector<runs> orders;
            int64_t first = 0;
            for (auto const count : tokens) {
                orders.push_back({{first, count}});
                first += count;
            }
            auto const expected = sequence::of(2, orders);
            if (step.hash() != expected.hash() || !(step.queries() == expected.queries()) ||
                step.cross())
                throw std::runtime_error("another step");
        });
    }
}

TEST_CASE("sequence::agree: random orders, any number of runs, with keys of their own") {
    for (std::uint64_t seed = 1; seed <= how_many(400); ++seed) {
        CAPTURE(seed);
        plan_cases::random_engine random{seed};
        auto const ranks = 1 + static_cast<int>(below(random, 8));
        auto const order = [&] {
            return random_order(random, static_cast<order_kind>(below(random, order_kinds)), ranks,
                                1 + below(random, 60));
        };
        auto const queries = order();
        auto const keys = below(random, 2) == 0 ? order() : std::vector<runs>{};
        auto const expected = sequence::of(3, queries, keys);
        std::atomic<int> wrong{0};
        uly::threads::run(ranks, [&](uly::threads::communicator group) {
            auto const r = at(group.rank());
            uly::sequence_options mine{
                .batch = 3, .tokens = tokens_in(queries[r]), .order = queries[r]};
            if (!keys.empty()) mine.keys = tokens_in(keys[r]), mine.key_order = keys[r];
            auto const step = sequence::agree(group, mine);
            wrong += step.hash() != expected.hash() || !(step.keys() == expected.keys());
        });
        CHECK(wrong == 0);
    }
}

TEST_CASE("sequence::agree: a mismatch is the same error on every rank") {
    auto const all = [](std::vector<std::string> const& texts, std::string const& expected) {
        for (auto const& text : texts) {
            INFO(text);
            CHECK(contains(text, expected));
            CHECK(text == texts[0]);
        }
    };
    using group = uly::threads::communicator;
    all(messages_over<uly::disagreement>(
            4, [](group g) { sequence::agree(g, {.batch = g.rank() == 2 ? 3 : 2, .tokens = 4}); }),
        "ulysses: sequence: batch must be equal on every rank: rank 0 has 2, rank 2 has 3");
    all(messages_over<uly::disagreement>(
            3, [](group g) { sequence::agree(g, {.tokens = 4, .keys = g.rank() == 1 ? 4 : -1}); }),
        "whether keys are given must be equal on every rank: rank 0 has false, rank 1 has true");
    all(messages_over<uly::invalid_sequence>(
            3, [](group g) { sequence::agree(g, {.tokens = g.rank() == 1 ? -1 : 4}); }),
        "a rank holds 0 .. 2^31 - 1 tokens: rank 1 has -1");
    all(messages_over<uly::invalid_sequence>(
            3, [](group g) { sequence::agree(g, {.batch = 0, .tokens = 4}); }),
        "batch must be at least 1: 0");
    all(messages_over<uly::invalid_sequence>(3, [](group g) { sequence::agree(g, {.tokens = 0}); }),
        "a sequence has 1 .. 2^31 - 1 tokens");
    all(messages_over<uly::invalid_sequence>(2,
                                             [](group g) {  // both hold token 1
                                                 runs const order{{g.rank(), 2}};
                                                 sequence::agree(g, {.tokens = 2, .order = order});
                                             }),
        "ranks must cover the sequence exactly once: token held twice: 1 of 4");
    all(messages_over<uly::invalid_sequence>(
            2,
            [](group g) {  // a list of other length than it says
                runs const order{{2 * g.rank(), 2}};
                sequence::agree(g, {.tokens = g.rank() == 1 ? 3 : 2, .order = order});
            }),
        "an order must list the rank's tokens: rank 1 has 3 tokens, its order lists 2");
    all(messages_over<uly::invalid_sequence>(
            2,
            [](group g) {  // one rank gives an order, the other none
                runs const order{{0, 2}};
                sequence::agree(g, g.rank() == 0
                                       ? uly::sequence_options{.tokens = 2, .order = order}
                                       : uly::sequence_options{.tokens = 2});
            }),
        "an order must list the rank's tokens: rank 1 has 2 tokens, its order lists 0");
    all(messages_over<uly::invalid_sequence>(2,
                                             [](group g) {  // an order of keys that would go unread
                                                 runs const order{{2 * g.rank(), 2}};
                                                 sequence::agree(g,
                                                                 {.tokens = 2, .key_order = order});
                                             }),
        "an order of keys needs their count: rank 0 has key_order of 1 runs, keys -1");
    all(messages_over<uly::invalid_sequence>(2,
                                             [](group g) {  // more than four runs
                                                 runs order;
                                                 for (int64_t i = 0; i < 6; ++i)
                                                     order.push_back({2 * i, 1});
                                                 sequence::agree(g, {.tokens = 6, .order = order});
                                             }),
        "token held twice: 0 of 12");
}

TEST_CASE("sequence::renew: after an error it is empty, then usable again") {
    // Orders that failed their check must never reach a plan under the hash of the step before.
    uly::threads::run(2, [](uly::threads::communicator group) {
        auto step = sequence::agree(group, {.tokens = 4});
        auto const hash = step.hash();
        bool thrown = false;
        try {
            runs const order{{0, 4}};
            step.renew(group, {.tokens = 4, .order = order});
        } catch (uly::invalid_sequence const&) {
            thrown = true;
        }
        if (!thrown || step.hash() != 0 || step.ranks() != 0 || step.queries().total() != 0)
            throw std::runtime_error("a failed step is not empty");
        step.renew(group, {.tokens = 4});
        if (step.hash() != hash) throw std::runtime_error("the step after it is another");
    });
}

TEST_CASE("sequence::renew: 100 steps of alternating splits, none of which allocates once all were "
          "seen") {
    std::mutex mutex;
    std::size_t most = 0;
    uly::threads::run(2, [&](uly::threads::communicator group) {
        runs many[2];  // more than four runs: the second collective
        for (int64_t i = 0; i < 8; ++i) many[i % 2].push_back({i, 1});
        auto const me = at(group.rank());
        uly::sequence_options const kinds[] = {{.tokens = me == 0 ? 5 : 3},
                                               {.tokens = me == 0 ? 3 : 5},
                                               {.batch = 2, .tokens = 4, .order = many[me]},
                                               {.tokens = 4, .keys = me == 0 ? 0 : 3},
                                               {.tokens = 4, .replicated = 2}};
        std::uint64_t hashes[5];
        for (int i = 0; i < 5; ++i) hashes[i] = sequence::agree(group, kinds[i]).hash();
        sequence step;
        for (auto const& kind : kinds) step.renew(group, kind);
        auto const before = allocations;
        bool right = true;
        for (int i = 0; i < 100; ++i) {
            step.renew(group, kinds[i % 5]);
            right = right && step.hash() == hashes[i % 5];
        }
        auto const made = allocations - before;
        if (!right) throw std::runtime_error("another step");
        std::lock_guard lock(mutex);
        most = std::max(most, made);
    });
    CHECK(most == 0);
}
