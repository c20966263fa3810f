#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/reference.hpp>
#include <ulysses/core/attention.hpp>

#include "../attention/problem.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// What every attention functor must satisfy, as one call for each element type:
///
///     conformance::check_attention<float>(my_attention{});
///
/// Problems are drawn from a seed, within what `features` says that the functor can do; results are
/// compared with `reference_attention` in double. A functor without `backward` is checked forward.
namespace conformance {

/// The rule that an attention functor breaks, and where.
struct broken_attention_rule : std::logic_error {
    using std::logic_error::logic_error;
};

namespace attention_detail {

using namespace attention_test;

inline void expect(bool right, std::string_view rule, std::string const& where) {
    if (!right) throw broken_attention_rule(ulysses::concat("conformance: ", rule, ": ", where));
}

/// Sizes of one problem that a functor with `features` and `multiple` takes: short and long ones,
/// cut rows, more keys than are seen, grouped heads, all layouts.
inline sizes drawn_sizes(std::mt19937_64& random, ulysses::attention_features const& features,
                         int64_t multiple) {
    int64_t const tokens[] = {1, 2, 17, 64, 100, 127, 128, 129, 200, 256, 257, 300, 400};
    auto const below = [&](int64_t limit) {
        return static_cast<int64_t>(random() % static_cast<std::uint64_t>(limit));
    };
    sizes s{};
    s.batch = 1 + below(2);
    s.tokens = s.keys = tokens[below(13)] + (multiple > 64 && below(2) == 0 ? multiple : 0);
    s.kv_heads = 1 + below(2), s.group = features.grouped ? 1 + below(3) : 1;
    s.dim = 1 + below(40), s.value_dim = features.value_dim ? 1 + below(40) : s.dim;
    auto const full = features.full && (!features.causal || below(3) == 0);
    s.mask = full ? ulysses::mask::full : ulysses::mask::causal;
    if (full && below(2) == 0) s.keys = tokens[below(13)];
    s.rows = s.tokens;
    if (features.row_range && below(2) == 0) {
        // Cuts lie on the functor's grid; the last one at the end of the sequence.
        s.begin = below(s.tokens) / multiple * multiple;
        auto const end = (s.begin + 1 + below(s.tokens - s.begin) + multiple - 1) / multiple;
        s.rows = std::min(end * multiple, s.tokens) - s.begin;
    }
    if (features.window && below(2) == 0) {
        auto const side = [&] {
            return below(below(2) == 0 ? s.keys : std::min<int64_t>(s.keys, 30));
        };
        s.window = {below(3) == 0 ? -1 : side(), below(3) == 0 ? -1 : side()};
    }
    if (features.documents && s.tokens == s.keys && below(2) == 0)
        for (int64_t b = 0; b < s.batch; ++b) {
            ulysses::sample_keys own{0, s.keys, 0, static_cast<int64_t>(s.documents.size()), 0};
            for (int64_t first = 0; first < s.keys; first += 1 + below(s.keys)) {
                s.documents.push_back(first);
                ++own.documents;
            }
            s.samples.push_back(own);
        }
    if (features.padding && below(2) == 0) {
        s.samples.resize(at(s.batch), ulysses::sample_keys{0, s.keys, s.keys - s.tokens, 0, 0});
        for (auto& own : s.samples) {
            own.begin = below(4) == 0 ? below(s.keys + 1) : 0;
            own.end = own.begin + below(s.keys - own.begin + 1);
            if (own.documents == 0) own.position = below(s.keys + s.tokens) - s.tokens;
        }
    }
    if (features.holes && below(2) == 0) {
        // Few holes, many, or whole samples.
        auto const there = 1 + below(8);
        s.samples.resize(at(s.batch), ulysses::sample_keys{0, s.keys, s.keys - s.tokens, 0, 0});
        for (int64_t i = 0; i < s.batch * s.keys; ++i)
            s.present.push_back(below(8) < there && (there > 1 || i >= s.keys));
    }
    auto const seen = seen_by_rows(s, s.begin, s.begin + s.rows);
    s.held_begin =
        features.window || features.documents || features.padding ? below(seen.begin + 1) : 0;
    s.held = seen.end - s.held_begin;
    if (features.row_range) s.held += below(s.keys - s.held_begin - s.held + 1);
    s.scale = below(4) == 0 ? -0.3 : 1 / std::sqrt(static_cast<double>(s.dim));
    s.layout = static_cast<order>(below(4));
    return s;
}

/// What the features allow to happen to scores, each in half of the problems.
template <class T>
void draw_scores(std::mt19937_64& random, ulysses::attention_features const& features,
                 problem<T>& p) {
    auto const below = [&](int64_t limit) {
        return static_cast<int64_t>(random() % static_cast<std::uint64_t>(limit));
    };
    auto const numbers = [&](int64_t count, float largest) {
        std::vector<float> all(at(count));
        for (auto& x : all) x = largest * static_cast<float>(below(129)) / 128;
        return all;
    };
    auto const heads = p.size.heads();
    p.query_head = p.size.group * below(4);  // the item's heads are not the layer's first
    if (features.softcap && below(2) == 0) p.softcap = 0.25 + 0.25 * static_cast<double>(below(8));
    if (features.alibi && below(2) == 0) p.slopes = numbers(heads, 0.5f);
    if (features.sinks && below(2) == 0) p.sinks = numbers(heads, 2.0f);
    if (features.bias && below(2) == 0) {
        auto const some = [&](int64_t all) { return below(2) == 0 ? 1 : all; };
        p.bias_extents = {some(p.size.batch), some(heads), some(p.size.tokens), some(p.size.keys)};
        auto const& [b, h, i, j] = p.bias_extents;
        p.bias = numbers(b * h * i * j, 1.0f);
    }
    if (features.dropout && below(2) == 0)
        p.dropout = {0.1 * static_cast<double>(1 + below(8)),
                     {.seed = random(), .first_sample = 7}};
    copy_scores(p, p);
}

/// A value that only this kit writes: what shows in a result has been read from where it may not be,
/// and what is missing afterwards has been written there.
template <class T>
T poison() {
    return T(std::numeric_limits<float>::quiet_NaN());
}

/// An operand between guards, with poison in all gaps between its rows.
template <class T>
struct guarded_operand {
    static constexpr std::size_t guard = 64;
    std::vector<T> memory;
    ulysses::extents4 extents{}, strides{};

    explicit guarded_operand(operand<T> const& from, bool copied = true)
        : memory(from.memory.size() + 2 * guard, poison<T>()),
          extents(from.extents),
          strides(from.strides) {
        if (!copied) return;
        auto const to = view();
        for_each(to,
                 [&](auto b, auto s, auto h, auto d) { to(b, s, h, d) = from.view()(b, s, h, d); });
    }

    head_view<T> view() { return {memory.data() + guard, extents, strides}; }
    head_view<T const> view() const { return {memory.data() + guard, extents, strides}; }

    /// True when all but the elements of the view are still poison.
    bool untouched_around() const {
        std::vector<bool> own(memory.size());
        for_each(view(), [&](auto b, auto s, auto h, auto d) {
            own[static_cast<std::size_t>(&view()(b, s, h, d) - memory.data())] = true;
        });
        auto const still = poison<T>();
        for (std::size_t i = 0; i < memory.size(); ++i)
            if (!own[i] && std::memcmp(&memory[i], &still, sizeof(T)) != 0) return false;
        return true;
    }
    /// The elements alone, in the layout of `like`.
    operand<T> packed(operand<T> like) const {
        auto const to = like.view();
        for_each(to, [&](auto b, auto s, auto h, auto d) { to(b, s, h, d) = view()(b, s, h, d); });
        return like;
    }
};

/// Workspace of exactly the bytes that were asked for, between guards.
class guarded_workspace {
   public:
    explicit guarded_workspace(std::size_t bytes) : memory_(bytes + 3 * 64, mark), bytes_(bytes) {
        auto const misaligned = reinterpret_cast<std::uintptr_t>(memory_.data()) % 64;
        first_ = 64 + (misaligned == 0 ? 0 : 64 - misaligned);
        std::fill_n(memory_.begin() + static_cast<std::ptrdiff_t>(first_), bytes, std::byte{0xff});
    }
    std::span<std::byte> span() { return std::span(memory_).subspan(first_, bytes_); }
    bool untouched_around() const {
        for (std::size_t i = 0; i < memory_.size(); ++i)
            if ((i < first_ || i >= first_ + bytes_) && memory_[i] != mark) return false;
        return true;
    }

   private:
    static constexpr std::byte mark{0xa5};
    std::vector<std::byte> memory_;
    std::size_t bytes_, first_ = 0;
};

/// Runs a problem between guards: forward, and backward where there is one, into `p`. What is added to
/// holds `before` when backward begins.
template <class Attention, class T>
void run_guarded(Attention const& attention, problem<T>& p, accumulator_t<T> before) {
    using A = accumulator_t<T>;
    auto const where = p.size.text();
    guarded_operand<T> const q(p.q), k(p.k), v(p.v), dout(p.dout);
    guarded_operand<T> o(p.o, false), dq(p.dq, false);
    guarded_operand<A> lse(p.lse, false), dk(p.dk), dv(p.dv);
    ulysses::attention_extents const extents{.batch = p.size.batch,
                                             .rows = p.size.rows,
                                             .heads = p.size.heads(),
                                             .keys = p.size.held,
                                             .kv_heads = p.size.kv_heads,
                                             .head_dim = p.size.dim,
                                             .value_dim = p.size.value_dim};
    auto bytes = attention.template workspace_bytes<T>(extents);
    // A functor that is asked with the call and its views says it exactly.
    auto const ask = [&](auto const&... call_and_views) {
        if constexpr (ulysses::prepared_attention_for<Attention, T>)
            bytes = attention.prepare(call_and_views...);
    };
    constexpr std::string_view workspace_rule = "workspace_bytes() is what the functor uses";
    constexpr std::string_view views_rule = "nothing is written but the rows of the views";
    auto call = p.call();
    {
        ask(call, q.view(), k.view(), v.view(), o.view(), lse.view());
        guarded_workspace workspace(bytes);
        call.workspace = workspace.span();
        attention.forward(call, q.view(), k.view(), v.view(), o.view(), lse.view());
        expect(workspace.untouched_around(), workspace_rule, "forward, " + where);
    }
    expect(o.untouched_around() && lse.untouched_around(), views_rule, "forward, " + where);
    p.o = o.packed(p.o);
    p.lse = lse.packed(p.lse);
    if constexpr (ulysses::differentiable_attention_for<Attention, T>) {
        for (auto* each : {&dk, &dv}) {
            auto const view = each->view();
            for_each(view, [&](auto b, auto s, auto h, auto d) { view(b, s, h, d) = before; });
        }
        for (auto* each : {&p.dsinks, &p.dbias}) std::fill(each->begin(), each->end(), before);
        ulysses::attention_backward_views<T> const views{q.view(),    k.view(),
                                                         v.view(),    std::as_const(o).view(),
                                                         dout.view(), std::as_const(lse).view(),
                                                         dq.view(),   dk.view(),
                                                         dv.view(),   p.dlogits()};
        ask(call, views);
        guarded_workspace workspace(bytes);
        call.workspace = workspace.span();
        attention.backward(call, views);
        expect(workspace.untouched_around(), workspace_rule, "backward, " + where);
        expect(dq.untouched_around() && dk.untouched_around() && dv.untouched_around() &&
                   o.untouched_around() && lse.untouched_around(),
               views_rule, "backward, " + where);
        p.dq = dq.packed(p.dq);
        p.dk = dk.packed(p.dk);
        p.dv = dv.packed(p.dv);
    }
}

inline void expect_near(double difference, double bound, std::string_view what,
                        std::string const& where) {
    expect(difference <= bound, ulysses::concat(what, " is the formula's within rounding"),
           where +
               ulysses::concat(", off by ", difference * 1e6, "e-6, allowed ", bound * 1e6, "e-6"));
}

template <class A>
void expect_gradient(std::vector<A> const& seen, std::vector<double> const& exact, double before,
                     double bound, std::string_view what, std::string const& where) {
    double worst = 0;
    for (std::size_t i = 0; i < exact.size(); ++i) {
        auto const off = std::fabs(static_cast<double>(seen[i]) - exact[i] - before);
        worst = std::isnan(off) ? INFINITY : std::max(worst, off);
    }
    expect_near(worst, bound, what, where);
}

template <class T, class Attention>
void compare_with_reference(Attention const& attention, std::uint64_t seed) {
    using A = accumulator_t<T>;
    std::mt19937_64 random{seed};
    auto p = random_problem<T>(random,
                               drawn_sizes(random, Attention::features, attention.row_multiple()));
    draw_scores(random, Attention::features, p);
    auto const where = ulysses::concat("seed ", seed, ", ", p.text());
    auto exact = converted<double>(p);
    exact.forward(ulysses::reference_attention{});
    exact.backward(ulysses::reference_attention{});
    auto const before = A(0.5f);
    run_guarded(attention, p, before);
    auto const bound = bounds_of(p);
    expect_near(largest_difference(p.o, exact.o), bound.o, "o", where);
    expect_near(largest_difference(p.lse, exact.lse), bound.lse, "lse", where);
    if constexpr (ulysses::differentiable_attention_for<Attention, T>) {
        // Every addition to what was there before rounds that as well.
        auto const u = static_cast<double>(std::numeric_limits<A>::epsilon()) / 2;
        auto const added = u * static_cast<double>(p.size.rows * p.size.group + 2);
        for (auto* each : {&exact.dk, &exact.dv})
            for (auto& x : each->memory) x += static_cast<double>(before);
        expect_near(largest_difference(p.dq, exact.dq), bound.dq, "dq, which is overwritten,",
                    where);
        expect_near(largest_difference(p.dk, exact.dk), bound.dk + added, "dk, which is added to,",
                    where);
        expect_near(largest_difference(p.dv, exact.dv), bound.dv + added, "dv, which is added to,",
                    where);
        auto const start = static_cast<double>(before);
        auto const all = static_cast<double>(p.size.batch * p.size.rows * p.size.heads());
        auto const rounded = u * (all * static_cast<double>(p.size.held) + 2);
        expect_gradient(p.dsinks, exact.dsinks, start, bound.dsinks + rounded,
                        "the gradient of sinks, which is added to,", where);
        expect_gradient(p.dbias, exact.dbias, start, bound.dbias + rounded,
                        "the gradient of the bias, which is added to,", where);
    }
    auto again = p;
    run_guarded(attention, again, before);
    constexpr std::string_view repeats = "equal calls give equal bits";
    expect(same_rows(again.o, p.o, 0) && same_rows(again.lse, p.lse, 0), repeats, where);
    expect(same_rows(again.dq, p.dq, 0) && same_rows(again.dk, p.dk, 0) &&
               same_rows(again.dv, p.dv, 0),
           repeats, where);
}

/// What a mask is combined with.
enum class edges { none, window, documents, holes, scores };

/// Rows [begin, end) alone, over the keys they see or some more, have the bits they have in the
/// whole; so do those of other layouts.

template <class T, class Attention>
void compare_cuts(Attention const& attention, std::vector<int64_t> const& cuts, ulysses::mask mask,
                  edges with = edges::none) {
    auto const tokens = cuts.back();
    std::mt19937_64 random{static_cast<std::uint64_t>(tokens)};
    sizes size{.batch = 2,
               .tokens = tokens,
               .keys = tokens,
               .kv_heads = 1,
               .group = Attention::features.grouped ? 2 : 1,
               .dim = 24,
               .value_dim = Attention::features.value_dim ? 17 : 24,
               .mask = mask,
               .rows = tokens,
               .held = tokens,
               .scale = 0.2};
    if (with == edges::window) size.window = {tokens / 3, mask == ulysses::mask::full ? 5 : -1};
    if (with == edges::documents) {
        size.documents = {0, tokens / 4, tokens / 4 + 1, tokens / 2, 0, tokens / 3};
        size.samples = {{0, tokens, 0, 0, 4}, {0, tokens, 0, 4, 2}};
    }
    if (with == edges::holes) {
        size.samples = {{0, tokens, 0, 0, 0}, {0, tokens, 0, 0, 0}};
        // Some keys of the first sample, and all of the second up to a fourth and from a half on.
        for (int64_t i = 0; i < tokens; ++i) size.present.push_back(random() % 3 != 0);
        for (int64_t i = 0; i < tokens; ++i)
            size.present.push_back(i < tokens / 4 || i >= tokens / 2);
    }
    auto whole = random_problem<T>(random, size);
    if (with == edges::scores) draw_scores(random, Attention::features, whole);
    run_guarded(attention, whole, accumulator_t<T>(0));
    constexpr std::string_view same =
        "a row has the same bits whichever cuts on row_multiple() it lies between";
    for (std::size_t c = 0; c + 1 < cuts.size(); ++c) {
        auto const begin = cuts[c], end = cuts[c + 1];
        auto const needed = seen_by_rows(size, begin, end);
        // What is held begins at key 0 where no edge is further on.
        auto const held_from_0 = with == edges::none || with == edges::scores;
        auto const first = held_from_0 ? 0 : needed.begin;
        auto const layout = static_cast<order>(c % 4);
        for (auto const more : {0, 5}) {
            auto part = item_of(
                whole, begin, end - begin,
                {std::max<int64_t>(first - more, 0), std::min<int64_t>(needed.end + more, tokens)},
                layout);
            run_guarded(attention, part, accumulator_t<T>(0));
            expect(same_rows(part.o, whole.o, begin) && same_rows(part.lse, whole.lse, begin) &&
                       same_rows(part.dq, whole.dq, begin),
                   same, part.size.text());
        }
    }
    for (auto const layout : {order::tokens_first, order::padded, order::batch_inner}) {
        auto moved = item_of(whole, 0, tokens, {0, tokens}, layout);
        run_guarded(attention, moved, accumulator_t<T>(0));
        expect(same_rows(moved.o, whole.o, 0) && same_rows(moved.lse, whole.lse, 0) &&
                   same_rows(moved.dq, whole.dq, 0) && same_rows(moved.dk, whole.dk, 0) &&
                   same_rows(moved.dv, whole.dv, 0),
               "bits do not depend on strides", moved.size.text());
    }
}

}  // namespace attention_detail

/// Cuts of `tokens` query rows that lie on `multiple`: small steps, then large ones.
inline std::vector<std::int64_t> cuts_on(std::int64_t multiple, std::int64_t tokens) {
    std::vector<std::int64_t> cuts{0};
    for (std::int64_t const step : {1, 1, 3, 35, 60, 27, 1, 128, 3, 253, 18, 400, 1000}) {
        auto const next = (cuts.back() + step + multiple - 1) / multiple * multiple;
        if (next >= tokens) break;
        cuts.push_back(next);
    }
    cuts.push_back(tokens);
    return cuts;
}

/// How much is checked; less for a slow functor.
struct attention_options {
    std::uint64_t problems = 16;  ///< drawn, of up to 400 rows
    std::int64_t longest_cut =
        600;           ///< rows that are cut, where they are more than the grid asks for
    bool cuts = true;  ///< whether the bits of rows are compared between cuts
};

/// Runs every rule that the functor's features ask for, over seeded shapes and cuts on its
/// `row_multiple()`. *Throws* `broken_attention_rule`.
template <class T, class Attention>
void check_attention(Attention const& attention, attention_options const& given = {}) {
    static_assert(ulysses::attention_for<Attention, T>);
    static_assert(std::same_as<ulysses::functor_call_t<ulysses::attention_call, Attention>,
                               ulysses::attention_call>,
                  "conformance: the kit's operands are the host's, and its calls have no queue; of "
                  "a functor of a "
                  "device compare layers.");
    namespace in = attention_detail;
    constexpr auto features = Attention::features;
    static_assert(features.full || features.causal, "a functor has at least one mask");
    for (std::uint64_t seed = 1; seed <= given.problems; ++seed)
        in::compare_with_reference<T>(attention, seed);
    auto const multiple = static_cast<std::int64_t>(attention.row_multiple());
    in::expect(multiple >= 1, "row_multiple() is at least 1", std::to_string(multiple));
    if (!features.row_range || !given.cuts) return;
    for (auto const mask : {ulysses::mask::full, ulysses::mask::causal}) {
        if (mask == ulysses::mask::full ? !features.full : !features.causal) continue;
        for (std::int64_t const tokens : {std::int64_t{40}, 2 * multiple + 1, 3 * multiple + 59})
            in::compare_cuts<T>(attention, cuts_on(multiple, tokens), mask);
        if (given.longest_cut > 3 * multiple + 59)
            in::compare_cuts<T>(attention, cuts_on(multiple, given.longest_cut), mask);
        for (auto const& [with, asked] : {std::pair{in::edges::window, features.window},
                                          {in::edges::documents, features.documents},
                                          {in::edges::holes, features.holes}})
            if (asked)
                in::compare_cuts<T>(attention, cuts_on(multiple, 3 * multiple + 59), mask, with);
        if (features.softcap || features.alibi || features.bias || features.sinks ||
            features.dropout)
            for (std::int64_t const tokens : {2 * multiple + 40, 3 * multiple + 59})
                in::compare_cuts<T>(attention, cuts_on(multiple, tokens), mask, in::edges::scores);
    }
}

}  // namespace conformance
