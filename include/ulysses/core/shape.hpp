#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/logits.hpp>
#include <ulysses/core/real.hpp>
#include <ulysses/core/visibility.hpp>

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

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

/// How a layer mixes tokens. Those after the first carry a state from token to token, which needs another
/// plan than this library's: asking for one is refused by name, never computed wrongly.
enum class mixer : std::uint8_t {
    softmax_attention,
    linear_attention,
    state_space,
    recurrence,
    convolution,
};

constexpr std::string_view name(mixer kind) {
    constexpr std::string_view names[] = {"softmax_attention", "linear_attention", "state_space",
                                          "recurrence", "convolution"};
    return names[static_cast<std::size_t>(kind)];
}
/// A window for each query head. Does not own them: they are read while a pipeline or plan is made,
/// which copies them. A structural type, so that a shape with windows of static storage may be a
/// template argument.
struct window_list {
    window const* data = nullptr;
    std::int64_t count = 0;

    window_list() = default;
    /// From an array, a vector or a span of windows.
    template <std::convertible_to<std::span<window const>> List>
    constexpr window_list(List const& given)
        : data(std::span<window const>(given).data()),
          count(static_cast<std::int64_t>(std::span<window const>(given).size())) {}

    constexpr bool empty() const { return count == 0; }
    constexpr window const* begin() const { return data; }
    constexpr window const* end() const { return data + count; }
    constexpr window const& operator[](std::int64_t head) const { return data[head]; }
    /// Those of heads [first, first + heads).
    constexpr window_list part(std::int64_t first, std::int64_t heads) const {
        auto result = *this;
        result.data += first;
        result.count = heads;
        return result;
    }
    friend constexpr bool operator==(window_list const& a, window_list const& b) {
        return std::equal(a.begin(), a.end(), b.begin(), b.end());
    }
};

/// Shape and options of an attention layer. An aggregate, made with designated initialisers, usable
/// as a template argument.
struct shape {
    std::int64_t heads = 0;      ///< query heads, Hq
    std::int64_t kv_heads = 0;   ///< key-value heads, Hkv; divides heads; 0: as many as heads
    std::int64_t head_dim = 0;   ///< dim of q and k, D
    std::int64_t value_dim = 0;  ///< dim of v and o, Dv; 0: head_dim
    ulysses::mask mask = ulysses::mask::full;
    ulysses::window window = {};         ///< of every head
    window_list head_windows = {};       ///< or one for each query head
    real scale = {};                     ///< the factor of Q K^T; 0: 1 / sqrt(head_dim)
    logit_rule logits = {};              ///< softcap, ALiBi, bias, sinks
    real dropout = {};                   ///< the probability of dropping one; 0: none
    bool local_dropout_allowed = false;  ///< by a functor whose masks depend on the number of ranks
    mixer kind = mixer::softmax_attention;
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

constexpr bool is_window(window const& w) {
    constexpr auto limit = std::int64_t{1} << 31;
    return w.left >= -1 && w.left < limit && w.right >= -1 && w.right < limit;
}

/// The first rule that `s` breaks, or an empty text.
constexpr std::string_view broken_rule(shape const& s) {
    constexpr auto limit = std::int64_t{1} << 31;
    if (s.heads < 1 || s.heads >= limit) return "heads must lie in 1 .. 2^31 - 1";
    if (s.kv_heads < 0) return "kv_heads must not be negative";
    if (s.kv_heads > 0 && s.heads % s.kv_heads != 0) return "kv_heads must divide heads";
    if (s.head_dim < 1 || s.head_dim >= limit) return "head_dim must lie in 1 .. 2^31 - 1";
    if (s.value_dim < 0 || s.value_dim >= limit) return "value_dim must lie in 0 .. 2^31 - 1";
    if (!s.head_windows.empty() && s.head_windows.count != s.heads)
        return "head_windows must name one for each query head";
    if (!s.head_windows.empty() && s.window != window{})
        return "windows come from window or from head_windows, not from both";
    if (!is_window(s.window) ||
        !std::all_of(s.head_windows.begin(), s.head_windows.end(), is_window))
        return "both sides of a window must lie in -1 .. 2^31 - 1";
    constexpr auto finite = [](double value) {
        return value >= -std::numeric_limits<double>::max() &&
               value <= std::numeric_limits<double>::max();
    };
    if (!finite(s.scale.value())) return "scale must be finite";
    auto const softcap = s.logits.softcap.value();
    if (!finite(softcap) || softcap < 0) return "a softcap must be finite, and not negative";
    auto const dropout = s.dropout.value();
    if (!(dropout >= 0 && dropout < 1)) return "dropout must lie in 0 <= p < 1";
    if (s.chunks < 1 || s.chunks > (s.kv_heads > 0 ? s.kv_heads : s.heads))
        return "chunks must lie in 1 .. kv_heads";
    if (s.overlap && s.chunks < 2) return "overlap needs at least 2 chunks";
    return {};
}

/// `s` with its defaults filled in; windows that are all the same become the one.
constexpr shape completed(shape s) {
    if (s.kv_heads == 0) s.kv_heads = s.heads;
    if (s.value_dim == 0) s.value_dim = s.head_dim;
    auto const& windows = s.head_windows;
    if (!windows.empty() &&
        std::count(windows.begin(), windows.end(), windows[0]) == windows.count) {
        s.window = windows[0];
        s.head_windows = {};
    }
    return s;
}

/// A shape with windows of its own, which may live as long as it likes.
class kept_shape : public shape {
   public:
    kept_shape() = default;
    explicit kept_shape(shape const& given) { *this = given; }
    kept_shape(kept_shape const& other) : kept_shape(static_cast<shape const&>(other)) {}
    kept_shape& operator=(kept_shape const& other) {
        return *this = static_cast<shape const&>(other);
    }
    /// Allocates only when it outgrows the most windows so far.
    kept_shape& operator=(shape const& given) {
        if (given.head_windows.data != windows_.data())
            windows_.assign(given.head_windows.begin(), given.head_windows.end());
        static_cast<shape&>(*this) = given;
        head_windows = windows_;
        return *this;
    }

   private:
    std::vector<ulysses::window> windows_;
};

}  // namespace detail

/// `s` checked and with its defaults filled in; its windows are still the caller's.
/// *Throws* `invalid_shape` with all values when a rule is broken.
inline shape checked(shape const& s, where at = where::here()) {
    if (auto const rule = detail::broken_rule(s); !rule.empty()) {
        auto const wrong =
            std::find_if_not(s.head_windows.begin(), s.head_windows.end(), detail::is_window);
        auto const& shown = wrong != s.head_windows.end() ? *wrong : s.window;
        raise(errc::invalid_shape, at, "shape", rule, "heads ", s.heads, ", kv_heads ", s.kv_heads,
              ", head_dim ", s.head_dim, ", value_dim ", s.value_dim, ", window ", shown.left,
              " and ", shown.right, ", head_windows ", s.head_windows.count, ", scale ",
              s.scale.value(), ", softcap ", s.logits.softcap.value(), ", dropout ",
              s.dropout.value(), ", chunks ", s.chunks);
    }
    return detail::completed(s);
}

/// The factor of Q K^T that a completed shape asks for.
inline double softmax_scale(shape const& s) {
    auto const given = s.scale.value();
    return given != 0.0 ? given : 1.0 / std::sqrt(static_cast<double>(s.head_dim));
}

}  // namespace ulysses::inline ULYSSES_ABI
