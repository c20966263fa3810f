#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/gather.hpp>
#include <ulysses/core/guarded.hpp>
#include <ulysses/plan/packing.hpp>
#include <ulysses/plan/step_record.hpp>
#include <ulysses/plan/token_order.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// How the ranks of a group agree on a step: gathers what each brings, checks that it fits, and
/// puts it together into what holds for all. Memory is kept from step to step. Room is made before
/// a rendezvous that can tell the others that there is none.
class agreement {
   public:
    /// Who holds which tokens; `keys` is set where they are another sequence. Makes room in
    /// `packed` for what this rank packs. *Blocking*, *Throws* as `sequence::agree`, but for what
    /// concerns a sequence of all ranks.
    template <class Comm>
    void gather_orders(Comm const& ranks, sequence_options const& mine, token_orders& queries,
                       token_orders& keys, packing& packed, where at) {
        auto const size = static_cast<std::size_t>(ranks.size());
        auto const reserve_orders = [&](std::size_t runs) {
            queries.reserve(size, size * runs);
            keys.reserve(size, size * runs);
        };
        fence_status status;
        guarded(status, [&] {
            records_.resize(size);
            reserve_orders(inline_runs);
            if (!mine.packing.empty() && mine.batch > 0)
                packed.reserve(static_cast<std::size_t>(mine.batch), mine.packing.documents.size(),
                               mine.packing.present.size());
        });
        step_record const own(mine);
        all_gather_or_fail(ranks, std::as_bytes(std::span(&own, 1)),
                           std::as_writable_bytes(std::span(records_)), status);
        check_records(records_, at);
        most_runs_ = 0;
        for (auto const& each : records_)
            most_runs_ = std::max({most_runs_, each.runs[0], each.runs[1]});
        if (most_runs_ > inline_runs) {
            guarded(status, [&] { reserve_orders(most_runs_); });
            gather_runs(ranks, mine, status);
        }
        set_orders(queries, 0, at);
        if (cross()) set_orders(keys, 1, at);
        if (!queries.contiguous() || (cross() && !keys.contiguous())) {
            guarded(status, [&] {
                queries.reserve_tokens();
                if (cross()) keys.reserve_tokens();
            });
            leaving_on_failure(ranks, [&] { ranks.fence(status); });
        }
    }

    std::int64_t batch() const { return records_[0].batch; }
    /// True when keys are another sequence than the queries.
    bool cross() const { return records_[0].tokens[1] >= 0; }

    /// What is packed into the samples, with what ranks bring of their own tokens; `queries` and
    /// `keys` are the step's. Makes room in `packed` for it. Valid until the next step.
    /// *Blocking*: a collective for positions, one for presence, where a rank brings them.
    template <class Comm>
    packing_options gather_packing(Comm const& ranks, sequence_options const& mine,
                                   token_orders const& queries, token_orders const& keys,
                                   packing& packed, where at) {
        auto all = mine.packing;
        if (brought(&step_record::positions))
            all.documents = gather_documents(ranks, mine, queries, packed, at);
        if (brought(&step_record::present))
            all.present = gather_present(ranks, mine, keys, packed, at);
        return all;
    }

   private:
    static constexpr auto inline_runs = step_record::inline_runs;

    /// A number for each sample and token, from the ranks that hold them.
    template <class Value>
    struct token_values {
        std::vector<Value> own, gathered, whole;
    };

    /// The runs of all orders, of queries and of keys.
    template <class Comm>
    void gather_runs(Comm const& ranks, sequence_options const& mine, fence_status& status) {
        guarded(status, [&] {
            runs_.assign(records_.size() * 2 * most_runs_, {});
            own_runs_.assign(2 * most_runs_, {});
            std::copy(mine.order.begin(), mine.order.end(), own_runs_.begin());
            std::copy(mine.key_order.begin(), mine.key_order.end(),
                      own_runs_.begin() + static_cast<std::ptrdiff_t>(most_runs_));
        });
        all_gather_or_fail(ranks, std::as_bytes(std::span(own_runs_)),
                           std::as_writable_bytes(std::span(runs_)), status);
    }

    /// From the records, or the runs that were gathered behind them.
    void set_orders(token_orders& orders, std::size_t side, where at) {
        orders.clear();
        // Once one rank gives an order, every rank that holds tokens must.
        bool given = false;
        for (auto const& each : records_) given = given || each.runs[side] > 0;
        auto begin = records_[0].replicated[side];
        for (std::size_t r = 0; r < records_.size(); ++r) {
            auto const& theirs = records_[r];
            if (!given) {
                std::array const own{
                    token_run{.count = theirs.replicated[side], .replicated = true},
                    token_run{.begin = begin,
                              .count = theirs.tokens[side] - theirs.replicated[side]}};
                orders.add_rank(own, at);
                begin += own[1].count;
                continue;
            }
            auto const* runs = most_runs_ > inline_runs ? runs_.data() + (2 * r + side) * most_runs_
                                                        : theirs.order[side].data();
            orders.add_rank({runs, theirs.runs[side]}, at);
            if (orders.count(static_cast<int>(r)) != theirs.tokens[side])
                raise(errc::invalid_sequence, at, "sequence",
                      "an order must list the rank's tokens", "rank ", r, " has ",
                      theirs.tokens[side], " tokens, its order lists ",
                      orders.count(static_cast<int>(r)));
        }
    }

    bool brought(std::int64_t step_record::*values) const {
        return std::any_of(records_.begin(), records_.end(),
                           [&](step_record const& each) { return each.*values > 0; });
    }

    /// A rank that brings other than one value for each sample and token that it holds.
    struct miscount {
        std::size_t rank;
        std::int64_t brought, expected;
    };
    std::optional<miscount> miscounted(std::int64_t step_record::*values, std::size_t side) const {
        for (std::size_t r = 0; r < records_.size(); ++r)
            if (auto const expected = batch() * records_[r].tokens[side];
                records_[r].*values != expected)
                return miscount{r, records_[r].*values, expected};
        return {};
    }

    /// The documents that the positions of all ranks' tokens mean.
    template <class Comm>
    std::span<std::int64_t const> gather_documents(Comm const& ranks, sequence_options const& mine,
                                                   token_orders const& queries, packing& packed,
                                                   where at) {
        if (auto const wrong = miscounted(&step_record::positions, 0))
            raise(errc::invalid_sequence, at, "sequence",
                  "positions must name one for each sample and token of the rank", "rank ",
                  wrong->rank, " has ", wrong->brought, ", expected ", wrong->expected);
        if (!mine.packing.documents.empty())
            raise(errc::invalid_sequence, at, "sequence",
                  "documents come from positions or from offsets, not from both",
                  mine.packing.documents.size(), " offsets");
        auto const total = static_cast<std::size_t>(batch() * queries.total());
        fence_status status;
        guarded(status, [&] {
            starts_.clear();
            starts_.reserve(total);
            packed.reserve(static_cast<std::size_t>(batch()), total);
        });
        auto const positions =
            gather_values(ranks, mine.positions, queries, positions_, status, "positions", at);
        for (std::size_t i = 0; i < total; ++i)
            if (i == 0 || positions[i] <= positions[i - 1])
                starts_.push_back(static_cast<std::int64_t>(i));
        return starts_;
    }

    /// Which keys of all ranks are there.
    template <class Comm>
    std::span<std::uint8_t const> gather_present(Comm const& ranks, sequence_options const& mine,
                                                 token_orders const& keys, packing& packed,
                                                 where at) {
        if (auto const wrong = miscounted(&step_record::present, cross() ? 1 : 0))
            raise(errc::invalid_sequence, at, "sequence",
                  "present must name one for each sample and key of the rank", "rank ", wrong->rank,
                  " has ", wrong->brought, ", expected ", wrong->expected);
        if (!mine.packing.present.empty())
            raise(errc::invalid_sequence, at, "sequence",
                  "present comes from the ranks' keys or from the packing, not from both",
                  mine.packing.present.size(), " in the packing");
        fence_status status;
        guarded(status, [&] {
            packed.reserve(static_cast<std::size_t>(batch()), 0,
                           static_cast<std::size_t>(batch() * keys.total()));
        });
        return gather_values(ranks, mine.present, keys, present_, status, "present", at);
    }

    /// [B, s] of each rank -> [B, S], in the order of the sequence.
    template <class Comm, class Value>
    std::span<Value const> gather_values(Comm const& ranks, std::span<Value const> mine,
                                         token_orders const& orders, token_values<Value>& values,
                                         fence_status& status, std::string_view what, where at) {
        std::int64_t most = 0;
        for (int r = 0; r < orders.ranks(); ++r) most = std::max(most, batch() * orders.count(r));
        auto const size = static_cast<std::size_t>(most);
        guarded(status, [&] {
            values.own.assign(size, 0);
            std::copy(mine.begin(), mine.end(), values.own.begin());
            values.gathered.resize(size * records_.size());
            values.whole.resize(static_cast<std::size_t>(batch() * orders.total()));
        });
        all_gather_or_fail(ranks, std::as_bytes(std::span(values.own)),
                           std::as_writable_bytes(std::span(values.gathered)), status);
        for (int r = 0; r < orders.ranks(); ++r) {
            auto const* next = values.gathered.data() + static_cast<std::size_t>(r) * size;
            for (std::int64_t b = 0; b < batch(); ++b)
                for (auto const& run : orders.runs(r))
                    for (std::int64_t i = 0; i < run.count; ++i)
                        place_value(r, run, b, i, *next++, orders.total(), what, values.whole, at);
        }
        return values.whole;
    }

    /// Takes a rank's value of a token; of a replicated one rank 0's.
    template <class Value>
    static void place_value(int rank, token_run const& run, std::int64_t sample, std::int64_t i,
                            Value value, std::int64_t tokens, std::string_view what,
                            std::vector<Value>& whole, where at) {
        auto& place = whole[static_cast<std::size_t>(sample * tokens + run.at(i))];
        if (rank > 0 && run.replicated && place != value)
            raise(errc::disagreement, at, "sequence",
                  concat(what, " of replicated tokens must be equal on every rank"), "token ",
                  run.at(i), " of sample ", sample, ": rank 0 has ", std::int64_t{place}, ", rank ",
                  rank, " has ", std::int64_t{value});
        place = value;
    }

    std::vector<step_record> records_;  ///< of all ranks
    std::size_t most_runs_ = 0;         ///< in any order
    std::vector<token_run> runs_;       ///< of all orders, if records have no room for some
    std::vector<token_run> own_runs_;
    token_values<std::int64_t> positions_;
    token_values<std::uint8_t> present_;
    std::vector<std::int64_t> starts_;
};

}  // namespace ulysses::inline ULYSSES_ABI
