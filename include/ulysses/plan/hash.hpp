#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

/// A hash of 64-bit words, taken in one after the other; tells steps and plans apart. *Source*:
/// FNV-1a over words, folded.
class word_hash {
   public:
    constexpr word_hash() = default;
    /// Goes on from another hash's value.
    constexpr explicit word_hash(std::uint64_t value) : value_(value) {}

    template <class Word>
    constexpr void add(Word word) {
        value_ = (value_ ^ static_cast<std::uint64_t>(word)) * 1099511628211u;
        value_ ^= value_ >> 32;
    }
    constexpr std::uint64_t value() const { return value_; }

   private:
    std::uint64_t value_ = 14695981039346656037u;
};

}  // namespace ulysses::inline ULYSSES_ABI
