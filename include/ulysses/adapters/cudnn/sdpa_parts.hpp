#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/sdpa_key.hpp>
#include <ulysses/core/index_range.hpp>
#include <ulysses/core/visibility.hpp>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

/// What the rows of a call see, as parts that a plan of cuDNN's can be told. Needs nothing of cuDNN.
namespace ulysses::inline ULYSSES_ABI {

/// Rows of one sample, or the same rows of several that follow each other, that see some of one range
/// of keys; rows and keys by their global indices. Row i of the part sees key j when
///
///     i + diagonal - left <= j <= i + diagonal + right
struct sdpa_part {
    std::int64_t sample = 0, samples = 1;
    index_range rows{}, keys{};  ///< no keys: the rows see none
    std::int64_t diagonal = 0;   ///< the first row's position, counted from the first key

    friend constexpr bool operator==(sdpa_part const&, sdpa_part const&) = default;
};

/// How far rows see to each side of their position; -1: to the end.
struct sdpa_reach {
    std::int64_t left = -1, right = -1;

    static constexpr sdpa_reach of(visibility const& visible) {
        return {visible.window.left,
                visible.mask == mask::causal ? std::int64_t{0} : visible.window.right};
    }
};

namespace detail {

/// Of rows [rows.begin, rows.end) of one document, which keys of `all` each sees: those without keys, if any,
/// before and after those with some.
template <class Take>
void split_rows(visibility const& visible, std::int64_t b, std::int64_t samples, index_range rows,
                Take const& take) {
    auto const own = visible.sample(b);
    auto const all = visible.document(own, visible.document_of(own, rows.begin + own.position));
    auto const [left, right] = sdpa_reach::of(visible);
    auto begin = rows.begin, end = rows.end;
    if (all.size() == 0) begin = end;
    if (right >= 0) begin = std::clamp(all.begin - right - own.position, begin, end);
    if (left >= 0) end = std::clamp(all.end + left - own.position, begin, end);
    auto const put = [&](index_range part, index_range keys) {
        if (part.size() > 0)
            take(sdpa_part{b, samples, part, keys, part.begin + own.position - keys.begin});
    };
    put({rows.begin, begin}, {});
    put({begin, end}, begin < end ? visible.keys_of_rows(b, begin, end) : index_range{});
    put({end, rows.end}, {});
}

}  // namespace detail

/// Parts of rows [rows.begin, rows.end) of `batch` samples, in their order, appended to `parts`. Knows no
/// holes.
inline void append_parts(visibility const& visible, std::int64_t batch, index_range rows,
                         std::vector<sdpa_part>& parts) {
    auto const samples = visible.uniform() ? batch : 1;
    for (std::int64_t b = 0; b < batch; b += samples) {
        auto const own = visible.sample(b);
        auto const first_of_sample = parts.size();
        for (auto begin = rows.begin; begin < rows.end;) {
            auto const which = visible.document_of(own, begin + own.position);
            auto end = rows.end;
            if (which >= 0 && which + 1 < own.first_document + own.documents)
                end = std::min(end, visible.documents[static_cast<std::size_t>(which + 1)] -
                                        own.position);
            detail::split_rows(visible, b, samples, {begin, end},
                               [&](sdpa_part const& part) { parts.push_back(part); });
            begin = end;
        }
        // The same as the sample before.
        auto const added = parts.size() - first_of_sample;
        if (added != 1 || first_of_sample == 0) continue;
        auto& before = parts[first_of_sample - 1];
        auto same = parts.back();
        same.sample = before.sample, same.samples = before.samples;
        if (before == same && before.sample + before.samples == b) {
            before.samples += samples;
            parts.pop_back();
        }
    }
}

/// One band that says what each part's rows see, counted from each part's own rows and keys; none
/// where no band says it for all of them. `from_first`: only a band that is counted from the first.
inline std::optional<sdpa_band> band_of(std::span<sdpa_part const> parts, sdpa_reach reach,
                                        bool from_first) {
    auto limits_left = false, limits_right = false, last_at_last = true, alike = true;
    for (auto const& part : parts) {
        auto const rows = part.rows.size(), keys = part.keys.size();
        limits_left |= reach.left >= 0 && part.diagonal + rows - 1 - reach.left > 0;
        limits_right |= reach.right >= 0 && part.diagonal + reach.right < keys - 1;
        last_at_last &= part.diagonal + rows == keys;
        alike &= part.diagonal == parts[0].diagonal;
    }
    if (!limits_left && !limits_right) return sdpa_band{};
    auto const diagonal = parts[0].diagonal;
    if (!from_first && last_at_last && reach.right == 0 && !(alike && diagonal == 0))
        return sdpa_band{limits_left ? reach.left + 1 : -1, 0, true};
    if (!alike) return std::nullopt;
    return sdpa_band{limits_left ? reach.left + 1 - diagonal : -1,
                     limits_right ? diagonal + reach.right : -1, false};
}

}  // namespace ulysses::inline ULYSSES_ABI
