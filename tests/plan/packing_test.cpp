// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/threads.hpp>
#include <ulysses/plan/plan.hpp>
#include <ulysses/plan/sequence.hpp>

#include "../visibility.hpp"
#include "cases.hpp"

#include <doctest/doctest.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace uly = ulysses;
using namespace plan_cases;
using list = std::vector<int64_t>;

namespace {

list documents_of(uly::sequence const& step) {
    auto const all = step.packed().documents();
    return {all.begin(), all.end()};
}

std::string refusal_of(std::function<void()> const& body) {
    try {
        body();
    } catch (uly::invalid_sequence const& e) {
        return e.what();
    }
    return "nothing was thrown";
}

/// The error of `agree` on each of two ranks.
template <class Options>
std::vector<std::string> agree_errors(Options const& options_of) {
    std::vector<std::string> texts(2, "nothing was thrown");
    uly::threads::run(2, [&](uly::threads::communicator group) {
        try {
            uly::sequence::agree(group, options_of(group.rank()));
        } catch (uly::error const& e) {
            texts[at(group.rank())] = e.what();
        }
        group.fence({});
    });
    return texts;
}

}  // namespace

TEST_CASE("packing: documents are counted over all samples, and a sample always begins one") {
    auto step = uly::sequence::split(2, 2, 8);
    auto const plain = step.hash();
    CHECK(step.visible(uly::checked({.heads = 1, .head_dim = 1})).uniform());
    list const documents{0, 3, 5, 11, 16};  // as cu_seqlens
    step.pack({.documents = documents});
    CHECK(documents_of(step) == list{0, 3, 5, 0, 3});
    CHECK(step.packed().samples()[1].first_document == 3);
    CHECK(step.packed().samples()[1].documents == 2);
    CHECK(step.hash() != plain);
    auto again = uly::sequence::split(2, 2, 8);
    list const same{3, 5, 11};
    CHECK(again.pack({.documents = same}).hash() == step.hash());
    CHECK(again.pack({}).hash() == plain);
}

TEST_CASE("packing: positions that restart give the documents, on every rank, in any order") {
    // Positions 0,1,2,0,1,0,1,2 over two ranks are documents at 0, 3 and 5.
    list const positions{0, 1, 2, 0, 1, 0, 1, 2};
    uly::threads::run(2, [&](uly::threads::communicator group) {
        auto const mine = std::span(positions).subspan(4 * at(group.rank()), 4);
        auto const step = uly::sequence::agree(group, {.tokens = 4, .positions = mine});
        if (documents_of(step) != list{0, 3, 5}) throw std::runtime_error("other documents");
        // Striped: rank 0 holds the even tokens. Two samples, the second one document.
        runs const order{{group.rank(), 4, 2}};
        list own;
        for (int64_t i = 0; i < 4; ++i) own.push_back(positions[at(group.rank() + 2 * i)]);
        for (int64_t i = 0; i < 4; ++i) own.push_back(group.rank() + 2 * i);
        auto const striped = uly::sequence::agree(
            group, {.batch = 2, .tokens = 4, .order = order, .positions = own});
        if (documents_of(striped) != list{0, 3, 5, 0}) throw std::runtime_error("other stripes");
        auto known = uly::sequence::split(2, 1, 8);
        list const offsets{0, 3, 5, 8};
        if (known.pack({.documents = offsets}).hash() != step.hash())
            throw std::runtime_error("another step");
        auto const agreed =
            uly::sequence::agree(group, {.tokens = 4, .packing = {.documents = offsets}});
        if (agreed.hash() != step.hash()) throw std::runtime_error("another agreed step");
    });
}

TEST_CASE(
    "packing: keys that are not there shorten a sample, and are holes between those that are") {
    using bytes = std::vector<std::uint8_t>;
    auto const layer = uly::checked({.heads = 1, .head_dim = 1});
    auto step = uly::sequence::split(2, 3, 5);
    // Padding on the left, on the right, and nothing there: ranges say it all.
    bytes const ends{0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0};
    step.pack({.present = ends});
    auto const samples = step.packed().samples();
    CHECK(std::pair{samples[0].begin, samples[0].end} == std::pair<int64_t, int64_t>{2, 5});
    CHECK(std::pair{samples[1].begin, samples[1].end} == std::pair<int64_t, int64_t>{0, 3});
    CHECK(samples[2].begin == samples[2].end);
    CHECK(step.visible(layer).present.empty());
    // Padding on the right is a length.
    list const lengths{5, 3, 0};
    bytes const right{1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0};
    auto short_step = uly::sequence::split(2, 3, 5);
    CHECK(short_step.pack({.present = right}).hash() ==
          uly::sequence::split(2, 3, 5).pack({.lengths = lengths}).hash());
    // One hole, and what counts as there.
    bytes const hole{0, 1, 0, 7, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    auto const whole = step.hash();
    step.pack({.present = hole});
    CHECK(step.hash() != whole);
    auto const rule = step.visible(layer);
    for (int64_t b = 0; b < 3; ++b)
        for (int64_t key = 0; key < 5; ++key) {
            CHECK(rule.sees(b, 0, key) == (hole[at(b * 5 + key)] != 0));
            CHECK(rule.sees(b, 0, key) == sees(rule, b, 0, key));
        }
    bytes other = hole;
    other[7] = 0;
    auto const before = step.hash();
    CHECK(step.pack({.present = other}).hash() != before);
    // A length cuts what is there; queries stand at the end of it.
    std::vector<runs> const queries{{{0, 2}}, {}}, keys{{{0, 5}}, {}};
    auto cross = uly::sequence::of(1, queries, keys);
    bytes const some{0, 1, 0, 1, 1};
    list const three{3};
    cross.pack({.lengths = three, .present = some});
    auto const own = cross.packed().samples()[0];
    CHECK(std::pair{own.begin, own.end} == std::pair<int64_t, int64_t>{1, 2});
    CHECK(own.position == 0);
}

TEST_CASE("packing: every rank says which of its keys are there, in any order") {
    std::vector<std::uint8_t> const present{1, 0, 1, 0, 1, 1, 0, 1, 0, 1, 1, 1, 0, 1, 1, 0};
    list const documents{3, 11};
    auto expected = uly::sequence::split(2, 2, 8);
    expected.pack({.documents = documents, .present = present});
    uly::threads::run(2, [&](uly::threads::communicator group) {
        auto const me = group.rank();
        std::vector<std::uint8_t> mine;
        for (int64_t b = 0; b < 2; ++b)
            for (int64_t i = 0; i < 4; ++i) mine.push_back(present[at(8 * b + 4 * me + i)]);
        auto const step = uly::sequence::agree(
            group, {.batch = 2, .tokens = 4, .packing = {.documents = documents}, .present = mine});
        if (step.hash() != expected.hash()) throw std::runtime_error("another step");
        auto const alike = uly::sequence::agree(
            group,
            {.batch = 2, .tokens = 4, .packing = {.documents = documents, .present = present}});
        if (alike.hash() != expected.hash()) throw std::runtime_error("another packed step");
        // Positions and presence in one step; striped.
        runs const order{{me, 4, 2}};
        list positions;
        mine.clear();
        for (int64_t b = 0; b < 2; ++b)
            for (int64_t i = 0; i < 4; ++i) {
                mine.push_back(present[at(8 * b + me + 2 * i)]);
                positions.push_back((me + 2 * i) % 3);  // documents at 0, 3 and 6
            }
        list const thirds{3, 6, 8, 11, 14};
        auto striped = uly::sequence::agree(
            group,
            {.batch = 2, .tokens = 4, .order = order, .positions = positions, .present = mine});
        std::vector<runs> const stripes{{{0, 4, 2}}, {{1, 4, 2}}};
        auto known = uly::sequence::of(2, stripes);
        known.pack({.documents = thirds, .present = present});
        if (striped.hash() != known.hash()) throw std::runtime_error("another striped step");
        // Keys of their own, all on rank 1.
        auto const cross = uly::sequence::agree(
            group, {.batch = 2,
                    .tokens = 1,
                    .keys = me * 8,
                    .present = me == 0 ? std::span<std::uint8_t const>{} : std::span(present)});
        std::vector<runs> const two{{{0, 1}}, {{1, 1}}}, all{{}, {{0, 8}}};
        auto crossed = uly::sequence::of(2, two, all);
        if (cross.hash() != crossed.pack({.present = present}).hash())
            throw std::runtime_error("another step of keys");
    });
}

TEST_CASE("packing: what ranks say of their keys is checked, with one error on every rank") {
    using bytes = std::vector<std::uint8_t>;
    bytes const four(4, 1), three(3, 1), eight(8, 1);
    auto const all = [](std::vector<std::string> const& texts, std::string const& expected) {
        for (auto const& text : texts)
            CHECK_MESSAGE(text.find(expected) != std::string::npos, text);
        CHECK(texts[0] == texts[1]);
    };
    all(agree_errors([&](int rank) {
            return uly::sequence_options{.tokens = 4, .present = rank == 0 ? four : three};
        }),
        "present must name one for each sample and key of the rank: rank 1 has 3, expected 4");
    all(agree_errors([&](int rank) {
            return uly::sequence_options{.tokens = 4,
                                         .present = rank == 0 ? std::span<std::uint8_t const>{}
                                                              : std::span(four)};
        }),
        "present must name one for each sample and key of the rank: rank 0 has 0, expected 4");
    all(agree_errors([&](int) {
            return uly::sequence_options{
                .tokens = 4, .packing = {.present = eight}, .present = four};
        }),
        "present comes from the ranks' keys or from the packing, not from both: 8 in the packing");
    all(agree_errors(
            [&](int) { return uly::sequence_options{.tokens = 4, .packing = {.present = four}}; }),
        "present must name one for each sample and key: 4 given, batch 1, 8 keys");
    bytes other = eight;
    other[3] = 0;
    all(agree_errors([&](int rank) {
            return uly::sequence_options{.tokens = 4,
                                         .packing = {.present = rank == 0 ? eight : other}};
        }),
        "the hash of present must be equal on every rank");
}

TEST_CASE("packing: what cannot be is refused with its values") {
    auto step = uly::sequence::split(2, 2, 8);
    auto const refused = [&](uly::packing_options const& given, char const* text) {
        auto const message = refusal_of([&] { step.pack(given); });
        CHECK_MESSAGE(message.find(text) != std::string::npos, message);
    };
    list const back{3, 3}, far{17}, three{1, 2, 3}, negative{-1, 4}, longer{4, 9}, wild{0, 99};
    refused({.documents = back},
            "documents must begin in ascending order within the step: 3 after 3");
    refused({.documents = far}, "17 after -1, 2 samples of 8 keys");
    refused({.lengths = three}, "lengths must name one for each sample: 3 lengths, batch 2");
    refused({.lengths = negative}, "sample 0 has length -1 of 8 keys");
    refused({.lengths = longer}, "sample 1 has length 9 of 8 keys");
    refused({.query_positions = three}, "query_positions must name one for each sample: 3");
    refused({.query_positions = wild}, "sample 1 has 99, 8 queries, 8 keys");
    auto vast = uly::sequence::split(2, 4, (int64_t{1} << 31) - 1);
    list const all(4, 1);
    auto const beyond = refusal_of([&] { vast.pack({.lengths = all}); });
    CHECK_MESSAGE(
        beyond.find("samples that differ must see less than 2^62 keys together: 4 samples "
                    "of 2147483647 queries") != std::string::npos,
        beyond);
    std::vector<runs> const queries{{{0, 4}}, {{4, 4}}}, keys{{{0, 9}}, {{9, 3}}};
    auto cross = uly::sequence::of(1, queries, keys);
    list const two{0, 4};
    auto const message = refusal_of([&] { cross.pack({.documents = two}); });
    CHECK_MESSAGE(message.find("documents of other queries than keys need query_positions: 8 "
                               "queries, 12 keys") != std::string::npos,
                  message);
}

TEST_CASE("packing: a past moves queries and keys behind what is cached") {
    auto step = uly::sequence::split(2, 3, 4);
    list const past{5, 0, 2}, lengths{4, 1, 0};
    step.pack({.lengths = lengths, .past = past});
    CHECK(step.keys().total() == 4);
    CHECK(step.visible_keys() == 9);
    auto const rule =
        step.visible(uly::checked({.heads = 1, .head_dim = 1, .mask = uly::mask::causal}));
    CHECK(rule.keys == 9);
    CHECK(rule.keys_of(0, 0) == uly::index_range{0, 6});
    CHECK(rule.keys_of(0, 3) == uly::index_range{0, 9});
    CHECK(rule.keys_of(1, 0) == uly::index_range{0, 1});
    CHECK(rule.keys_of(1, 3) == uly::index_range{0, 1});  // padding: sees what there is
    CHECK(rule.keys_of(2, 0) == uly::index_range{0, 2});
    // The same samples without a cache are another step.
    auto const with_past = step.hash();
    list const ends{4}, five{3}, one{1};
    auto placed = uly::sequence::split(1, 1, 4), cached = uly::sequence::split(1, 1, 4);
    placed.pack({.lengths = ends, .query_positions = five});
    cached.pack({.lengths = one, .past = five});
    CHECK(placed.packed().samples()[0].end == cached.packed().samples()[0].end);
    CHECK(placed.packed().samples()[0].position == cached.packed().samples()[0].position);
    CHECK(placed.hash() != cached.hash());
    CHECK(step.pack({}).hash() != with_past);
    CHECK(step.visible_keys() == 4);
}

TEST_CASE("packing: a past that cannot be is refused with its values") {
    auto step = uly::sequence::split(2, 2, 8);
    auto const refused = [&](uly::packing_options const& given, char const* text) {
        auto const message = refusal_of([&] { step.pack(given); });
        CHECK_MESSAGE(message.find(text) != std::string::npos, message);
    };
    list const two{3, 4}, three{1, 2, 3}, negative{0, -1}, far{0, (int64_t{1} << 31) - 8}, zero{0};
    refused({.past = three}, "past must name one for each sample: 3 pasts, batch 2");
    refused({.past = negative}, "a sample's past and the step's tokens together must lie in 0 .. "
                                "2^31 - 1: sample 1 has past -1 and 8 tokens");
    refused({.past = far}, "sample 1 has past 2147483640 and 8 tokens");
    refused({.documents = zero, .past = two},
            "past says where queries stand, in one document a sample without padding: 1 documents, 0 "
            "query_positions");
    refused({.query_positions = two, .past = two}, "0 documents, 2 query_positions");
    std::vector<std::uint8_t> const there(16, 1);
    refused({.present = there, .past = two}, "0 documents, 0 query_positions, 16 present");
    std::vector<runs> const queries{{{0, 4}}, {{4, 4}}}, keys{{{0, 5}}, {{5, 3}}};
    auto cross = uly::sequence::of(2, queries, keys);
    auto const message = refusal_of([&] { cross.pack({.past = two}); });
    CHECK_MESSAGE(message.find("keys behind those of a cache are the queries' own: the step has 8 "
                               "queries and 8 keys of their own") != std::string::npos,
                  message);
}

TEST_CASE("packing: ranks that pack otherwise get the same error") {
    list const two{0, 3}, other{0, 5}, none, four(4), three(3), one{5}, six{6};
    auto const same = [&](auto const& options_of, std::string const& text) {
        auto const seen = agree_errors(options_of);
        CHECK(seen[0] == seen[1]);
        CHECK_MESSAGE(seen[0].find(text) != std::string::npos, seen[0]);
    };
    using options = uly::sequence_options;
    same([&](int r) { return options{.tokens = 4, .packing = {.documents = r == 0 ? two : none}}; },
         "the number of documents must be equal on every rank: rank 0 has 2, rank 1 has 0");
    same(
        [&](int r) { return options{.tokens = 4, .packing = {.documents = r == 0 ? two : other}}; },
        "the hash of documents must be equal on every rank: rank 0 has ");
    same([&](int r) { return options{.tokens = 4, .packing = {.past = r == 0 ? one : six}}; },
         "the hash of past must be equal on every rank: rank 0 has ");
    same([&](int r) { return options{.tokens = 4, .packing = {.past = r == 0 ? one : none}}; },
         "the number of past must be equal on every rank: rank 0 has 1, rank 1 has 0");
    same([&](int) { return options{.tokens = 4, .packing = {.past = one}, .positions = four}; },
         "past says where queries stand, in one document a sample");
    same([&](int r) { return options{.tokens = 4, .positions = r == 0 ? four : none}; },
         "positions must name one for each sample and token of the rank: rank 1 has 0, expected 4");
    same([&](int r) { return options{.tokens = 4, .positions = r == 0 ? three : four}; },
         "rank 0 has 3, expected 4");
    same(
        [&](int) { return options{.tokens = 4, .packing = {.documents = two}, .positions = four}; },
        "documents come from positions or from offsets, not from both");
}

TEST_CASE("packing: work is balanced under windows and documents (4096 rows and more)") {
    for (std::uint64_t seed = 1; seed <= how_many(40); ++seed) {
        CAPTURE(seed);
        random_engine random{seed};
        auto const tokens = 4096 + below(random, 3000);
        uly::shape layer{.heads = 1 + below(random, 12),
                         .kv_heads = 1,
                         .head_dim = 1,
                         .value_dim = 1,
                         .mask = below(random, 2) == 0 ? uly::mask::full : uly::mask::causal};
        if (below(random, 2) == 0) layer.window = {.left = below(random, tokens)};
        auto step = uly::sequence::split(1, 1, tokens);
        list documents;
        for (int64_t first = 0; first < tokens; first += 1 + below(random, tokens))
            documents.push_back(first);
        if (below(random, 2) == 0) step.pack({.documents = documents});
        auto const rule = step.visible(layer);
        for (int const ranks : {2, 3, 4, 7, 8, 16})
            for (int64_t const multiple : {1, 64, 256}) {
                std::vector<int64_t> memory;
                uly::row_weights const weights =
                    rule.uniform() ? uly::row_weights(rule) : uly::row_weights(rule, memory);
                uly::line const cuts(layer, rule, 1, ranks, multiple, weights);
                int64_t most = 0, longest = 0;
                for (int64_t row = 0; row < tokens; ++row)
                    longest = std::max(longest, weights.before(row + 1) - weights.before(row));
                for (int r = 0; r < ranks; ++r) {
                    int64_t work = 0;
                    for (auto const& item : cuts.items(r))
                        work += item.heads() *
                                (weights.before(item.row_end) - weights.before(item.row_begin));
                    most = std::max(most, work);
                }
                auto const mean = static_cast<double>(layer.heads * weights.before(tokens)) / ranks;
                CAPTURE(ranks);
                CAPTURE(multiple);
                if (multiple == 1)
                    CHECK(static_cast<double>(most) <= 1.02 * mean);
                else
                    CHECK(static_cast<double>(most) <=
                          mean + static_cast<double>(multiple * longest));
            }
    }
}

TEST_CASE("packing: a plan that was copied has its own rule") {
    auto step = uly::sequence::split(2, 2, 8);
    list const documents{0, 3, 5, 11};
    step.pack({.documents = documents});
    auto const layer = uly::checked({.heads = 2, .head_dim = 1});
    uly::plan copied;
    {
        uly::plan made;
        made.rebuild(layer, step, 2, 0, 1);
        copied = made;
        made.rebuild(layer, uly::sequence::split(2, 2, 8), 2, 0, 1);
    }
    CHECK(copied.visible().keys_of(0, 4) == uly::index_range{3, 5});
    CHECK(copied.visible().keys_of(1, 0) == uly::index_range{0, 3});
}

TEST_CASE("packing: ranks whose steps are packed otherwise are told so") {
    std::vector<std::string> texts(2);
    uly::threads::run(2, [&](uly::threads::communicator group) {
        auto step = uly::sequence::split(2, 1, 8);
        list const documents{0, 3 + group.rank()};
        step.pack({.documents = documents});
        uly::plan moves;
        moves.rebuild(uly::checked({.heads = 2, .head_dim = 1}), step, 2, group.rank(), 1);
        uly::fence_status status{.call = group.begin_call(), .plan = moves.hash()};
        status.terms = moves.terms();
        try {
            group.fence(status);
        } catch (uly::disagreement const& e) {
            texts[at(group.rank())] = e.what();
        }
    });
    CHECK(texts[0] == texts[1]);
    CHECK(texts[0].find("every rank must pass the same token orders and packing: plan of rank 0") !=
          std::string::npos);
}
