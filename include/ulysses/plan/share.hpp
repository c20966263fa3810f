#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/index_range.hpp>
#include <ulysses/plan/line.hpp>

#include <algorithm>
#include <array>
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

/// What every rank must know of another's share of a layer: its items, and the keys they need.
struct rank_share {
    work_items items;
    std::vector<std::int64_t> query_row;      ///< each item's first row in the query region
    std::int64_t query_rows = 0;              ///< rows of the query region
    std::int64_t kv_begin = 0, kv_end = 0;    ///< key-value heads of all items
    std::int64_t key_begin = 0, key_end = 0;  ///< keys of all items

    /// Becomes rank `r`'s; allocates only when it outgrows the largest so far. The line's heads are
    /// the layer's from `first_head` and `first_kv_head` on.
    void assign(line const& cuts, int r, std::int64_t batch, std::int64_t first_head,
                std::int64_t first_kv_head) {
        items.clear();
        query_row.clear();
        runs_.clear();
        spans_.clear();
        query_rows = kv_begin = kv_end = key_begin = key_end = 0;
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

    /// Makes the last run, once it has all its keys, one with the run before if both need the same.
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

/// The shares of all ranks, and the regions that they lie in: the query region of a rank holds its
/// items one behind the other, each [head, batch, row]; its key region holds its key-value heads as
/// [head, batch, key], `key_capacity` rows a head and sample, the same on every rank.
class rank_shares {
   public:
    /// Deals a line whose heads are the layer's from `first_head` and `first_kv_head` on; allocates
    /// only when it outgrows the largest so far. `cache_capacity`: where key regions are those of a
    /// cache, the keys that it has room for, else 0.
    void deal(line const& cuts, int ranks, std::int64_t batch, std::int64_t first_head,
              std::int64_t first_kv_head, std::int64_t cache_capacity) {
        shares_.resize(static_cast<std::size_t>(ranks));
        batch_ = batch;
        query_region_rows_ = key_capacity_ = 0;
        std::int64_t most_kv_heads = 0;
        for (int r = 0; r < ranks; ++r) {
            auto& share = shares_[static_cast<std::size_t>(r)];
            share.assign(cuts, r, batch, first_head, first_kv_head);
            if (cache_capacity > 0) share.key_begin = 0, share.key_end = cache_capacity;
            query_region_rows_ = std::max(query_region_rows_, share.query_rows);
            key_capacity_ = std::max(key_capacity_, share.key_end - share.key_begin);
            most_kv_heads = std::max(most_kv_heads, share.kv_end - share.kv_begin);
        }
        key_region_rows_ = most_kv_heads * batch * key_capacity_;
    }

    rank_share const& operator[](int rank) const { return shares_[static_cast<std::size_t>(rank)]; }
    int ranks() const { return static_cast<int>(shares_.size()); }
    std::int64_t batch() const { return batch_; }

    /// Rows of the largest query and key region.
    std::int64_t query_region_rows() const { return query_region_rows_; }
    std::int64_t key_region_rows() const { return key_region_rows_; }
    /// Rows of a rank's own key region.
    std::int64_t key_rows(rank_share const& share) const {
        return (share.kv_end - share.kv_begin) * batch_ * key_capacity_;
    }
    std::int64_t key_capacity() const { return key_capacity_; }

    /// The row of a key-value head's first sample and of a key in a rank's key region.
    std::int64_t key_row(rank_share const& share, std::int64_t head, std::int64_t key) const {
        return (head - share.kv_begin) * batch_ * key_capacity_ + key - share.key_begin;
    }
    /// Rows per batch, token, head in a key region, and in an item's part of a query region.
    std::array<std::int64_t, 3> key_strides() const {
        return {key_capacity_, 1, batch_ * key_capacity_};
    }
    std::array<std::int64_t, 3> query_strides(work_item const& item) const {
        return {item.rows(), 1, batch_ * item.rows()};
    }

   private:
    std::vector<rank_share> shares_;
    std::int64_t batch_ = 0;
    std::int64_t query_region_rows_ = 0, key_region_rows_ = 0, key_capacity_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI
