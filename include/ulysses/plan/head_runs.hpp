#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/shape.hpp>
#include <ulysses/core/visibility.hpp>
#include <ulysses/plan/weights.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// The heads of a layer whose windows differ.
namespace ulysses::inline ULYSSES_ABI {

/// Weights of a whole layer: up to 2^31 heads of less than 2^62 each, times up to 2^31 ranks.
__extension__ using wide_weight = unsigned __int128;

/// Neighbouring heads with one window.
struct head_run {
    std::int64_t begin = 0, end = 0;
    visibility rule{};       ///< what their rows see
    row_weights weights{};   ///< of one of the heads
    wide_weight before = 0;  ///< weight of all heads before
};

/// The runs of a layer with a window for each head; none where all heads have one. Allocates only
/// when it outgrows the largest so far.
class head_runs {
   public:
    /// `rule` is the step's, without a window; its lists are used while the runs are.
    void assign(shape const& layer, visibility rule) {
        runs_.clear();
        std::size_t used = 0;
        wide_weight before = 0;
        for (std::int64_t head = 0; head < layer.head_windows.count;) {
            rule.window = layer.head_windows[head];
            auto const begin = head;
            while (head < layer.head_windows.count && layer.head_windows[head] == rule.window)
                ++head;
            auto const known = std::find_if(runs_.begin(), runs_.end(), [&](auto const& each) {
                return each.rule.window == rule.window;
            });
            auto const weights = known != runs_.end() ? known->weights
                                 : rule.uniform()     ? row_weights(rule)
                                                      : row_weights(rule, memory(used++));
            runs_.push_back({begin, head, rule, weights, before});
            before += static_cast<wide_weight>(head - begin) *
                      static_cast<wide_weight>(weights.before(rule.queries));
        }
    }

    operator std::span<head_run const>() const { return runs_; }

   private:
    std::vector<std::int64_t>& memory(std::size_t which) {
        if (which == memory_.size()) memory_.emplace_back();
        return memory_[which];
    }

    std::vector<head_run> runs_;
    std::vector<std::vector<std::int64_t>> memory_;  ///< of the documents, by window
};

}  // namespace ulysses::inline ULYSSES_ABI
