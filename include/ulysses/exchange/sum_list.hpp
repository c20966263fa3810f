#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/block.hpp>
#include <ulysses/exchange/messages.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// Sums of rows that lie apart, listed one after the other and then added at once: `begin` a sum, and
/// list `from` where its parts are, in the order in which they are added. A sum of no part is zero.
template <class Space>
class sum_list {
   public:
    using queue_type = typename Space::queue;
    using strides3 = std::array<std::int64_t, 3>;

    void clear() {
        sums_.clear();
        counts_.clear();
        sources_.clear();
        late_.clear();
    }

    /// The next sum. Its `from` is listed here.
    void begin(block_sum const& sum) {
        sums_.push_back(sum);
        counts_.push_back(0);
    }
    /// A part of it.
    void from(std::byte const* rows, strides3 const& strides) {
        sources_.push_back({rows, strides});
        ++counts_.back();
    }
    /// A part of it that comes as a message, which has no memory yet.
    void from(message_place const& place, strides3 const& strides) {
        late_.push_back({sources_.size(), place});
        from(static_cast<std::byte const*>(nullptr), strides);
    }

    /// Once messages have memory.
    void locate(message_buffer<Space> const& messages) {
        for (auto const& each : late_) sources_[each.index].rows = messages.at(each.place);
    }

    /// Executes all that is listed, and forgets it.
    template <class To, class From>
    void add(queue_type queue) {
        // Addresses are only stable once all are listed.
        std::size_t next = 0;
        for (std::size_t i = 0; i < sums_.size(); next += counts_[i++])
            sums_[i].from = std::span<sum_source const>(sources_).subspan(next, counts_[i]);
        Space::template add<To, From>(queue, sums_);
        clear();
    }

   private:
    struct late_source {
        std::size_t index;
        message_place place;
    };

    std::vector<block_sum> sums_;
    std::vector<std::size_t> counts_;  ///< of each sum's parts
    std::vector<sum_source> sources_;
    std::vector<late_source> late_;
};

}  // namespace ulysses::inline ULYSSES_ABI
