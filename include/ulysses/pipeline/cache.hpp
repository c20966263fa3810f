#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/guarded.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/core/view_copy.hpp>
#include <ulysses/exchange/regions.hpp>
#include <ulysses/plan/line.hpp>
#include <ulysses/plan/plan.hpp>
#include <ulysses/plan/sequence.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// The heads of one rank, half-open: query heads, and the key-value heads that they read.
struct head_share {
    std::int64_t head_begin = 0, head_end = 0;
    std::int64_t kv_begin = 0, kv_end = 0;

    constexpr std::int64_t heads() const { return head_end - head_begin; }
    constexpr std::int64_t kv_heads() const { return kv_end - kv_begin; }
};

/// The keys and values that a layer has seen, for inference: on each rank all keys of the key-value
/// heads that its query heads read, [head, sample, key] as in a region, with room for `capacity`
/// keys a sample. Made by `pipeline::make_cache`, one a layer. A call with a step puts the step's
/// keys behind those that are there, from every rank straight to their place, and lets rows see
/// all:
///
///     auto cache = layer.make_cache<float>(batch, capacity);
///     step.renew(ranks, {.batch = batch, .tokens = own, .packing = {.past = cache.lengths()}});
///     layer.attend(step, cache, q, k, v, o);
///
/// A `head_local` pipeline on the same group and shape reads and extends the same cache, without an
/// exchange. Memory is a window of the group. Whatever changes a cache is done on every rank alike.
///
/// *Thread safety*: belongs to its rank's thread. Destroying it is not collective.
template <class Comm>
class kv_cache {
   public:
    using space_type = typename Comm::space_type;
    using window_type = typename Comm::window_type;

    kv_cache() = default;
    kv_cache(kv_cache&& other) noexcept { swap(other); }
    kv_cache& operator=(kv_cache&& other) noexcept {
        swap(other);
        return *this;
    }
    void swap(kv_cache& other) noexcept {
        std::swap(ranks_, other.ranks_);
        std::swap(layer_, other.layer_);
        std::swap(type_, other.type_);
        std::swap(share_, other.share_);
        std::swap(capacity_, other.capacity_);
        std::swap(places_, other.places_);
        std::swap(memory_, other.memory_);
        std::swap(number_, other.number_);
        std::swap(used_alone_, other.used_alone_);
        lengths_.swap(other.lengths_);
    }

    /// For each sample how many keys are there: the `past` of the next step.
    std::span<std::int64_t const> lengths() const { return lengths_; }
    std::int64_t batch() const { return static_cast<std::int64_t>(lengths_.size()); }
    /// Keys that a sample has room for.
    std::int64_t capacity() const { return capacity_; }
    /// The heads whose keys lie on this rank: those of a head_local pipeline's operands.
    head_share const& share() const { return share_; }
    /// Bytes this cache holds on this rank.
    std::size_t bytes() const { return places_.bytes; }

    /// Forgets a sample's keys from `length` on; 0 makes room for another. On every rank alike.
    /// *Throws* `invalid_call` when the sample is not there or not that long.
    void truncate(std::int64_t sample, std::int64_t length, where at = where::here()) {
        auto const held = sample < 0 || sample >= batch() ? -1 : lengths_[index(sample)];
        if (length < 0 || length > held)
            raise(errc::invalid_call, at, "kv_cache", "truncate shortens a sample of the cache",
                  "sample ", sample, " of ", batch(), " to ", length, " keys, it has ",
                  std::max<std::int64_t>(held, 0));
        if (length == held) return;
        lengths_[index(sample)] = length;
        used_alone_ = true;
    }

    // What follows is for the pipeline.

    /// Collective. *Throws* the same error on every rank.
    template <element T>
    static kv_cache make(Comm const& ranks, shape const& layer, std::int64_t batch,
                         std::int64_t capacity, where at) {
        kv_cache own;
        leaving_on_failure(ranks, [&] { own.allocate<T>(ranks, layer, batch, capacity, at); });
        return own;
    }

    /// *Throws* when a call with this step, layer and element type must not use the cache.
    void expect_fits(sequence const& step, shape const& layer, dtype type, Comm const& ranks,
                     where at) const {
        if (!ranks_)
            raise(errc::invalid_call, at, "kv_cache", "a cache must be made by make_cache",
                  "this one holds nothing");
        if constexpr (std::equality_comparable<Comm>)
            if (!(*ranks_ == ranks))
                raise(errc::invalid_call, at, "kv_cache",
                      "a cache belongs to the group it was made on", "rank ", ranks_->rank(),
                      " of ", ranks_->size(), " then, rank ", ranks.rank(), " of ", ranks.size(),
                      " of another group now");
        if (layer.heads != layer_.heads || layer.kv_heads != layer_.kv_heads ||
            layer.head_dim != layer_.head_dim || layer.value_dim != layer_.value_dim)
            raise(errc::invalid_call, at, "kv_cache",
                  "a cache takes a layer of the heads and dims it was made for", "made for ",
                  layer_.heads, " / ", layer_.kv_heads, " heads of ", layer_.head_dim, " and ",
                  layer_.value_dim, ", the layer has ", layer.heads, " / ", layer.kv_heads, " of ",
                  layer.head_dim, " and ", layer.value_dim);
        expect_whole_heads(layer, ranks.size(), at);
        if (type != type_)
            raise(errc::invalid_call, at, "kv_cache",
                  "a cache takes the element type it was made for", "made for ", name(type_),
                  ", the operands are ", name(type));
        expect_step(step, at);
    }

    /// True when a rank may have read or changed its part since the last fence: then a call needs
    /// one before it writes to the others'.
    bool used_alone() const { return used_alone_; }
    void settle() { used_alone_ = false; }

    /// Puts the step's keys and values that this rank holds itself, all tokens [B, S, g, D], into
    /// its own part.
    template <class T, class Layout>
    void append(typename space_type::queue queue, plan const& moves,
                tensor_view<T const, Layout> const& k, tensor_view<T const, Layout> const& v) {
        used_alone_ = true;
        if (k.heads() == 0) return;
        moves.for_each_append([&](std::int64_t sample, std::int64_t samples, std::int64_t key,
                                  std::int64_t tokens) {
            auto const copy = [&](region const& place, tensor_view<T const, Layout> const& from) {
                auto const pitch = place.pitch / static_cast<std::int64_t>(sizeof(T));
                auto* const rows = reinterpret_cast<T*>(own_part() + place.offset);
                tensor_view<T, Layout> const to(
                    rows + (sample * capacity_ + key) * pitch,
                    {samples, tokens, from.heads(), from.dim()},
                    {capacity_ * pitch, pitch, batch() * capacity_ * pitch, 1});
                copy_view<space_type>(queue, to,
                                      from.slice(0, sample, samples).slice_tokens(0, tokens));
            };
            copy(places_.k, k);
            copy(places_.v, v);
        });
    }

    /// The step's keys are there now.
    void extend(plan const& moves) {
        moves.for_each_append(
            [&](std::int64_t sample, std::int64_t samples, std::int64_t key, std::int64_t tokens) {
                std::fill_n(lengths_.begin() + sample, samples, key + tokens);
            });
    }

    window_type const& memory() const { return memory_; }
    cache_regions const& places() const { return places_; }
    std::byte* own_part() const { return ranks_->address(memory_, ranks_->rank()); }
    /// The call that made it: equal on all ranks when all use the same cache.
    std::int64_t number() const { return number_; }

   private:
    static std::size_t index(std::int64_t sample) { return static_cast<std::size_t>(sample); }

    template <element T>
    void allocate(Comm const& ranks, shape const& layer, std::int64_t batch, std::int64_t capacity,
                  where at) {
        fence_status status;
        status.call = ranks.begin_call();
        auto const set = [&](term which, auto value) {
            status.terms[static_cast<std::size_t>(which)] = static_cast<std::int64_t>(value);
        };
        set(term::call, pass_kind::make_cache);
        set(term::element_type, dtype_of<T>);
        set(term::heads, layer.heads);
        set(term::kv_heads, layer.kv_heads);
        set(term::head_dim, layer.head_dim);
        set(term::value_dim, layer.value_dim);
        set(term::batch, batch);
        set(term::capacity, capacity);
        set(term::fence, 1);
        guarded(status, name(pass_kind::make_cache), at, [&] {
            expect_whole_heads(layer, ranks.size(), at);
            places_ = cache_regions::of<T>(layer, rows_of(ranks, layer, batch, capacity, at));
            share_ = share_of(layer, ranks.size(), ranks.rank());
            lengths_.assign(index(batch), 0);
        });
        ranks.fence(status);
        ranks_ = ranks;
        layer_ = layer;
        layer_.head_windows = {};  // the caller's; whole heads do not depend on them
        type_ = dtype_of<T>;
        capacity_ = capacity;
        number_ = static_cast<std::int64_t>(status.call);
        memory_ = ranks.make_window(places_.bytes);
        // Rows that were never written may lie beside those that are read: a probability of 0 must
        // not meet a NaN there.
        auto const elements = static_cast<std::int64_t>(places_.bytes / sizeof(T));
        zero_view<space_type>(queue_of(ranks),
                              head_view<T>(reinterpret_cast<T*>(own_part()), {1, 1, 1, elements}));
        set(term::fence, 2);
        ranks.fence(status);
    }

    /// Whole heads are dealt alike whatever rows weigh.
    static head_share share_of(shape const& layer, int ranks, int rank) {
        line const cuts(layer, 1, 1, ranks, 1);
        auto const begin = cuts.cut(rank).head, end = cuts.cut(rank + 1).head;
        auto const group = layer.heads / layer.kv_heads;
        if (begin == end) return {};
        return {begin, end, begin / group, (end - 1) / group + 1};
    }

    /// Rows of k, and of v, on the rank with most key-value heads.
    static std::int64_t rows_of(Comm const& ranks, shape const& layer, std::int64_t batch,
                                std::int64_t capacity, where at) {
        if (batch < 1 || batch >= token_limit || capacity < 1 || capacity >= token_limit)
            raise(errc::invalid_shape, at, "make_cache",
                  "a cache has 1 .. 2^31 - 1 samples, of as many keys", "batch ", batch,
                  ", capacity ", capacity);
        std::int64_t most = 0;
        for (int r = 0; r < ranks.size(); ++r)
            most = std::max(most, share_of(layer, ranks.size(), r).kv_heads());
        if (most > (std::int64_t{1} << 62) / batch / capacity)
            raise(errc::invalid_shape, at, "make_cache", "a cache must stay below 2^62 rows",
                  "key-value heads ", most, ", batch ", batch, ", capacity ", capacity);
        return most * batch * capacity;
    }

    static void expect_whole_heads(shape const& layer, int ranks, where at) {
        // Heads of other windows weigh differently, so that balance would cut them.
        if (layer.assignment == assignment::balanced && ranks > 1 &&
            (layer.heads % ranks != 0 || !layer.head_windows.empty()))
            raise(errc::invalid_shape, at, "kv_cache",
                  "a cache needs whole heads on every rank (assignment::whole_heads)", layer.heads,
                  " heads on ", ranks, " ranks");
    }

    void expect_step(sequence const& step, where at) const {
        if (step.batch() != batch())
            raise(errc::invalid_sequence, at, "kv_cache", "a step must have the cache's batch",
                  "step of ", step.batch(), ", cache of ", batch());
        auto const rule = step.visible(layer_);
        auto const& packed = step.packed();
        if (step.cross() || !packed.documents().empty())
            raise(errc::invalid_sequence, at, "kv_cache",
                  "a step over a cache has one document a sample, and no keys of its own",
                  packed.documents().size(), " documents, ", step.queries().total(), " queries, ",
                  step.keys().total(), " keys");
        for (std::int64_t b = 0; b < batch(); ++b) {
            auto const own = rule.sample(b);
            auto const held = lengths_[index(b)];
            // Later steps see all that is kept.
            if (own.begin > 0 || !rule.present.empty())
                raise(errc::invalid_sequence, at, "kv_cache",
                      "a step over a cache brings a sample's first keys, as many as its length",
                      "sample ", b, " brings ", own.begin, " .. ", own.end, " of ",
                      step.keys().total(), rule.present.empty() ? "" : ", with holes");
            if (own.position != held || (held > 0 && !packed.has_past()))
                raise(errc::invalid_sequence, at, "kv_cache",
                      "a step's past must be what the cache holds", "sample ", b, " has past ",
                      packed.has_past() || held == 0 ? own.position : 0, ", the cache holds ",
                      held);
            if (own.end > capacity_)
                raise(errc::invalid_sequence, at, "kv_cache",
                      "a cache must have room for the step's keys", "sample ", b, " has ", held,
                      " and gets ", own.end - held, ", capacity ", capacity_);
        }
    }

    std::optional<Comm> ranks_;
    shape layer_{};
    head_share share_{};
    dtype type_ = dtype::none;
    std::int64_t capacity_ = 0;
    cache_regions places_{};
    window_type memory_{};
    std::int64_t number_ = 0;
    bool used_alone_ = false;
    std::vector<std::int64_t> lengths_;
};

}  // namespace ulysses::inline ULYSSES_ABI
