#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/gather.hpp>
#include <ulysses/core/guarded.hpp>
#include <ulysses/plan/hash.hpp>
#include <ulysses/plan/sequence.hpp>
#include <ulysses/train/agree.hpp>
#include <ulysses/train/fields.hpp>
#include <ulysses/train/mesh.hpp>
#include <ulysses/train/packed_samples.hpp>
#include <ulysses/train/source.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

/// Samples of each rank -> micro-batches that the ranks of a sequence share.
///
///     ulysses::batch_adapter batches{ranks, source, std::tuple{ids_field(&sample::ids), ...}, options};
///     decltype(batches)::batch_type batch;
///     while (batches.next(batch)) ...        // one epoch
///
/// In a rotation every rank draws samples from its own source, and the ranks of a sequence process
/// them in turn: first those of the group's rank 0, all ranks together, then those of rank 1, and so
/// on. Between two rotations all ranks of the mesh agree on whether there is another: every group
/// gets as many micro-batches.
namespace ulysses::inline ULYSSES_ABI {

/// Where an adapter stands, on one rank: restored on every rank, it goes on with the next
/// micro-batch.
struct batch_state {
    std::int64_t epoch = 0;
    std::int64_t rotation = 0;  ///< of the epoch
    std::int64_t position = 0;  ///< micro-batches of the rotation that are done
    std::int64_t drawn = 0;     ///< samples of this rank's source before the rotation
    // Of the run that it is a state of, and of one that it is restored in.
    std::int64_t ranks = 0, sp = 0, micro_batch = 0;

    friend bool operator==(batch_state const&, batch_state const&) = default;
};

/// *Thread safety*: one per rank, on the thread of its communicators.
template <class Comm, sample_source Source, class... Fields>
class batch_adapter {
    static_assert(gathers<Comm> || explain_gathers<Comm>());

   public:
    using sample_type = typename Source::sample_type;
    using batch_type = micro_batch<sample_type, Fields...>;

    /// *Blocking*: collective over the mesh. *Throws* the same on every rank: `disagreement` when
    /// ranks pass other options or fields, `invalid_config` for options that do not fit each other.
    batch_adapter(mesh<Comm> const& ranks, Source source, std::tuple<Fields...> const& fields,
                  batch_options const& options = {}, where at = where::here())
        : ranks_(ranks),
          source_(std::move(source)),
          options_(options),
          own_(fields),
          incoming_(fields),
          at_(at) {
        agree(fields);
    }

    /// The next micro-batch of the epoch; false, on every rank alike, at its end, and then until
    /// `restart`. *Blocking*: collective, over the mesh at the first of each rotation, else over the
    /// ranks of a sequence. *Throws* the same on every rank that takes part: `invalid_config` for a
    /// sample that does not fit, `disagreement` for sources that begin with the same samples, what
    /// the source throws as `functor_failed`. The samples of the rotation are then lost: `restore`.
    bool next(batch_type& batch) {
        for (;;) {
            while (position_ == ranks_.sp().size())
                if (!rotate()) return false;
            auto const source = position_++;
            if (any_has(source)) {
                share(source, batch);
                return true;
            }
        }
    }

    /// Begins the next epoch. On every rank alike. *Throws* `invalid_call` for a source that cannot.
    void restart() { begin(beginning_of(state_.epoch + 1)); }

    /// To be saved, on every rank its own; at any time but after an error.
    batch_state state() const {
        auto saved = state_;
        saved.position = rotating_ ? position_ : resumed_;
        return saved;
    }
    /// Goes on where `state` was taken, on every rank from its own state of that time.
    /// *Throws* `invalid_call` for a state of a run with other ranks or micro-batches, or of none; for
    /// a source that cannot, or has not so many samples.
    void restore(batch_state const& state) {
        check_state(state);
        begin(state);
    }

    /// What this rank holds of whole samples: its own of a rotation and those being shared.
    std::size_t bytes() const { return own_.memory_bytes() + incoming_.memory_bytes(); }
    batch_options const& options() const { return options_; }

   private:
    using packed_type = detail::packed_samples<sample_type, Fields...>;

    /// What a rank tells of its part of a rotation.
    struct record {
        detail::packed_extents extents{};
        std::int64_t samples = 0, valid = 0;
        std::uint64_t hash = 0;
        batch_state state{};
    };

    static constexpr std::array<std::string_view, 10> option_names{"micro_batch",
                                                                   "max_length",
                                                                   "too_long",
                                                                   "fixed_length",
                                                                   "pad_to_multiple_of",
                                                                   "shift_labels",
                                                                   "balance_valid_tokens",
                                                                   "end",
                                                                   "duplicates_allowed",
                                                                   "the hash of fields"};

    void agree(std::tuple<Fields...> const& fields) {
        word_hash hash;
        std::apply(
            [&](auto const&... field) {
                auto const add = [&](auto const& each) {
                    hash.add(each.width);
                    hash.add(each.role);
                    for (auto const c : each.name) hash.add(c);
                };
                (add(field), ...);
            },
            fields);
        auto const& o = options_;
        std::array<std::int64_t, option_names.size()> const mine{
            o.micro_batch,
            o.max_length,
            static_cast<std::int64_t>(o.too_long),
            o.fixed_length,
            o.pad_to_multiple_of,
            o.shift_labels,
            o.balance_valid_tokens,
            static_cast<std::int64_t>(o.end),
            o.duplicates_allowed,
            static_cast<std::int64_t>(hash.value())};
        fence_status status;
        auto const& world = ranks_.world();
        guarded(status, [&] {
            records_.resize(static_cast<std::size_t>(world.size()));
            check_options();
            std::apply([&](auto const&... field) { (check_width(field.name, field.width), ...); },
                       fields);
        });
        agree_on(world, "batch", option_names, mine, status, at_);
        state_ = beginning_of(0);
        position_ = ranks_.sp().size();
    }
    void check_options() const {
        auto const& o = options_;
        if (o.micro_batch < 1 || o.max_length < 0 || o.pad_to_multiple_of < 1 ||
            std::max({o.micro_batch, o.max_length, o.pad_to_multiple_of}) >= token_limit)
            raise(
                errc::invalid_config, at_, "batch",
                "micro_batch and pad_to_multiple_of lie in 1 .. 2^31 - 1, max_length in 0 .. 2^31 "
                "- 1",
                "micro_batch ", o.micro_batch, ", pad_to_multiple_of ", o.pad_to_multiple_of,
                ", max_length ", o.max_length);
        if (o.fixed_length && o.max_length == 0)
            raise(errc::invalid_config, at_, "batch", "fixed_length needs max_length",
                  "max_length ", o.max_length);
        if (o.max_length % o.pad_to_multiple_of != 0)
            raise(errc::invalid_config, at_, "batch",
                  "max_length must be a multiple of pad_to_multiple_of", o.max_length, " and ",
                  o.pad_to_multiple_of);
        if (o.balance_valid_tokens && !packed_type::has_labels)
            raise(errc::invalid_config, at_, "batch", "balance_valid_tokens needs labels_field",
                  sizeof...(Fields), " fields without");
    }

    void check_width(std::string_view name, std::int64_t width) const {
        if (width < 1 || width >= token_limit)
            raise(errc::invalid_config, at_, "batch", "a field has 1 or more values a token", name,
                  ": ", width);
    }

    batch_state beginning_of(std::int64_t epoch) const {
        return {.epoch = epoch,
                .ranks = ranks_.world().size(),
                .sp = ranks_.sp().size(),
                .micro_batch = options_.micro_batch};
    }
    void check_state(batch_state const& state) const {
        auto const own = beginning_of(0);
        if (state.ranks != own.ranks || state.sp != own.sp || state.micro_batch != own.micro_batch)
            raise(errc::invalid_call, at_, "batch",
                  "a state is restored on as many ranks, divided alike, with the same micro_batch",
                  "saved with ", state.ranks, " ranks, sp ", state.sp, ", micro_batch ",
                  state.micro_batch, ", restored with ", own.ranks, ", ", own.sp, ", ",
                  own.micro_batch);
        // A rotation draws at most micro_batch samples.
        auto const rotations = state.drawn / own.micro_batch + (state.drawn % own.micro_batch > 0);
        if (std::min({state.epoch, state.rotation, state.position, state.drawn}) < 0 ||
            state.position > own.sp || rotations > state.rotation)
            raise(errc::invalid_call, at_, "batch", "a state is one that an adapter was in",
                  "epoch ", state.epoch, ", rotation ", state.rotation, ", position ",
                  state.position, " of ", own.sp, ", ", state.drawn, " samples drawn");
    }

    void begin(batch_state const& state) {
        if (touched_ || state.epoch > 0) restart_source(source_, state.epoch, at_);
        if (state.drawn > 0) {
            touched_ = true;
            skip_samples(source_, state.drawn, at_);
        }
        state_ = state;
        resumed_ = state.position;
        rotating_ = ended_ = false;
        position_ = ranks_.sp().size();
    }

    /// Draws the next rotation; false when the mesh has agreed that there is none.
    bool rotate() {
        if (ended_) return false;
        if (rotating_) {
            ++state_.rotation;
            state_.drawn += own_record().samples;
        }
        rotating_ = false;
        fence_status status;
        record mine{.state = {state_.epoch, state_.rotation, resumed_}};
        guarded(status, "batch", at_, [&] { mine.samples = draw(mine); });
        auto const& world = ranks_.world();
        all_gather_or_fail(world, std::as_bytes(std::span(&mine, 1)),
                           std::as_writable_bytes(std::span(records_)), status);
        check_records();
        auto const fewest = std::ranges::min(records_, {}, &record::samples).samples;
        auto const most = std::ranges::max(records_, {}, &record::samples).samples;
        ended_ = options_.end == at_end::drop ? fewest < options_.micro_batch : most == 0;
        if (ended_) return false;
        guarded(status, [&] {
            for (int r = 0; r < ranks_.sp().size(); ++r)
                if (r != ranks_.sp().rank())
                    incoming_.reserve(incoming_.size_of(record_of(r).extents));
        });
        leaving_on_failure(world, [&] { world.fence(status); });
        rotating_ = true;
        position_ = static_cast<int>(std::exchange(resumed_, 0));
        return true;
    }

    /// *Returns* how many samples the source had.
    std::int64_t draw(record& mine) {
        touched_ = true;
        samples_.clear();
        while (static_cast<std::int64_t>(samples_.size()) < options_.micro_batch) {
            auto sample = source_.next();
            if (!sample) break;
            samples_.push_back(std::move(*sample));
        }
        if (samples_.empty())
            own_.pack_nothing(options_);
        else
            own_.pack(std::span<sample_type const>(samples_), options_, at_);
        mine.extents = own_.extents();
        mine.valid = own_.valid_tokens();
        mine.hash = own_.hash();
        return static_cast<std::int64_t>(samples_.size());
    }

    void check_records() const {
        auto const& first = records_[0].state;
        for (std::size_t r = 1; r < records_.size(); ++r)
            if (auto const& other = records_[r].state; other != first)
                raise(errc::disagreement, at_, "batch",
                      "every rank must be at the same micro-batch, or restored to it",
                      "rank 0 is in epoch ", first.epoch, ", rotation ", first.rotation,
                      ", position ", first.position, ", rank ", r, " in ", other.epoch, ", ",
                      other.rotation, ", ", other.position);
        if (first.rotation > 0 || options_.duplicates_allowed) return;
        for (std::size_t r = 1; r < records_.size(); ++r)
            for (std::size_t other = 0; other < r; ++other)
                if (records_[r].samples > 0 && records_[r].samples == records_[other].samples &&
                    records_[r].hash == records_[other].hash)
                    raise(errc::disagreement, at_, "batch",
                          "every rank's source must have samples of its own", "ranks ", other,
                          " and ", r, " both begin with the same ", records_[r].samples,
                          " samples; deal them out, or set duplicates_allowed");
    }

    /// Of a rank of this rank's sequences.
    record const& record_of(int sp_rank) const {
        return records_[static_cast<std::size_t>(ranks_.world().rank() - ranks_.sp().rank() +
                                                 sp_rank)];
    }
    record const& own_record() const { return record_of(ranks_.sp().rank()); }
    /// Whether any group has samples in this place of the rotation.
    bool any_has(int position) const {
        auto const sp = static_cast<std::size_t>(ranks_.sp().size());
        for (auto r = static_cast<std::size_t>(position); r < records_.size(); r += sp)
            if (records_[r].samples > 0) return true;
        return false;
    }

    /// The samples of one rank become a micro-batch of all ranks of the sequence.
    void share(int source, batch_type& batch) {
        auto const& ranks = ranks_.sp();
        auto& whole = source == ranks.rank() ? own_ : incoming_;
        auto const& world = ranks_.world();
        auto const known = [&](error const&) { return ranks.size() == world.size(); };
        leaving_unless(world, known, [&] {
            whole.reshape(record_of(source).extents);
            ranks.broadcast(whole.bytes(), source);
            auto const own = order_of(whole);
            batch.step.renew(
                ranks,
                {.batch = whole.extents().samples,
                 .tokens = own,
                 .order = runs_,
                 .packing = {.documents = whole.documents(), .lengths = whole.lengths()}},
                at_);
            batch.source = source;
            batch.valid_tokens = record_of(source).valid;
            take<std::int64_t>(whole.positions(), 1, batch.step, batch.positions);
            [&]<std::size_t... I>(std::index_sequence<I...>) { (take_field<I>(whole, batch), ...); }
            (std::index_sequence_for<Fields...>{});
        });
    }

    /// This rank's tokens of the sequence: a number, and runs where they are not an equal share.
    std::int64_t order_of(packed_type const& whole) {
        auto const tokens = whole.extents().tokens;
        auto const ranks = ranks_.sp().size(), rank = ranks_.sp().rank();
        runs_.clear();
        if constexpr (packed_type::has_labels)
            if (options_.balance_valid_tokens) return balanced_order(whole);
        return tokens / ranks + (rank < tokens % ranks ? 1 : 0);
    }

    /// Equal parts, but for one token each, of the tokens with a label that counts in none, one, ...
    /// of the samples.
    std::int64_t balanced_order(packed_type const& whole) {
        auto const& extents = whole.extents();
        std::int64_t const ranks = ranks_.sp().size(), rank = ranks_.sp().rank();
        auto const class_of = [&](std::int64_t t) {
            std::size_t count = 0;
            for (std::int64_t b = 0; b < extents.samples; ++b) count += whole.valid(b, t);
            return count;
        };
        class_sizes_.assign(static_cast<std::size_t>(extents.samples) + 1, 0);
        class_next_.assign(class_sizes_.size(), 0);
        for (std::int64_t t = 0; t < extents.tokens; ++t) ++class_sizes_[class_of(t)];
        std::int64_t own = 0;
        for (std::int64_t t = 0; t < extents.tokens; ++t) {
            auto const c = class_of(t);
            auto const size = class_sizes_[c], i = class_next_[c]++;
            if (i < size * rank / ranks || i >= size * (rank + 1) / ranks) continue;
            ++own;
            if (!runs_.empty() && runs_.back().begin + runs_.back().count == t)
                ++runs_.back().count;
            else
                runs_.push_back({.begin = t, .count = 1});
        }
        return own;
    }

    template <std::size_t I>
    void take_field(packed_type const& whole, batch_type& batch) const {
        auto& to = std::get<I>(batch.values);
        if constexpr (I == packed_type::positions_index)
            to.assign(batch.positions.begin(), batch.positions.end());
        else
            take<typename packed_type::template value_type<I>>(
                whole.template values<I>(),
                static_cast<std::int64_t>(whole.template values<I>().size()) /
                    (whole.extents().samples * whole.extents().tokens),
                batch.step, to);
    }
    /// This rank's tokens of [B, S, width] -> [B, s, width].
    template <class Value>
    void take(std::span<Value const> from, std::int64_t width, sequence const& step,
              std::vector<Value>& to) const {
        to.clear();
        for (std::int64_t b = 0; b < step.batch(); ++b)
            for (auto const& run : step.queries().runs(ranks_.sp().rank()))
                for (std::int64_t i = 0; i < run.count; ++i) {
                    auto const at = (b * step.queries().total() + run.at(i)) * width;
                    auto const token =
                        from.subspan(static_cast<std::size_t>(at), static_cast<std::size_t>(width));
                    to.insert(to.end(), token.begin(), token.end());
                }
    }

    mesh<Comm> ranks_;
    Source source_;
    batch_options options_;
    packed_type own_, incoming_;
    where at_;  ///< where the adapter was made: what its errors name
    std::vector<sample_type> samples_;
    std::vector<record> records_;  ///< of all ranks, of this rotation
    std::vector<token_run> runs_;
    std::vector<std::int64_t> class_sizes_, class_next_;
    batch_state state_{};  ///< at the beginning of this rotation, or of the next
    std::int64_t resumed_ = 0;
    int position_ = 0;
    bool rotating_ = false, ended_ = false, touched_ = false;
};

}  // namespace ulysses::inline ULYSSES_ABI
