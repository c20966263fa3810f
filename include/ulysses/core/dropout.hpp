#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/index_range.hpp>
#include <ulysses/core/logits.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

/// Dropout's random numbers: a function of where a probability stands in the whole, not of who computes
/// it or when, so that the same are dropped at every number of ranks, forward and backward.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

/// Philox-4x32: four random words for each counter. *Source*: Salmon et al., "Parallel random numbers: as
/// easy as 1, 2, 3" (2011). `Lanes` counters at once, word by word.
template <std::size_t Lanes>
struct philox {
    using words = std::uint32_t[4][Lanes];

    ULYSSES_HD static constexpr void apply(words& x, std::uint32_t key0, std::uint32_t key1) {
        for (int round = 0; round < 10; ++round) {
            for (std::size_t l = 0; l < Lanes; ++l) {
                auto const even = std::uint64_t{0xD2511F53} * x[0][l];
                auto const odd = std::uint64_t{0xCD9E8D57} * x[2][l];
                x[0][l] = static_cast<std::uint32_t>(odd >> 32) ^ x[1][l] ^ key0;
                x[1][l] = static_cast<std::uint32_t>(odd);
                x[2][l] = static_cast<std::uint32_t>(even >> 32) ^ x[3][l] ^ key1;
                x[3][l] = static_cast<std::uint32_t>(even);
            }
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
    }
};

/// A bijection of 64 bits that spreads every bit over all. *Source*: Stafford's variant 13 of MurmurHash3's
/// finaliser, as in SplitMix64.
ULYSSES_HD constexpr std::uint64_t mixed(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

}  // namespace detail

/// Which probabilities of a call are dropped.
class dropout_mask {
   public:
    constexpr dropout_mask() = default;
    /// `rate` in [0, 1): the probability of being dropped, to 2^-32.
    constexpr dropout_mask(double rate, dropout_key const& key)
        : threshold_(std::min(static_cast<std::uint64_t>(rate * 0x1p32 + 0.5), most)),
          first_sample_(key.first_sample),
          key_(detail::mixed(detail::mixed(detail::mixed(key.seed) + key.step) + key.layer)) {}

    constexpr bool empty() const { return threshold_ == 0; }
    constexpr double rate() const { return static_cast<double>(threshold_) * 0x1p-32; }

    /// Of seed, step and layer, for a generator of the functor's own.
    constexpr std::uint64_t key() const { return key_; }

    /// What a probability that is kept is multiplied by: one over the probability of being kept.
    constexpr double scale() const { return 0x1p32 / (0x1p32 - static_cast<double>(threshold_)); }

    /// factors[j] = 0 or `scale()` for the keys of global query row `row` of global head `head`, sample
    /// `b` of the call.
    template <class A>
    void row(std::int64_t b, std::int64_t head, std::int64_t row, index_range keys,
             A* factors) const {
        // A single key lies in one counter's words.
        if (keys.size() == 1)
            fill<1>(b, head, row, keys, factors);
        else
            fill<16>(b, head, row, keys, factors);
    }

   private:
    template <std::size_t Lanes, class A>
    void fill(std::int64_t b, std::int64_t head, std::int64_t row, index_range keys,
              A* factors) const {
        constexpr auto lanes = static_cast<std::int64_t>(Lanes);
        auto const kept = static_cast<A>(scale());
        auto const sample = first_sample_ + static_cast<std::uint64_t>(b);
        for (auto four = keys.begin / 4; four * 4 < keys.end; four += lanes) {
            typename detail::philox<Lanes>::words words;
            for (std::size_t l = 0; l < Lanes; ++l) {
                words[0][l] = static_cast<std::uint32_t>(four) + static_cast<std::uint32_t>(l);
                words[1][l] = static_cast<std::uint32_t>(row);
                words[2][l] = static_cast<std::uint32_t>(head);
                words[3][l] = static_cast<std::uint32_t>(sample);
            }
            detail::philox<Lanes>::apply(
                words, static_cast<std::uint32_t>(key_) + static_cast<std::uint32_t>(sample >> 32),
                static_cast<std::uint32_t>(key_ >> 32));
            auto const first = std::max(keys.begin, four * 4);
            auto const last = std::min(keys.end, (four + lanes) * 4);
            for (auto j = first; j < last; ++j) {
                auto const place = static_cast<std::size_t>(j - four * 4);
                factors[j - keys.begin] = words[place % 4][place / 4] < threshold_ ? A(0) : kept;
            }
        }
    }

    static constexpr std::uint64_t most = 0xFFFFFFFF;  // something is always kept
    std::uint64_t threshold_ = 0;
    std::uint64_t first_sample_ = 0;
    std::uint64_t key_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI
