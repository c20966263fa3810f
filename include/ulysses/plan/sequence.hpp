#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/core/visibility.hpp>
#include <ulysses/plan/hash.hpp>
#include <ulysses/plan/packing.hpp>
#include <ulysses/plan/token_order.hpp>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// What one rank brings to `sequence::agree`.
struct sequence_options {
    std::int64_t batch = 1;   ///< samples, equal on every rank
    std::int64_t tokens = 0;  ///< tokens this rank holds of each sample; zero is allowed
    /// Which global tokens they are; empty: ranks hold contiguous shares in rank order.
    std::span<token_run const> order{};
    /// Without an order: how many tokens every rank holds. They are the first of the sequence and
    /// of each rank's `tokens`.
    std::int64_t replicated = 0;
    /// Keys this rank holds when they are another sequence than the queries (cross-attention), else
    /// -1.
    std::int64_t keys = -1;
    std::span<token_run const> key_order{};
    std::int64_t replicated_keys = 0;  ///< as `replicated`, of keys
    packing_options packing{};  ///< documents, lengths, positions and past, equal on every rank
    /// [B, s]: the position of each of this rank's tokens in its document, from which the documents
    /// are found: one begins wherever positions do not grow. Given by every rank that holds tokens.
    std::span<std::int64_t const> positions{};
    /// [B, s], or [B, keys]: whether each of this rank's keys is there; 0: padding. Given by every
    /// rank that holds keys.
    std::span<std::uint8_t const> present{};
};

/// The per-step value that every layer's call takes: batch and token orders of all ranks. Built
/// once a step by one small collective, or purely from known shares. Layers gather nothing.
///
/// *Thread safety*: immutable while in use; one per rank.
class sequence {
   public:
    sequence() = default;

    /// Agrees on a step over the group. *Blocking*: one collective of a fixed record; a second one
    /// only when some rank's order has more than four runs, and a fence only when one has a stride.
    /// *Throws* the same error on every rank: `disagreement` when batches differ,
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
        auto const size = static_cast<std::size_t>(ranks.size());
        // Room is made before a rendezvous that can tell the others that there is none.
        fence_status status;
        guarded(status, [&] {
            shares_.resize(size);
            reserve_orders(size, inline_runs);
            if (!mine.packing.empty() && mine.batch > 0)
                packing_.reserve(static_cast<std::size_t>(mine.batch),
                                 mine.packing.documents.size(), mine.packing.present.size());
        });
        auto const own = share_of(mine);
        gather(ranks, std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(shares_)),
               status);
        check_shares(at);
        std::size_t most_runs = 0;
        for (auto const& each : shares_)
            most_runs = std::max({most_runs, each.runs[0], each.runs[1]});
        if (most_runs > inline_runs) {
            guarded(status, [&] {
                gathered_.assign(size * 2 * most_runs, {});
                own_runs_.assign(2 * most_runs, {});
                std::copy(mine.order.begin(), mine.order.end(), own_runs_.begin());
                std::copy(mine.key_order.begin(), mine.key_order.end(),
                          own_runs_.begin() + static_cast<std::ptrdiff_t>(most_runs));
                reserve_orders(size, most_runs);
            });
            gather(ranks, std::as_bytes(std::span(own_runs_)),
                   std::as_writable_bytes(std::span(gathered_)), status);
        }
        batch_ = shares_[0].batch;
        cross_ = shares_[0].tokens[1] >= 0;
        set_orders(queries_, 0, most_runs, at);
        if (cross_) set_orders(keys_, 1, most_runs, at);
        if (!queries_.contiguous() || !keys().contiguous()) {
            guarded(status, [&] {
                queries_.reserve_tokens();
                keys_.reserve_tokens();
            });
            leaving_on_failure(ranks, [&] { ranks.fence(status); });
        }
        finish(at);
        auto packed = mine.packing;
        if (gives(&share::positions)) packed.documents = gather_documents(ranks, mine, at);
        if (gives(&share::present)) packed.present = gather_present(ranks, mine, at);
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
    static constexpr std::size_t inline_runs = 4;

    struct share {
        std::int64_t batch = 0;
        std::array<std::int64_t, 2> tokens{};  // of queries and of keys
        std::array<std::int64_t, 2> replicated{};
        std::array<std::size_t, 2> runs{};
        std::array<std::array<token_run, inline_runs>, 2> order{};
        std::array<std::size_t, 5>
            lists{};  // entries of documents, lengths, positions, past, present
        std::array<std::uint64_t, 5> contents{};  // their hashes
        std::int64_t positions = 0, present = 0;  // how many it brings of its own tokens
    };

    /// A number for each sample and token, from the ranks that hold them.
    template <class Value>
    struct token_values {
        std::vector<Value> own, gathered, whole;
    };

    void reserve_orders(std::size_t ranks, std::size_t runs) {
        queries_.reserve(ranks, ranks * runs);
        keys_.reserve(ranks, ranks * runs);
    }

    /// `all_gather`, or the error that a rank brings instead. Where the communicator's own cannot
    /// carry one, that rank leaves the group, if it can.
    template <class Comm>
    static void gather(Comm const& ranks, std::span<std::byte const> part, std::span<std::byte> all,
                       fence_status const& status) {
        if constexpr (requires { ranks.all_gather(part, all, status); }) {
            leaving_on_failure(ranks, [&] { ranks.all_gather(part, all, status); });
        } else {
            if (status.code != errc::none) {
                if constexpr (can_leave<Comm>) ranks.leave(status.text);
                throw_error(status.code, status.text, ranks.rank());
            }
            leaving_on_failure(ranks, [&] { ranks.all_gather(part, all); });
        }
    }

    static share share_of(sequence_options const& mine) {
        share own;
        own.batch = mine.batch;
        own.tokens = {mine.tokens, mine.keys};
        own.replicated = {mine.replicated, mine.replicated_keys};
        own.runs = {mine.order.size(), mine.key_order.size()};
        std::copy_n(mine.order.begin(), std::min(inline_runs, mine.order.size()),
                    own.order[0].begin());
        std::copy_n(mine.key_order.begin(), std::min(inline_runs, mine.key_order.size()),
                    own.order[1].begin());
        std::array const lists{mine.packing.documents, mine.packing.lengths,
                               mine.packing.query_positions, mine.packing.past};
        for (std::size_t i = 0; i < lists.size(); ++i) {
            own.lists[i] = lists[i].size();
            word_hash hash;
            for (auto const value : lists[i]) hash.add(value);
            own.contents[i] = hash.value();
        }
        own.lists[4] = mine.packing.present.size();
        own.contents[4] = hash_of(mine.packing.present);
        own.positions = static_cast<std::int64_t>(mine.positions.size());
        own.present = static_cast<std::int64_t>(mine.present.size());
        return own;
    }

    void check_shares(where at) const {
        // The field is put together only when it differs: a step that is renewed allocates nothing.
        auto const differs = [&](std::size_t rank, std::string_view what, std::string_view field,
                                 auto first, auto other) {
            if (first != other)
                raise(errc::disagreement, at, "sequence",
                      concat(what, field, " must be equal on every rank"), "rank 0 has ", first,
                      ", rank ", rank, " has ", other);
        };
        for (std::size_t r = 0; r < shares_.size(); ++r) {
            auto const& theirs = shares_[r];
            differs(r, "", "batch", shares_[0].batch, theirs.batch);
            differs(r, "", "whether keys are given", shares_[0].tokens[1] >= 0,
                    theirs.tokens[1] >= 0);
            constexpr std::string_view lists[] = {"documents", "lengths", "query_positions", "past",
                                                  "present"};
            for (std::size_t i = 0; i < std::size(lists); ++i) {
                differs(r, "the number of ", lists[i], shares_[0].lists[i], theirs.lists[i]);
                differs(r, "the hash of ", lists[i], shares_[0].contents[i], theirs.contents[i]);
            }
            if (theirs.tokens[0] < 0 || std::max(theirs.tokens[0], theirs.tokens[1]) >= token_limit)
                raise(errc::invalid_sequence, at, "sequence", "a rank holds 0 .. 2^31 - 1 tokens",
                      "rank ", r, " has ", theirs.tokens[0], ", keys ", theirs.tokens[1]);
            for (std::size_t side = 0; side < 2; ++side) {
                auto const tokens = std::max<std::int64_t>(theirs.tokens[side], 0);
                auto const* const what = side == 0 ? "tokens" : "keys";
                differs(r, "the number of replicated ", what, shares_[0].replicated[side],
                        theirs.replicated[side]);
                if (theirs.replicated[side] < 0 || theirs.replicated[side] > tokens)
                    raise(errc::invalid_sequence, at, "sequence",
                          "replicated tokens are among those of each rank", "rank ", r, " has ",
                          tokens, " ", what, ", ", theirs.replicated[side], " of them replicated");
                if (shares_[0].replicated[side] > 0 && theirs.runs[side] > 0)
                    raise(errc::invalid_sequence, at, "sequence",
                          "replicated tokens come from a number or from an order, not from both",
                          theirs.replicated[side], " replicated ", what, ", rank ", r,
                          " has an order of ", theirs.runs[side], " runs");
            }
            if (theirs.tokens[1] < 0 && theirs.runs[1] > 0)
                raise(errc::invalid_sequence, at, "sequence", "an order of keys needs their count",
                      "rank ", r, " has key_order of ", theirs.runs[1], " runs, keys ",
                      theirs.tokens[1]);
        }
    }

    bool gives(std::int64_t share::*values) const {
        return std::any_of(shares_.begin(), shares_.end(),
                           [&](share const& each) { return each.*values > 0; });
    }

    /// The documents that the positions of all ranks' tokens mean.
    template <class Comm>
    std::span<std::int64_t const> gather_documents(Comm const& ranks, sequence_options const& mine,
                                                   where at) {
        for (std::size_t r = 0; r < shares_.size(); ++r)
            if (auto const expected = batch_ * shares_[r].tokens[0];
                shares_[r].positions != expected)
                raise(errc::invalid_sequence, at, "sequence",
                      "positions must name one for each sample and token of the rank", "rank ", r,
                      " has ", shares_[r].positions, ", expected ", expected);
        if (!mine.packing.documents.empty())
            raise(errc::invalid_sequence, at, "sequence",
                  "documents come from positions or from offsets, not from both",
                  mine.packing.documents.size(), " offsets");
        auto const total = static_cast<std::size_t>(batch_ * queries_.total());
        fence_status status;
        guarded(status, [&] {
            starts_.clear();
            starts_.reserve(total);
            packing_.reserve(static_cast<std::size_t>(batch_), total);
        });
        auto const positions =
            gather_values(ranks, mine.positions, queries_, positions_, status, "positions", at);
        for (std::size_t i = 0; i < total; ++i)
            if (i == 0 || positions[i] <= positions[i - 1])
                starts_.push_back(static_cast<std::int64_t>(i));
        return starts_;
    }

    /// Which keys of all ranks are there.
    template <class Comm>
    std::span<std::uint8_t const> gather_present(Comm const& ranks, sequence_options const& mine,
                                                 where at) {
        for (std::size_t r = 0; r < shares_.size(); ++r)
            if (auto const expected = batch_ * shares_[r].tokens[cross_ ? 1 : 0];
                shares_[r].present != expected)
                raise(errc::invalid_sequence, at, "sequence",
                      "present must name one for each sample and key of the rank", "rank ", r,
                      " has ", shares_[r].present, ", expected ", expected);
        if (!mine.packing.present.empty())
            raise(errc::invalid_sequence, at, "sequence",
                  "present comes from the ranks' keys or from the packing, not from both",
                  mine.packing.present.size(), " in the packing");
        fence_status status;
        guarded(status, [&] {
            packing_.reserve(static_cast<std::size_t>(batch_), 0,
                             static_cast<std::size_t>(batch_ * keys().total()));
        });
        return gather_values(ranks, mine.present, keys(), present_, status, "present", at);
    }

    /// [B, s] of each rank -> [B, S], in the order of the sequence.
    template <class Comm, class Value>
    std::span<Value const> gather_values(Comm const& ranks, std::span<Value const> mine,
                                         token_orders const& orders, token_values<Value>& values,
                                         fence_status& status, std::string_view what, where at) {
        std::int64_t most = 0;
        for (int r = 0; r < orders.ranks(); ++r) most = std::max(most, batch_ * orders.count(r));
        auto const size = static_cast<std::size_t>(most);
        guarded(status, [&] {
            values.own.assign(size, 0);
            std::copy(mine.begin(), mine.end(), values.own.begin());
            values.gathered.resize(size * shares_.size());
            values.whole.resize(static_cast<std::size_t>(batch_ * orders.total()));
        });
        gather(ranks, std::as_bytes(std::span(values.own)),
               std::as_writable_bytes(std::span(values.gathered)), status);
        for (int r = 0; r < orders.ranks(); ++r) {
            auto const* next = values.gathered.data() + static_cast<std::size_t>(r) * size;
            for (std::int64_t b = 0; b < batch_; ++b)
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

    void set_orders(token_orders& orders, std::size_t side, std::size_t most_runs, where at) {
        orders.clear();
        // Once one rank gives an order, every rank that holds tokens must.
        bool given = false;
        for (auto const& each : shares_) given = given || each.runs[side] > 0;
        auto begin = shares_[0].replicated[side];
        for (std::size_t r = 0; r < shares_.size(); ++r) {
            auto const& theirs = shares_[r];
            if (!given) {
                std::array const own{
                    token_run{.count = theirs.replicated[side], .replicated = true},
                    token_run{.begin = begin,
                              .count = theirs.tokens[side] - theirs.replicated[side]}};
                orders.add_rank(own, at);
                begin += own[1].count;
                continue;
            }
            auto const* runs = most_runs > inline_runs
                                   ? gathered_.data() + (2 * r + side) * most_runs
                                   : theirs.order[side].data();
            orders.add_rank({runs, theirs.runs[side]}, at);
            if (orders.count(static_cast<int>(r)) != theirs.tokens[side])
                raise(errc::invalid_sequence, at, "sequence",
                      "an order must list the rank's tokens", "rank ", r, " has ",
                      theirs.tokens[side], " tokens, its order lists ",
                      orders.count(static_cast<int>(r)));
        }
    }

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

    /// Of bytes as true and false, 64 in a word.
    static std::uint64_t hash_of(std::span<std::uint8_t const> bytes) {
        word_hash hash;
        for (std::size_t i = 0; i < bytes.size(); i += 64) {
            std::uint64_t word = 0;
            for (std::size_t j = i; j < std::min(i + 64, bytes.size()); ++j)
                word = word << 1 | (bytes[j] != 0 ? 1u : 0u);
            hash.add(word);
        }
        return hash.value();
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
    std::vector<share> shares_;
    std::vector<token_run> gathered_, own_runs_;
    packing packing_;
    token_values<std::int64_t> positions_;
    token_values<std::uint8_t> present_;
    std::vector<std::int64_t> starts_;
};

}  // namespace ulysses::inline ULYSSES_ABI
