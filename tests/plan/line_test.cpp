// SPDX-License-Identifier: Apache-2.0

#include <ulysses/plan/line.hpp>
#include <ulysses/plan/plan.hpp>

#include "../visibility.hpp"
#include "cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

namespace uly = ulysses;
using namespace plan_cases;

namespace {

uly::line causal_line(int64_t heads, int64_t kv_heads, int ranks, int64_t tokens = 4096) {
    return {{.heads = heads,
             .kv_heads = kv_heads,
             .head_dim = 1,
             .value_dim = 1,
             .mask = uly::mask::causal},
            tokens,
            tokens,
            ranks,
            1};
}

/// "2-4|0-1|0-4096" of each item.
std::string text_of(uly::work_items const& items) {
    std::string text;
    for (auto const& item : items) {
        if (!text.empty()) text += "; ";
        text += uly::concat(item.head_begin, "-", item.head_end, "|", item.kv_begin, "-",
                            item.kv_end, "|", item.row_begin, "-", item.row_end);
    }
    return text;
}

std::vector<int64_t> heads_of_ranks(int64_t heads, int ranks) {
    uly::line const cuts(
        {.heads = heads, .kv_heads = 1, .assignment = uly::assignment::whole_heads}, 10, 10, ranks,
        1);
    std::vector<int64_t> shares;
    for (int r = 0; r < ranks; ++r) {
        int64_t sum = 0;
        for (auto const& item : cuts.items(r)) {
            CHECK(item.rows() == 10);
            sum += item.heads();
        }
        shares.push_back(sum);
    }
    return shares;
}

/// The first rule that a line breaks, or "".
std::string fault_of(problem const& p) {
    auto const step = p.step();
    auto const rule = step.visible(p.layer);
    auto const queries = rule.queries, samples = rule.uniform() ? 1 : p.batch;
    std::vector<int64_t> memory;
    uly::head_runs runs;
    runs.assign(p.layer, rule);
    uly::line const cuts(p.layer, rule, p.batch, p.ranks, p.row_multiple,
                         rule.uniform() ? uly::row_weights(rule) : uly::row_weights(rule, memory),
                         runs);
    auto const rule_of = [&](int64_t head) {
        auto own = rule;
        if (!p.windows.empty()) own.window = p.windows[at(head)];
        return own;
    };

    // Work by counting each key of each row of each sample, and ranges by looking at each.
    std::vector<int64_t> seen(at(p.layer.heads * queries));
    for (int64_t head = 0; head < p.layer.heads; ++head) {
        if (head > 0 && rule_of(head).window == rule_of(head - 1).window) {
            std::copy_n(seen.begin() + (head - 1) * queries, queries,
                        seen.begin() + head * queries);
            continue;
        }
        auto const own_rule = rule_of(head);
        for (int64_t b = 0; b < samples; ++b)
            for (int64_t row = 0; row < queries; ++row) {
                int64_t count = 0;
                for (int64_t key = 0; key < rule.keys; ++key) {
                    auto const own = reaches(own_rule, b, row, key);
                    auto const range = own_rule.keys_of(b, row);
                    if (own != (range.begin <= key && key < range.end) ||
                        own_rule.sees(b, row, key) != sees(own_rule, b, row, key))
                        return uly::concat("row ", row, " of sample ", b, " sees keys ",
                                           range.begin, " to ", range.end,
                                           ", which is wrong for key ", key);
                    count += own;
                }
                seen[at(head * queries + row)] += std::max<int64_t>(count, 1);
            }
    }
    int64_t total = 0;
    for (int64_t head = 0; head < p.layer.heads; ++head)
        for (int64_t row = 0, before = 0; row < queries; ++row) {
            if (cuts.weight(row, head) != before)
                return uly::concat("rows before ", row, " of head ", head, " weigh ",
                                   cuts.weight(row, head), ", not ", before);
            before += seen[at(head * queries + row)];
            total += seen[at(head * queries + row)];
        }
    auto const longest = *std::max_element(seen.begin(), seen.end());
    auto const group = p.layer.heads / p.layer.kv_heads;

    if (cuts.cut(0) != uly::line_cut{0, 0}) return "the first cut is not the start of the line";
    if (cuts.cut(p.ranks) != uly::line_cut{p.layer.heads, 0}) return "the last cut is not its end";
    if (p.layer.assignment == uly::assignment::balanced) {
        // By the definition: the first row whose preceding weight reaches r/P of the total, then up
        // to the grid, and past a head's end to the next one.
        int64_t head = 0, row = 0, preceding = 0;
        for (int r = 1; r < p.ranks; ++r) {
            while (preceding * p.ranks < r * total) {
                preceding += seen[at(head * queries + row)];
                if (++row == queries) row = 0, ++head;
            }
            auto const up = (row + p.row_multiple - 1) / p.row_multiple * p.row_multiple;
            auto const expected =
                up < queries ? uly::line_cut{head, up} : uly::line_cut{head + 1, 0};
            if (cuts.cut(r) != expected)
                return uly::concat("cut ", r, " is at head ", cuts.cut(r).head, " row ",
                                   cuts.cut(r).row, ", not ", expected.head, ", ", expected.row);
        }
    }
    std::vector<int> owner(at(p.layer.heads * queries), -1);
    int64_t next = 0;  // rows come in the order of the line
    for (int r = 0; r < p.ranks; ++r) {
        auto const from = cuts.cut(r), to = cuts.cut(r + 1);
        if (to < from) return uly::concat("cut ", r + 1, " lies before cut ", r);
        if (from.row % p.row_multiple != 0) return uly::concat("cut ", r, " is off the grid");
        auto const items = cuts.items(r);
        auto changes = 0;
        for (auto h = from.head + 1; h < to.head + (to.row > 0); ++h)
            changes += rule_of(h).window != rule_of(h - 1).window;
        if (items.size() > at(5 + 2 * changes))
            return uly::concat("rank ", r, " has ", items.size(), " items");
        int64_t work = 0;
        for (auto const& item : items) {
            if (item.heads() < 1 || item.rows() < 1)
                return uly::concat("rank ", r, " has an empty item");
            if (item.row_begin != 0 && item.heads() != 1)
                return uly::concat("rank ", r, " has part of the rows of several heads");
            // One ratio, local head h of the item reading local key-value head h / ratio.
            if (item.heads() % item.kv_heads() != 0)
                return uly::concat("rank ", r, " has a mixed ratio");
            auto const ratio = item.heads() / item.kv_heads();
            for (auto h = item.head_begin; h < item.head_end; ++h)
                if (h / group != item.kv_begin + (h - item.head_begin) / ratio)
                    return uly::concat("rank ", r, " pairs head ", h,
                                       " with a wrong key-value head");
            for (auto h = item.head_begin; h < item.head_end; ++h)
                if (item.window != rule_of(h).window)
                    return uly::concat("rank ", r, " has head ", h, " in another's window");
            auto const needed =
                seen_by_rows(rule_of(item.head_begin), samples, item.row_begin, item.row_end);
            if (item.key_begin != needed.begin || item.key_end != needed.end)
                return uly::concat("rank ", r, " has keys ", item.key_begin, " to ", item.key_end);
            for (auto h = item.head_begin; h < item.head_end; ++h)
                for (auto row = item.row_begin; row < item.row_end; ++row) {
                    auto& mine = owner[at(h * queries + row)];
                    if (mine != -1) return uly::concat("head ", h, " row ", row, " is dealt twice");
                    mine = r;
                    if (h * queries + row != next++)
                        return uly::concat("head ", h, " row ", row, " is out of order");
                    work += seen[at(h * queries + row)];
                }
        }
        // From the definition: a cut overshoots its r/P by less than row_multiple rows and one row.
        if (p.layer.assignment == uly::assignment::balanced &&
            work * p.ranks > total + p.ranks * p.row_multiple * longest)
            return uly::concat("rank ", r, " has work ", work, " of ", total);
    }
    if (next != p.layer.heads * queries) return "rows are left out";
    return "";
}

}  // namespace

TEST_CASE("line: the examples") {
    CHECK(text_of(causal_line(32, 8, 16).items(1)) == "2-4|0-1|0-4096");
    CHECK(text_of(causal_line(12, 12, 8).items(0)) == "0-1|0-1|0-4096; 1-2|1-2|0-2897");
    CHECK(text_of(causal_line(6, 3, 2).items(1)) == "3-4|1-2|0-4096; 4-6|2-3|0-4096");
    CHECK(text_of(causal_line(28, 7, 8).items(1)) == "3-4|0-1|2897-4096; 4-7|1-2|0-4096");
    CHECK(text_of(causal_line(3, 1, 8).items(2)) == "0-1|0-1|3548-4096; 1-2|0-1|0-1448");
    // A rank may have nothing.
    CHECK(causal_line(1, 1, 4, 1).items(3).size() + causal_line(1, 1, 4, 1).items(2).size() <= 1);
    CHECK(text_of(causal_line(1, 1, 1, 5).items(0)) == "0-1|0-1|0-5");
}

TEST_CASE("line: a cut within a head sees only the keys its rows may") {
    auto const items = causal_line(12, 12, 8).items(0);
    CHECK(items[1].key_begin == 0);
    CHECK(items[1].key_end == 2897);
    CHECK(items[0].key_end == 4096);
}

TEST_CASE("line: textbook shares when ranks divide heads") {
    for (int ranks : {1, 2, 4, 8})
        for (int r = 0; r < ranks; ++r) {
            auto const items = causal_line(8, 8, ranks, 100).items(r);
            REQUIRE(items.size() == 1);
            CHECK(items[0].head_begin == 8 / ranks * r);
            CHECK(items[0].heads() == 8 / ranks);
            CHECK(items[0].rows() == 100);
        }
}

TEST_CASE("line: whole_heads shares") {
    using list = std::vector<int64_t>;
    CHECK(heads_of_ranks(7, 4) == list{2, 2, 2, 1});
    CHECK(heads_of_ranks(20, 8) == list{3, 3, 3, 3, 2, 2, 2, 2});
    CHECK(heads_of_ranks(3, 2) == list{2, 1});
    CHECK(heads_of_ranks(12, 4) == list{3, 3, 3, 3});
    CHECK(heads_of_ranks(2, 4) == list{1, 1, 0, 0});
}

TEST_CASE("line: long sequences and many ranks stay in range") {
    // The longest sequence and 4096 ranks: cuts are exact integers, so neighbours' work stays
    // level.
    auto const tokens = (int64_t{1} << 31) - 1;
    for (auto const mask : {uly::mask::causal, uly::mask::full}) {
        uly::line const cuts({.heads = 5, .kv_heads = 5, .mask = mask}, tokens, tokens, 4096, 1);
        auto const weight = [&](uly::line_cut const& cut) {
            return static_cast<long double>(cut.head) *
                       static_cast<long double>(cuts.weight(tokens)) +
                   static_cast<long double>(cuts.weight(cut.row));
        };
        auto const mean = weight({5, 0}) / 4096;
        for (int r = 0; r < 4096; ++r) {
            auto const work = weight(cuts.cut(r + 1)) - weight(cuts.cut(r));
            if (work < 0 || work > mean + 2 * static_cast<long double>(tokens)) {
                CAPTURE(r);
                FAIL("a rank's work is " << static_cast<double>(work) << ", the mean "
                                         << static_cast<double>(mean));
            }
        }
    }
}

TEST_CASE("line: random ones deal every row once, in order, in balance") {
    for (std::uint64_t seed = 1; seed <= how_many(100000); ++seed) {
        auto const p = random_problem(seed);
        if (auto const fault = fault_of(p); !fault.empty()) {
            CAPTURE(seed);
            INFO(p.text());
            FAIL(fault);
        }
    }
}

TEST_CASE("line: heads of other windows share the work in balance") {
    // Counted row by row: a row of a causal head at p sees p + 1 keys, of which a window leaves
    // left + 1.
    struct group {
        int64_t heads, kv_heads;
        int ranks;
    };
    for (int64_t const tokens : {4096, 6000})
        for (auto const& each : {group{8, 2, 4}, {12, 4, 8}, {7, 7, 5}, {3, 1, 8}, {32, 8, 16}}) {
            auto const heads = each.heads;
            auto const ranks = each.ranks;
            CAPTURE(tokens);
            CAPTURE(heads);
            CAPTURE(ranks);
            uly::window const kinds[] = {{511, -1}, {}, {63, 0}};
            for (auto const every : {1, 2, 3}) {
                std::vector<uly::window> windows;
                for (int64_t h = 0; h < heads; ++h) windows.push_back(kinds[h / every % 3]);
                auto const layer = uly::checked({.heads = heads,
                                                 .kv_heads = each.kv_heads,
                                                 .head_dim = 1,
                                                 .mask = uly::mask::causal,
                                                 .head_windows = windows});
                uly::plan moves;
                moves.rebuild(layer, uly::sequence::split(ranks, 1, tokens), ranks, 0, 1);
                int64_t total = 0, most = 0, rows = 0;
                for (int r = 0; r < ranks; ++r) {
                    int64_t work = 0;
                    for (auto const& item : moves.items(r))
                        for (auto row = item.row_begin; row < item.row_end; ++row) {
                            auto const left = windows[at(item.head_begin)].left;
                            work += item.heads() * (left < 0 ? row + 1 : std::min(row, left) + 1);
                            rows += item.heads();
                        }
                    total += work;
                    most = std::max(most, work);
                }
                CHECK(rows == heads * tokens);
                CHECK(static_cast<double>(most * ranks) <= 1.02 * static_cast<double>(total));
            }
        }
}

TEST_CASE("line: heads of one window make one item, and receive no key that nobody sees") {
    // 8 heads, of which the last 4 see 100 keys to the left; queries are the last 1000 of 4000.
    std::vector<uly::window> windows(8);
    std::fill(windows.begin() + 4, windows.end(), uly::window{100, -1});
    auto const layer = uly::checked({.heads = 8,
                                     .kv_heads = 4,
                                     .head_dim = 1,
                                     .mask = uly::mask::causal,
                                     .head_windows = windows});
    auto const queries = std::vector<runs>{{{0, 1000}}}, keys = std::vector<runs>{{{0, 4000}}};
    uly::plan moves;
    moves.rebuild(layer, uly::sequence::of(1, queries, keys), 1, 0, 1);
    CHECK(text_of(moves.items(0)) == "0-4|0-2|0-1000; 4-8|2-4|0-1000");
    CHECK(moves.items(0)[1].key_begin == 3000 - 100);
    CHECK(moves.rows(0).keys_to == 2 * 4000 + 2 * 1100);
    // Windows that are all the same are the layer's one.
    std::fill(windows.begin(), windows.end(), uly::window{100, -1});
    auto const alike = uly::checked({.heads = 8, .head_dim = 1, .head_windows = windows});
    CHECK(alike == uly::checked({.heads = 8, .head_dim = 1, .window = {100, -1}}));
}

TEST_CASE("line: a row_multiple beyond any sequence cuts no head") {
    for (auto const multiple : {int64_t{1} << 31, std::numeric_limits<int64_t>::max()}) {
        uly::line const cuts({.heads = 3, .kv_heads = 3, .head_dim = 1, .value_dim = 1}, 4, 4, 2,
                             multiple);
        CHECK(text_of(cuts.items(0)) == "0-2|0-2|0-4");
        CHECK(text_of(cuts.items(1)) == "2-3|2-3|0-4");
    }
}
