#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/tensor_view.hpp>
#include <ulysses/plan/hash.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>

/// What a plan of cuDNN's attention is made for, and what a run of it is given. Needs nothing of cuDNN.
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

/// Strides of batch, token and head; the dims of a row are contiguous.
using row_strides = std::array<std::int64_t, 3>;

/// All that a plan depends on, but for the device: calls with equal keys share a plan.
struct sdpa_key {
    bool backward = false;
    bool deterministic = false;  ///< backward
    bool sinks = false;
    /// Each of the batch has its own length, at most `rows` and `keys`, and its own first row, counted in
    /// elements from where the operand begins: strides of batch are not used, but for lse. Backward no more
    /// than `row_places` and `key_places` rows of dq and dk lie from where the first begins to where the last
    /// ends.
    bool varied = false;
    dtype type = dtype::none;
    std::int64_t batch = 0, heads = 0, kv_heads = 0, rows = 0, keys = 0;
    std::int64_t row_places = 0, key_places = 0;
    std::int64_t head_dim = 0, value_dim = 0;
    double scale = 1;
    double softcap = 0;         ///< 0: none
    double dropout = 0;         ///< the rate
    bool slopes = false;        ///< ALiBi: s -= slope |i + diagonal - j|
    std::int64_t diagonal = 0;  ///< of ALiBi
    sdpa_band band{};
    row_strides q{}, k{}, v{}, o{}, lse{};
    row_strides dout{}, dq{}, dk{}, dv{};     ///< backward; dk and dv are of `type`
    dtype bias_type = dtype::none;            ///< none: no bias
    extents4 bias_extents{}, bias_strides{};  ///< of the rows and keys of the call
    extents4
        dbias_extents{};  ///< backward, packed, of `type`; an extent of 1 is summed over; 0: none

    friend bool operator==(sdpa_key const&, sdpa_key const&) = default;

    std::string text() const {
        auto result = concat(backward ? "backward, " : "forward, ", name(type), ", B ", batch,
                             ", heads ", heads, " / ", kv_heads, ", rows ", rows, ", keys ", keys,
                             ", D ", head_dim, ", Dv ", value_dim);
        if (band != sdpa_band{})
            result += concat(", band ", band.left, " ", band.right,
                             band.from_last ? " from the last" : " from the first");
        if (bias_type != dtype::none) result += concat(", bias ", name(bias_type));
        if (varied) result += ", of varied lengths";
        if (dbias_extents[0] > 0) result += " and its gradient";
        if (softcap > 0) result += ", softcap";
        if (slopes) result += ", ALiBi";
        if (sinks) result += ", sinks";
        if (dropout > 0) result += ", dropout";
        if (deterministic) result += ", deterministic";
        return result;
    }
};

struct sdpa_key_hash {
    std::size_t operator()(sdpa_key const& key) const {
        word_hash hash;
        for (auto const flag : {key.backward, key.deterministic, key.sinks, key.varied, key.slopes,
                                key.band.from_last})
            hash.add(flag);
        for (auto const type : {key.type, key.bias_type}) hash.add(type);
        for (auto const number :
             {key.batch, key.heads, key.kv_heads, key.rows, key.keys, key.head_dim, key.value_dim,
              key.band.left, key.band.right, key.row_places, key.key_places, key.diagonal})
            hash.add(number);
        for (auto const real : {key.scale, key.softcap, key.dropout})
            hash.add(std::bit_cast<std::uint64_t>(real));
        for (auto const* strides :
             {&key.q, &key.k, &key.v, &key.o, &key.lse, &key.dout, &key.dq, &key.dk, &key.dv})
            for (auto const stride : *strides) hash.add(stride);
        for (auto const* four : {&key.bias_extents, &key.bias_strides, &key.dbias_extents})
            for (auto const number : *four) hash.add(number);
        return hash.value();
    }
};

/// What a plan that adds elements of `type` to floats is made for: [batch, key, head, dim].
struct sum_key {
    dtype type = dtype::none;
    std::int64_t batch = 0, heads = 0, keys = 0, dim = 0;
    row_strides from{}, to{};

    friend bool operator==(sum_key const&, sum_key const&) = default;

    std::string text() const {
        return concat("a sum, ", name(type), ", B ", batch, ", heads ", heads, ", keys ", keys,
                      ", D ", dim);
    }
};

struct sum_key_hash {
    std::size_t operator()(sum_key const& key) const {
        word_hash hash;
        for (auto const number :
             {static_cast<std::int64_t>(key.type), key.batch, key.heads, key.keys, key.dim})
            hash.add(number);
        for (auto const* strides : {&key.from, &key.to})
            for (auto const stride : *strides) hash.add(stride);
        return hash.value();
    }
};

/// Which operand of a plan an address is for.
enum class sdpa_operand : std::int64_t {
    q = 1,
    k,
    v,
    o,
    lse,
    dout,
    dq,
    dk,
    dv,
    slopes,  ///< one float a head
    sinks,   ///< likewise
    dsinks,  ///< likewise, overwritten
    bias,
    dbias,
    seed,        ///< an int64
    offset,      ///< an int64
    row_counts,  ///< varied: int32, one for each of the batch
    key_counts,
    first_q,  ///< varied: int64 elements, one for each of the batch, and where the last ends
    first_k,
    first_v,
    first_o,
    first_dout,
    first_dq,
    first_dk,
    first_dv,
    addend,  ///< of a sum
    sum,     ///< of a sum, read and written
    result,  ///< of a sum, where cuDNN writes it: the same address
    count,
};

/// The addresses that a run is given; null: none.
class sdpa_operands {
   public:
    void*& operator[](sdpa_operand which) { return all_[static_cast<std::size_t>(which)]; }
    void* operator[](sdpa_operand which) const { return all_[static_cast<std::size_t>(which)]; }

   private:
    std::array<void*, static_cast<std::size_t>(sdpa_operand::count)> all_{};
};

}  // namespace ulysses::inline ULYSSES_ABI
