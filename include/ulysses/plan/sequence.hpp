#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/core/visibility.hpp>
#include <ulysses/plan/agreement.hpp>
#include <ulysses/plan/hash.hpp>
#include <ulysses/plan/packing.hpp>
#include <ulysses/plan/step_record.hpp>
#include <ulysses/plan/token_order.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// The per-step value that every layer's call takes: batch and token orders of all ranks. Built
/// once a step by one small collective, or purely from known shares. Layers gather nothing.
///
/// *Thread safety*: immutable while in use; one per rank.
class sequence {
   public:
    sequence() = default;

    /// Agrees on a step over the group. *Blocking*: one collective of a fixed record; a second one
    /// only when some rank's order has more than four runs, a fence only when one has a stride, one
    /// more each where ranks bring `positions` and `present`.
    /// *Throws* the same error on every rank: `disagreement` when batches or packings differ,
    /// `invalid_sequence` when the orders do not cover the sequence exactly once, `out_of_memory`
    /// when a rank has no room for them.
    template <class Comm>
    static sequence agree(Comm const& ranks, sequence_options const& mine,
                          where at = where::here()) {
        static_assert(gathers<Comm> || explain_gathers<Comm>());
        sequence step;
        step.renew(ranks, mine, at);
        return step;
    }

    /// As `agree`, into this value; allocates only when it outgrows the largest step seen. When it
    /// throws, this value is left empty.
    template <class Comm>
    void renew(Comm const& ranks, sequence_options const& mine, where at = where::here()) {
        static_assert(gathers<Comm> || explain_gathers<Comm>());
        // Orders that were not checked must not reach a plan.
        struct emptied_unless_finished {
            sequence& step;
            bool finished = false;
            ~emptied_unless_finished() {
                if (!finished) step.clear();
            }
        } guard{*this};
        hash_ = 0;
        agreement_.gather_orders(ranks, mine, queries_, keys_, packing_, at);
        batch_ = agreement_.batch();
        cross_ = agreement_.cross();
        finish(at);
        auto const packed = agreement_.gather_packing(ranks, mine, queries_, keys(), packing_, at);
        if (!packed.empty()) pack(packed, at);
        guard.finished = true;
    }

    /// Contiguous shares of `tokens` over `ranks`: rank r holds floor(S/P) + (r < S mod P) tokens.
    static sequence split(int ranks, std::int64_t batch, std::int64_t tokens,
                          where at = where::here()) {
        sequence step;
        step.batch_ = batch;
        if (ranks < 1 || tokens < 0)
            raise(errc::invalid_sequence, at, "sequence", "a split has ranks and tokens", ranks,
                  " ranks, ", tokens, " tokens");
        std::int64_t begin = 0;
        for (int r = 0; r < ranks; ++r) {
            token_run const run{begin, tokens / ranks + (r < tokens % ranks ? 1 : 0)};
            step.queries_.add_rank({&run, 1}, at);
            begin += run.count;
        }
        step.finish(at);
        return step;
    }

    /// From the orders of all ranks, known without a collective; `keys` empty: the same as the
    /// queries.
    static sequence of(std::int64_t batch, std::span<std::vector<token_run> const> queries,
                       std::span<std::vector<token_run> const> keys = {},
                       where at = where::here()) {
        sequence step;
        step.batch_ = batch;
        step.cross_ = !keys.empty();
        for (auto const& runs : queries) step.queries_.add_rank(runs, at);
        for (auto const& runs : keys) step.keys_.add_rank(runs, at);
        step.finish(at);
        return step;
    }

    /// Packs documents into the samples, shortens them, or places their queries. On a step that was
    /// built without a collective call: the same on every rank.
    sequence& pack(packing_options const& given, where at = where::here()) {
        if (cross_ && !given.past.empty())
            raise(errc::invalid_sequence, at, "sequence",
                  "keys behind those of a cache are the queries' own", "the step has ",
                  queries_.total(), " queries and ", keys_.total(), " keys of their own");
        packing_.set(given, batch_, queries_.total(), keys().total(), at);
        set_hash();
        return *this;
    }

    /// Which keys each query row of a layer sees in this step. *Thread safety*: points into this.
    visibility visible(shape const& layer) const {
        return {layer.mask,         layer.window,         queries_.total(),  visible_keys(),
                packing_.samples(), packing_.documents(), packing_.present()};
    }
    /// Keys of a sample that rows may see: those of a cache, of the sample with most, and the
    /// step's.
    std::int64_t visible_keys() const { return packing_.largest_past() + keys().total(); }
    packing const& packed() const { return packing_; }

    int ranks() const { return queries_.ranks(); }
    std::int64_t batch() const { return batch_; }
    token_orders const& queries() const { return queries_; }
    token_orders const& keys() const { return cross_ ? keys_ : queries_; }
    bool cross() const { return cross_; }

    /// Changes whenever anything above does; 0 of a sequence that nobody agreed on.
    std::uint64_t hash() const { return hash_; }

   private:
    void finish(where at) {
        if (batch_ < 1)
            raise(errc::invalid_sequence, at, "sequence", "batch must be at least 1", batch_);
        if (cross_ && keys_.ranks() != queries_.ranks())
            raise(errc::invalid_sequence, at, "sequence",
                  "queries and keys must name as many ranks", queries_.ranks(), " and ",
                  keys_.ranks());
        if (queries_.total() < 1 || keys().total() < 1 ||
            std::max(queries_.total(), keys().total()) >= token_limit)
            raise(errc::invalid_sequence, at, "sequence", "a sequence has 1 .. 2^31 - 1 tokens",
                  queries_.total(), " queries, ", keys().total(), " keys");
        queries_.check("sequence", at);
        if (cross_) keys_.check("sequence: keys", at);
        packing_.clear();
        set_hash();
    }

    void set_hash() {
        word_hash hash;
        hash.add(batch_);
        add_orders(hash, queries_);
        if (cross_) add_orders(hash, keys_);
        for (auto const& own : packing_.samples())
            for (auto const word : {own.begin, own.end, own.position, own.documents})
                hash.add(word);
        for (auto const first : packing_.documents()) hash.add(first);
        if (!packing_.present().empty()) hash.add(hash_of(packing_.present()));
        hash.add(packing_.has_past());
        hash_ = hash.value();
    }

    void clear() {
        batch_ = 0;
        cross_ = false;
        queries_.clear();
        keys_.clear();
        packing_.clear();
        hash_ = 0;
    }

    static void add_orders(word_hash& hash, token_orders const& orders) {
        hash.add(orders.ranks());
        for (int r = 0; r < orders.ranks(); ++r) {
            hash.add(orders.runs(r).size());
            for (auto const& run : orders.runs(r))
                for (auto const word :
                     {run.begin, run.count, run.stride, std::int64_t{run.replicated}})
                    hash.add(word);
        }
    }

    std::int64_t batch_ = 0;
    bool cross_ = false;
    token_orders queries_, keys_;
    std::uint64_t hash_ = 0;
    packing packing_;
    agreement agreement_;
};

}  // namespace ulysses::inline ULYSSES_ABI
