#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/plan/blocks.hpp>
#include <ulysses/plan/hash.hpp>
#include <ulysses/plan/line.hpp>
#include <ulysses/plan/sequence.hpp>
#include <ulysses/plan/share.hpp>

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
///
/// With a cache the key region is the cache's: `key_capacity` is its capacity, the first row of a head
/// and sample is that of key 0, and what moves are the keys of the step's tokens, to behind those
/// that are there. Such a plan is for a forward pass; it lists no returns.
namespace ulysses::inline ULYSSES_ABI {

class plan {
   public:
    /// Makes this the plan of `rank` in a group of `ranks`; allocates only when it outgrows the
    /// largest so far. `cache_capacity`: of the cache that the step's keys go to and that has room for
    /// them; 0: none, or, when the step has a past, one that they fill. *Throws* `invalid_sequence`
    /// when `step` names another number of ranks. *Complexity*: O(P (items + runs) + own blocks).
    void rebuild(shape const& layer, sequence const& step, int ranks, int rank,
                 std::int64_t row_multiple, std::int64_t cache_capacity = 0,
                 where at = where::here()) {
        if (step.ranks() != ranks)
            raise(errc::invalid_sequence, at, "plan", "the sequence must name the group's ranks",
                  "sequence of ", step.ranks(), " ranks, group of ", ranks);
        if (row_multiple < 1)
            raise(errc::unsupported, at, "plan",
                  "an attention functor's row_multiple is at least 1", row_multiple);
        if (step.batch() >= token_limit ||
            layer.heads * step.batch() >=
                (std::int64_t{1} << 62) / std::max(step.queries().total(), step.visible_keys()))
            raise(errc::invalid_sequence, at, "plan", "a layer must stay below 2^62 rows", "heads ",
                  layer.heads, ", batch ", step.batch(), ", queries ", step.queries().total(),
                  ", keys ", step.visible_keys());
        layer_ = layer;
        ranks_ = ranks;
        rank_ = rank;
        row_multiple_ = row_multiple;
        batch_ = step.batch();
        queries_ = step.queries().total();
        keys_ = step.visible_keys();
        step_keys_ = step.keys().total();
        caching_ = cache_capacity > 0 || step.packed().has_past();
        own_queries_ = step.queries().count(rank);
        own_keys_ = step.keys().count(rank);
        holds_all_in_order_ = in_order(step.queries()) && in_order(step.keys());
        word_hash hash(step.hash());
        for (auto const word : terms()) hash.add(word);
        hash.add(cache_capacity);
        hash_ = hash.value();
        auto const rule = step.visible(layer);
        samples_.assign(rule.samples.begin(), rule.samples.end());
        documents_.assign(rule.documents.begin(), rule.documents.end());
        rule_ = line::rule_of(layer, queries_, keys_);
        deal(line(layer, rule, batch_, ranks, row_multiple,
                  rule.uniform() ? row_weights(rule) : row_weights(rule, document_weights_)),
             cache_capacity > 0 ? cache_capacity : keys_);
        list_blocks(step);
        list_sums(step);
        count_rows();
    }

    shape const& layer() const { return layer_; }
    int ranks() const { return ranks_; }
    int rank() const { return rank_; }
    std::int64_t batch() const { return batch_; }
    std::int64_t queries() const { return queries_; }
    std::int64_t keys() const { return keys_; }
    /// Keys of all ranks' tokens: `keys()` without what is in a cache.
    std::int64_t step_keys() const { return step_keys_; }
    /// True when the step's keys go to a cache.
    bool caching() const { return caching_; }
    /// Local tokens of this rank.
    std::int64_t own_queries() const { return own_queries_; }
    std::int64_t own_keys() const { return own_keys_; }
    /// True when this rank's local tokens are the whole sequence in global order.
    bool holds_all_in_order() const { return holds_all_in_order_; }
    std::int64_t row_multiple() const { return row_multiple_; }
    /// Which keys each query row sees; points into this plan.
    visibility visible() const {
        auto rule = rule_;
        rule.samples = samples_;
        rule.documents = documents_;
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
        set(term::assignment, layer_.assignment);
        set(term::keep, layer_.keep);
        set(term::scale, layer_.scale.bits);
        set(term::row_multiple, row_multiple_);
        set(term::batch, batch_);
        set(term::queries, queries_);
        set(term::keys, keys_);
        return all;
    }
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

    /// Calls `use(sample, samples, key, tokens)` for neighbouring samples whose keys go to one place in
    /// a cache: the first `tokens` of the step's, to rows `key` and on.
    template <class Use>
    void for_each_append(Use const& use) const {
        auto const rule = visible();
        for (std::int64_t b = 0; b < batch_;) {
            auto const own = rule.sample(b);
            auto next = b + 1;
            for (; next < batch_; ++next)
                if (auto const other = rule.sample(next);
                    other.position != own.position || other.end != own.end)
                    break;
            if (own.position < own.end) use(b, next - b, own.position, own.end - own.position);
            b = next;
        }
    }

    /// Moves of q, o, dO, dq; moves of k and v; returns of dk and dv.
    plan_moves query_moves() const { return {query_blocks_, query_arrivals_}; }
    plan_moves key_moves() const { return {key_blocks_, key_arrivals_}; }
    plan_returns key_returns() const { return {key_moves(), key_returns_, key_sums_, sources_}; }

    /// Rows exchanged with a peer, the rank's own share included as peer `rank()`.
    plan_rows const& rows(int peer) const { return rows_[static_cast<std::size_t>(peer)]; }

   private:
    bool in_order(token_orders const& orders) const {
        auto const runs = orders.runs(rank_);
        return runs.size() == 1 && runs[0].count == orders.total() &&
               (runs[0].stride == 1 || runs[0].count == 1);
    }

    void deal(line const& cuts, std::int64_t cache_capacity) {
        shares_.resize(static_cast<std::size_t>(ranks_));
        query_region_rows_ = key_capacity_ = 0;
        std::int64_t most_kv_heads = 0;
        for (int r = 0; r < ranks_; ++r) {
            auto& share = shares_[static_cast<std::size_t>(r)];
            share = rank_share(cuts.items(r), batch_);
            if (caching_) share.key_begin = 0, share.key_end = cache_capacity;
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
        query_arrivals_.clear();
        key_arrivals_.clear();
        first_key_block_.clear();
        for (int peer = 0; peer < ranks_; ++peer) {
            first_key_block_.push_back(key_blocks_.size());
            list_queries(query_blocks_, step.queries().runs(rank_), peer, peer);
            list_keys(key_blocks_, step.keys().runs(rank_), peer, peer);
            list_queries(query_arrivals_, step.queries().runs(peer), rank_, peer);
            list_keys(key_arrivals_, step.keys().runs(peer), rank_, peer);
        }
        first_key_block_.push_back(key_blocks_.size());
    }

    using token_runs = std::span<token_run const>;

    /// The rows of one rank's tokens that the items of `computing` cover.
    void list_queries(std::vector<plan_block>& list, token_runs runs, int computing, int peer) {
        auto const& share = shares_[static_cast<std::size_t>(computing)];
        std::int64_t first = 0;
        for (std::size_t i = 0; i < share.items.size(); ++i) {
            auto const& item = share.items[i];
            std::array const strides{item.rows(), std::int64_t{1}, batch_ * item.rows()};
            first += list_span(list, runs, {item.row_begin, item.row_end},
                               {peer, item.head_begin, item.heads(), share.query_row[i], strides},
                               first);
        }
    }

    /// The rows of one rank's tokens that the items of `computing` see, each once; all that go to its
    /// cache.
    void list_keys(std::vector<plan_block>& list, token_runs runs, int computing, int peer) {
        auto const& share = shares_[static_cast<std::size_t>(computing)];
        std::array const strides{key_capacity_, std::int64_t{1}, batch_ * key_capacity_};
        std::int64_t first = 0;
        if (caching_ && share.kv_begin < share.kv_end)
            for_each_append([&](std::int64_t sample, std::int64_t samples, std::int64_t key,
                                std::int64_t tokens) {
                first += list_span(list, runs, {0, tokens},
                                   {peer, share.kv_begin, share.kv_end - share.kv_begin,
                                    sample * key_capacity_ + key, strides, sample, samples},
                                   first);
            });
        if (caching_) return;
        for (auto head = share.kv_begin; head < share.kv_end;) {
            auto const end = share.same_keys_end(head);
            auto const group = static_cast<std::ptrdiff_t>(list.size());
            for (auto const span : share.keys_of(head))
                first += list_span(
                    list, runs, span,
                    {peer, head, end - head, key_row(share, head, span.begin), strides}, first);
            std::sort(list.begin() + group, list.end(),
                      [](auto const& a, auto const& b) { return a.token < b.token; });
            head = end;
        }
    }

    /// Heads of a region that share the rows of `index_range`.
    struct region_heads {
        int peer;
        std::int64_t head, heads;
        std::int64_t row;  ///< of the first head and sample and the span's first token
        std::array<std::int64_t, 3> strides;
        std::int64_t sample = 0, samples = -1;  ///< as in plan_block
    };

    /// Lists the tokens of `runs` that lie in `rows`; returns how many message rows they take from
    /// `first_message_row` on.
    std::int64_t list_span(std::vector<plan_block>& list, token_runs runs, index_range rows,
                           region_heads const& place, std::int64_t first_message_row) {
        std::int64_t count = 0;
        for (auto const& run : runs) {
            auto const part = run.within(rows.begin, rows.end);
            count += part.end - part.begin;
        }
        auto const samples = place.samples < 0 ? batch_ : place.samples;
        std::array const message_strides{count, std::int64_t{1}, samples * count};
        std::int64_t listed = 0;
        for_tokens(
            runs, rows,
            [&](std::int64_t token, std::int64_t tokens, std::int64_t global, std::int64_t stride) {
                plan_block block{place.peer,      token,
                                 tokens,          place.head,
                                 place.heads,     place.row + global - rows.begin,
                                 place.strides,   first_message_row + listed,
                                 message_strides, place.sample,
                                 place.samples};
                block.row_strides[1] = stride;
                list.push_back(block);
                listed += tokens;
            });
        return place.heads * samples * count;
    }

    /// Calls `use(local token, count, global index, stride)` for the tokens of `runs` in `rows`.
    template <class Use>
    static void for_tokens(token_runs runs, index_range rows, Use const& use) {
        std::int64_t token = 0;
        for (auto const& run : runs) {
            auto const part = run.within(rows.begin, rows.end);
            if (part.begin < part.end)
                use(token + part.begin, part.end - part.begin, run.at(part.begin), run.stride);
            token += run.count;
        }
    }

    /// Where the rows of a key-value head and one of this rank's tokens lie with a peer that sees
    /// them, its message included.
    plan_source source_of(int peer, std::int64_t head, std::int64_t token,
                          std::int64_t global) const {
        auto const& share = shares_[static_cast<std::size_t>(peer)];
        auto const at = static_cast<std::size_t>(peer);
        auto const blocks =
            std::span(key_blocks_)
                .subspan(first_key_block_[at], first_key_block_[at + 1] - first_key_block_[at]);
        // In order of head, then of token: the last that begins no later than these.
        auto const heads = std::prev(std::upper_bound(
            blocks.begin(), blocks.end(), head,
            [](std::int64_t wanted, plan_block const& block) { return wanted < block.head; }));
        auto const& block =
            *std::prev(std::upper_bound(blocks.begin(), blocks.end(), std::pair{heads->head, token},
                                        [](auto const& wanted, plan_block const& each) {
                                            return wanted < std::pair{each.head, each.token};
                                        }));
        return {peer, key_row(share, head, global),
                block.message_row + (head - block.head) * block.message_strides[2] + token -
                    block.token,
                block.message_strides};
    }

    /// Who computed with a key-value head: the gradient of its keys returns from all of them.
    void list_sums(sequence const& step) {
        key_returns_.clear();
        key_sums_.clear();
        sources_.clear();
        if (caching_) return;
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
        for (auto const user : users_)
            for (auto const span : shares_[static_cast<std::size_t>(user)].keys_of(head)) {
                edges_.push_back(span.begin);
                edges_.push_back(span.end);
            }
        std::sort(edges_.begin(), edges_.end());
        for (std::size_t e = 0; e + 1 < edges_.size(); ++e) {
            index_range const rows{edges_[e], edges_[e + 1]};
            if (rows.begin == rows.end) continue;
            for_tokens(
                step.keys().runs(rank_), rows,
                [&](std::int64_t token, std::int64_t tokens, std::int64_t global,
                    std::int64_t stride) {
                    auto const first = sources_.size();
                    for (auto const user : users_) {
                        if (shares_[static_cast<std::size_t>(user)].keys_of(head).covers(rows))
                            sources_.push_back(source_of(user, head, token, global));
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
            auto const& from = sources_[first];
            key_returns_.push_back({from.peer, token, tokens, head, heads, from.row, strides,
                                    from.message_row, from.message_strides});
            sources_.pop_back();
        } else {
            key_sums_.push_back({token, tokens, head, heads, first, count, strides});
        }
    }

    void count_rows() {
        rows_.assign(static_cast<std::size_t>(ranks_), {});
        auto const count = [&](std::vector<plan_block> const& list, std::int64_t plan_rows::*to) {
            for (auto const& block : list)
                rows_[static_cast<std::size_t>(block.peer)].*to +=
                    block.samples_of(batch_) * block.tokens * block.heads;
        };
        count(query_blocks_, &plan_rows::queries_to);
        count(query_arrivals_, &plan_rows::queries_from);
        count(key_blocks_, &plan_rows::keys_to);
        count(key_arrivals_, &plan_rows::keys_from);
    }

    shape layer_;
    int ranks_ = 0, rank_ = 0;
    std::int64_t row_multiple_ = 1;
    std::int64_t batch_ = 0, queries_ = 0, keys_ = 0, own_queries_ = 0, own_keys_ = 0;
    std::int64_t step_keys_ = 0;
    bool caching_ = false;
    bool holds_all_in_order_ = false;
    std::uint64_t hash_ = 0;
    visibility rule_;  ///< without the lists that follow
    std::vector<sample_keys> samples_;
    std::vector<std::int64_t> documents_, document_weights_;
    std::vector<rank_share> shares_;
    std::vector<planned_item> items_;
    std::int64_t query_region_rows_ = 0, key_region_rows_ = 0, key_capacity_ = 0;
    std::vector<plan_block> query_blocks_, key_blocks_, query_arrivals_, key_arrivals_;
    std::vector<std::size_t> first_key_block_;  ///< in key_blocks_, by peer
    std::vector<plan_block> key_returns_;
    std::vector<plan_sum> key_sums_;
    std::vector<plan_source> sources_;
    std::vector<plan_rows> rows_;
    std::vector<int> users_;
    std::vector<std::int64_t> edges_;
};

}  // namespace ulysses::inline ULYSSES_ABI
