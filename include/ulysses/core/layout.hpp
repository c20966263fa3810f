#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <concepts>
#include <string_view>

/// Layout policies: how an operand is spread over the ranks of a group. They are types, so that the
/// move between two of them is chosen, and a wrong one refused, at compile time.
namespace ulysses::inline ULYSSES_ABI {

/// Every rank holds all heads of its own tokens: [B, s, H, D].
struct sequence_local {
    static constexpr std::string_view name = "sequence_local";
};

/// Every rank holds all tokens of its own heads: [B, S, h, D].
struct head_local {
    static constexpr std::string_view name = "head_local";
};

/// Every rank holds everything: [B, S, H, D].
struct replicated {
    static constexpr std::string_view name = "replicated";
};

template <class L>
concept layout_policy =
    std::same_as<L, sequence_local> || std::same_as<L, head_local> || std::same_as<L, replicated>;

}  // namespace ulysses::inline ULYSSES_ABI
