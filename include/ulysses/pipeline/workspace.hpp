#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/tensor_view.hpp>
#include <ulysses/exchange/regions.hpp>
#include <ulysses/pipeline/call_windows.hpp>
#include <ulysses/pipeline/operands.hpp>
#include <ulysses/plan/plan.hpp>
#include <ulysses/stage/attend.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>

/// What memory the calls of a step need on a rank, beside operands and contexts.
namespace ulysses::inline ULYSSES_ABI {

/// Bytes by what they are for.
struct workspace_use {
    std::size_t inbox = 0, outbox = 0;  ///< of the group's windows, which its pipelines share
    std::size_t attention = 0;          ///< the functor's
    std::size_t messages = 0;           ///< to and from ranks that are not reached
    std::size_t scratch = 0;            ///< the pipeline's own

    std::size_t total() const { return inbox + outbox + attention + messages + scratch; }
};

/// Of the functor's workspace, which the work items of all chunks use in turn.
template <class T, class Attention>
std::size_t most_workspace_bytes(Attention const& attention, std::span<plan const> chunks) {
    std::size_t bytes = 0;
    for (auto const& moves : chunks)
        bytes = std::max(bytes, attend_workspace_bytes<T>(attention, moves));
    return bytes;
}

/// Of log-sum-exps: of all chunks where they are kept, else of the largest.
template <class T>
std::size_t lse_bytes(std::span<plan const> chunks, bool kept) {
    std::int64_t rows = 0;
    for (auto const& moves : chunks)
        rows = std::max(rows, (kept ? moves.chunk().first_query_row : 0) + moves.own_query_rows());
    return static_cast<std::size_t>(rows) * sizeof(accumulator_t<T>);
}

/// Bytes that one exchange moves for each row of queries, of outputs and of keys.
struct bytes_of_rows {
    std::int64_t query = 0, output = 0, key = 0;

    template <class T>
    static bytes_of_rows forward_to_heads(shape const& layer) {
        constexpr std::int64_t size = sizeof(T);
        return {layer.head_dim * size, 0, (layer.head_dim + layer.value_dim) * size};
    }
    template <class T>
    static bytes_of_rows forward_to_tokens(shape const& layer) {
        return {0, layer.value_dim * static_cast<std::int64_t>(sizeof(T)), 0};
    }
    /// With what the context did not keep.
    template <class T>
    static bytes_of_rows backward_to_heads(shape const& layer) {
        auto const output = forward_to_tokens<T>(layer).output;
        if (layer.keep == keep::exchanged) return {0, output, 0};
        auto again = forward_to_heads<T>(layer);
        // o goes the way of q.
        if (layer.keep == keep::local) again.query += output;
        return {again.query, output, again.key};
    }
    template <class T>
    static bytes_of_rows backward_to_tokens(shape const& layer, bool six_steps) {
        constexpr std::int64_t size = sizeof(T), wide = sizeof(accumulator_t<T>);
        auto const o = six_steps && layer.keep == keep::nothing ? layer.value_dim : 0;
        return {layer.head_dim * size, o * size, (layer.head_dim + layer.value_dim) * wide};
    }
};

/// The memory for messages of one exchange object, which its exchanges use in turn.
struct message_use {
    std::size_t out = 0, in = 0;

    /// An exchange to the ranks of the heads, or back from them.
    template <class SendsTo>
    void add(plan const& moves, bytes_of_rows const& each, bool to_heads, SendsTo const& sends_to) {
        std::size_t to = 0, from = 0;
        for (int peer = 0; peer < moves.ranks(); ++peer) {
            if (!sends_to(peer)) continue;
            auto const& rows = moves.rows(peer);
            to += whole_lines(rows.queries_to * each.query + rows.outputs_to * each.output +
                              rows.keys_to * each.key);
            from += whole_lines(rows.queries_from * each.query + rows.outputs_from * each.output +
                                rows.keys_from * each.key);
        }
        out = std::max(out, to_heads ? to : from);
        in = std::max(in, to_heads ? from : to);
    }

   private:
    static std::size_t whole_lines(std::int64_t bytes) {
        constexpr std::int64_t line_bytes = 64;
        return static_cast<std::size_t>((bytes + line_bytes - 1) / line_bytes * line_bytes);
    }
};

/// Memory for messages of the passes of a step; `sends_to(peer)` says to whom they go.
template <class T, class SendsTo>
std::size_t message_bytes(std::span<plan const> chunks, bool backward, bool six_steps,
                          SendsTo const& sends_to) {
    auto const& layer = chunks[0].layer();
    message_use forth, back;
    for (std::size_t c = 0; c < chunks.size(); ++c) {
        // As in chunk_schedule.
        auto& arriving = layer.overlap && c == 0 ? back : forth;
        auto& returning = layer.overlap ? back : forth;
        auto const add = [&](bytes_of_rows const& to_heads, bytes_of_rows const& to_tokens) {
            arriving.add(chunks[c], to_heads, true, sends_to);
            returning.add(chunks[c], to_tokens, false, sends_to);
        };
        add(bytes_of_rows::forward_to_heads<T>(layer), bytes_of_rows::forward_to_tokens<T>(layer));
        if (backward)
            add(bytes_of_rows::backward_to_heads<T>(layer),
                bytes_of_rows::backward_to_tokens<T>(layer, six_steps));
    }
    return forth.out + forth.in + back.out + back.in;
}

/// Of the passes of a step whose operands are exchanged, forward and backward if the functor has
/// it.
template <class T, class Attention, class SendsTo>
workspace_use exchanged_use(Attention const& attention, std::span<plan const> chunks,
                            bool six_steps, SendsTo const& sends_to) {
    constexpr auto backward = differentiable_attention_for<Attention, T>;
    workspace_use use;
    use.attention = most_workspace_bytes<T>(attention, chunks);
    use.scratch = lse_bytes<T>(chunks, false);
    use.messages = message_bytes<T>(chunks, backward, six_steps, sends_to);
    auto const add = [&](window_slots const& slots) {
        use.inbox = std::max(use.inbox, slots.inbox());
        use.outbox = std::max(use.outbox, slots.outbox());
    };
    add(window_slots::of<forward_regions, T>(chunks, shared_slots(chunks[0])));
    if (backward) add(window_slots::of<backward_regions, T>(chunks, shared_slots(chunks[0])));
    return use;
}

/// Of those that run in place: o that is computed again, gradients of keys that are rounded at the
/// end.
template <class T, class Layout, class Attention>
workspace_use in_place_use(Attention const& attention, plan const& moves, bool six_steps) {
    auto const& layer = moves.layer();
    workspace_use use;
    use.attention = most_workspace_bytes<T>(attention, {&moves, 1});
    use.scratch = lse_bytes<T>({&moves, 1}, false);
    if (!differentiable_attention_for<Attention, T>) return use;
    auto const elements = [](extents4 const& extents) {
        return static_cast<std::size_t>(tensor_view<T, Layout>(nullptr, extents).size());
    };
    if (layer.keep == keep::nothing && !six_steps)
        use.scratch += elements(query_extents<Layout>(moves, layer.value_dim)) * sizeof(T);
    if (!std::is_same_v<T, accumulator_t<T>>)
        for (auto const dim : {layer.head_dim, layer.value_dim})
            use.scratch += elements(key_extents<Layout>(moves, dim)) * sizeof(accumulator_t<T>);
    return use;
}

/// Calls `use(std::type_identity<T>)` for the elements `type`; nothing for those that the functor
/// does not take.
template <class Attention, class Use>
std::optional<workspace_use> use_of_elements(dtype type, Use const& use) {
    auto const of = [&]<class T>(std::type_identity<T> element) -> std::optional<workspace_use> {
        if constexpr (attention_for<Attention, T>)
            return use(element);
        else
            return {};
    };
    switch (type) {
        case dtype::f64: return of(std::type_identity<double>{});
        case dtype::f32: return of(std::type_identity<float>{});
        case dtype::f16: return of(std::type_identity<half>{});
        case dtype::bf16: return of(std::type_identity<bf16>{});
        case dtype::none: break;
    }
    return {};
}

}  // namespace ulysses::inline ULYSSES_ABI
