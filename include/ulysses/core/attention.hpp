#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/dropout.hpp>
#include <ulysses/core/logits.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/progress.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/tensor_view.hpp>
#include <ulysses/core/visibility.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

namespace ulysses::inline ULYSSES_ABI {

/// What an attention functor cannot know from its views: where its work item lies in the whole.
///
/// The functor is given query heads [query_head, query_head + q.heads()), all at one ratio to its
/// key-value heads: local query head h reads local key-value head h / (q.heads() / k.heads()). Its
/// query rows are global rows [query_begin, query_begin + q.tokens()), its keys are global rows
/// [key_begin, key_begin + k.tokens()), which hold every key its rows may see: row i of sample b those
/// of `visible.keys_of(b, query_begin + i)`, which may be none, but for those that are not
/// `visible.there`.
struct attention_call {
    std::int64_t query_head = 0;   ///< global index of the first query head
    std::int64_t kv_head = 0;      ///< global index of the first key-value head
    std::int64_t query_begin = 0;  ///< global index of the first query row
    std::int64_t key_begin = 0;    ///< global index of the first key row
    visibility visible{};          ///< which keys a global query row sees; global lengths
    double scale = 1.0;
    double softcap = 0;      ///< 0: none
    head_values slopes{};    ///< ALiBi, of the item's heads; empty: none
    head_values sinks{};     ///< of the item's heads; empty: none
    logit_bias bias{};       ///< from the item's first head on; rows and keys by their global index
    dropout_mask dropout{};  ///< by global indices; empty: none
    std::span<std::byte>
        workspace{};           ///< at least workspace_bytes(), aligned to 64, contents undefined
    progress_hook progress{};  ///< to be called now and then, on the thread of the call
};

/// Extents of one work item, for sizing workspace: [batch, rows, heads] of q and k, and both dims.
struct attention_extents {
    std::int64_t batch = 0;
    std::int64_t rows = 0;
    std::int64_t heads = 0;
    std::int64_t keys = 0;
    std::int64_t kv_heads = 0;
    std::int64_t head_dim = 0;
    std::int64_t value_dim = 0;
};

/// Features a functor declares as `static constexpr attention_features features`.
struct attention_features {
    bool causal = false;     ///< mask::causal
    bool full = false;       ///< mask::full
    bool grouped = false;    ///< fewer key-value heads than query heads
    bool value_dim = false;  ///< value_dim != head_dim
    bool row_range = false;  ///< part of a head's query rows, over a span of its keys
    bool window = false;     ///< a sliding window
    bool documents = false;  ///< several documents in a sample
    bool padding = false;    ///< samples with keys that are not there, or rows at other positions
    bool holes = false;      ///< keys that are not there between others that are
    bool softcap = false;
    bool alibi = false;
    bool bias = false;
    bool sinks = false;
    bool dropout = false;  ///< by `attention_call::dropout`
    bool local_dropout =
        false;  ///< of its own, by local indices: other masks at other numbers of ranks
};

/// The views of one work item's backward pass.
template <class T>
struct attention_backward_views {
    head_view<T const> q, k, v, o,
        dout;  // [B, rows, h, D], [B, keys, g, D], [B, keys, g, Dv], o's, o's
    head_view<accumulator_t<T> const> lse;  // [B, rows, h, 1]
    head_view<T> dq;                        // [B, rows, h, D]
    head_view<accumulator_t<T>> dk, dv;     // [B, keys, g, D], [B, keys, g, Dv]
    logit_gradients<accumulator_t<T>>
        dlogits{};  // of the item's heads, as the call's sinks and bias
};

/// Ordinary attention on the heads a rank was given; step 4.
///
/// Requirements:
/// 1. `forward(call, q, k, v, o, lse)`: o = softmax(scale Q K^T + mask) V, lse = log of the
///    softmax's denominator (natural logarithm, maximum and sink included), both overwritten. What
///    else happens to scores and probabilities, and in which order, is in core/logits.hpp.
/// 2. Views are head_local; rows of `dim` elements are contiguous, other strides are arbitrary.
/// 3. `row_multiple()`: cuts between ranks are rounded up to a multiple of this, so that a row has
///    the same bits whichever rank computes it.
/// 4. `workspace_bytes<T>(extents)`: what both passes need in `call.workspace`; a functor allocates
///    nothing itself.
/// 5. `features`: what it can do; asking for more is an error at construction.
/// 6. `call` is a `queued<attention_call, space_type>` where the space has queues, and what is above
///    is ordered on its `queue`; it has been done on return where the space is the host's.
template <class A, class T>
concept attention_for = requires(A const& attention, functor_call_t<attention_call, A> const& call,
                                 attention_extents const& extents, head_view<T const> in,
                                 head_view<T> out, head_view<accumulator_t<T>> lse) {
    typename A::space_type;
    { A::features } -> std::convertible_to<attention_features>;
    { attention.row_multiple() } -> std::convertible_to<std::int64_t>;
    { attention.template workspace_bytes<T>(extents) } -> std::convertible_to<std::size_t>;
    attention.forward(call, in, in, in, out, lse);
};

/// An attention functor with `backward(call, views)`: dq is overwritten; dk and dv are added to,
/// query heads of a group in ascending order, so that shared key-value heads accumulate over work
/// items; so are the gradients of sinks and bias where they are wanted.
template <class A, class T>
concept differentiable_attention_for = attention_for<A, T> &&
    requires(A const& attention, functor_call_t<attention_call, A> const& call,
             attention_backward_views<T> const& views) {
    attention.backward(call, views);
};

/// An attention functor that is asked before anything moves, with the call and the views that it will
/// be given, whose contents are undefined yet. `prepare` refuses what the functor cannot do, makes
/// ready what takes long, and returns the bytes of workspace that the call needs: with it,
/// `workspace_bytes` is no more than what a step is said to need. It is asked again before each call.
template <class A, class T>
concept prepared_attention_for = attention_for<A, T> &&
    requires(A const& attention, functor_call_t<attention_call, A> const& call,
             head_view<T const> in, head_view<T> out, head_view<accumulator_t<T>> lse,
             attention_backward_views<T> const& views) {
    { attention.prepare(call, in, in, in, out, lse) } -> std::convertible_to<std::size_t>;
    { attention.prepare(call, views) } -> std::convertible_to<std::size_t>;
};

}  // namespace ulysses::inline ULYSSES_ABI
