#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/visibility.hpp>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

/// The shape of one attention layer: what does not change from step to step.
namespace ulysses::inline ULYSSES_ABI {

/// How query rows are dealt to ranks.
enum class assignment : std::uint8_t {
    balanced,     ///< equal work for every rank; a head may be shared by neighbouring ranks
    whole_heads,  ///< rank r computes floor(H/P) + (r < H mod P) whole heads
};

/// What a context keeps between forward and backward.
enum class keep : std::uint8_t {
    exchanged,  ///< q, k, v, o head-local: backward exchanges only gradients
    local,      ///< q, k, v, o sequence-local: backward exchanges them again
    nothing,    ///< recomputed from the layer's input
};

/// The factor of Q K^T. Holds the bits of a double so that a shape may be a template argument;
/// zero stands for 1 / sqrt(head_dim).
struct scale_factor {
    std::uint64_t bits = 0;

    scale_factor() = default;
    constexpr scale_factor(double value) : bits(std::bit_cast<std::uint64_t>(value)) {}
    constexpr double value() const { return std::bit_cast<double>(bits); }
    friend constexpr bool operator==(scale_factor, scale_factor) = default;
};

/// Shape and options of an attention layer. An aggregate, made with designated initialisers, usable
/// as a template argument.
struct shape {
    std::int64_t heads = 0;      ///< query heads, Hq
    std::int64_t kv_heads = 0;   ///< key-value heads, Hkv; divides heads; 0: as many as heads
    std::int64_t head_dim = 0;   ///< dim of q and k, D
    std::int64_t value_dim = 0;  ///< dim of v and o, Dv; 0: head_dim
    ulysses::mask mask = ulysses::mask::full;
    ulysses::window window = {};
    scale_factor scale = {};
    ulysses::assignment assignment = ulysses::assignment::balanced;
    ulysses::keep keep = ulysses::keep::exchanged;
    /// Parts of the heads that exchange and attend one after the other, 1 .. kv_heads: the same
    /// bits in memory for one part.
    std::int64_t chunks = 1;
    /// Exchanges a chunk while the one before it is computed, in memory for two.
    bool overlap = false;

    friend constexpr bool operator==(shape const&, shape const&) = default;
};

/// A shape known at compile time: `fixed<shape{.heads = 8, .head_dim = 64}>`.
template <shape Shape>
struct fixed_shape {
    static constexpr shape value = Shape;
    constexpr operator shape() const { return Shape; }
};
template <shape Shape>
inline constexpr fixed_shape<Shape> fixed{};

namespace detail {

template <class S>
inline constexpr bool is_fixed_shape = false;
template <shape Shape>
inline constexpr bool is_fixed_shape<fixed_shape<Shape>> = true;

/// The first rule that `s` breaks, or an empty text.
constexpr std::string_view broken_rule(shape const& s) {
    constexpr auto limit = std::int64_t{1} << 31;
    if (s.heads < 1 || s.heads >= limit) return "heads must lie in 1 .. 2^31 - 1";
    if (s.kv_heads < 0) return "kv_heads must not be negative";
    if (s.kv_heads > 0 && s.heads % s.kv_heads != 0) return "kv_heads must divide heads";
    if (s.head_dim < 1 || s.head_dim >= limit) return "head_dim must lie in 1 .. 2^31 - 1";
    if (s.value_dim < 0 || s.value_dim >= limit) return "value_dim must lie in 0 .. 2^31 - 1";
    if (s.window.left < -1 || s.window.left >= limit || s.window.right < -1 ||
        s.window.right >= limit)
        return "both sides of a window must lie in -1 .. 2^31 - 1";
    auto const scale = s.scale.value();
    if (!(scale >= -std::numeric_limits<double>::max() &&
          scale <= std::numeric_limits<double>::max()))
        return "scale must be finite";
    if (s.chunks < 1 || s.chunks > (s.kv_heads > 0 ? s.kv_heads : s.heads))
        return "chunks must lie in 1 .. kv_heads";
    if (s.overlap && s.chunks < 2) return "overlap needs at least 2 chunks";
    return {};
}

/// `s` with its defaults filled in.
constexpr shape completed(shape s) {
    if (s.kv_heads == 0) s.kv_heads = s.heads;
    if (s.value_dim == 0) s.value_dim = s.head_dim;
    return s;
}

}  // namespace detail

/// `s` checked and with its defaults filled in.
/// *Throws* `invalid_shape` with all values when a rule is broken.
inline shape checked(shape const& s, where at = where::here()) {
    if (auto const rule = detail::broken_rule(s); !rule.empty())
        raise(errc::invalid_shape, at, "shape", rule, "heads ", s.heads, ", kv_heads ", s.kv_heads,
              ", head_dim ", s.head_dim, ", value_dim ", s.value_dim, ", window ", s.window.left,
              " and ", s.window.right, ", scale ", s.scale.value(), ", chunks ", s.chunks);
    return detail::completed(s);
}

/// The factor of Q K^T that a completed shape asks for.
inline double softmax_scale(shape const& s) {
    auto const given = s.scale.value();
    return given != 0.0 ? given : 1.0 / std::sqrt(static_cast<double>(s.head_dim));
}

}  // namespace ulysses::inline ULYSSES_ABI
