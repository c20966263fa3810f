#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/train/accounting.hpp>
#include <ulysses/train/mesh.hpp>

#include <concepts>
#include <cstdint>
#include <iterator>
#include <optional>
#include <ranges>
#include <utility>

/// Where a rank's samples come from.
namespace ulysses::inline ULYSSES_ABI {

/// What yields a rank's samples, one after the other.
///
/// Requirements:
/// 1. `next()` returns the next sample, or nothing at the end, then and in every later call.
/// 2. It may have `restart(epoch)`: from the first sample of that epoch on; the same samples
///    whenever it is called with the same number. Without it there is one epoch.
/// 3. It may have `skip(count)`: as `count` calls of `next`, but cheaper; it throws when there are
///    fewer samples.
template <class S>
concept sample_source = requires(S& source) {
    typename S::sample_type;
    { source.next() } -> std::same_as<std::optional<typename S::sample_type>>;
};

/// From the first sample of an epoch on. *Throws* `invalid_call` for a source that cannot.
template <sample_source S>
void restart_source(S& source, std::int64_t epoch, where at) {
    if constexpr (requires { source.restart(epoch); })
        source.restart(epoch);
    else
        raise(errc::invalid_call, at, "source", "a source that cannot restart has one epoch",
              "epoch ", epoch, " was asked for");
}

/// As `count` calls of `next`. *Throws* `invalid_call` when there are fewer samples.
template <sample_source S>
void skip_samples(S& source, std::int64_t count, where at) {
    if constexpr (requires { source.skip(count); })
        source.skip(count);
    else
        for (std::int64_t i = 0; i < count; ++i)
            if (!source.next())
                raise(errc::invalid_call, at, "source", "samples to be skipped must be there", i,
                      " of ", count);
}

/// The elements of a range, which is referred to where it is an lvalue, else held; each epoch all of
/// them, in order. One that can be passed only once, as one that reads a stream, has one epoch. Moved,
/// if at all, before its first sample.
template <class Range>
    requires std::ranges::input_range<Range>
class range_source {
   public:
    using sample_type = std::ranges::range_value_t<Range>;

    explicit range_source(Range&& range) : range_(std::forward<Range>(range)) {}

    std::optional<sample_type> next() {
        if (!at_) at_.emplace(std::ranges::begin(range_));
        if (*at_ == std::ranges::end(range_)) return {};
        std::optional<sample_type> sample(**at_);
        ++*at_;
        return sample;
    }
    void restart(std::int64_t) requires std::ranges::forward_range<Range> { at_.reset(); }

   private:
    Range range_;
    std::optional<std::ranges::iterator_t<Range>> at_;
};
template <class Range>
range_source(Range&&) -> range_source<Range>;

/// A rank's share of a range that all ranks have: of every `places` blocks of `block` samples that at
/// `place`.
struct dealing {
    std::int64_t place = 0, places = 1, block = 1;
};

/// The share of this rank by which `batch_adapter` processes a common range in its order at every
/// division of the ranks: micro-batch k of data rank d is block k * data_ranks + d.
template <class Comm>
dealing dealing_of(mesh<Comm> const& ranks, std::int64_t micro_batch) {
    auto const& config = ranks.config();
    return {ranks.sp().rank() * config.data_ranks() + ranks.data_rank(), config.ranks(),
            micro_batch};
}

/// A rank's share of a range, which is referred to where it is an lvalue, else held. *Throws*
/// `invalid_config`, when samples are asked for, for a share that there is not.
template <class Range>
    requires(std::ranges::random_access_range<Range>&& std::ranges::sized_range<Range>)
class dealt_source {
   public:
    using sample_type = std::ranges::range_value_t<Range>;

    dealt_source(Range&& range, dealing share)
        : range_(std::forward<Range>(range)), share_(share) {}

    std::optional<sample_type> next() {
        if (next_ >= count()) return {};
        auto const block = next_ / share_.block * share_.places + share_.place;
        auto const i = block * share_.block + next_ % share_.block;
        ++next_;
        return std::ranges::begin(range_)[static_cast<std::ranges::range_difference_t<Range>>(i)];
    }
    void restart(std::int64_t) { next_ = 0; }
    void skip(std::int64_t samples) {
        if (auto const left = count() - next_; samples > left)
            raise(errc::invalid_call, {}, "source", "samples to be skipped must be there", left,
                  " of ", samples);
        next_ += samples;
    }

   private:
    /// How many samples are in the share.
    std::int64_t count() const {
        auto const [place, places, block] = share_;
        if (block < 1 || place < 0 || place >= places)
            raise(errc::invalid_config, {}, "source",
                  "a place is one of those that blocks of at least 1 sample are dealt to", "place ",
                  place, " of ", places, ", block ", block);
        auto const all = static_cast<std::int64_t>(std::ranges::size(range_));
        auto const blocks = all / block, rest = blocks % places;
        auto const last = place < rest ? block : place == rest ? all % block : 0;
        return blocks / places * block + last;
    }

    Range range_;
    dealing share_;
    std::int64_t next_ = 0;
};
template <class Range>
dealt_source(Range&&, dealing) -> dealt_source<Range>;

}  // namespace ulysses::inline ULYSSES_ABI
