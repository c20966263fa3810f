#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/mpi/meeting.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

/// What all ranks of a group have made together, and can only give back together: windows, and groups
/// that were split off. It goes at a meeting, once no rank uses it any more.
namespace ulysses::inline ULYSSES_ABI::mpi::detail {

struct resource {
    virtual ~resource() = default;
    /// Collective over the ranks that have made it; nobody uses it any more.
    virtual void release() = 0;
    /// False where it cannot be given back.
    virtual bool is_intact() { return true; }
    /// Before and after a meeting.
    virtual void synchronise() {}
};

/// Those of a group, in the same order on every rank. A meeting considers 64 of them.
class resource_list {
   public:
    /// So that `keep` throws nothing.
    void reserve() { all_.reserve(all_.size() + 1); }
    void keep(std::shared_ptr<resource> made) { all_.push_back(std::move(made)); }

    void synchronise() {
        for (auto const& each : all_) each->synchronise();
    }

    /// Which of those that meeting number `meetings` considers this rank no longer uses.
    std::uint64_t dropped(std::uint64_t meetings) {
        auto const parts = (all_.size() + 63) / 64;
        considered_ = parts == 0 ? 0 : 64 * (meetings % parts);
        std::uint64_t mask = 0;
        for (std::size_t i = 0; i < 64 && considered_ + i < all_.size(); ++i)
            if (auto const& each = all_[considered_ + i];
                each.use_count() == 1 && each->is_intact())
                mask |= std::uint64_t{1} << i;
        return mask;
    }

    bool is_releasable(std::span<offer const> shown) const { return common(shown) != 0; }
    /// Gives back what no rank uses, of which there is some.
    void release_dropped(std::span<offer const> shown) {
        auto const mask = common(shown);
        auto kept = considered_;
        for (auto i = considered_; i < all_.size(); ++i)
            if (i - considered_ < 64 && (mask >> (i - considered_) & 1) != 0)
                all_[i]->release();
            else if (kept++ != i)
                all_[kept - 1] = std::move(all_[i]);
        all_.resize(kept);
    }
    /// Gives back all.
    void release() {
        for (auto& each : all_) each->release();
        all_.clear();
    }

   private:
    static std::uint64_t common(std::span<offer const> shown) {
        auto mask = ~std::uint64_t{0};
        for (auto const& each : shown) mask &= each.dropped;
        return mask;
    }

    std::vector<std::shared_ptr<resource>> all_;
    std::size_t considered_ = 0;  ///< the first of those that the meeting under way considers
};

}  // namespace ulysses::inline ULYSSES_ABI::mpi::detail
