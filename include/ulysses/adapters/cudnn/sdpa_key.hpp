#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/index_range.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/tensor_view.hpp>
#include <ulysses/core/visibility.hpp>
#include <ulysses/plan/hash.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

/// What a plan of cuDNN's attention is made for, and how a rule of what rows see is said to it. Needs
/// nothing of cuDNN.
namespace ulysses::inline ULYSSES_ABI {

/// The keys that rows see, as a band about a diagonal: row i sees key j when
///
///     d - left < j <= d + right        d = i, or i + keys - rows with `from_last`
///
/// -1: no limit on that side.
struct sdpa_band {
    std::int64_t left = -1, right = -1;
    bool from_last =
        false;  ///< the diagonal ends at the last row and key, else begins at the first

    constexpr bool sees(std::int64_t i, std::int64_t j, std::int64_t rows,
                        std::int64_t keys) const {
        auto const d = from_last ? i + keys - rows : i;
        return (left < 0 || d - left < j) && (right < 0 || j <= d + right);
    }
    friend constexpr bool operator==(sdpa_band const&, sdpa_band const&) = default;
};

/// The keys that rows see together, and which of them each row sees.
struct banded_keys {
    index_range keys;
    sdpa_band band;
};

/// What rows [begin, begin + rows) see, as the fewest keys and one band over them.
/// *Throws* `unsupported` where samples differ, or where a row sees no key.
inline banded_keys banded_keys_of(visibility const& visible, std::int64_t begin,
                                  std::int64_t rows) {
    if (!visible.uniform() || !visible.present.empty())
        raise(errc::unsupported, where{}, "cudnn", "all samples see the same keys",
              visible.samples.size(), " samples of their own");
    auto const first = visible.keys_of(0, begin), last = visible.keys_of(0, begin + rows - 1);
    if (first.size() == 0 || last.size() == 0)
        raise(errc::unsupported, where{}, "cudnn", "each row sees a key", "row ",
              first.size() == 0 ? begin : begin + rows - 1, " of ", visible.queries, ", ",
              visible.keys, " keys");
    banded_keys result{{first.begin, last.end}, {}};
    auto const keys = result.keys.size();
    auto const diagonal = begin + visible.sample(0).position - first.begin;  // of the first row
    auto const right = visible.mask == mask::causal ? 0 : visible.window.right;
    auto const left = visible.window.left;
    auto const limits_left = left >= 0 && diagonal + rows - 1 - left > 0;
    auto const limits_right = right >= 0 && diagonal + right < keys - 1;
    if (right == 0 && limits_right && diagonal != 0 && diagonal + rows == keys)
        result.band = {limits_left ? left + 1 : -1, 0, true};
    else
        result.band = {limits_left ? left + 1 - diagonal : -1, limits_right ? diagonal + right : -1,
                       false};
    return result;
}

/// Strides of batch, token and head; the dims of a row are contiguous.
using row_strides = std::array<std::int64_t, 3>;

/// All that a plan depends on, but for the device: calls with equal keys share a plan.
struct sdpa_key {
    bool backward = false;
    bool deterministic = false;  ///< backward
    bool sinks = false;
    dtype type = dtype::none;
    std::int64_t batch = 0, heads = 0, kv_heads = 0, rows = 0, keys = 0;
    std::int64_t head_dim = 0, value_dim = 0;
    double scale = 1;
    double dropout = 0;  ///< the rate
    sdpa_band band{};
    row_strides q{}, k{}, v{}, o{}, lse{}, dout{}, dq{};  ///< dout and dq: backward
    dtype bias_type = dtype::none;                        ///< none: no bias
    extents4 bias_extents{}, bias_strides{};              ///< of the rows and keys of the call

    friend bool operator==(sdpa_key const&, sdpa_key const&) = default;

    std::string text() const {
        auto result = concat(backward ? "backward, " : "forward, ", name(type), ", B ", batch,
                             ", heads ", heads, " / ", kv_heads, ", rows ", rows, ", keys ", keys,
                             ", D ", head_dim, ", Dv ", value_dim);
        if (band != sdpa_band{})
            result += concat(", band ", band.left, " ", band.right,
                             band.from_last ? " from the last" : " from the first");
        if (bias_type != dtype::none) result += concat(", bias ", name(bias_type));
        if (sinks) result += ", sinks";
        if (dropout > 0) result += ", dropout";
        if (deterministic) result += ", deterministic";
        return result;
    }
};

struct sdpa_key_hash {
    std::size_t operator()(sdpa_key const& key) const {
        word_hash hash;
        for (auto const flag : {key.backward, key.deterministic, key.sinks, key.band.from_last})
            hash.add(flag);
        for (auto const type : {key.type, key.bias_type}) hash.add(type);
        for (auto const number : {key.batch, key.heads, key.kv_heads, key.rows, key.keys,
                                  key.head_dim, key.value_dim, key.band.left, key.band.right})
            hash.add(number);
        for (auto const real : {key.scale, key.dropout})
            hash.add(std::bit_cast<std::uint64_t>(real));
        for (auto const* strides : {&key.q, &key.k, &key.v, &key.o, &key.lse, &key.dout, &key.dq})
            for (auto const stride : *strides) hash.add(stride);
        for (auto const* four : {&key.bias_extents, &key.bias_strides})
            for (auto const number : *four) hash.add(number);
        return hash.value();
    }
};

}  // namespace ulysses::inline ULYSSES_ABI
