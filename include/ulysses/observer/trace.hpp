#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/observer.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// Records when each step of each call ran on a rank and what it moved.
///
///     ulysses::trace_recorder recorder(ranks.rank(), ranks.size());
///     ulysses::pipeline layer{ranks,      ulysses::sequence_local{},   attention, shape,
///                             projection, recorder.observe("layer 0")};
///     ...
///     ulysses::write_trace(file, recorders);  // of all ranks; see observer/write_trace.hpp
namespace ulysses::inline ULYSSES_ABI {

/// Something that happened on a rank: a span of time, or a fence, which is a moment.
struct trace_event {
    enum class kind : std::uint8_t { call, step, fence };
    static constexpr std::int64_t open = -1;

    kind what = kind::call;
    std::uint8_t id = 0;      ///< a pass_kind or a step_id
    bool finished = true;     ///< false: an error left it
    bool in_call = false;     ///< the two that follow are known
    pass_kind pass{};         ///< of the call
    std::uint32_t layer = 0;  ///< index of the layer's name
    std::uint64_t call = 0;   ///< counts the calls of this recorder's observers
    std::int64_t begin = 0;   ///< nanoseconds of the steady clock
    std::int64_t end = open;
    std::size_t kept = 0;  ///< bytes of the rank's own share
    std::size_t first_transfer = 0, transfers = 0;
};

/// Bytes that one span of this rank copied between its memory and another rank's.
struct trace_transfer {
    int peer = 0;
    std::size_t written = 0;  ///< into its memory
    std::size_t read = 0;     ///< from its memory
};

struct trace_options {
    /// How many events fit: a forward call of the six steps over several ranks is eight, of its
    /// calls, steps and fences. What does not fit is dropped and counted.
    std::size_t events = 1 << 14;
    bool recording = true;  ///< false: paused until `resume`
};

class trace_observer;

/// Owns what one rank has recorded, in memory reserved by its constructor. Its observers are cheap
/// handles: those of several layers may share it. Recording allocates nothing and does not throw.
///
/// *Thread safety*: belongs to its rank's thread; to be read once that rank has stopped. It must
/// outlive its observers.
class trace_recorder {
   public:
    /// *Throws* `invalid_call` unless 0 <= rank < ranks.
    trace_recorder(int rank, int ranks, trace_options const& given = {}, where at = where::here())
        : rank_(rank), capacity_(given.events), recording_(given.recording) {
        if (rank < 0 || rank >= ranks)
            raise(errc::invalid_call, at, "trace_recorder", "rank must lie in the group", "rank ",
                  rank, " of ", ranks);
        if (capacity_ > (std::size_t{1} << 40) / static_cast<std::size_t>(ranks + 1))
            raise(errc::invalid_call, at, "trace_recorder",
                  "events of all ranks together must stay below 2^40", capacity_, " events, ",
                  ranks, " ranks");
        events_.reserve(capacity_);
        // A call moves something in two of its steps, of at least three events.
        most_transfers_ = capacity_ * static_cast<std::size_t>(ranks + 1) / 2;
        transfers_.reserve(most_transfers_);
        moving_.resize(static_cast<std::size_t>(ranks));
        for (int peer = 0; peer < ranks; ++peer)
            moving_[static_cast<std::size_t>(peer)].peer = peer;
    }
    trace_recorder(trace_recorder const&) = delete;
    trace_recorder& operator=(trace_recorder const&) = delete;

    /// The observer of a layer of that name. Allocates for a name that is new.
    trace_observer observe(std::string_view layer);

    /// Nothing is recorded, nor counted as dropped, until `resume`. Calls are counted on.
    void pause() noexcept {
        close_call(false);
        recording_ = false;
    }
    void resume() noexcept { recording_ = true; }

    /// Forgets all events; memory, names and the count of calls are kept.
    void clear() noexcept {
        step_ = call_ = {};
        forget_moves();
        events_.clear();
        transfers_.clear();
        dropped_ = 0;
    }

    int rank() const noexcept { return rank_; }
    int ranks() const noexcept { return static_cast<int>(moving_.size()); }
    std::size_t capacity() const noexcept { return capacity_; }
    /// Events, and a span's bytes to and from one rank, for which there was no room.
    std::size_t dropped() const noexcept { return dropped_; }

    /// In the order in which they began.
    std::span<trace_event const> events() const noexcept { return events_; }
    /// What a span moved, in the order of ranks; none of its own share.
    std::span<trace_transfer const> transfers(trace_event const& of) const noexcept {
        return std::span(transfers_).subspan(of.first_transfer, of.transfers);
    }
    std::string_view layer(trace_event const& of) const noexcept { return layers_[of.layer]; }

   private:
    friend class trace_observer;

    /// A span that has begun: its event, or none where there was no room.
    struct open_span {
        bool open = false;
        trace_event* event = nullptr;
        std::uint8_t id = 0;
    };

    static std::int64_t now() noexcept {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(
                   std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }

    void begin(std::uint32_t layer, step_id step) noexcept {
        if (!recording_) return;
        close_step(false);
        step_ = begun(trace_event::kind::step, static_cast<std::uint8_t>(step), layer);
    }
    void end(step_id step) noexcept {
        if (step_.open && step_.id == static_cast<std::uint8_t>(step)) close_step(true);
    }
    void begin(std::uint32_t layer, pass_kind kind) noexcept {
        close_call(false);
        ++calls_;
        if (!recording_) return;
        pass_ = kind;
        call_ = begun(trace_event::kind::call, static_cast<std::uint8_t>(kind), layer);
    }
    void end(pass_kind) noexcept { close_call(true); }
    void fence(std::uint32_t layer) noexcept {
        if (!recording_) return;
        if (auto* const event = begun(trace_event::kind::fence, 0, layer).event)
            event->end = event->begin;
    }

    void moved(int from, int to, std::size_t bytes) noexcept {
        if (!recording_) return;
        auto const peer = from == rank_ ? to : from;
        if ((from != rank_ && to != rank_) || peer < 0 || peer >= ranks()) {
            ++dropped_;
            return;
        }
        anything_moved_ = true;
        auto& with = moving_[static_cast<std::size_t>(peer)];
        (from == to ? kept_ : from == rank_ ? with.written : with.read) += bytes;
    }

    open_span begun(trace_event::kind what, std::uint8_t id, std::uint32_t layer) noexcept {
        open_span span{.open = true, .id = id};
        if (events_.size() == capacity_) {
            ++dropped_;
            return span;
        }
        auto& event = events_.emplace_back();
        event.what = what;
        event.id = id;
        event.layer = layer;
        event.in_call = call_.open || what == trace_event::kind::call;
        event.pass = pass_;
        event.call = calls_;
        event.begin = now();
        span.event = &event;
        return span;
    }

    void close_step(bool finished) noexcept {
        if (!step_.open) return;
        close(step_, finished);
        if (!finished && call_.event != nullptr) call_.event->finished = false;
    }
    void close_call(bool finished) noexcept {
        close_step(false);
        if (call_.open) close(call_, finished && (!call_.event || call_.event->finished));
    }

    void close(open_span& span, bool finished) noexcept {
        if (span.event != nullptr) {
            span.event->end = now();
            span.event->finished = finished;
            span.event->kept = kept_;
            span.event->first_transfer = transfers_.size();
        }
        if (anything_moved_)
            for (auto const& with : moving_)
                if (with.written + with.read > 0) keep(span.event, with);
        forget_moves();
        span = {};
    }
    void keep(trace_event* event, trace_transfer const& with) noexcept {
        if (event == nullptr || transfers_.size() == most_transfers_) {
            ++dropped_;
            return;
        }
        transfers_.push_back(with);
        ++event->transfers;
    }
    void forget_moves() noexcept {
        for (auto& with : moving_) with.written = with.read = 0;
        kept_ = 0;
        anything_moved_ = false;
    }

    int rank_;
    std::size_t capacity_, most_transfers_ = 0;
    bool recording_;
    std::vector<trace_event> events_;
    std::vector<trace_transfer> transfers_;
    std::vector<trace_transfer> moving_;  // of the span that is open, for each rank
    std::size_t kept_ = 0;
    bool anything_moved_ = false;
    std::vector<std::string> layers_;
    std::size_t dropped_ = 0;
    std::uint64_t calls_ = 0;
    pass_kind pass_{};
    open_span step_, call_;
};

/// An `observer` that tells a recorder; one of no recorder, the default, does nothing.
class trace_observer {
   public:
    trace_observer() = default;

    void begin(step_id step) noexcept {
        if (to_ != nullptr) to_->begin(layer_, step);
    }
    void end(step_id step) noexcept {
        if (to_ != nullptr) to_->end(step);
    }
    void begin(pass_kind kind) noexcept {
        if (to_ != nullptr) to_->begin(layer_, kind);
    }
    void end(pass_kind kind) noexcept {
        if (to_ != nullptr) to_->end(kind);
    }
    void moved(int from, int to, std::size_t bytes) noexcept {
        if (to_ != nullptr) to_->moved(from, to, bytes);
    }
    void fence() noexcept {
        if (to_ != nullptr) to_->fence(layer_);
    }

   private:
    friend class trace_recorder;
    trace_observer(trace_recorder* to, std::uint32_t layer) : to_(to), layer_(layer) {}

    trace_recorder* to_ = nullptr;
    std::uint32_t layer_ = 0;
};
static_assert(observer<trace_observer> && observes_calls<trace_observer>);

inline trace_observer trace_recorder::observe(std::string_view layer) {
    auto const found = std::find(layers_.begin(), layers_.end(), layer);
    auto const index = static_cast<std::uint32_t>(found - layers_.begin());
    if (found == layers_.end()) layers_.emplace_back(layer);
    return {this, index};
}

}  // namespace ulysses::inline ULYSSES_ABI
