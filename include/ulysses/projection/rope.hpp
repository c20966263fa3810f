#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/projection.hpp>
#include <ulysses/core/tensor_view.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// Rotary position embedding, an epilogue of `dense`:
///
///     dense{builtin_gemm{}, rope{layer.head_dim, {.base = 500000}}}
namespace ulysses::inline ULYSSES_ABI {

/// Which two dims of a head are turned together.
enum class rope_pairs : std::uint8_t {
    halves,       ///< i and i + dims / 2
    interleaved,  ///< 2 i and 2 i + 1
};

struct rope_options {
    std::int64_t dims = 0;  ///< the first of each head, which are turned; 0: all
    rope_pairs pairs = rope_pairs::halves;
    double base = 10000;        ///< pair i turns by base^(-2 i / dims) radians a position
    double position_scale = 1;  ///< factor of all positions, as 1 / 4 for a context four times
                                ///< as long
    /// [dims / 2]: radians a position of each pair, in place of those of `base`, as YaRN and NTK
    /// have them. Copied.
    std::span<double const> frequencies{};
    /// Positions count from the first token of a packed document, else from that of the sample.
    bool restart_in_documents = true;
};

/// Turns pairs of q and k by angles that grow with the token's position, wherever the token lies; k
/// may have other heads and tokens than q. Angles, sines and cosines are double; the products are in
/// `accumulator_t<T>`.
///
/// *Thread safety*: immutable. *Source*: Su et al., "RoFormer" (2021).
class rope {
   public:
    /// *Throws* `invalid_shape` when the options do not fit `head_dim`.
    explicit rope(std::int64_t head_dim, rope_options const& given = {}, where at = where::here())
        : head_dim_(head_dim), pairs_(given.pairs), restarts_(given.restart_in_documents), at_(at) {
        auto const dims = given.dims == 0 ? head_dim : given.dims;
        if (dims < 2 || dims > head_dim)
            raise(errc::invalid_shape, at, "rope", "dims must lie in 2 .. head_dim", dims,
                  " dims of ", head_dim);
        if (dims % 2 != 0)
            raise(errc::invalid_shape, at, "rope", "dims must be even", dims, " dims of ",
                  head_dim);
        if (!(given.base > 0) || !std::isfinite(given.base) || !std::isfinite(given.position_scale))
            raise(errc::invalid_shape, at, "rope",
                  "base must be positive, and it and position_scale finite", "base ", given.base,
                  ", position_scale ", given.position_scale);
        auto const& table = given.frequencies;
        auto const count = static_cast<std::size_t>(dims / 2);
        if (!table.empty() && table.size() != count)
            raise(errc::invalid_shape, at, "rope", "frequencies must name one for each pair",
                  table.size(), " frequencies, ", count, " pairs");
        frequencies_.reserve(count);
        for (std::size_t i = 0; i < count; ++i)
            frequencies_.push_back(
                given.position_scale *
                (table.empty()
                     ? std::pow(given.base, -2 * static_cast<double>(i) / static_cast<double>(dims))
                     : table[i]));
    }

    template <element T>
    void forward(projection_call const& call, token_view<T> q, token_view<T> k) const {
        turn_both(call, q, k, 1);
    }
    /// A rotation's gradient is turned back by it.
    template <element T>
    void backward(projection_call const& call, token_view<T> dq, token_view<T> dk) const {
        turn_both(call, dq, dk, -1);
    }

   private:
    /// So many pairs have their sines at hand for all heads of a token, and for all samples where
    /// it has one position.
    static constexpr std::int64_t chunk = 128;

    template <class T>
    void turn_both(projection_call const& call, token_view<T> const& q, token_view<T> const& k,
                   double direction) const {
        if (q.dim() != head_dim_ || k.dim() != head_dim_)
            raise(errc::invalid_shape, at_, "rope", "q and k must have rope's head_dim", "q has ",
                  q.dim(), ", k has ", k.dim(), ", rope has ", head_dim_);
        auto const placed = [&](std::int64_t sample, std::int64_t position) {
            return restarts_ ? call.in_document(sample, position) : position;
        };
        turn(q, direction, [&](std::int64_t sample, std::int64_t token) {
            return placed(sample, call.query_position(sample, token));
        });
        turn(k, direction, [&](std::int64_t sample, std::int64_t token) {
            return placed(sample, call.key_position(sample, token));
        });
    }

    template <class T, class Position>
    void turn(token_view<T> const& x, double direction, Position const& position_of) const {
        using sum = accumulator_t<T>;
        auto const half = static_cast<std::int64_t>(frequencies_.size());
        // A pair's two elements, and one pair after another.
        auto const apart = pairs_ == rope_pairs::halves ? half : 1;
        auto const step = pairs_ == rope_pairs::halves ? 1 : 2;
        std::array<sum, chunk> cosines, sines;
        for (std::int64_t token = 0; token < x.tokens(); ++token)
            for (std::int64_t begin = 0; begin < half; begin += chunk) {
                auto const count = std::min(chunk, half - begin);
                std::int64_t last = 0;
                for (std::int64_t b = 0; b < x.batch(); ++b) {
                    auto const position = position_of(b, token);
                    if (b == 0 || position != last)
                        fill(position, direction, begin, count, cosines.data(), sines.data());
                    last = position;
                    for (std::int64_t h = 0; h < x.heads(); ++h) {
                        auto* const first = x.row(b, token, h) + begin * step;
                        auto* const second = first + apart;
                        for (std::int64_t i = 0; i < count; ++i) {
                            auto const u = static_cast<sum>(first[i * step]);
                            auto const v = static_cast<sum>(second[i * step]);
                            auto const place = static_cast<std::size_t>(i);
                            auto const cosine = cosines[place], sine = sines[place];
                            first[i * step] = static_cast<T>(u * cosine - v * sine);
                            second[i * step] = static_cast<T>(u * sine + v * cosine);
                        }
                    }
                }
            }
    }

    template <class Sum>
    void fill(std::int64_t position, double direction, std::int64_t begin, std::int64_t count,
              Sum* cosines, Sum* sines) const {
        for (std::int64_t i = 0; i < count; ++i) {
            auto const angle =
                static_cast<double>(position) * frequencies_[static_cast<std::size_t>(begin + i)];
            cosines[i] = static_cast<Sum>(std::cos(angle));
            sines[i] = static_cast<Sum>(direction * std::sin(angle));
        }
    }

    std::int64_t head_dim_;
    rope_pairs pairs_;
    bool restarts_;
    where at_;
    std::vector<double> frequencies_;  // radians a position, [dims / 2]
};

}  // namespace ulysses::inline ULYSSES_ABI
