// SPDX-License-Identifier: Apache-2.0

#include "harness.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

using namespace pipeline_test;
namespace uly = ulysses;

/// Windows for each head and padding with holes, against attention by its formula over the keys that
/// the problem's words name, not the library's rule.
namespace {

std::size_t at(int64_t index) { return static_cast<std::size_t>(index); }

template <class T>
bool is_there(problem<T> const& p, int64_t b, int64_t key) {
    return (p.lengths.empty() || key < p.lengths[at(b)]) &&
           (p.present.empty() || p.present[at(b * p.keys + key)] != 0);
}

bool row_sees(problem<double> const& p, int64_t b, int64_t h, int64_t row, int64_t key) {
    if (!is_there(p, b, key)) return false;
    auto position = row;
    if (!p.positions.empty()) {
        position += p.positions[at(b)];
    } else if (p.tokens != p.keys) {  // the last query stands at the last key that is there
        auto last = p.present.empty() && !p.lengths.empty() ? p.lengths[at(b)] : p.keys;
        while (last > 0 && !p.present.empty() && !is_there(p, b, last - 1)) --last;
        position += last - p.tokens;
    }
    auto const document = [&](int64_t place) {
        return std::count_if(p.documents.begin(), p.documents.end(), [&](int64_t first) {
            return b * p.keys < first && first <= b * p.keys + std::min(place, p.keys - 1);
        });
    };
    if (document(position) != document(key)) return false;
    auto const window = p.layer.head_windows.empty() ? p.layer.window : p.layer.head_windows[h];
    return !(p.layer.mask == uly::mask::causal && key > position) &&
           !(window.left >= 0 && key < position - window.left) &&
           !(window.right >= 0 && key > position + window.right);
}

results<double> by_words(problem<double> const& p) {
    results<double> r(p);
    for (auto* x : {&r.dq, &r.dk, &r.dv, &r.o}) std::fill(x->memory.begin(), x->memory.end(), 0.0);
    auto const scale = uly::softmax_scale(p.layer);
    auto const group = p.layer.heads / p.layer.kv_heads;
    std::vector<double> weight(at(p.keys)), slope(at(p.keys));
    for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t h = 0; h < p.layer.heads; ++h)
            for (int64_t i = 0; i < p.tokens; ++i) {
                auto const g = h / group;
                double sum = 0, mean = 0;
                for (int64_t j = 0; j < p.keys; ++j) {
                    weight[at(j)] = slope[at(j)] = 0;
                    if (!row_sees(p, b, h, i, j)) continue;
                    double score = 0;
                    for (int64_t d = 0; d < p.layer.head_dim; ++d)
                        score += scale * p.q(b, i, h, d) * p.k(b, j, g, d);
                    for (int64_t d = 0; d < p.layer.value_dim; ++d)
                        slope[at(j)] += p.dout(b, i, h, d) * p.v(b, j, g, d);
                    sum += weight[at(j)] = std::exp(score);
                }
                r.lse(b, i, h, 0) = std::log(sum);
                for (int64_t j = 0; j < p.keys; ++j) {
                    if (weight[at(j)] == 0) continue;
                    weight[at(j)] /= sum;
                    mean += weight[at(j)] * slope[at(j)];
                    for (int64_t d = 0; d < p.layer.value_dim; ++d) {
                        r.o(b, i, h, d) += weight[at(j)] * p.v(b, j, g, d);
                        r.dv(b, j, g, d) += weight[at(j)] * p.dout(b, i, h, d);
                    }
                }
                for (int64_t j = 0; j < p.keys; ++j) {
                    auto const ds = scale * weight[at(j)] * (slope[at(j)] - mean);
                    for (int64_t d = 0; d < p.layer.head_dim; ++d) {
                        r.dq(b, i, h, d) += ds * p.k(b, j, g, d);
                        r.dk(b, j, g, d) += ds * p.q(b, i, h, d);
                    }
                }
            }
    return r;
}

/// dk and dv of what is not there are zero, exactly.
template <class T>
bool nothing_for_hidden(problem<T> const& p, results<T> const& r) {
    for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t s = 0; s < p.keys; ++s)
            for (int64_t h = 0; h < p.layer.kv_heads && !is_there(p, b, s); ++h)
                for (auto const* x : {&r.dk, &r.dv})
                    for (int64_t d = 0; d < x->sizes[3]; ++d)
                        if ((*x)(b, s, h, d) != T(0)) return false;
    return true;
}

template <class T>
void check_against(problem<T> const& p, results<double> const& exact, results<T> const& mine) {
    auto const bound = bounds_of(p, 8);
    CHECK(largest_difference(mine.o, exact.o) <= bound.o);
    CHECK(largest_difference(mine.lse, exact.lse) <= bound.lse);
    CHECK(largest_difference(mine.dq, exact.dq) <= bound.dq);
    CHECK(largest_difference(mine.dk, exact.dk) <= bound.dk);
    CHECK(largest_difference(mine.dv, exact.dv) <= bound.dv);
    CHECK(nothing_for_hidden(p, mine));
}

template <class T>
void check_at_any_number_of_ranks(problem<T> const& p, results<double> const& exact,
                                  std::mt19937_64& random) {
    auto const one = compute_alone<builtin_attention>(p);
    check_against(p, exact, one);
    for (int ranks = 1; ranks <= 8; ++ranks) {
        CAPTURE(ranks);
        auto const queries = random_orders(random, p.tokens, ranks);
        auto const keys = p.keys != p.tokens ? random_orders(random, p.keys, ranks) : orders{};
        auto const many = compute<builtin_attention>(p, queries, keys);
        CHECK(same_bits(many.o, one.o));
        CHECK(same_bits(many.lse, one.lse));
        CHECK(same_bits(many.dq, one.dq));
        check_against(p, exact, many);
        for (auto const way : {reach::none, reach::some})
            if (ranks % 4 == 3 && reach_under_test() == reach::all)
                CHECK(same_bits(compute<builtin_attention>(p, queries, keys, {}, way), many));
    }
}

struct random_case {
    std::vector<uly::window> windows;  // the layer's, so that a case stays where it is
    problem<float> p;
};

/// Windows for each head, in runs or in turn, and holes; in a part of the cases documents, lengths
/// and positions beside them. Some sequences are longer than a tile.
void make_case(random_case& c, std::uint64_t seed, std::mt19937_64& random) {
    auto const kv_heads = 1 + below(random, 4);
    uly::shape layer{.heads = kv_heads * (1 + below(random, 4)),
                     .kv_heads = kv_heads,
                     .head_dim = 1 + below(random, 12),
                     .value_dim = 1 + below(random, 12),
                     .mask = below(random, 2) == 0 ? uly::mask::full : uly::mask::causal,
                     .assignment = below(random, 8) == 0 ? uly::assignment::whole_heads
                                                         : uly::assignment::balanced};
    auto const length = [&] { return 1 + below(random, below(random, 6) == 0 ? 600 : 50); };
    auto const tokens = length();
    auto const keys = layer.mask == uly::mask::full && below(random, 3) == 0 ? length() : tokens;
    auto const batch = 1 + below(random, tokens > 50 ? 1 : 3);
    if (below(random, 4) != 0) {
        auto const some = [&]() -> uly::window {
            return {below(random, 4) == 0 ? -1 : below(random, keys),
                    below(random, 3) == 0 ? -1 : below(random, keys)};
        };
        uly::window const kinds[] = {some(), some(), {}};
        auto const every = 1 + below(random, layer.heads);
        for (int64_t h = 0; h < layer.heads; ++h) c.windows.push_back(kinds[h / every % 3]);
        layer.head_windows = c.windows;
    }
    c.p = make_problem<float>(seed, layer, batch, tokens, keys);
    if (c.windows.empty() || below(random, 3) != 0)
        for (int64_t b = 0; b < batch; ++b) {
            auto const hidden = below(random, 8),
                       first = below(random, 2) * below(random, keys + 1);
            for (int64_t key = 0; key < keys; ++key)
                c.p.present.push_back(key >= first && below(random, 8) >= hidden);
        }
    if (below(random, 4) == 0)
        for (int64_t b = 0; b < batch; ++b) c.p.lengths.push_back(below(random, keys + 1));
    if (below(random, 4) == 0)
        for (int64_t b = 0; b < batch; ++b)
            c.p.positions.push_back(below(random, keys + tokens) - tokens);
    if (below(random, 4) == 0 && (tokens == keys || !c.p.positions.empty()))
        for (int64_t first = below(random, keys); first <= batch * keys;
             first += 1 + below(random, keys))
            c.p.documents.push_back(first);
}

}  // namespace

TEST_CASE("masks: windows for each head and holes, at any number of ranks") {
    for (std::uint64_t seed = 1; seed <= 48; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        random_case c;
        make_case(c, seed, random);
        INFO(c.p.text());
        auto const wide = converted<double>(c.p);
        auto const exact = by_words(wide);
        auto const reference = compute_alone<uly::reference_attention>(wide);
        check_against(wide, exact, reference);
        auto const ranks = 2 + static_cast<int>(seed % 7);
        auto const many = compute<uly::reference_attention>(
            wide, random_orders(random, c.p.tokens, ranks),
            c.p.keys != c.p.tokens ? random_orders(random, c.p.keys, ranks) : orders{});
        CHECK(same_bits(many.o, reference.o));
        CHECK(same_bits(many.lse, reference.lse));
        CHECK(same_bits(many.dq, reference.dq));
        check_against(wide, exact, many);
        if (seed % 2 == 0)
            check_at_any_number_of_ranks(c.p, exact, random);
        else
            check_at_any_number_of_ranks(wide, exact, random);
    }
}

TEST_CASE("masks: holes within narrow windows, over several tiles") {
    // The keys of rows near a tile's end begin in the middle of a tile of keys.
    std::vector<uly::window> const windows{{20, 0}, {5, 40}, {}};
    auto p = make_problem<float>(5, {.heads = 3, .head_dim = 3, .head_windows = windows}, 1, 700);
    std::mt19937_64 random{5};
    for (int64_t key = 0; key < 700; ++key)
        p.present.push_back(below(random, 3) != 0 && (key < 300 || key > 400));
    check_at_any_number_of_ranks(p, by_words(converted<double>(p)), random);
}

TEST_CASE("masks: local and global heads in turn, one key-value head for both") {
    // Heads 0, 2, ... see 3 tokens back, the others all before: a group of two windows.
    std::vector<uly::window> const windows{{3, -1}, {}, {3, -1}, {}, {3, -1}, {}};
    std::mt19937_64 random{3};
    for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing}) {
        auto const p = make_problem<double>(3,
                                            {.heads = 6,
                                             .kv_heads = 3,
                                             .head_dim = 4,
                                             .mask = uly::mask::causal,
                                             .head_windows = windows,
                                             .keep = keep},
                                            2, 21);
        auto const one = compute_alone<builtin_attention>(p),
                   many = compute<builtin_attention>(p, zigzag(21, 4));
        auto const exact = by_words(p);
        auto const bound = bounds_of(p, 4);
        CHECK(same_bits(many.o, one.o));
        CHECK(same_bits(many.dq, one.dq));
        CHECK(largest_difference(many.o, exact.o) <= bound.o);
        CHECK(largest_difference(many.dk, exact.dk) <= bound.dk);
        CHECK(largest_difference(many.dv, exact.dv) <= bound.dv);
    }
}

namespace {

constexpr uly::window local_and_global[] = {{2, -1}, {}};
constexpr uly::shape two_kinds{
    .heads = 2, .head_dim = 4, .mask = uly::mask::causal, .head_windows = local_and_global};

/// The reference without one of its features.
template <bool uly::attention_features::*Feature>
struct without : uly::reference_attention {
    static constexpr auto features = [] {
        auto all = uly::reference_attention::features;
        all.*Feature = false;
        return all;
    }();
};

}  // namespace

TEST_CASE("masks: a pipeline keeps its windows, and a fixed shape may have some") {
    using layer_type = uly::pipeline<uly::serial, uly::sequence_local, uly::reference_attention>;
    auto const step = uly::sequence::split(1, 1, 8);
    std::vector<layer_type> layers;
    for (int i = 0; i < 3; ++i) {  // moved as the list grows, its windows long gone
        std::vector<uly::window> windows{{i, -1}, {}};
        layers.emplace_back(uly::serial{}, uly::sequence_local{}, uly::reference_attention{},
                            uly::shape{.heads = 2, .head_dim = 4, .head_windows = windows});
        windows.assign(2, {7, 7});
    }
    for (int i = 0; i < 3; ++i) {
        auto const items = layers[at(i)].planned(step).items();
        REQUIRE(items.size() == 2);
        CHECK(items[0].work.window == uly::window{i, -1});
        CHECK(items[1].work.window == uly::window{});
    }
    uly::pipeline fixed{uly::serial{}, uly::sequence_local{}, uly::reference_attention{},
                        uly::fixed<two_kinds>};
    CHECK(fixed.planned(step).items()[0].work.window == uly::window{2, -1});
    CHECK(fixed.describe(step).find("| keys 0-8, window 2 left, all right") != std::string::npos);
}

#if ULYSSES_EXCEPTIONS
TEST_CASE("masks: a functor without windows or holes is refused") {
    auto const made = outcome_of([] {
        uly::pipeline layer{uly::serial{}, uly::sequence_local{},
                            without<&uly::attention_features::window>{}, uly::shape(two_kinds)};
    });
    CHECK(made.code == uly::errc::unsupported);
    CHECK(made.text.find("lacks a feature the layer asks for: window") != std::string::npos);
    // Two heads of other windows are cut between two ranks, and alike ones are not.
    using whole = without<&uly::attention_features::row_range>;
    auto const checked_for = [](uly::shape const& layer) {
        return outcome_of([&] { uly::check_features<whole>(layer, 2, {}); }).code;
    };
    CHECK(checked_for(uly::checked(two_kinds)) == uly::errc::unsupported);
    CHECK(checked_for(uly::checked({.heads = 2, .head_dim = 4, .window = {2, -1}})) ==
          uly::errc::none);
    uly::pipeline layer{uly::serial{}, uly::sequence_local{},
                        without<&uly::attention_features::holes>{}, uly::shape(two_kinds)};
    std::vector<std::uint8_t> const right{1, 1, 0}, hole{1, 0, 1};
    auto step = uly::sequence::split(1, 1, 3);
    layer.planned(step.pack({.present = right}));  // a length says as much
    auto const planned = outcome_of([&] { layer.planned(step.pack({.present = hole})); });
    CHECK(planned.code == uly::errc::unsupported);
    CHECK(planned.text.find("lacks a feature the step asks for: holes") != std::string::npos);
}

TEST_CASE("masks: ranks with other windows, or other keys there, end alike") {
    auto const p = make_problem<double>(1, {.heads = 2, .head_dim = 4}, 1, 6);
    auto const failing = [&](auto const& layer_of, auto const& present_of,
                             std::string const& text) {
        std::vector<outcome> ends(3);
        run_ranks(3, [&](uly::threads::communicator c) {
            auto step = uly::sequence::split(3, 1, 6);
            step.pack({.present = present_of(c.rank())});
            uly::pipeline layer{c, uly::sequence_local{}, uly::reference_attention{},
                                layer_of(c.rank())};
            local_problem<double> l(p, step, c.rank());
            ends[at(c.rank())] = outcome_of([&] { layer.attend(step, l.q, l.k, l.v, l.o); });
        });
        for (auto const& end : ends) {
            CHECK(end.code == uly::errc::disagreement);
            CHECK_MESSAGE(end.text.find(text) != std::string::npos, end.text);
            CHECK(end.text == ends[0].text);
            CHECK(end.rank == 2);
        }
    };
    static constexpr uly::window kinds[2][2] = {{{1, 0}, {}}, {{}, {1, 0}}};
    std::vector<std::uint8_t> const holes[2] = {{1, 0, 1, 1, 0, 1}, {1, 0, 1, 0, 1, 1}};
    failing(
        [](int rank) {
            return uly::shape{.heads = 2, .head_dim = 4, .head_windows = kinds[rank == 2]};
        },
        [&](int) { return std::span(holes[0]); },
        "every rank must pass the same head_windows (its hash)");
    failing([&](int) { return p.layer; }, [&](int rank) { return std::span(holes[rank == 2]); },
            "every rank must pass the same token orders and packing");
}
#endif
