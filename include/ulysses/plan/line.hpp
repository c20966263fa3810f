#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/shape.hpp>
#include <ulysses/core/visibility.hpp>
#include <ulysses/plan/head_runs.hpp>
#include <ulysses/plan/weights.hpp>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

/// The line: who computes which query rows.
///
/// All query rows of all heads lie end to end, head by head; a row weighs the number of keys it may
/// see. Cut r is the first row, on a multiple of `row_multiple`, whose preceding weight reaches r/P
/// of the total. Rank r computes the rows between cut r and cut r + 1. Any P and any number of
/// heads; nothing is padded; the keys of a row are never split, so a row has the bits of one rank.
namespace ulysses::inline ULYSSES_ABI {

/// Part of a rank's share: query heads and their key-value heads at one uniform ratio, a range of
/// their query rows, and the keys those rows may see. Half-open ranges of global indices.
struct work_item {
    std::int64_t head_begin = 0, head_end = 0;
    std::int64_t kv_begin = 0, kv_end = 0;
    std::int64_t row_begin = 0, row_end = 0;
    std::int64_t key_begin = 0, key_end = 0;
    ulysses::window window{};  ///< of all its heads

    constexpr std::int64_t heads() const { return head_end - head_begin; }
    constexpr std::int64_t kv_heads() const { return kv_end - kv_begin; }
    constexpr std::int64_t rows() const { return row_end - row_begin; }
    constexpr std::int64_t keys() const { return key_end - key_begin; }
    friend constexpr bool operator==(work_item const&, work_item const&) = default;
};

/// At most five items where heads have one window: a head begun by the rank before, the rest of its
/// group, whole groups, part of a group, a head ended by the rank after. Of heads with other
/// windows each is cut once more where the window changes.
using work_items = std::vector<work_item>;

/// The first row of a rank's share: a head and a row in it.
struct line_cut {
    std::int64_t head = 0;
    std::int64_t row = 0;
    friend constexpr auto operator<=>(line_cut const&, line_cut const&) = default;
};

class line {
   public:
    /// `layer` is a completed shape of one window; `queries` and `keys` are global lengths below
    /// 2^31; ranks and row_multiple are at least 1.
    constexpr line(shape const& layer, std::int64_t queries, std::int64_t keys, int ranks,
                   std::int64_t row_multiple)
        : line(layer, rule_of(layer, queries, keys), 1, ranks, row_multiple,
               row_weights(rule_of(layer, queries, keys))) {}

    /// With what a step brings, and the runs of a layer with `head_windows`; the lists of the rule
    /// and the runs are used while this is.
    constexpr line(shape const& layer, visibility const& rule, std::int64_t batch, int ranks,
                   std::int64_t row_multiple, row_weights const& weights,
                   std::span<head_run const> runs = {})
        : layer_(layer),
          rule_(rule),
          samples_(rule.uniform() ? 1 : batch),
          queries_(rule.queries),
          ranks_(ranks),
          // No sequence is longer than 2^31 rows: beyond that nothing is ever cut.
          row_multiple_(std::min(row_multiple, std::int64_t{1} << 31)),
          weights_(weights),
          runs_(runs) {}

    /// What a layer without documents and padding lets its rows see.
    static constexpr visibility rule_of(shape const& layer, std::int64_t queries,
                                        std::int64_t keys) {
        return {.mask = layer.mask, .window = layer.window, .queries = queries, .keys = keys};
    }

    /// Keys seen by rows [0, row) of one head, together. At least 1 a row; below 2^62.
    constexpr std::int64_t weight(std::int64_t row, std::int64_t head = 0) const {
        return runs_.empty() ? weights_.before(row) : run_of(head).weights.before(row);
    }

    /// Where rank `r`'s share begins; r = ranks is the end of the line.
    constexpr line_cut cut(int r) const {
        if (r >= ranks_) return {layer_.heads, 0};
        if (layer_.assignment == assignment::whole_heads)
            return {r * (layer_.heads / ranks_) + std::min<std::int64_t>(r, layer_.heads % ranks_),
                    0};
        if (!runs_.empty()) return cut_of_runs(r);
        auto const head = r * layer_.heads / ranks_;
        auto const part = r * layer_.heads % ranks_;  // of a head's weight, in 1/P
        auto const total = weight(queries_);
        auto const target = total / ranks_ * part + (total % ranks_ * part + ranks_ - 1) / ranks_;
        return cut_in(head, weights_, target);
    }

    /// The keys that rows [begin, end) of a head may see, in any sample.
    constexpr index_range key_span(std::int64_t begin, std::int64_t end,
                                   std::int64_t head = 0) const {
        auto const& rule = rule_at(head);
        index_range all;
        for (std::int64_t b = 0; b < samples_; ++b) {
            auto const own = rule.keys_of_rows(b, begin, end);
            if (own.size() == 0) continue;
            all = all.size() == 0
                      ? own
                      : index_range{std::min(all.begin, own.begin), std::max(all.end, own.end)};
        }
        return all;
    }

    work_items items(int r) const {
        work_items list;
        add_items(r, list);
        return list;
    }

    /// Rank `r`'s items, put at the end of `list`.
    void add_items(int r, work_items& list) const {
        auto from = cut(r);
        auto const to = cut(r + 1);
        if (from.row > 0 && from < to) {
            auto const end = to.head == from.head ? to.row : queries_;
            list.push_back(item(from.head, from.head + 1, from.row, end));
            from = end < queries_ ? line_cut{from.head, end} : line_cut{from.head + 1, 0};
        }
        auto const group = layer_.heads / layer_.kv_heads;
        while (from.row == 0 && from.head < to.head) {
            // Whole groups as far as they go; a part of a group on either side of them.
            auto const stop = runs_.empty() ? to.head : std::min(to.head, run_of(from.head).end);
            auto const next_group = (from.head / group + 1) * group;
            auto const last_group = stop / group * group;
            auto const end = from.head % group == 0 && last_group > from.head
                                 ? last_group
                                 : std::min(next_group, stop);
            list.push_back(item(from.head, end, 0, queries_));
            from.head = end;
        }
        if (from < to) list.push_back(item(to.head, to.head + 1, 0, to.row));
    }

    constexpr std::int64_t queries() const { return queries_; }

   private:
    constexpr work_item item(std::int64_t head_begin, std::int64_t head_end, std::int64_t row_begin,
                             std::int64_t row_end) const {
        auto const group = layer_.heads / layer_.kv_heads;
        auto const span = key_span(row_begin, row_end, head_begin);
        return {head_begin, head_end,   head_begin / group, (head_end - 1) / group + 1, row_begin,
                row_end,    span.begin, span.end,           rule_at(head_begin).window};
    }

    constexpr head_run const& run_of(std::int64_t head) const {
        return *std::prev(std::upper_bound(
            runs_.begin(), runs_.end(), head,
            [](std::int64_t wanted, head_run const& run) { return wanted < run.begin; }));
    }

    constexpr visibility const& rule_at(std::int64_t head) const {
        return runs_.empty() ? rule_ : run_of(head).rule;
    }

    /// Cut `r` where heads weigh differently: over the running total.
    constexpr line_cut cut_of_runs(int r) const {
        auto const weight_of = [&](head_run const& run) {
            return static_cast<wide_weight>(run.weights.before(queries_));
        };
        auto const& last = runs_.back();
        auto const heads = static_cast<wide_weight>(last.end - last.begin);
        auto const total = last.before + heads * weight_of(last);
        auto const ranks = static_cast<wide_weight>(ranks_);
        auto const target = (static_cast<wide_weight>(r) * total + ranks - 1) / ranks;
        auto const& run = *std::prev(std::upper_bound(
            runs_.begin(), runs_.end(), target,
            [](wide_weight wanted, head_run const& each) { return wanted < each.before; }));
        auto const within = target - run.before;
        return cut_in(run.begin + static_cast<std::int64_t>(within / weight_of(run)), run.weights,
                      static_cast<std::int64_t>(within % weight_of(run)));
    }

    /// The first row of a head, on the grid, whose preceding weight in the head reaches `target`.
    constexpr line_cut cut_in(std::int64_t head, row_weights const& weights,
                              std::int64_t target) const {
        auto const row = round_up(first_row_reaching(weights, target));
        return row < queries_ ? line_cut{head, row} : line_cut{head + 1, 0};
    }

    constexpr std::int64_t first_row_reaching(row_weights const& weights,
                                              std::int64_t target) const {
        std::int64_t low = 0, high = queries_;
        while (low < high) {
            auto const middle = low + (high - low) / 2;
            if (weights.before(middle) >= target)
                high = middle;
            else
                low = middle + 1;
        }
        return low;
    }

    constexpr std::int64_t round_up(std::int64_t row) const {
        return (row + row_multiple_ - 1) / row_multiple_ * row_multiple_;
    }

    shape layer_;
    visibility rule_;
    std::int64_t samples_, queries_;
    int ranks_;
    std::int64_t row_multiple_;
    row_weights weights_;
    std::span<head_run const> runs_;
};

}  // namespace ulysses::inline ULYSSES_ABI
