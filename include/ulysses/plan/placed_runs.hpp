#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/index_range.hpp>
#include <ulysses/plan/token_order.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// A run and the local token that it begins at.
struct placed_run {
    token_run run;
    std::int64_t token = 0;
};
using placed_runs = std::span<placed_run const>;

/// Which of a rank's tokens: all, those that it alone holds, those that every rank holds.
enum class held { all, sharded, replicated };

/// Lists a rank's runs of one kind: in its own order, replicated ones in that of the sequence,
/// which is the same on all ranks.
class run_lister {
   public:
    /// Valid until the next call.
    placed_runs operator()(token_orders const& orders, int rank, held which) {
        list_.clear();
        std::int64_t token = 0;
        for (auto const& run : orders.runs(rank)) {
            if (which == held::all || run.replicated == (which == held::replicated))
                list_.push_back({run, token});
            token += run.count;
        }
        if (which == held::replicated)
            std::sort(list_.begin(), list_.end(),
                      [](auto const& a, auto const& b) { return a.run.begin < b.run.begin; });
        return list_;
    }

   private:
    std::vector<placed_run> list_;
};

/// Calls `use(local token, count, global index, stride)` for the tokens of `runs` in `rows`.
template <class Use>
void for_tokens(placed_runs runs, index_range rows, Use const& use) {
    for (auto const& [run, token] : runs) {
        auto const part = run.within(rows.begin, rows.end);
        if (part.begin < part.end)
            use(token + part.begin, part.size(), run.at(part.begin), run.stride);
    }
}

}  // namespace ulysses::inline ULYSSES_ABI
