#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

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

/// Of bytes as true and false, 64 in a word.
inline std::uint64_t hash_of(std::span<std::uint8_t const> bytes) {
    word_hash hash;
    for (std::size_t i = 0; i < bytes.size(); i += 64) {
        std::uint64_t word = 0;
        for (std::size_t j = i; j < std::min(i + 64, bytes.size()); ++j)
            word = word << 1 | (bytes[j] != 0 ? 1u : 0u);
        hash.add(word);
    }
    return hash.value();
}

}  // namespace ulysses::inline ULYSSES_ABI
