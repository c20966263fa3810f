#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/index_range.hpp>
#include <ulysses/plan/line.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// Keys in ascending order, in as few spans as they lie in.
using key_spans = std::span<index_range const>;

inline bool covers(key_spans spans, index_range keys) {
    return std::any_of(spans.begin(), spans.end(), [&](index_range each) {
        return each.begin <= keys.begin && keys.end <= each.end;
    });
}

/// What every rank must know of another's share of a layer.
struct rank_share {
    work_items items;
    std::vector<std::int64_t> query_row;      ///< each item's first row in the query region
    std::int64_t query_rows = 0;              ///< rows of the query region
    std::int64_t kv_begin = 0, kv_end = 0;    ///< key-value heads of all items
    std::int64_t key_begin = 0, key_end = 0;  ///< keys of all items
    std::int64_t key_rows = 0;                ///< rows of the key region

    /// Becomes rank `r`'s; allocates only when it outgrows the largest so far. The line's heads are the
    /// layer's from `first_head` and `first_kv_head` on.
    void assign(line const& cuts, int r, std::int64_t batch, std::int64_t first_head = 0,
                std::int64_t first_kv_head = 0) {
        items.clear();
        query_row.clear();
        runs_.clear();
        spans_.clear();
        query_rows = kv_begin = kv_end = key_begin = key_end = key_rows = 0;
        cuts.add_items(r, items);
        if (items.empty()) return;
        for (auto& item : items) {
            item.head_begin += first_head;
            item.head_end += first_head;
            item.kv_begin += first_kv_head;
            item.kv_end += first_kv_head;
        }
        kv_begin = items.front().kv_begin;
        kv_end = items.back().kv_end;
        key_begin = items.front().key_begin;
        for (auto const& item : items) {
            query_row.push_back(query_rows);
            query_rows += item.heads() * batch * item.rows();
            key_begin = std::min(key_begin, item.key_begin);
            key_end = std::max(key_end, item.key_end);
            // An item shares key-value heads with those beside it only when it has a single one.
            if (runs_.empty() || item.kv_begin >= runs_.back().end) {
                join_last_run();
                runs_.push_back({item.kv_begin, item.kv_end, spans_.size()});
            }
            add_span({item.key_begin, item.key_end});
        }
        join_last_run();
    }

    /// The keys that the rank's items need of one head.
    key_spans keys_of(std::int64_t head) const {
        if (head < kv_begin || head >= kv_end) return {};
        auto const run = run_of(head);
        auto const end = run + 1 == runs_.end() ? spans_.size() : (run + 1)->first;
        return key_spans(spans_).subspan(run->first, end - run->first);
    }
    /// The end of the longest run of heads from `head` on that need the same keys.
    std::int64_t same_keys_end(std::int64_t head) const { return run_of(head)->end; }

   private:
    /// Key-value heads that need the same keys: those in spans_ from `first` on.
    struct key_run {
        std::int64_t begin = 0, end = 0;
        std::size_t first = 0;
    };

    std::vector<key_run>::const_iterator run_of(std::int64_t head) const {
        return std::prev(std::upper_bound(
            runs_.begin(), runs_.end(), head,
            [](std::int64_t wanted, key_run const& run) { return wanted < run.begin; }));
    }

    /// Adds keys to those of the last run.
    void add_span(index_range keys) {
        if (keys.size() == 0) return;
        auto const first = spans_.begin() + static_cast<std::ptrdiff_t>(runs_.back().first);
        auto const from = std::find_if(first, spans_.end(),
                                       [&](index_range each) { return each.end >= keys.begin; });
        auto const to = std::find_if(from, spans_.end(),
                                     [&](index_range each) { return each.begin > keys.end; });
        if (from == to) {
            spans_.insert(from, keys);
        } else {
            *from = {std::min(from->begin, keys.begin), std::max(std::prev(to)->end, keys.end)};
            spans_.erase(from + 1, to);
        }
    }

    /// Makes the last run, once it has all its keys, one with the run before if that needs the same.
    void join_last_run() {
        if (runs_.size() < 2) return;
        auto& before = runs_[runs_.size() - 2];
        auto const last = runs_.back();
        auto const own = spans_.begin() + static_cast<std::ptrdiff_t>(last.first);
        if (!std::equal(spans_.begin() + static_cast<std::ptrdiff_t>(before.first), own, own,
                        spans_.end()))
            return;
        before.end = last.end;
        spans_.erase(own, spans_.end());
        runs_.pop_back();
    }

    std::vector<key_run> runs_;
    std::vector<index_range> spans_;
};

}  // namespace ulysses::inline ULYSSES_ABI
