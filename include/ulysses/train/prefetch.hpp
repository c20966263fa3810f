#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/train/source.hpp>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <utility>

namespace ulysses::inline ULYSSES_ABI {

/// A source whose samples are drawn ahead by a thread of its own, for one that reads, decodes or
/// tokenises: it works while the rank computes. The same samples in the same order.
///
/// *Thread safety*: as any source, one per rank; the source within is used by the thread alone.
template <sample_source Source>
class prefetched {
   public:
    using sample_type = typename Source::sample_type;

    /// `depth` samples at most are held. *Throws* `invalid_config` for none.
    explicit prefetched(Source source, std::int64_t depth = 2, where at = where::here()) {
        if (depth < 1)
            raise(errc::invalid_config, at, "prefetch", "at least one sample is drawn ahead",
                  depth);
        state_ = std::make_unique<state>(std::move(source), static_cast<std::size_t>(depth));
    }

    /// *Blocking*: until there is a sample. *Throws* what the source throws, where it did.
    std::optional<sample_type> next() {
        auto& s = *state_;
        if (!s.worker.joinable())
            s.worker = std::jthread([&s](std::stop_token const& stop) { s.draw(stop); });
        std::unique_lock lock(s.mutex);
        s.changed.wait(lock, [&] { return !s.drawn.empty() || s.ended; });
        if (s.drawn.empty()) {
#if ULYSSES_EXCEPTIONS
            if (s.failure) std::rethrow_exception(s.failure);
#endif
            return {};
        }
        std::optional<sample_type> sample(std::move(s.drawn.front()));
        s.drawn.pop_front();
        s.changed.notify_all();
        return sample;
    }

    void restart(std::int64_t epoch) requires requires(Source& source) { source.restart(epoch); }
    {
        auto& s = *state_;
        s.stop();
        s.source.restart(epoch);
    }
    void skip(std::int64_t count) {
        if (!state_->worker.joinable()) return skip_samples(state_->source, count, {});
        for (std::int64_t i = 0; i < count; ++i)
            if (!next())
                raise(errc::invalid_call, {}, "source", "samples to be skipped must be there", i,
                      " of ", count);
    }

   private:
    /// Stays where it is while the thread runs.
    struct state {
        Source source;
        std::size_t depth;
        std::mutex mutex{};
        std::condition_variable_any changed{};
        std::deque<sample_type> drawn{};
        std::exception_ptr failure{};
        bool ended = false;
        std::jthread worker{};  // last: joined before the others are gone

        state(Source from, std::size_t most) : source(std::move(from)), depth(most) {}

        void draw(std::stop_token const& stop) {
#if ULYSSES_EXCEPTIONS
            try {
                draw_all(stop);
            } catch (...) {
                end(std::current_exception());
            }
#else
            draw_all(stop);
#endif
        }
        void draw_all(std::stop_token const& stop) {
            while (true) {
                {
                    std::unique_lock lock(mutex);
                    if (!changed.wait(lock, stop, [&] { return drawn.size() < depth; })) return;
                }
                auto sample = source.next();
                if (!sample) return end({});
                std::lock_guard lock(mutex);
                drawn.push_back(std::move(*sample));
                changed.notify_all();
            }
        }
        void end(std::exception_ptr const& why) {
            std::lock_guard lock(mutex);
            failure = why;
            ended = true;
            changed.notify_all();
        }
        void stop() {
            if (worker.joinable()) {
                worker.request_stop();
                worker.join();
                worker = {};
            }
            drawn.clear();
            failure = nullptr;
            ended = false;
        }
    };

    std::unique_ptr<state> state_;
};

}  // namespace ulysses::inline ULYSSES_ABI
