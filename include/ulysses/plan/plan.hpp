#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/core/visibility.hpp>
#include <ulysses/plan/blocks.hpp>
#include <ulysses/plan/hash.hpp>
#include <ulysses/plan/head_chunk.hpp>
#include <ulysses/plan/head_runs.hpp>
#include <ulysses/plan/key_lists.hpp>
#include <ulysses/plan/line.hpp>
#include <ulysses/plan/listing.hpp>
#include <ulysses/plan/placed_runs.hpp>
#include <ulysses/plan/query_lists.hpp>
#include <ulysses/plan/sequence.hpp>
#include <ulysses/plan/share.hpp>
#include <ulysses/plan/weights.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// The plan: what moves between one rank and the others, as a pure function of shape, sequence,
/// number of ranks and rank. It talks to nobody and knows no element type: places are counted in
/// rows of one token and head, so one list of blocks serves q, o and their gradients, another k, v
/// and theirs.
///
/// The line says who computes what (`line`), shares say where that lies in each rank's head-local
/// memory (`rank_shares`), and lists say what moves there (`query_lists`, `key_lists`).
///
/// With a cache the key region is the cache's: `key_capacity` is its capacity, the first row of a
/// head and sample is that of key 0, and what moves are the keys of the step's tokens, to behind
/// those that are there. Such a plan is for a forward pass; it lists no returns.
namespace ulysses::inline ULYSSES_ABI {

class plan {
   public:
    /// Makes this the plan of `rank` in a group of `ranks`; allocates only when it outgrows the
    /// largest so far. *Throws* `invalid_sequence` when `step` names another number of ranks or a
    /// layer has 2^62 rows, `unsupported` for a row_multiple below 1.
    /// *Complexity*: O(P (items + runs) + own blocks).
    void rebuild(shape const& layer, sequence const& step, int ranks, int rank,
                 std::int64_t row_multiple, where at = where::here()) {
        rebuild(layer, step, ranks, rank, row_multiple, {{0, layer.kv_heads}}, 0, at);
    }

    /// The plan of one chunk of the layer's heads, dealt to the ranks as a layer of so many heads
    /// would be. Heads are counted over the whole layer in all that it lists. `cache_capacity`: of
    /// the cache that the step's keys go to and that has room for them; 0: none, or, when the step
    /// has a past, one that they fill.
    void rebuild(shape const& layer, sequence const& step, int ranks, int rank,
                 std::int64_t row_multiple, head_chunk const& chunk,
                 std::int64_t cache_capacity = 0, where at = where::here()) {
        check(layer, step, ranks, row_multiple, at);
        layer_ = layer;
        chunk_ = chunk;
        rank_ = rank;
        row_multiple_ = row_multiple;
        take(step);
        caching_ = cache_capacity > 0 || step.packed().has_past();
        word_hash hash(step.hash());
        for (auto const word : terms()) hash.add(word);
        hash.add(cache_capacity);
        hash_ = hash.value();
        deal(step, ranks, cache_capacity);
        list(step);
    }

    /// The whole layer.
    shape const& layer() const { return layer_; }
    head_chunk const& chunk() const { return chunk_; }
    int ranks() const { return shares_.ranks(); }
    int rank() const { return rank_; }
    std::int64_t batch() const { return batch_; }
    std::int64_t queries() const { return queries_; }
    /// Keys that a sample's rows may see: those of all ranks' tokens, behind what is in a cache.
    std::int64_t keys() const { return keys_; }
    /// Keys of all ranks' tokens: `keys()` without what is in a cache.
    std::int64_t step_keys() const { return step_keys_; }
    /// True when the step's keys go to a cache.
    bool caching() const { return caching_; }
    /// Local tokens of this rank.
    std::int64_t own_queries() const { return own_queries_; }
    std::int64_t own_keys() const { return own_keys_; }
    /// Those of them that every rank holds.
    std::int64_t replicated_queries() const { return replicated_queries_; }
    std::int64_t replicated_keys() const { return replicated_keys_; }
    /// True when this rank's local tokens are the whole sequence in global order.
    bool holds_all_in_order() const { return holds_all_in_order_; }
    static bool holds_all_in_order(sequence const& step, int rank) {
        return rank < step.ranks() && in_order(step.queries(), rank) && in_order(step.keys(), rank);
    }
    std::int64_t row_multiple() const { return row_multiple_; }
    /// Which keys each query row sees, but for the window, which is the layer's: that of an item is
    /// its own. Points into this plan.
    visibility visible() const {
        auto rule = line::rule_of(layer_, queries_, keys_);
        rule.samples = samples_;
        rule.documents = documents_;
        rule.present = present_;
        return rule;
    }

    /// What ranks must pass alike for their plans to fit; the call, its element type, fence and
    /// windows are the caller's.
    call_terms terms() const {
        call_terms all{};
        auto const set = [&](term which, auto value) {
            all[static_cast<std::size_t>(which)] = static_cast<std::int64_t>(value);
        };
        set(term::heads, layer_.heads);
        set(term::kv_heads, layer_.kv_heads);
        set(term::head_dim, layer_.head_dim);
        set(term::value_dim, layer_.value_dim);
        set(term::mask, layer_.mask);
        set(term::window_left, layer_.window.left);
        set(term::window_right, layer_.window.right);
        if (!layer_.head_windows.empty()) {
            word_hash hash;
            for (auto const& each : layer_.head_windows) hash.add(each.left), hash.add(each.right);
            set(term::head_windows, hash.value());
        }
        set(term::assignment, layer_.assignment);
        set(term::keep, layer_.keep);
        set(term::chunks, layer_.chunks);
        set(term::overlap, layer_.overlap);
        set(term::scale, layer_.scale.bits);
        set(term::softcap, layer_.logits.softcap.bits);
        set(term::logits, (layer_.logits.alibi ? 1 : 0) | (layer_.logits.bias ? 2 : 0) |
                              (layer_.logits.sinks ? 4 : 0));
        set(term::dropout, layer_.dropout.bits);
        set(term::row_multiple, row_multiple_);
        set(term::batch, batch_);
        set(term::queries, queries_);
        set(term::keys, keys_);
        return all;
    }
    /// The same for all chunks of a call.
    std::uint64_t hash() const { return hash_; }

    /// Who computes what: the items of any rank; this rank's, with their places in its regions.
    work_items const& items(int rank) const { return shares_[rank].items; }
    std::span<planned_item const> items() const { return items_; }

    /// Rows of the largest query and key region over all ranks.
    std::int64_t query_region_rows() const { return shares_.query_region_rows(); }
    std::int64_t key_region_rows() const { return shares_.key_region_rows(); }
    /// Rows of this rank's own regions.
    std::int64_t own_query_rows() const { return shares_[rank_].query_rows; }
    std::int64_t own_key_rows() const { return shares_.key_rows(shares_[rank_]); }
    /// Rows of a key-value head and sample in a key region, the same on every rank.
    std::int64_t key_capacity() const { return shares_.key_capacity(); }

    /// See `ulysses::for_each_append`.
    template <class Use>
    void for_each_append(Use const& use) const {
        ulysses::for_each_append(visible(), batch_, use);
    }

    /// Rows of all ranks' slots together, where the gradients of replicated outputs are summed.
    std::int64_t slot_rows() const { return ranks() * query_lists_.slot_rows(); }

    /// Moves of q and dq, in which this rank's replicated tokens only meet its own region, and the
    /// rows of dq that it leaves zero: of replicated tokens, what other ranks compute.
    plan_moves query_moves() const { return query_lists_.moves(); }
    std::span<plan_sum const> query_zeros() const { return query_lists_.zeros(); }
    /// Moves of o; of dO. Without replicated tokens they are those of q.
    plan_moves output_moves() const { return query_lists_.output_moves(); }
    plan_output_gradient output_gradient() const { return query_lists_.output_gradient(); }
    /// Moves of k and v; returns of dk and dv.
    plan_moves key_moves() const { return key_lists_.moves(); }
    plan_returns key_returns() const { return key_lists_.returns(); }

    /// Rows exchanged with a peer, the rank's own share included as peer `rank()`.
    plan_rows const& rows(int peer) const { return rows_[static_cast<std::size_t>(peer)]; }

   private:
    static bool in_order(token_orders const& orders, int rank) {
        std::int64_t next = 0;
        for (auto const& run : orders.runs(rank)) {
            if (run.begin != next || (run.stride != 1 && run.count != 1)) return false;
            next += run.count;
        }
        return next == orders.total();
    }

    static void check(shape const& layer, sequence const& step, int ranks,
                      std::int64_t row_multiple, where at) {
        if (step.ranks() != ranks)
            raise(errc::invalid_sequence, at, "plan", "the sequence must name the group's ranks",
                  "sequence of ", step.ranks(), " ranks, group of ", ranks);
        if (row_multiple < 1)
            raise(errc::unsupported, at, "plan",
                  "an attention functor's row_multiple is at least 1", row_multiple);
        if (step.batch() >= token_limit ||
            layer.heads * step.batch() >=
                (std::int64_t{1} << 62) / std::max({step.queries().total(), step.visible_keys(),
                                                    ranks * step.queries().replicated()}))
            raise(errc::invalid_sequence, at, "plan", "a layer must stay below 2^62 rows", "heads ",
                  layer.heads, ", batch ", step.batch(), ", queries ", step.queries().total(),
                  ", keys ", step.visible_keys(), ", replicated queries ",
                  step.queries().replicated(), " on ", ranks, " ranks");
    }

    void take(sequence const& step) {
        batch_ = step.batch();
        queries_ = step.queries().total();
        keys_ = step.visible_keys();
        step_keys_ = step.keys().total();
        own_queries_ = step.queries().count(rank_);
        own_keys_ = step.keys().count(rank_);
        replicated_queries_ = step.queries().replicated();
        replicated_keys_ = step.keys().replicated();
        holds_all_in_order_ = holds_all_in_order(step, rank_);
        auto const rule = step.visible(layer_);
        samples_.assign(rule.samples.begin(), rule.samples.end());
        documents_.assign(rule.documents.begin(), rule.documents.end());
        present_.assign(rule.present.begin(), rule.present.end());
    }

    /// The chunk's query heads.
    index_range chunk_heads() const {
        auto const group = layer_.heads / layer_.kv_heads;
        return {chunk_.kv_heads.begin * group, chunk_.kv_heads.end * group};
    }

    void deal(sequence const& step, int ranks, std::int64_t cache_capacity) {
        auto const rule = step.visible(layer_);
        auto const part = chunk_.alone(layer_);
        head_runs_.assign(part, rule);
        line const cuts(part, rule, batch_, ranks, row_multiple_,
                        rule.uniform() ? row_weights(rule) : row_weights(rule, document_weights_),
                        head_runs_);
        shares_.deal(cuts, ranks, batch_, chunk_heads().begin, chunk_.kv_heads.begin,
                     !caching_            ? 0
                     : cache_capacity > 0 ? cache_capacity
                                          : keys_);
        items_.clear();
        auto const& own = shares_[rank_];
        for (std::size_t i = 0; i < own.items.size(); ++i)
            items_.push_back({own.items[i], own.query_row[i],
                              shares_.key_row(own, own.items[i].kv_begin, own.items[i].key_begin)});
    }

    void list(sequence const& step) {
        rows_.assign(static_cast<std::size_t>(ranks()), {});
        query_lists_.rebuild({shares_, step.queries(), rank_, runs_of_}, chunk_heads(), rows_);
        listing const keys{shares_, step.keys(), rank_, runs_of_};
        if (caching_)
            key_lists_.rebuild_for_cache(keys, visible(), rows_);
        else
            key_lists_.rebuild(keys, chunk_.kv_heads, rows_);
    }

    detail::kept_shape layer_;
    head_chunk chunk_;
    int rank_ = 0;
    std::int64_t row_multiple_ = 1;
    std::int64_t batch_ = 0, queries_ = 0, keys_ = 0, step_keys_ = 0;
    std::int64_t own_queries_ = 0, own_keys_ = 0;
    std::int64_t replicated_queries_ = 0, replicated_keys_ = 0;
    bool caching_ = false;
    bool holds_all_in_order_ = false;
    std::uint64_t hash_ = 0;
    std::vector<sample_keys> samples_;
    std::vector<std::int64_t> documents_, document_weights_;
    std::vector<std::uint8_t> present_;
    head_runs head_runs_;
    rank_shares shares_;
    std::vector<planned_item> items_;
    run_lister runs_of_;
    query_lists query_lists_;
    key_lists key_lists_;
    std::vector<plan_rows> rows_;
};

}  // namespace ulysses::inline ULYSSES_ABI
