#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/sdpa_key.hpp>
#include <ulysses/adapters/cudnn/sdpa_parts.hpp>
#include <ulysses/core/attention.hpp>
#include <ulysses/core/index_range.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

struct sdpa_options {
    /// Backward gives the same bits each time. On GPUs before Blackwell it takes memory for all rows
    /// times keys: see docs/cudnn.md.
    bool deterministic = false;
    /// All calls go as plans of varied lengths, made for lengths that are rounded up: where lengths differ
    /// from step to step, as with a cache, they share plans, which take about half a second each to make.
    bool round_lengths = false;
};

namespace detail {

/// What one plan is for.
struct sdpa_group {
    std::span<sdpa_part const> parts;
    std::optional<sdpa_band> band;  ///< none: the rows see no key
    bool varied = false;
};

/// The parts of a call, and which of them go as one plan.
class sdpa_grouping {
   public:
    sdpa_grouping(sdpa_options const& options, attention_call const& call)
        : options_(options), call_(call) {}

    /// Of so many samples and rows: all parts that see keys go together if one plan can be told what they
    /// see, else each by itself. Valid until the next call.
    std::vector<sdpa_group> groups(std::int64_t batch, std::int64_t tokens) {
        std::vector<sdpa_group> result;
        index_range const rows{call_.query_begin, call_.query_begin + tokens};
        parts_.clear();
        append_parts(call_.visible, batch, rows, parts_);
        if (by_place()) halve_parts();
        auto const unseen =
            std::stable_partition(parts_.begin(), parts_.end(),
                                  [](sdpa_part const& part) { return part.keys.size() > 0; });
        std::span<sdpa_part const> const seen(parts_.begin(), unseen);
        auto const reach = sdpa_reach::of(call_.visible);
        auto const from_first = !call_.bias.empty() || !call_.dropout.empty();
        auto const together =
            !by_place() && seen.size() > 1 ? band_of(seen, reach, from_first) : std::nullopt;
        if (together) {
            result.push_back({seen, together, true});
        } else {
            for (std::size_t i = 0; i < seen.size(); ++i) {
                auto const one = seen.subspan(i, 1);
                auto const band = band_of(one, reach, from_first);
                result.push_back({one, band, must_vary(one[0], *band)});
            }
        }
        for (auto part = unseen; part != parts_.end(); ++part)
            result.push_back({{&*part, 1}, std::nullopt, false});
        return result;
    }

   private:
    /// Whether scores change by where they stand, so that a plan is for one part: by a bias, or by what
    /// cuDNN has only without lengths that vary.
    bool by_place() const {
        return !call_.bias.empty() || call_.softcap > 0 || !call_.slopes.empty();
    }

    /// cuDNN has no window to the left of more rows than keys, unless lengths vary: halves such parts until
    /// they are none.
    void halve_parts() {
        auto const reach = sdpa_reach::of(call_.visible);
        for (std::size_t i = 0; i < parts_.size();) {
            auto& part = parts_[i];
            auto const rows = part.rows.size();
            if (part.keys.size() == 0 || rows <= part.keys.size() ||
                band_of({&part, 1}, reach, true)->left < 0) {
                ++i;
                continue;
            }
            auto const half = [&](index_range own) {
                auto const keys = call_.visible.keys_of_rows(part.sample, own.begin, own.end);
                auto const moved = own.begin - part.rows.begin - (keys.begin - part.keys.begin);
                return sdpa_part{part.sample, part.samples, own, keys, part.diagonal + moved};
            };
            auto const middle = part.rows.begin + rows / 2;
            auto const second = half({middle, part.rows.end});
            part = half({part.rows.begin, middle});
            parts_.push_back(second);
        }
    }

    /// Whether one part goes as a plan of varied lengths: by the options, or because cuDNN has no other
    /// for it.
    bool must_vary(sdpa_part const& part, sdpa_band const& band) const {
        if (by_place()) return false;
        return options_.round_lengths || (!call_.sinks.empty() && part.rows.size() == 1) ||
               (band.left >= 0 && part.rows.size() > part.keys.size());
    }

    sdpa_options const& options_;
    attention_call const& call_;
    std::vector<sdpa_part> parts_;
};

}  // namespace detail

}  // namespace ulysses::inline ULYSSES_ABI
