#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/index_range.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

/// Which tokens of the global sequence each rank holds, and in which order.
namespace ulysses::inline ULYSSES_ABI {

/// `count` tokens at global indices begin, begin + stride, begin + 2 stride, ...
struct token_run {
    std::int64_t begin = 0;
    std::int64_t count = 0;
    std::int64_t stride = 1;
    bool replicated = false;  ///< held by every rank: each lists the same run, wherever it wants

    constexpr std::int64_t at(std::int64_t i) const { return begin + i * stride; }
    constexpr std::int64_t last() const { return at(count - 1); }

    /// The indices i whose token lies in global [from, to), as a half-open range.
    constexpr index_range within(std::int64_t from, std::int64_t to) const {
        auto const first_at = [&](std::int64_t token) {
            return std::clamp<std::int64_t>(
                token <= begin ? 0 : (token - begin + stride - 1) / stride, 0, count);
        };
        auto const first = first_at(from);
        return {first, std::max(first, first_at(to))};
    }
    friend constexpr bool operator==(token_run const&, token_run const&) = default;
};

/// Global indices and counts stay below this.
inline constexpr auto token_limit = std::int64_t{1} << 31;

/// The token orders of all ranks: rank r's local tokens are its runs, one after the other. A
/// replicated run counts once, however many ranks list it.
class token_orders {
   public:
    /// Forgets all ranks; memory is kept.
    void clear() {
        runs_.clear();
        first_.clear();
        counts_.clear();
        sharded_ = replicated_ = 0;
    }

    /// Makes room for so many ranks and runs: adding them and a check of runs of stride 1 then
    /// allocate nothing.
    void reserve(std::size_t ranks, std::size_t runs) {
        first_.reserve(ranks);
        counts_.reserve(ranks);
        runs_.reserve(runs);
        sorted_.reserve(runs);
        first_replicated_.reserve(runs);
    }
    /// Makes room for what a check of runs of other strides needs.
    void reserve_tokens() {
        if (!contiguous() && total() < token_limit)
            seen_.reserve(static_cast<std::size_t>(total()));
    }

    /// True when every run has stride 1.
    bool contiguous() const {
        return std::all_of(runs_.begin(), runs_.end(),
                           [](auto const& run) { return run.stride == 1; });
    }

    /// Adds the next rank's runs; empty runs are dropped, neighbours that continue each other
    /// joined, unless they are replicated.
    void add_rank(std::span<token_run const> runs, where at = {}) {
        auto const first = runs_.size();
        std::int64_t count = 0, replicated = 0;
        for (auto const& run : runs) {
            if (run.count == 0) continue;
            if (run.count < 0 || run.count >= token_limit || run.begin < 0 ||
                run.begin >= token_limit || run.stride < 1 || run.stride >= token_limit)
                raise(errc::invalid_sequence, at, "sequence",
                      "a run has begin and count in 0 .. 2^31 - 1 and a stride of at least 1",
                      "rank ", ranks(), " has {begin ", run.begin, ", count ", run.count,
                      ", stride ", run.stride, "}");
            count += run.count;
            if (run.replicated) replicated += run.count;
            if (runs_.size() > first && runs_.back().stride == 1 && run.stride == 1 &&
                !runs_.back().replicated && !run.replicated &&
                runs_.back().begin + runs_.back().count == run.begin)
                runs_.back().count += run.count;
            else
                runs_.push_back(run);
        }
        first_.push_back(first);
        counts_.push_back(count);
        sharded_ += count - replicated;
        replicated_ = std::max(replicated_, replicated);  // equal on all, or `check` refuses them
    }

    int ranks() const { return static_cast<int>(counts_.size()); }
    /// Tokens of the sequence.
    std::int64_t total() const { return sharded_ + replicated_; }
    /// Those that every rank holds.
    std::int64_t replicated() const { return replicated_; }
    /// Tokens of one rank, replicated ones included.
    std::int64_t count(int rank) const { return counts_[static_cast<std::size_t>(rank)]; }
    std::span<token_run const> runs(int rank) const {
        auto const r = static_cast<std::size_t>(rank);
        auto const end = r + 1 < first_.size() ? first_[r + 1] : runs_.size();
        return std::span(runs_).subspan(first_[r], end - first_[r]);
    }

    /// Global index of a rank's local token.
    std::int64_t position(int rank, std::int64_t token) const {
        for (auto const& run : runs(rank)) {
            if (token < run.count) return run.at(token);
            token -= run.count;
        }
        return -1;
    }

    /// How many tokens of the run of a rank's local token there are from it on.
    std::int64_t run_from(int rank, std::int64_t token) const {
        for (auto const& run : runs(rank)) {
            if (token < run.count) return run.count - token;
            token -= run.count;
        }
        return 0;
    }

    /// Checks that every rank lists the same replicated runs, and that these, once, and the others
    /// cover 0 .. total() - 1 exactly once.
    /// *Throws* `invalid_sequence` naming a run or token at fault. *Complexity*: O(runs log runs)
    /// for runs of stride 1, else O(total).
    void check(std::string_view what, where at) {
        for (int r = 0; r < ranks(); ++r) check_replicated(r, what, at);
        for (int r = 0; r < ranks(); ++r)
            for (auto const& run : runs(r))
                if (run.last() >= total())
                    raise(errc::invalid_sequence, at, what, "runs must lie within the sequence",
                          "rank ", r, " has run {begin ", run.begin, ", count ", run.count,
                          ", stride ", run.stride, "} of ", total(), " tokens");
        sorted_.clear();
        for (int r = 0; r < ranks(); ++r)
            for (auto const& run : runs(r))
                if (r == 0 || !run.replicated) sorted_.push_back(run);
        contiguous() ? check_contiguous(what, at) : check_each(what, at);
    }

    friend bool operator==(token_orders const& a, token_orders const& b) {
        return a.first_ == b.first_ && a.runs_ == b.runs_;
    }

   private:
    /// Compares a rank's replicated runs, in any order, with those of rank 0.
    void check_replicated(int rank, std::string_view what, where at) {
        if (replicated_ == 0) return;
        auto& list = rank == 0 ? first_replicated_ : sorted_;
        list.clear();
        for (auto const& run : runs(rank))
            if (run.replicated) list.push_back(run);
        std::sort(list.begin(), list.end(), [](auto const& a, auto const& b) {
            return std::tie(a.begin, a.count, a.stride) < std::tie(b.begin, b.count, b.stride);
        });
        auto const differ = std::mismatch(list.begin(), list.end(), first_replicated_.begin(),
                                          first_replicated_.end());
        auto const text = [](auto const& place, auto const& all) {
            return place == all.end() ? std::string("no such run")
                                      : concat("{begin ", place->begin, ", count ", place->count,
                                               ", stride ", place->stride, "}");
        };
        if (differ.first != list.end() || differ.second != first_replicated_.end())
            raise(errc::invalid_sequence, at, what, "every rank must list each replicated run",
                  "rank 0 has ", text(differ.second, first_replicated_), ", rank ", rank, " has ",
                  text(differ.first, list));
    }

    void check_contiguous(std::string_view what, where at) {
        std::sort(sorted_.begin(), sorted_.end(),
                  [](auto const& a, auto const& b) { return a.begin < b.begin; });
        std::int64_t next = 0;
        for (auto const& run : sorted_) {
            if (run.begin != next)
                raise(errc::invalid_sequence, at, what,
                      "ranks must cover the sequence exactly once",
                      run.begin < next ? "token held twice: " : "token held by no rank: ",
                      std::min(run.begin, next), " of ", total());
            next += run.count;
        }
    }

    void check_each(std::string_view what, where at) {
        seen_.assign(static_cast<std::size_t>(total()), false);
        for (auto const& run : sorted_)
            for (std::int64_t i = 0; i < run.count; ++i) {
                auto const token = static_cast<std::size_t>(run.at(i));
                if (seen_[token])
                    raise(errc::invalid_sequence, at, what,
                          "ranks must cover the sequence exactly once",
                          "token held twice: ", run.at(i), " of ", total());
                seen_[token] = true;  // as many tokens as indices: none twice means none left out
            }
    }

    std::vector<token_run> runs_;
    std::vector<std::size_t> first_;  ///< of a rank's runs; an empty value allocates nothing
    std::vector<std::int64_t> counts_;
    std::int64_t sharded_ = 0, replicated_ = 0;
    std::vector<token_run> sorted_, first_replicated_;
    std::vector<bool> seen_;
};

}  // namespace ulysses::inline ULYSSES_ABI
