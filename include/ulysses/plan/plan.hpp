#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/plan/blocks.hpp>
#include <ulysses/plan/hash.hpp>
#include <ulysses/plan/head_chunk.hpp>
#include <ulysses/plan/line.hpp>
#include <ulysses/plan/placed_runs.hpp>
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
    /// largest so far. *Throws* `invalid_sequence` when `step` names another number of ranks.
    /// *Complexity*: O(P (items + runs) + own blocks).
    void rebuild(shape const& layer, sequence const& step, int ranks, int rank,
                 std::int64_t row_multiple, where at = where::here()) {
        rebuild(layer, step, ranks, rank, row_multiple, {{0, layer.kv_heads}}, 0, at);
    }

    /// The plan of one chunk of the layer's heads, dealt to the ranks as a layer of so many heads would
    /// be. Heads are counted over the whole layer in all that it lists. `cache_capacity`: of the cache
    /// that the step's keys go to and that has room for them; 0: none, or, when the step has a past, one
    /// that they fill.
    void rebuild(shape const& layer, sequence const& step, int ranks, int rank,
                 std::int64_t row_multiple, head_chunk const& chunk,
                 std::int64_t cache_capacity = 0, where at = where::here()) {
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
        layer_ = layer;
        chunk_ = chunk;
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
        replicated_queries_ = step.queries().replicated();
        replicated_keys_ = step.keys().replicated();
        holds_all_in_order_ = holds_all_in_order(step, rank);
        word_hash hash(step.hash());
        for (auto const word : terms()) hash.add(word);
        hash.add(cache_capacity);
        hash_ = hash.value();
        auto const rule = step.visible(layer);
        samples_.assign(rule.samples.begin(), rule.samples.end());
        documents_.assign(rule.documents.begin(), rule.documents.end());
        present_.assign(rule.present.begin(), rule.present.end());
        rule_ = line::rule_of(layer, queries_, keys_);
        auto const part = chunk.alone(layer_);
        head_runs_.assign(part, rule);
        deal(line(part, rule, batch_, ranks, row_multiple,
                  rule.uniform() ? row_weights(rule) : row_weights(rule, document_weights_),
                  head_runs_),
             cache_capacity > 0 ? cache_capacity : keys_);
        list_blocks(step);
        list_replicated(step.queries());
        list_sums(step);
    }

    /// The whole layer.
    shape const& layer() const { return layer_; }
    head_chunk const& chunk() const { return chunk_; }
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
        auto rule = rule_;
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

    /// Rows of the slots, all ranks' together, where the gradients of replicated outputs are summed.
    std::int64_t slot_rows() const { return ranks_ * slot_rows_; }

    /// Moves of q and dq, in which this rank's replicated tokens only meet its own region, and the
    /// rows of dq that it leaves zero: of replicated tokens, what other ranks compute.
    plan_moves query_moves() const { return moves_before(own_); }
    std::span<plan_sum const> query_zeros() const { return query_zeros_; }
    /// Moves of o; of dO. Without replicated tokens they are those of q.
    plan_moves output_moves() const { return {query_blocks_, query_arrivals_}; }
    plan_output_gradient output_gradient() const {
        return {moves_before(sharded_),
                {partial_blocks_, partial_arrivals_},
                std::span(query_arrivals_)
                    .subspan(sharded_.arrivals, own_.arrivals - sharded_.arrivals),
                slot_rows_};
    }
    /// Moves of k and v; returns of dk and dv.
    plan_moves key_moves() const { return {key_blocks_, key_arrivals_}; }
    plan_returns key_returns() const { return {key_moves(), key_returns_, key_sums_, sources_}; }

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

    /// Entries of the lists of query blocks and arrivals.
    struct list_sizes {
        std::size_t blocks = 0, arrivals = 0;
    };
    list_sizes listed_queries() const { return {query_blocks_.size(), query_arrivals_.size()}; }
    plan_moves moves_before(list_sizes const& end) const {
        return {std::span(query_blocks_).first(end.blocks),
                std::span(query_arrivals_).first(end.arrivals)};
    }

    /// The chunk's query heads.
    index_range chunk_heads() const {
        auto const group = layer_.heads / layer_.kv_heads;
        return {chunk_.kv_heads.begin * group, chunk_.kv_heads.end * group};
    }

    void deal(line const& cuts, std::int64_t cache_capacity) {
        shares_.resize(static_cast<std::size_t>(ranks_));
        query_region_rows_ = key_capacity_ = 0;
        std::int64_t most_kv_heads = 0;
        for (int r = 0; r < ranks_; ++r) {
            auto& share = shares_[static_cast<std::size_t>(r)];
            share.assign(cuts, r, batch_, chunk_heads().begin, chunk_.kv_heads.begin);
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
        rows_.assign(static_cast<std::size_t>(ranks_), {});
        for (int peer = 0; peer < ranks_; ++peer) {
            auto& rows = rows_[static_cast<std::size_t>(peer)];
            auto const keys = peer == rank_ ? held::all : held::sharded;
            first_key_block_.push_back(key_blocks_.size());
            rows.queries_to = list_queries(
                query_blocks_, runs_of_(step.queries(), rank_, held::sharded), peer, peer);
            rows.keys_to = list_keys(key_blocks_, runs_of_(step.keys(), rank_, keys), peer, peer);
            rows.queries_from = list_queries(
                query_arrivals_, runs_of_(step.queries(), peer, held::sharded), rank_, peer);
            rows.keys_from =
                list_keys(key_arrivals_, runs_of_(step.keys(), peer, keys), rank_, peer);
            rows.outputs_to = rows.queries_to;
            rows.outputs_from = rows.queries_from;
        }
        first_key_block_.push_back(key_blocks_.size());
        sharded_ = own_ = listed_queries();
    }

    /// Behind the blocks of sharded tokens those of replicated ones: of this rank with itself, then
    /// with its peers; and the slots of their gradients.
    void list_replicated(token_orders const& queries) {
        partial_blocks_.clear();
        partial_arrivals_.clear();
        query_zeros_.clear();
        slot_rows_ = 0;
        if (replicated_queries_ == 0) return;
        auto const runs = [&](int rank) { return runs_of_(queries, rank, held::replicated); };
        auto& own = rows_[static_cast<std::size_t>(rank_)];
        list_queries(query_blocks_, runs(rank_), rank_, rank_);
        own.queries_from += list_queries(query_arrivals_, runs(rank_), rank_, rank_);
        own.queries_to = own.outputs_to = own.outputs_from = own.queries_from;
        own_ = listed_queries();
        for (int peer = 0; peer < ranks_; ++peer) {
            slot_rows_ =
                std::max(slot_rows_, list_queries(partial_blocks_, runs(rank_), peer, peer));
            list_queries(partial_arrivals_, runs(peer), rank_, peer);
            if (peer == rank_) continue;
            auto& rows = rows_[static_cast<std::size_t>(peer)];
            rows.outputs_to = list_queries(query_blocks_, runs(rank_), peer, peer, rows.queries_to);
            rows.outputs_from =
                list_queries(query_arrivals_, runs(peer), rank_, peer, rows.queries_from);
        }
        // In a slot, rows lie as in the message.
        auto const place = [&](plan_block& block, int slot) {
            block.row = slot * slot_rows_ + block.message_row;
            block.row_strides = block.message_strides;
        };
        for (auto& block : partial_blocks_) place(block, rank_);
        for (auto& block : partial_arrivals_) place(block, block.peer);
        list_zeros(runs(rank_));
    }

    /// The rows of this rank's replicated tokens that it does not compute. Its items lie on the line
    /// one behind the other, so these are all before the first and all behind the last.
    void list_zeros(placed_runs runs) {
        auto const zeros = [&](std::int64_t head, std::int64_t head_end, index_range rows) {
            if (head == head_end) return;
            for_tokens(runs, rows,
                       [&](std::int64_t token, std::int64_t tokens, std::int64_t, std::int64_t) {
                           query_zeros_.push_back({token, tokens, head, head_end - head});
                       });
        };
        index_range const all{0, queries_};
        auto const heads = chunk_heads();
        if (items_.empty()) return zeros(heads.begin, heads.end, all);
        auto const &first = items_.front().work, &last = items_.back().work;
        zeros(heads.begin, first.head_begin, all);
        zeros(first.head_begin, first.head_begin + 1, {0, first.row_begin});
        zeros(last.head_end - 1, last.head_end, {last.row_end, queries_});
        zeros(last.head_end, heads.end, all);
    }

    /// The rows of one rank's tokens that the items of `computing` cover; returns the message row
    /// behind them.
    std::int64_t list_queries(std::vector<plan_block>& list, placed_runs runs, int computing,
                              int peer, std::int64_t first = 0) {
        auto const& share = shares_[static_cast<std::size_t>(computing)];
        for (std::size_t i = 0; i < share.items.size(); ++i) {
            auto const& item = share.items[i];
            std::array const strides{item.rows(), std::int64_t{1}, batch_ * item.rows()};
            first += list_span(list, runs, {item.row_begin, item.row_end},
                               {peer, item.head_begin, item.heads(), share.query_row[i], strides},
                               first);
        }
        return first;
    }

    /// The rows of one rank's tokens that the items of `computing` see, each once; all that go to its
    /// cache. Returns the message row behind them.
    std::int64_t list_keys(std::vector<plan_block>& list, placed_runs runs, int computing,
                           int peer) {
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
        if (caching_) return first;
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
        return first;
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
    std::int64_t list_span(std::vector<plan_block>& list, placed_runs runs, index_range rows,
                           region_heads const& place, std::int64_t first_message_row) {
        std::int64_t count = 0;
        for (auto const& each : runs) count += each.run.within(rows.begin, rows.end).size();
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

    /// Who computed with a key-value head: the gradient of its keys returns from all of them; of a
    /// replicated key to each of them its own part, to others zero.
    void list_sums(sequence const& step) {
        key_returns_.clear();
        key_sums_.clear();
        sources_.clear();
        if (caching_) return;
        for (auto head = chunk_.kv_heads.begin; head < chunk_.kv_heads.end;) {
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
            auto const list = [&](placed_runs runs, bool replicated) {
                for_tokens(runs, rows,
                           [&](std::int64_t token, std::int64_t tokens, std::int64_t global,
                               std::int64_t stride) {
                               auto const first = sources_.size();
                               for (auto const user : users_) {
                                   if (replicated && user != rank_) continue;
                                   auto const& share = shares_[static_cast<std::size_t>(user)];
                                   if (covers(share.keys_of(head), rows))
                                       sources_.push_back(source_of(user, head, token, global));
                               }
                               add_return(token, tokens, head, end - head, first, stride);
                           });
            };
            list(runs_of_(step.keys(), rank_, held::sharded), false);
            if (replicated_keys_ > 0) list(runs_of_(step.keys(), rank_, held::replicated), true);
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

    detail::kept_shape layer_;
    head_chunk chunk_;
    int ranks_ = 0, rank_ = 0;
    std::int64_t row_multiple_ = 1;
    std::int64_t batch_ = 0, queries_ = 0, keys_ = 0, own_queries_ = 0, own_keys_ = 0;
    std::int64_t replicated_queries_ = 0, replicated_keys_ = 0;
    std::int64_t step_keys_ = 0;
    bool caching_ = false;
    bool holds_all_in_order_ = false;
    std::uint64_t hash_ = 0;
    visibility rule_;  ///< without the lists that follow
    std::vector<sample_keys> samples_;
    std::vector<std::int64_t> documents_, document_weights_;
    std::vector<std::uint8_t> present_;
    head_runs head_runs_;
    std::vector<rank_share> shares_;
    std::vector<planned_item> items_;
    std::int64_t query_region_rows_ = 0, key_region_rows_ = 0, key_capacity_ = 0;
    std::vector<plan_block> query_blocks_, key_blocks_, query_arrivals_, key_arrivals_;
    list_sizes sharded_, own_;  ///< where the lists of queries go on with replicated tokens
    std::vector<plan_block> partial_blocks_, partial_arrivals_;
    std::vector<plan_sum> query_zeros_;
    std::int64_t slot_rows_ = 0;
    run_lister runs_of_;
    std::vector<std::size_t> first_key_block_;  ///< in key_blocks_, by peer
    std::vector<plan_block> key_returns_;
    std::vector<plan_sum> key_sums_;
    std::vector<plan_source> sources_;
    std::vector<plan_rows> rows_;
    std::vector<int> users_;
    std::vector<std::int64_t> edges_;
};

}  // namespace ulysses::inline ULYSSES_ABI
