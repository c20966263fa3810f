#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/number.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/tensor_view.hpp>
#include <ulysses/core/visibility.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

/// Maps a rank's local token index to its global position; what epilogues such as RoPE need.
class token_positions {
   public:
    using function = std::int64_t (*)(void const* orders, int rank, std::int64_t token);

    /// `run_from`, where it is known: so many tokens from one on, it included, have positions that go on
    /// by a step.
    constexpr token_positions(void const* orders, int rank, function position,
                              function run_from = nullptr)
        : orders_(orders), rank_(rank), position_(position), run_(run_from) {}
    std::int64_t operator()(std::int64_t token) const { return position_(orders_, rank_, token); }
    std::int64_t run(std::int64_t token) const {
        return run_ == nullptr ? 1 : run_(orders_, rank_, token);
    }

   private:
    void const* orders_;
    int rank_;
    function position_, run_;
};

/// What a projection cannot know from its views.
struct projection_call {
    token_positions query_positions;  ///< of the local tokens of x, q and y
    token_positions key_positions;    ///< of the local tokens of k and v
    visibility visible{};   ///< the step's documents and where its queries stand; no layer's mask
    bool has_past = false;  ///< a token's key stands where its query does, behind those of a cache

    /// Where a local token of q stands among its sample's keys, as masks place it. In the six steps
    /// that is its global position, unless the step has `query_positions` or `past`.
    std::int64_t query_position(std::int64_t sample, std::int64_t token) const {
        return query_positions(token) + visible.sample(sample).position;
    }
    /// Where a local token of k stands among its sample's keys.
    std::int64_t key_position(std::int64_t sample, std::int64_t token) const {
        return has_past ? query_position(sample, token) : key_positions(token);
    }
    /// `token_positions::run` of the two.
    std::int64_t query_run(std::int64_t token) const { return query_positions.run(token); }
    std::int64_t key_run(std::int64_t token) const {
        return has_past ? query_run(token) : key_positions.run(token);
    }
    /// A position among a sample's keys, counted from the first key of its document.
    std::int64_t in_document(std::int64_t sample, std::int64_t position) const {
        auto const document = visible.document_of(visible.sample(sample), position);
        if (document < 0) return position;
        return position - visible.documents[static_cast<std::size_t>(document)];
    }
    /// How many positions there are from one on to the end of its document, where there is one.
    std::int64_t left_in_document(std::int64_t sample, std::int64_t position) const {
        auto const own = visible.sample(sample);
        auto const next = visible.document_of(own, position) + 1;
        if (next == 0 || next == own.first_document + own.documents) return std::int64_t{1} << 62;
        return visible.documents[static_cast<std::size_t>(next)] - position;
    }
};

/// A space whose memory the host does not address, and which runs `Work` on it: what an epilogue of
/// `dense` does to rows of an element type, as `run(queue, dtype, work)`.
template <class Space, class Work>
concept runs_work = !std::same_as<Space, host_space> &&
                    requires(typename Space::queue queue, dtype type, Work const& work) {
    Space::run(queue, type, work);
};

/// Steps 2 and 6: x [B, s, C] -> q, k, v [B, s, H, D], and o [B, s, Hq, Dv] -> y [B, s, C].
///
/// Requirements, for a weights type W and a gradients type G of the projection's own:
/// 1. `project_in(call, x, weights, q, k, v)` overwrites q, k, v, which are packed.
/// 2. `project_in_backward(call, x, weights, dq, dk, dv, dx, gradients)` overwrites dx and adds to
///    the gradients; it may change dq, dk, dv in place.
/// 3. `project_out(call, o, weights, y)` overwrites y.
/// 4. `project_out_backward(call, weights, dy, dout)` overwrites dout, which is packed.
/// 5. `project_out_gradients(call, o, dy, gradients)` adds to the output weights' gradients. It
///    comes after the exchange, when a recomputed o is at hand.
/// Only sequence-local views: a projection is local to a rank's tokens. Where its space has queues,
/// `call` is a `queued<projection_call, space_type>`, and what it does is ordered on that queue.
template <class Pr, class T, class Weights>
concept projection_for = requires(Pr const& projection,
                                  functor_call_t<projection_call, Pr> const& call,
                                  token_view<T const> in, token_view<T> out,
                                  Weights const& weights) {
    typename Pr::space_type;
    projection.project_in(call, in, weights, out, out, out);
    projection.project_out(call, in, weights, out);
};

template <class Pr, class T, class Weights, class Gradients>
concept differentiable_projection_for = projection_for<Pr, T, Weights> &&
    requires(Pr const& projection, functor_call_t<projection_call, Pr> const& call,
             token_view<T const> in, token_view<T> out, Weights const& weights,
             Gradients const& gradients) {
    projection.project_in_backward(call, in, weights, out, out, out, out, gradients);
    projection.project_out_backward(call, weights, in, out);
    projection.project_out_gradients(call, in, in, gradients);
};

}  // namespace ulysses::inline ULYSSES_ABI
