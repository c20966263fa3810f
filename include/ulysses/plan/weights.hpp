#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/visibility.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// How much work rows of queries are: the keys that they see, counted without visiting them.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

/// The sum of max(1, x) for the integers x in [from, to).
constexpr std::int64_t sum_of_at_least_1(std::int64_t from, std::int64_t to) {
    if (from >= to) return 0;
    auto const ones = std::clamp<std::int64_t>(1 - from, 0, to - from);
    auto const low = from + ones;
    auto const count = to - low;
    // One of the factors is even.
    auto const ends = low + to - 1;
    return ones + (count % 2 == 0 ? count / 2 * ends : ends / 2 * count);
}

/// The weight of positions [from, to) of one document: for each max(1, keys seen), where position p
/// sees min(C, p + A, D - p) keys: all that the window and the document hold, from the document's
/// begin to the row's right edge, from its left edge to the document's end.
constexpr std::int64_t weight_in(visibility const& rule, index_range const& keys, std::int64_t from,
                                 std::int64_t to) {
    constexpr auto without_limit = std::int64_t{1} << 32;
    auto const left = rule.window.left >= 0 ? rule.window.left : without_limit;
    auto right = rule.window.right >= 0 ? rule.window.right : without_limit;
    if (rule.mask == mask::causal) right = 0;
    auto const most = std::min(keys.size(), left + right + 1);
    auto const rising = right + 1 - keys.begin;  // A
    auto const falling = keys.end + left;        // D
    // First positions that no longer rise, and that fall; `most` is at most the mean of the two
    // lines' sum, so they do not cross below it.
    auto const top = std::clamp(most - rising, from, to);
    auto const fall = std::clamp(falling - most, top, to);
    return sum_of_at_least_1(from + rising, top + rising) +
           (fall - top) * std::max<std::int64_t>(most, 1) +
           sum_of_at_least_1(falling - to + 1, falling - fall + 1);
}

}  // namespace detail

/// The weight of a head's rows, summed over the samples of a step; where all are alike, of one.
class row_weights {
   public:
    constexpr row_weights() = default;
    /// `rule` without lists.
    constexpr explicit row_weights(visibility const& rule) : rule_(rule) {}
    /// Any rule; `memory` holds a number for each document while this is used.
    row_weights(visibility const& rule, std::vector<std::int64_t>& memory) : rule_(rule) {
        memory.assign(rule.documents.size(), 0);
        for (std::size_t b = 0; b < rule.samples.size(); ++b) {
            auto const& own = rule.samples[b];
            for (auto d = own.first_document + 1; d < own.first_document + own.documents; ++d) {
                auto const [from, to] = positions_of(own, d - 1);
                memory[static_cast<std::size_t>(d)] =
                    memory[static_cast<std::size_t>(d - 1)] +
                    detail::weight_in(rule_, rule_.document(own, d - 1), from, std::max(from, to));
            }
        }
        before_document_ = memory;
    }

    /// Of rows [0, row). At least 1 a row and sample.
    constexpr std::int64_t before(std::int64_t row) const {
        if (rule_.uniform()) return before(rule_.sample(0), row);
        std::int64_t sum = 0;
        for (auto const& own : rule_.samples) sum += before(own, row);
        return sum;
    }

   private:
    constexpr std::int64_t before(sample_keys const& own, std::int64_t row) const {
        auto const end = own.position + row;
        if (row == 0) return 0;
        auto const d = rule_.document_of(own, end - 1);
        auto const from = d < 0 ? own.position : positions_of(own, d).begin;
        auto const earlier = d < 0 ? 0 : before_document_[static_cast<std::size_t>(d)];
        return earlier + detail::weight_in(rule_, rule_.document(own, d), from, end);
    }

    /// Positions of the sample's rows in document `d`; the first also has those before it, the last
    /// those after.
    constexpr index_range positions_of(sample_keys const& own, std::int64_t d) const {
        auto const begin = rule_.documents[static_cast<std::size_t>(d)];
        auto const last = d + 1 == own.first_document + own.documents;
        auto const end =
            last ? own.position + rule_.queries : rule_.documents[static_cast<std::size_t>(d + 1)];
        return {d == own.first_document ? own.position : std::max(begin, own.position),
                std::max(end, own.position)};
    }

    visibility rule_{};
    std::span<std::int64_t const> before_document_{};
};

}  // namespace ulysses::inline ULYSSES_ABI
