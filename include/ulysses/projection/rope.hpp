#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/projection.hpp>
#include <ulysses/core/space.hpp>
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

namespace detail {

/// Cosine and sine of an angle.
template <class Sum>
struct turn {
    Sum cosine, sine;
};
/// *Shape*: `frequency` radians a position; direction 1, or -1 for back.
template <class Sum>
ULYSSES_HD turn<Sum> turn_of(std::int64_t position, double frequency, double direction) {
    auto const angle = static_cast<double>(position) * frequency;
    return {static_cast<Sum>(std::cos(angle)), static_cast<Sum>(direction * std::sin(angle))};
}

template <class T>
ULYSSES_HD void turn_pair(T& first, T& second, turn<accumulator_t<T>> const& by) {
    auto const u = static_cast<accumulator_t<T>>(first), v = static_cast<accumulator_t<T>>(second);
    first = static_cast<T>(u * by.cosine - v * by.sine);
    second = static_cast<T>(u * by.sine + v * by.cosine);
}

/// Rows of one sample from a token on, whose positions go on by a step.
struct position_run {
    std::int64_t first_row;  ///< rows of the runs before
    std::int64_t batch, token, position, step;
};

/// Turns of some pairs in rows of all heads, for a space that runs them: by value, and in the 4 KiB
/// that every GPU gives a kernel's parameters.
struct rope_turns {
    static constexpr int most_runs = 64, most_pairs = 128;

    void* data;               ///< of elements T, at the first of the pairs
    std::int64_t strides[3];  ///< of batch, token and head, in elements
    std::int64_t heads, pairs;
    std::int64_t apart, step;  ///< elements between those of a pair, and from one pair to the next
    double direction;
    std::int64_t rows;
    int count;
    position_run runs[most_runs];
    double frequencies[most_pairs];

    /// One pair of one row, of all heads. *Shape*: row in 0 .. rows - 1, pair in 0 .. pairs - 1.
    template <class T>
    ULYSSES_HD void turn_heads(std::int64_t row, std::int64_t pair) const {
        int which = 0;
        for (int after = count; after - which > 1;) {
            auto const middle = (which + after) / 2;
            if (runs[middle].first_row <= row)
                which = middle;
            else
                after = middle;
        }
        auto const& run = runs[which];
        auto const on = row - run.first_row;
        auto const by =
            turn_of<accumulator_t<T>>(run.position + on * run.step, frequencies[pair], direction);
        auto* first = static_cast<T*>(data) + run.batch * strides[0] +
                      (run.token + on) * strides[1] + pair * step;
        for (std::int64_t head = 0; head < heads; ++head, first += strides[2])
            turn_pair(first[0], first[apart], by);
    }
};
static_assert(sizeof(rope_turns) <= 4096);

}  // namespace detail

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

    template <element T, class Call>
    void forward(Call const& call, token_view<T> q, token_view<T> k) const {
        turn_both(call, q, k, 1);
    }
    /// A rotation's gradient is turned back by it.
    template <element T, class Call>
    void backward(Call const& call, token_view<T> dq, token_view<T> dk) const {
        turn_both(call, dq, dk, -1);
    }

   private:
    /// So many pairs have their sines at hand for all heads of a token, and for all samples where
    /// it has one position.
    static constexpr std::int64_t chunk = detail::rope_turns::most_pairs;

    std::int64_t pairs() const { return static_cast<std::int64_t>(frequencies_.size()); }
    /// A pair's two elements, and one pair after another.
    std::int64_t apart() const { return pairs_ == rope_pairs::halves ? pairs() : 1; }
    std::int64_t step() const { return pairs_ == rope_pairs::halves ? 1 : 2; }

    template <class T, class Call>
    void turn_both(Call const& call, token_view<T> const& q, token_view<T> const& k,
                   double direction) const {
        if (q.dim() != head_dim_ || k.dim() != head_dim_)
            raise(errc::invalid_shape, at_, "rope", "q and k must have rope's head_dim", "q has ",
                  q.dim(), ", k has ", k.dim(), ", rope has ", head_dim_);
        projection_call const& known = call;
        auto const placed = [&](std::int64_t sample, std::int64_t position) {
            return restarts_ ? known.in_document(sample, position) : position;
        };
        auto const turn = [&](token_view<T> const& x, auto const& position_of, auto const& run_of) {
            using space = space_of_call_t<Call>;
            if constexpr (runs_work<space, detail::rope_turns>)
                turn_on<space>(call.queue, x, direction, [&](std::int64_t b, std::int64_t token) {
                    auto const position = position_of(b, token);
                    auto count = std::clamp<std::int64_t>(run_of(token), 1, x.tokens() - token);
                    auto const step = count > 1 ? position_of(b, token + 1) - position : 1;
                    if (restarts_)
                        count = std::min(count,
                                         (known.left_in_document(b, position) + step - 1) / step);
                    return tokens_in_step{count, placed(b, position), step};
                });
            else
                turn_here(x, direction, [&](std::int64_t b, std::int64_t token) {
                    return placed(b, position_of(b, token));
                });
        };
        turn(
            q, [&](std::int64_t b, std::int64_t token) { return known.query_position(b, token); },
            [&](std::int64_t token) { return known.query_run(token); });
        turn(
            k, [&](std::int64_t b, std::int64_t token) { return known.key_position(b, token); },
            [&](std::int64_t token) { return known.key_run(token); });
    }

    /// Tokens of a sample whose positions go on by a step.
    struct tokens_in_step {
        std::int64_t count, position, step;
    };

    template <class T, class Position>
    void turn_here(token_view<T> const& x, double direction, Position const& position_of) const {
        std::array<detail::turn<accumulator_t<T>>, chunk> turns;
        for (std::int64_t token = 0; token < x.tokens(); ++token)
            for (std::int64_t begin = 0; begin < pairs(); begin += chunk) {
                auto const count = std::min(chunk, pairs() - begin);
                std::int64_t last = 0;
                for (std::int64_t b = 0; b < x.batch(); ++b) {
                    auto const position = position_of(b, token);
                    for (std::int64_t i = 0; (b == 0 || position != last) && i < count; ++i)
                        turns[static_cast<std::size_t>(i)] = detail::turn_of<accumulator_t<T>>(
                            position, frequency(begin + i), direction);
                    last = position;
                    for (std::int64_t h = 0; h < x.heads(); ++h) {
                        auto* const first = x.row(b, token, h) + begin * step();
                        for (std::int64_t i = 0; i < count; ++i)
                            detail::turn_pair(first[i * step()], first[i * step() + apart()],
                                              turns[static_cast<std::size_t>(i)]);
                    }
                }
            }
    }

    /// By the space, in lists of runs that its launches take.
    template <class Space, class T, class Tokens>
    void turn_on(typename Space::queue queue, token_view<T> const& x, double direction,
                 Tokens const& tokens_from) const {
        detail::rope_turns turns{};
        for (std::size_t axis = 0; axis < 3; ++axis) turns.strides[axis] = x.strides[axis];
        turns.heads = x.heads();
        turns.apart = apart();
        turns.step = step();
        turns.direction = direction;
        auto const run = [&] {
            for (std::int64_t begin = 0; turns.rows > 0 && begin < pairs(); begin += chunk) {
                turns.data = x.data + begin * step();
                turns.pairs = std::min(chunk, pairs() - begin);
                for (std::int64_t i = 0; i < turns.pairs; ++i)
                    turns.frequencies[i] = frequency(begin + i);
                Space::run(queue, dtype_of<T>, turns);
            }
            turns.rows = turns.count = 0;
        };
        for (std::int64_t b = 0; b < x.batch(); ++b)
            for (std::int64_t token = 0; token < x.tokens();) {
                auto const next = tokens_from(b, token);
                turns.runs[turns.count++] = {turns.rows, b, token, next.position, next.step};
                turns.rows += next.count;
                token += next.count;
                if (turns.count == detail::rope_turns::most_runs) run();
            }
        run();
    }

    double frequency(std::int64_t pair) const {
        return frequencies_[static_cast<std::size_t>(pair)];
    }

    std::int64_t head_dim_;
    rope_pairs pairs_;
    bool restarts_;
    where at_;
    std::vector<double> frequencies_;  // radians a position, [dims / 2]
};

}  // namespace ulysses::inline ULYSSES_ABI
