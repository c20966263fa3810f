#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/sdpa_parts.hpp>
#include <ulysses/core/tensor_view.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

/// Parts of varied lengths as a plan is given them: how many rows and keys each has, and where they begin.
namespace ulysses::inline ULYSSES_ABI::detail {

/// The length that a plan is made for: so that steps of other lengths may share it, at most an eighth is
/// added.
constexpr std::int64_t rounded_length(std::int64_t length) {
    constexpr std::uint64_t least = 64;
    auto const exact = static_cast<std::uint64_t>(length);
    auto const step = std::max(least, std::bit_floor(exact) / 8);
    return static_cast<std::int64_t>((exact + step - 1) / step * step);
}

/// Parts as a batch: one row or key range of one sample each.
struct varied_batch {
    struct entry {
        std::int64_t sample, row, rows, key, keys;  // local to the views
    };
    std::vector<entry> entries;
    std::int64_t batch = 0, rows = 0, keys = 0;  ///< what a plan is made for

    /// Rows and keys counted from `first_row` and `first_key`.
    varied_batch(std::span<sdpa_part const> parts, std::int64_t first_row, std::int64_t first_key) {
        for (auto const& part : parts)
            for (std::int64_t b = 0; b < part.samples; ++b) {
                entries.push_back({part.sample + b, part.rows.begin - first_row, part.rows.size(),
                                   part.keys.begin - first_key, part.keys.size()});
                rows = std::max(rows, part.rows.size());
                keys = std::max(keys, part.keys.size());
            }
        rows = rounded_length(rows);
        keys = rounded_length(keys);
        batch = static_cast<std::int64_t>(std::bit_ceil(entries.size()));
    }
};

/// Small arrays that are written to a workspace together.
class host_lists {
   public:
    /// Where the array begins in what is written.
    template <class Number>
    std::size_t put(std::span<Number const> numbers) {
        auto const begin = (bytes_.size() + 63) / 64 * 64;
        bytes_.resize(begin + numbers.size_bytes());
        std::memcpy(bytes_.data() + begin, numbers.data(), numbers.size_bytes());
        return begin;
    }
    std::span<std::byte const> bytes() const { return bytes_; }

    /// How many rows, or keys, each of a batch has: none where it has less entries.
    std::size_t put_counts(varied_batch const& batch, std::int64_t varied_batch::entry::*count) {
        std::vector<std::int32_t> counts(static_cast<std::size_t>(batch.batch), 0);
        for (std::size_t i = 0; i < batch.entries.size(); ++i)
            counts[i] = static_cast<std::int32_t>(batch.entries[i].*count);
        return put(std::span<std::int32_t const>(counts));
    }
    /// Where each begins in an operand, in elements, and where the last ends.
    std::size_t put_firsts(varied_batch const& batch, extents4 const& strides,
                           std::int64_t varied_batch::entry::*first,
                           std::int64_t varied_batch::entry::*count) {
        std::vector<std::int64_t> firsts(static_cast<std::size_t>(batch.batch) + 1);
        for (std::size_t i = 0; i < firsts.size(); ++i) {
            auto const& entry = batch.entries[std::min(i, batch.entries.size() - 1)];
            auto const past = i < batch.entries.size() ? 0 : entry.*count;
            firsts[i] = entry.sample * strides[0] + (entry.*first + past) * strides[1];
        }
        return put(std::span<std::int64_t const>(firsts));
    }

   private:
    std::vector<std::byte> bytes_;
};

}  // namespace ulysses::inline ULYSSES_ABI::detail
