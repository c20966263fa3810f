#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/number.hpp>
#include <ulysses/pipeline/workspace.hpp>
#include <ulysses/plan/plan.hpp>
#include <ulysses/plan/traffic.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace ulysses::inline ULYSSES_ABI {

constexpr std::size_t bytes_of(dtype type) {
    switch (type) {
        case dtype::f64: return 8;
        case dtype::f32: return 4;
        case dtype::f16:
        case dtype::bf16: return 2;
        case dtype::none: break;
    }
    return 0;
}

inline std::string text_of(window const& w) {
    if (w == window{}) return {};
    auto const side = [](std::int64_t keys) {
        return keys < 0 ? std::string("all") : std::to_string(keys);
    };
    return concat(", window ", side(w.left), " left, ", side(w.right), " right");
}

/// What is done to a layer's scores beside the mask.
inline std::string text_of_logits(shape const& layer) {
    auto const number = [](term which, real value) {
        return text_of(which, static_cast<std::int64_t>(value.bits));
    };
    std::string text;
    if (layer.logits.softcap != real{})
        text += concat(", softcap ", number(term::softcap, layer.logits.softcap));
    if (layer.logits.bias) text += ", bias";
    if (layer.logits.alibi) text += ", alibi";
    if (layer.logits.sinks) text += ", sinks";
    if (layer.dropout != real{}) text += concat(", dropout ", number(term::dropout, layer.dropout));
    return text;
}

/// The text behind `pipeline::describe`: one line a step, then the rank's items and its traffic.
inline std::string describe(std::span<plan const> chunks, std::string_view layout, dtype type,
                            bool exchanging, std::optional<workspace_use> const& memory) {
    auto const& moves = chunks[0];
    auto const& layer = moves.layer();
    auto const size = bytes_of(type);
    auto const accumulator = std::max<std::size_t>(size, 4);
    auto const exchange = exchanging ? "written into the ranks' inboxes in final layout"
                                     : "nothing moves: this rank holds its heads";
    auto const drain = exchanging ? "read from the ranks' outboxes in final layout"
                                  : "nothing moves: this rank holds its heads";
    auto text =
        concat("attention layer, rank ", moves.rank(), " of ", moves.ranks(), ", ", layout,
               " operands, ", name(type), "\n", "  heads ", layer.heads, " query, ", layer.kv_heads,
               " key-value; dim ", layer.head_dim, ", value dim ", layer.value_dim, "; ",
               layer.mask == mask::causal ? "causal" : "full", text_of(layer.window),
               layer.head_windows.empty() ? "" : ", a window for each head", text_of_logits(layer),
               "\n", "  batch ", moves.batch(), ", ", moves.queries(), " queries, ", moves.keys(),
               " keys; this rank's tokens: ", moves.own_queries(), "\n");
    if (moves.replicated_queries() > 0 || moves.replicated_keys() > 0)
        text += concat("  on every rank: ", moves.replicated_queries(), " of the queries, ",
                       moves.replicated_keys(), " of the keys\n");
    if (auto const documents = moves.visible().documents.size(); documents > 0)
        text += concat("  ", documents, " documents\n");
    if (chunks.size() > 1)
        text += concat("  ", chunks.size(), " chunks of heads, ",
                       layer.overlap ? "each exchanged while another is computed"
                                     : "one after the other",
                       "\n");
    auto const s = moves.own_queries(), t = moves.own_keys(), b = moves.batch();
    text += concat("  1 shard        [", b, ", ", s, ", C]\n");
    text += concat("  2 project_in   q [", b, ", ", s, ", ", layer.heads, ", ", layer.head_dim,
                   "], k [", b, ", ", t, ", ", layer.kv_heads, ", ", layer.head_dim, "], v [", b,
                   ", ", t, ", ", layer.kv_heads, ", ", layer.value_dim, "]\n");
    text += concat("  3 to_heads     ", exchange, "\n");
    std::size_t items = 0;
    for (auto const& chunk : chunks) items += chunk.items().size();
    text += concat("  4 attend       ", items, " work items\n");
    for (auto const& chunk : chunks)
        for (auto const& [work, query_row, key_row] : chunk.items())
            text +=
                concat("                 heads ", work.head_begin, "-", work.head_end,
                       " | key-value heads ", work.kv_begin, "-", work.kv_end, " | rows ",
                       work.row_begin, "-", work.row_end, " | keys ", work.key_begin, "-",
                       work.key_end, layer.head_windows.empty() ? "" : text_of(work.window), "\n");
    text += concat("  5 to_tokens    ", drain, "\n");
    text += concat("  6 project_out  [", b, ", ", s, ", C]\n");
    traffic forward, backward;
    if (exchanging)
        for (auto const& chunk : chunks) {
            forward += forward_traffic(chunk, size);
            backward += backward_traffic(chunk, size, accumulator);
        }
    text += concat("  bytes sent     forward ", forward.sent, ", backward ", backward.sent, "\n");
    text += concat("  bytes received forward ", forward.received, ", backward ", backward.received,
                   "\n");
    if (memory)
        text += concat("  workspace      ", memory->total(), " bytes: inbox ", memory->inbox,
                       ", outbox ", memory->outbox, ", attention ", memory->attention,
                       ", messages ", memory->messages, ", scratch ", memory->scratch, "\n");
    return text;
}

}  // namespace ulysses::inline ULYSSES_ABI
