#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/plan/head_chunk.hpp>
#include <ulysses/plan/plan.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// The plans of one step on one rank, one for each chunk of heads.
class chunk_plans {
   public:
    /// True while these are the plans of `step`, and of a cache of that capacity.
    bool fit(sequence const& step, std::int64_t cache_capacity) const {
        return count_ > 0 && step_ == step.hash() && cache_capacity_ == cache_capacity;
    }

    /// `chunks` is the layer's own number, or 1, as for a cache; `cache_capacity` as a plan takes
    /// it; `check(plan)` is given the first and may refuse it. *Throws* as `plan::rebuild` and as
    /// `check`, and then these fit no step.
    template <class Check>
    void rebuild(shape const& layer, std::int64_t chunks, sequence const& step, int ranks, int rank,
                 std::int64_t row_multiple, std::int64_t cache_capacity, where at,
                 Check const& check) {
        count_ = 0;
        auto const count = static_cast<std::size_t>(chunks);
        auto dealt = layer;
        dealt.overlap = layer.overlap && count > 1;  // a single chunk has none to overlap with
        if (plans_.size() < count) plans_.resize(count);
        std::int64_t rows = 0;
        for (std::size_t c = 0; c < count; ++c) {
            auto chunk = head_chunk{{0, layer.kv_heads}};
            if (count > 1) chunk = head_chunk::of(layer, static_cast<std::int64_t>(c));
            chunk.first_query_row = rows;
            plans_[c].rebuild(dealt, step, ranks, rank, row_multiple, chunk, cache_capacity, at);
            rows += plans_[c].own_query_rows();
        }
        check(plans_[0]);
        step_ = step.hash();
        cache_capacity_ = cache_capacity;
        count_ = count;
    }

    plan const& first() const { return plans_[0]; }
    std::span<plan const> all() const { return std::span(plans_).first(count_); }

   private:
    std::vector<plan> plans_;  ///< more where another step had more
    std::size_t count_ = 0;
    std::uint64_t step_ = 0;
    std::int64_t cache_capacity_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI
