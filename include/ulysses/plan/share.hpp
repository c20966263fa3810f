#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/plan/line.hpp>
#include <ulysses/plan/token_order.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

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
    token_span keys_of(std::int64_t head) const {
        token_span span{0, 0};
        for (auto const& item : items)
            if (item.kv_begin <= head && head < item.kv_end)
                span = span.begin == span.end ? token_span{item.key_begin, item.key_end}
                                              : token_span{std::min(span.begin, item.key_begin),
                                                           std::max(span.end, item.key_end)};
        return span;
    }
    /// The end of the longest run of heads from `head` on that need the same keys.
    std::int64_t same_keys_end(std::int64_t head) const {
        auto const span = keys_of(head);
        auto end = head + 1;
        // Spans only change where an item begins or ends.
        while (end < kv_end) {
            auto const next = keys_of(end);
            if (next.begin != span.begin || next.end != span.end) break;
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
