#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/exchange/regions.hpp>
#include <ulysses/plan/plan.hpp>

#include <algorithm>
#include <cstddef>
#include <span>

namespace ulysses::inline ULYSSES_ABI {

/// The head-local operands of step 4 on one rank; gradients are only used backward.
template <class T>
struct attend_operands {
    head_operand<T const> q, k, v;
    head_operand<T> o;
    head_operand<accumulator_t<T>> lse;
    head_operand<T const> dout;
    head_operand<T> dq;
    head_operand<accumulator_t<T>> dk, dv;
    logit_inputs logits;  ///< of all heads
    logit_gradients<accumulator_t<T>> dlogits;
};

namespace detail {

template <class Space>
queued<attention_call, Space> call_of(plan const& moves, planned_item const& item,
                                      logit_inputs const& logits, std::span<std::byte> workspace,
                                      typename Space::queue queue, progress_hook progress) {
    auto const& work = item.work;
    auto const& layer = moves.layer();
    queued<attention_call, Space> call;
    call.queue = queue;
    call.query_head = work.head_begin;
    call.kv_head = work.kv_begin;
    call.query_begin = work.row_begin;
    call.key_begin = work.key_begin;
    call.visible = moves.visible();
    call.visible.window = work.window;
    call.scale = softmax_scale(layer);
    call.softcap = layer.logits.softcap.value();
    call.slopes = logits.slopes.part(work.head_begin, work.heads());
    call.sinks = logits.sinks.part(work.head_begin, work.heads());
    call.bias = logits.bias.from_head(work.head_begin);
    if (logits.dropout) call.dropout = {layer.dropout.value(), *logits.dropout};
    call.workspace = workspace;
    call.progress = progress;
    return call;
}

}  // namespace detail

/// Bytes of workspace that the largest work item of this rank needs; over a cache, when it is full.
template <class T, class Attention>
std::size_t attend_workspace_bytes(Attention const& attention, plan const& moves) {
    std::size_t bytes = 0;
    for (auto const& item : moves.items()) {
        auto const& work = item.work;
        attention_extents const extents{.batch = moves.batch(),
                                        .rows = work.rows(),
                                        .heads = work.heads(),
                                        .keys =
                                            moves.caching() ? moves.key_capacity() : work.keys(),
                                        .kv_heads = work.kv_heads(),
                                        .head_dim = moves.layer().head_dim,
                                        .value_dim = moves.layer().value_dim};
        bytes = std::max(bytes,
                         static_cast<std::size_t>(attention.template workspace_bytes<T>(extents)));
    }
    return bytes;
}

namespace detail {

/// Calls `use(call, q, k, v, o, lse)` for each of the rank's work items.
template <class Space, class T, class Use>
void for_each_item(plan const& moves, attend_operands<T> const& operands,
                   std::span<std::byte> workspace, typename Space::queue queue,
                   progress_hook progress, Use const& use) {
    for (auto const& item : moves.items()) {
        progress();
        use(call_of<Space>(moves, item, operands.logits, workspace, queue, progress),
            operands.q.queries(moves, item), operands.k.keys(moves, item),
            operands.v.keys(moves, item), operands.o.queries(moves, item),
            operands.lse.queries(moves, item));
    }
}

/// Calls `use(call, views)` for each of the rank's work items.
template <class Space, class T, class Use>
void for_each_item_backward(plan const& moves, attend_operands<T> const& operands,
                            std::span<std::byte> workspace, typename Space::queue queue,
                            progress_hook progress, Use const& use) {
    for (auto const& item : moves.items()) {
        progress();
        attention_backward_views<T> views;
        views.q = operands.q.queries(moves, item);
        views.k = operands.k.keys(moves, item);
        views.v = operands.v.keys(moves, item);
        views.o = operands.o.queries(moves, item);
        views.dout = operands.dout.queries(moves, item);
        views.lse = operands.lse.queries(moves, item);
        views.dq = operands.dq.queries(moves, item);
        views.dk = operands.dk.keys(moves, item);
        views.dv = operands.dv.keys(moves, item);
        auto const& [sinks, bias] = operands.dlogits;
        auto const first = static_cast<std::size_t>(item.work.head_begin);
        if (!sinks.empty())
            views.dlogits.sinks = sinks.subspan(first, static_cast<std::size_t>(item.work.heads()));
        views.dlogits.bias = bias.from_head(item.work.head_begin);
        use(call_of<Space>(moves, item, operands.logits, workspace, queue, progress), views);
    }
}

}  // namespace detail

/// What a functor that is asked before says of a forward call, or of a backward one: the workspace
/// that the largest work item needs.
template <class T, class Attention>
std::size_t prepare_attend(Attention const& attention, plan const& moves,
                           attend_operands<T> const& operands, bool backward,
                           typename Attention::space_type::queue queue = {}) {
    using space = typename Attention::space_type;
    std::size_t bytes = 0;
    auto const ask = [&](auto const& call, auto const&... views) {
        bytes = std::max(bytes, static_cast<std::size_t>(attention.prepare(call, views...)));
    };
    if (backward)
        detail::for_each_item_backward<space>(moves, operands, {}, queue, {}, ask);
    else
        detail::for_each_item<space>(moves, operands, {}, queue, {}, ask);
    return bytes;
}

/// Step 4: ordinary attention on each of the rank's work items; `progress` is called now and then.
/// *Shape*: q [B, rows, h, D], k [B, keys, g, D], v [B, keys, g, Dv] -> o [B, rows, h, Dv], lse [B,
/// rows, h, 1].
template <class T, class Attention>
void attend(Attention const& attention, plan const& moves, attend_operands<T> const& operands,
            std::span<std::byte> workspace, typename Attention::space_type::queue queue = {},
            progress_hook progress = {}) {
    static_assert(attention_for<Attention, T> || explain_attention<Attention, T>());
    detail::for_each_item<typename Attention::space_type>(
        moves, operands, workspace, queue, progress,
        [&](auto const& call, auto const&... views) { attention.forward(call, views...); });
}

/// Step 4 backward. dq is overwritten; dk and dv, zeroed by the caller, are added to, item by item.
template <class T, class Attention>
void attend_backward(Attention const& attention, plan const& moves,
                     attend_operands<T> const& operands, std::span<std::byte> workspace,
                     typename Attention::space_type::queue queue = {},
                     progress_hook progress = {}) {
    static_assert(differentiable_attention_for<Attention, T> ||
                  explain_differentiable_attention<Attention, T>());
    detail::for_each_item_backward<typename Attention::space_type>(
        moves, operands, workspace, queue, progress,
        [&](auto const& call, auto const& views) { attention.backward(call, views); });
}

}  // namespace ulysses::inline ULYSSES_ABI
