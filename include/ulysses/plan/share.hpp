#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/index_range.hpp>
#include <ulysses/plan/line.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

/// Keys in ascending order, in as few spans as they lie in.
class key_spans {
   public:
    void add(index_range span) {
        if (span.begin >= span.end) return;
        std::array<index_range, most + 1> all{};
        std::size_t count = 0;
        auto placed = false;
        for (auto const& each : *this)
            if (each.end < span.begin) {
                all[count++] = each;
            } else if (span.end < each.begin) {
                if (!placed) all[count++] = span;
                placed = true;
                all[count++] = each;
            } else {
                span = {std::min(span.begin, each.begin), std::max(span.end, each.end)};
            }
        if (!placed) all[count++] = span;
        std::copy_n(all.begin(), count, spans_.begin());
        size_ = count;
    }

    index_range const* begin() const { return spans_.data(); }
    index_range const* end() const { return spans_.data() + size_; }

    bool covers(index_range span) const {
        return std::any_of(begin(), end(), [&](index_range each) {
            return each.begin <= span.begin && span.end <= each.end;
        });
    }
    friend bool operator==(key_spans const& a, key_spans const& b) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end());
    }

   private:
    static constexpr std::size_t most = 5;  ///< items of a rank
    std::array<index_range, most + 1> spans_{};
    std::size_t size_ = 0;
};

/// What every rank must know of another's share of a layer.
struct rank_share {
    work_items items;
    std::array<std::int64_t, 5> query_row{};  ///< each item's first row in the query region
    std::int64_t query_rows = 0;              ///< rows of the query region
    std::int64_t kv_begin = 0, kv_end = 0;    ///< key-value heads of all items
    std::int64_t key_begin = 0, key_end = 0;  ///< keys of all items
    std::int64_t key_rows = 0;                ///< rows of the key region

    rank_share() = default;
    rank_share(work_items const& given, std::int64_t batch) : items(given) {
        for (std::size_t i = 0; i < items.size(); ++i) {
            auto const& item = items[i];
            query_row[i] = query_rows;
            query_rows += item.heads() * batch * item.rows();
            kv_begin = i == 0 ? item.kv_begin : kv_begin;
            kv_end = std::max(kv_end, item.kv_end);
            key_begin = i == 0 ? item.key_begin : std::min(key_begin, item.key_begin);
            key_end = std::max(key_end, item.key_end);
        }
    }

    /// The keys that the rank's items need of one head.
    key_spans keys_of(std::int64_t head) const {
        key_spans spans;
        for (auto const& item : items)
            if (item.kv_begin <= head && head < item.kv_end)
                spans.add({item.key_begin, item.key_end});
        return spans;
    }
    /// The end of the longest run of heads from `head` on that need the same keys.
    std::int64_t same_keys_end(std::int64_t head) const {
        auto const spans = keys_of(head);
        auto end = head + 1;
        // Spans only change where an item begins or ends.
        while (end < kv_end) {
            if (!(keys_of(end) == spans)) break;
            auto boundary = kv_end;
            for (auto const& item : items)
                for (auto const edge : {item.kv_begin, item.kv_end})
                    if (edge > end) boundary = std::min(boundary, edge);
            end = boundary;
        }
        return end;
    }
};

}  // namespace ulysses::inline ULYSSES_ABI
