#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/plan/blocks.hpp>
#include <ulysses/plan/line.hpp>
#include <ulysses/plan/sequence.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

/// The plan: what moves between one rank and the others, as a pure function of shape, sequence,
/// number of ranks and rank. It talks to nobody and knows no element type: places are counted in
/// rows of one token and head, so one list of blocks serves q, o and their gradients, another k, v
/// and theirs.
///
/// Head-local memory. Every rank's *query region* holds its items one after the other, each
/// [head, batch, row]; its *key region* holds its key-value heads as [head, batch, key], with
/// `key_capacity` rows a head and batch, the same on every rank.
namespace ulysses::inline ULYSSES_ABI {

class plan {
   public:
    /// Makes this the plan of `rank` in a group of `ranks`; allocates only when it outgrows the
    /// largest so far. *Throws* `invalid_sequence` when `step` names another number of ranks, or a
    /// causal mask has queries and keys of different lengths. *Complexity*: O(P (items + runs) +
    /// own blocks).
    void rebuild(shape const& layer, sequence const& step, int ranks, int rank,
                 std::int64_t row_multiple, where at = where::here()) {
        if (step.ranks() != ranks)
            raise(errc::invalid_sequence, at, "plan", "the sequence must name the group's ranks",
                  "sequence of ", step.ranks(), " ranks, group of ", ranks);
        if (layer.mask == mask::causal && step.queries().total() != step.keys().total())
            raise(errc::invalid_sequence, at, "plan", "a causal mask needs as many keys as queries",
                  step.queries().total(), " queries, ", step.keys().total(), " keys");
        if (row_multiple < 1)
            raise(errc::unsupported, at, "plan",
                  "an attention functor's row_multiple is at least 1", row_multiple);
        if (step.batch() >= token_limit ||
            layer.heads * step.batch() >=
                (std::int64_t{1} << 62) / std::max(step.queries().total(), step.keys().total()))
            raise(errc::invalid_sequence, at, "plan", "a layer must stay below 2^62 rows", "heads ",
                  layer.heads, ", batch ", step.batch(), ", queries ", step.queries().total(),
                  ", keys ", step.keys().total());
        layer_ = layer;
        ranks_ = ranks;
        rank_ = rank;
        row_multiple_ = row_multiple;
        batch_ = step.batch();
        queries_ = step.queries().total();
        keys_ = step.keys().total();
        own_queries_ = step.queries().count(rank);
        own_keys_ = step.keys().count(rank);
        holds_all_in_order_ = in_order(step.queries()) && in_order(step.keys());
        hash_ = combined_hash(step);
        deal(line(layer, queries_, keys_, ranks, row_multiple));
        list_blocks(step);
        list_sums(step);
        count_rows(step);
    }

    shape const& layer() const { return layer_; }
    int ranks() const { return ranks_; }
    int rank() const { return rank_; }
    std::int64_t batch() const { return batch_; }
    std::int64_t queries() const { return queries_; }
    std::int64_t keys() const { return keys_; }
    /// Local tokens of this rank.
    std::int64_t own_queries() const { return own_queries_; }
    std::int64_t own_keys() const { return own_keys_; }
    /// True when this rank's local tokens are the whole sequence in global order.
    bool holds_all_in_order() const { return holds_all_in_order_; }
    std::int64_t row_multiple() const { return row_multiple_; }
    std::uint64_t hash() const { return hash_; }

    work_items const& items(int rank) const {
        return shares_[static_cast<std::size_t>(rank)].items;
    }
    std::span<planned_item const> items() const { return items_; }

    /// Rows of the largest query and key region over all ranks.
    std::int64_t query_region_rows() const { return query_region_rows_; }
    std::int64_t key_region_rows() const { return key_region_rows_; }
    /// Rows of this rank's own regions.
    std::int64_t own_query_rows() const {
        return shares_[static_cast<std::size_t>(rank_)].query_rows;
    }
    std::int64_t own_key_rows() const { return shares_[static_cast<std::size_t>(rank_)].key_rows; }
    std::int64_t key_capacity() const { return key_capacity_; }

    /// Moves of q, o, dO, dq; moves of k and v; returns of dk and dv that one rank computed.
    std::span<plan_block const> query_blocks() const { return query_blocks_; }
    std::span<plan_block const> key_blocks() const { return key_blocks_; }
    std::span<plan_block const> key_returns() const { return key_returns_; }
    /// Returns of dk and dv that several ranks, or none, computed.
    std::span<plan_sum const> key_sums() const { return key_sums_; }
    std::span<plan_source const> sources() const { return sources_; }

    /// Rows exchanged with a peer, the rank's own share included as peer `rank()`.
    plan_rows const& rows(int peer) const { return rows_[static_cast<std::size_t>(peer)]; }

   private:
    struct kv_span {
        std::int64_t begin = 0, end = 0;
    };

    /// What every rank must know of another's share.
    struct rank_share {
        work_items items;
        std::array<std::int64_t, 5> query_row{};
        std::int64_t query_rows = 0;
        std::int64_t kv_begin = 0, kv_end = 0;
        std::int64_t key_begin = 0, key_end = 0;
        std::int64_t key_rows = 0;

        /// The keys that the rank's items need of one head.
        kv_span keys_of(std::int64_t head) const {
            kv_span span{0, 0};
            for (auto const& item : items)
                if (item.kv_begin <= head && head < item.kv_end)
                    span = span.begin == span.end ? kv_span{item.key_begin, item.key_end}
                                                  : kv_span{std::min(span.begin, item.key_begin),
                                                            std::max(span.end, item.key_end)};
            return span;
        }
        /// The end of the longest run of heads from `head` on that need the same keys.
        std::int64_t same_keys_end(std::int64_t head) const {
            auto const span = keys_of(head);
            auto end = head + 1;
            // Spans only change where an item begins or ends.
            while (end < kv_end) {
                auto const next = keys_of(end);
                if (next.begin != span.begin || next.end != span.end) break;
                auto boundary = kv_end;
                for (auto const& item : items)
                    for (auto const edge : {item.kv_begin, item.kv_end})
                        if (edge > end) boundary = std::min(boundary, edge);
                end = boundary;
            }
            return end;
        }
    };

    bool in_order(token_orders const& orders) const {
        auto const runs = orders.runs(rank_);
        return runs.size() == 1 && runs[0].count == orders.total() &&
               (runs[0].stride == 1 || runs[0].count == 1);
    }

    std::uint64_t combined_hash(sequence const& step) const {
        auto hash = step.hash();
        for (auto const word :
             {layer_.heads, layer_.kv_heads, layer_.head_dim, layer_.value_dim,
              static_cast<std::int64_t>(layer_.mask), static_cast<std::int64_t>(layer_.assignment),
              static_cast<std::int64_t>(layer_.keep), static_cast<std::int64_t>(layer_.scale.bits),
              row_multiple_}) {
            hash = (hash ^ static_cast<std::uint64_t>(word)) * 1099511628211u;
            hash ^= hash >> 32;
        }
        return hash;
    }

    void deal(line const& cuts) {
        shares_.resize(static_cast<std::size_t>(ranks_));
        query_region_rows_ = key_capacity_ = 0;
        std::int64_t most_kv_heads = 0;
        for (int r = 0; r < ranks_; ++r) {
            auto& share = shares_[static_cast<std::size_t>(r)];
            share = {};
            share.items = cuts.items(r);
            for (std::size_t i = 0; i < share.items.size(); ++i) {
                auto const& item = share.items[i];
                share.query_row[i] = share.query_rows;
                share.query_rows += item.heads() * batch_ * item.rows();
                share.kv_begin = i == 0 ? item.kv_begin : share.kv_begin;
                share.kv_end = std::max(share.kv_end, item.kv_end);
                share.key_begin =
                    i == 0 ? item.key_begin : std::min(share.key_begin, item.key_begin);
                share.key_end = std::max(share.key_end, item.key_end);
            }
            query_region_rows_ = std::max(query_region_rows_, share.query_rows);
            key_capacity_ = std::max(key_capacity_, share.key_end - share.key_begin);
            most_kv_heads = std::max(most_kv_heads, share.kv_end - share.kv_begin);
        }
        for (auto& share : shares_)
            share.key_rows = (share.kv_end - share.kv_begin) * batch_ * key_capacity_;
        key_region_rows_ = most_kv_heads * batch_ * key_capacity_;
        items_.clear();
        auto const& own = shares_[static_cast<std::size_t>(rank_)];
        for (std::size_t i = 0; i < own.items.size(); ++i)
            items_.push_back({own.items[i], own.query_row[i],
                              key_row(own, own.items[i].kv_begin, own.items[i].key_begin)});
    }

    std::int64_t key_row(rank_share const& share, std::int64_t head, std::int64_t key) const {
        return (head - share.kv_begin) * batch_ * key_capacity_ + key - share.key_begin;
    }

    void list_blocks(sequence const& step) {
        query_blocks_.clear();
        key_blocks_.clear();
        for (int peer = 0; peer < ranks_; ++peer) {
            auto const& share = shares_[static_cast<std::size_t>(peer)];
            for (std::size_t i = 0; i < share.items.size(); ++i) {
                auto const& item = share.items[i];
                for_tokens(step.queries(), item.row_begin, item.row_end,
                           [&](std::int64_t token, std::int64_t tokens, std::int64_t global,
                               std::int64_t stride) {
                               query_blocks_.push_back(
                                   {peer,
                                    token,
                                    tokens,
                                    item.head_begin,
                                    item.heads(),
                                    share.query_row[i] + global - item.row_begin,
                                    {item.rows(), stride, batch_ * item.rows()}});
                           });
            }
            for (auto head = share.kv_begin; head < share.kv_end;) {
                auto const end = share.same_keys_end(head);
                auto const span = share.keys_of(head);
                for_tokens(step.keys(), span.begin, span.end,
                           [&](std::int64_t token, std::int64_t tokens, std::int64_t global,
                               std::int64_t stride) {
                               key_blocks_.push_back(
                                   {peer,
                                    token,
                                    tokens,
                                    head,
                                    end - head,
                                    key_row(share, head, global),
                                    {key_capacity_, stride, batch_ * key_capacity_}});
                           });
                head = end;
            }
        }
    }

    /// Calls `use(local token, count, global index, stride)` for this rank's tokens in global
    /// [from, to).
    template <class Use>
    void for_tokens(token_orders const& orders, std::int64_t from, std::int64_t to,
                    Use const& use) const {
        std::int64_t token = 0;
        for (auto const& run : orders.runs(rank_)) {
            auto const part = run.within(from, to);
            if (part.begin < part.end)
                use(token + part.begin, part.end - part.begin, run.at(part.begin), run.stride);
            token += run.count;
        }
    }

    /// Who computed with a key-value head: the gradient of its keys returns from all of them.
    void list_sums(sequence const& step) {
        key_returns_.clear();
        key_sums_.clear();
        sources_.clear();
        for (std::int64_t head = 0; head < layer_.kv_heads;) {
            users_.clear();
            for (int peer = 0; peer < ranks_; ++peer) {
                auto const& share = shares_[static_cast<std::size_t>(peer)];
                if (share.kv_begin <= head && head < share.kv_end) users_.push_back(peer);
            }
            auto end = head + 1;
            if (users_.size() == 1) {
                // Heads of one and the same user return together.
                auto const& user = shares_[static_cast<std::size_t>(users_[0])];
                end = user.same_keys_end(head);
                for (int peer = 0; peer < ranks_; ++peer) {
                    auto const& share = shares_[static_cast<std::size_t>(peer)];
                    if (peer != users_[0] && share.kv_begin < share.kv_end && share.kv_end > head)
                        end = std::min(end, std::max(head + 1, share.kv_begin));
                }
            }
            list_sums_of(step, head, end);
            head = end;
        }
    }

    void list_sums_of(sequence const& step, std::int64_t head, std::int64_t end) {
        edges_.assign({0, keys_});
        for (auto const user : users_) {
            auto const span = shares_[static_cast<std::size_t>(user)].keys_of(head);
            edges_.push_back(span.begin);
            edges_.push_back(span.end);
        }
        std::sort(edges_.begin(), edges_.end());
        for (std::size_t e = 0; e + 1 < edges_.size(); ++e) {
            auto const from = edges_[e], to = edges_[e + 1];
            if (from == to) continue;
            for_tokens(step.keys(), from, to,
                       [&](std::int64_t token, std::int64_t tokens, std::int64_t global,
                           std::int64_t stride) {
                           auto const first = sources_.size();
                           for (auto const user : users_) {
                               auto const& share = shares_[static_cast<std::size_t>(user)];
                               auto const span = share.keys_of(head);
                               if (span.begin <= from && to <= span.end)
                                   sources_.push_back({user, key_row(share, head, global)});
                           }
                           add_return(token, tokens, head, end - head, first, stride);
                       });
        }
    }

    void add_return(std::int64_t token, std::int64_t tokens, std::int64_t head, std::int64_t heads,
                    std::size_t first, std::int64_t stride) {
        std::array const strides{key_capacity_, stride, batch_ * key_capacity_};
        auto const count = sources_.size() - first;
        if (count == 1) {
            key_returns_.push_back(
                {sources_[first].peer, token, tokens, head, heads, sources_[first].row, strides});
            sources_.pop_back();
        } else {
            key_sums_.push_back({token, tokens, head, heads, first, count, strides});
        }
    }

    void count_rows(sequence const& step) {
        rows_.assign(static_cast<std::size_t>(ranks_), {});
        for (auto const& block : query_blocks_)
            rows_[static_cast<std::size_t>(block.peer)].queries_to +=
                batch_ * block.tokens * block.heads;
        for (auto const& block : key_blocks_)
            rows_[static_cast<std::size_t>(block.peer)].keys_to +=
                batch_ * block.tokens * block.heads;
        auto const& own = shares_[static_cast<std::size_t>(rank_)];
        for (int peer = 0; peer < ranks_; ++peer) {
            auto& rows = rows_[static_cast<std::size_t>(peer)];
            for (auto const& run : step.queries().runs(peer))
                for (auto const& item : own.items) {
                    auto const part = run.within(item.row_begin, item.row_end);
                    rows.queries_from += batch_ * item.heads() * (part.end - part.begin);
                }
            for (auto const& run : step.keys().runs(peer))
                for (auto head = own.kv_begin; head < own.kv_end;) {
                    auto const end = own.same_keys_end(head);
                    auto const span = own.keys_of(head);
                    auto const part = run.within(span.begin, span.end);
                    rows.keys_from += batch_ * (end - head) * (part.end - part.begin);
                    head = end;
                }
        }
    }

    shape layer_;
    int ranks_ = 0, rank_ = 0;
    std::int64_t row_multiple_ = 1;
    std::int64_t batch_ = 0, queries_ = 0, keys_ = 0, own_queries_ = 0, own_keys_ = 0;
    bool holds_all_in_order_ = false;
    std::uint64_t hash_ = 0;
    std::vector<rank_share> shares_;
    std::vector<planned_item> items_;
    std::int64_t query_region_rows_ = 0, key_region_rows_ = 0, key_capacity_ = 0;
    std::vector<plan_block> query_blocks_, key_blocks_, key_returns_;
    std::vector<plan_sum> key_sums_;
    std::vector<plan_source> sources_;
    std::vector<plan_rows> rows_;
    std::vector<int> users_;
    std::vector<std::int64_t> edges_;
};

/// What ranks must pass alike for their plans to fit; the call, its element type, fence and windows
/// are the caller's.
inline call_terms terms_of(plan const& moves) {
    auto const& layer = moves.layer();
    return {0,
            0,
            layer.heads,
            layer.kv_heads,
            layer.head_dim,
            layer.value_dim,
            static_cast<std::int64_t>(layer.mask),
            static_cast<std::int64_t>(layer.assignment),
            static_cast<std::int64_t>(layer.keep),
            static_cast<std::int64_t>(layer.scale.bits),
            moves.row_multiple(),
            moves.batch(),
            moves.queries(),
            moves.keys(),
            0,
            0,
            0};
}

}  // namespace ulysses::inline ULYSSES_ABI
