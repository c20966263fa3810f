#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/plan/plan.hpp>

#include <algorithm>
#include <cstdint>
#include <string_view>

/// Does the attention functor have what the layer asks for: at compile time for a fixed shape, at
/// construction for any.
namespace ulysses::inline ULYSSES_ABI {

/// One sentence for each rule that a fixed shape breaks and each feature that the functor lacks.
template <class Shape, class Attention>
consteval bool fixed_shape_fits() {
    static_assert(detail::broken_rule(Shape::value).empty(),
                  "ulysses: a fixed shape must have heads and head_dim of at least 1, and kv_heads "
                  "that divide heads.");
    constexpr auto layer = detail::completed(Shape::value);
    constexpr attention_features has = Attention::features;
    static_assert(layer.kind == mixer::softmax_attention,
                  "ulysses: a layer that carries a state along the sequence is not supported; only "
                  "softmax attention is.");
    static_assert(has.causal || layer.mask != mask::causal,
                  "ulysses: the attention functor has no causal mask.");
    static_assert(has.full || layer.mask != mask::full,
                  "ulysses: the attention functor has no full (bidirectional) attention.");
    static_assert(has.window || (layer.window == window{} && layer.head_windows.empty()),
                  "ulysses: the attention functor has no sliding window.");
    static_assert(has.grouped || layer.kv_heads == layer.heads,
                  "ulysses: the attention functor has no grouped key-value heads.");
    static_assert(has.value_dim || layer.value_dim == layer.head_dim,
                  "ulysses: the attention functor has no value_dim other than head_dim.");
    static_assert(has.softcap || layer.logits.softcap == real{},
                  "ulysses: the attention functor has no softcap.");
    static_assert(has.alibi || !layer.logits.alibi, "ulysses: the attention functor has no ALiBi.");
    static_assert(has.bias || !layer.logits.bias, "ulysses: the attention functor has no bias.");
    static_assert(has.sinks || !layer.logits.sinks,
                  "ulysses: the attention functor has no attention sinks.");
    static_assert(has.dropout || has.local_dropout || layer.dropout == real{},
                  "ulysses: the attention functor has no dropout.");
    return true;
}

/// *Throws* `unsupported` naming the feature that a completed shape, exchanged in its chunks, asks
/// of a functor without it.
template <class Attention>
void check_features(shape const& layer, int ranks, where at) {
    constexpr attention_features has = Attention::features;
    auto const need = [&](bool asked, bool present, std::string_view feature) {
        if (asked && !present)
            raise(errc::unsupported, at, "pipeline",
                  "the attention functor lacks a feature the layer asks for", feature);
    };
    if (layer.kind != mixer::softmax_attention)
        raise(errc::unsupported, at, "pipeline",
              "a layer must not carry a state along the sequence", name(layer.kind));
    need(layer.mask == mask::causal, has.causal, "causal");
    need(layer.mask == mask::full, has.full, "full");
    need(layer.window != window{} || !layer.head_windows.empty(), has.window, "window");
    need(layer.kv_heads != layer.heads, has.grouped, "grouped");
    need(layer.value_dim != layer.head_dim, has.value_dim, "value_dim");
    need(layer.logits.softcap != real{}, has.softcap, "softcap");
    need(layer.logits.alibi, has.alibi, "alibi");
    need(layer.logits.bias, has.bias, "bias");
    need(layer.logits.sinks, has.sinks, "sinks");
    need(layer.dropout != real{}, has.dropout || has.local_dropout, "dropout");
    need(layer.dropout != real{} && ranks > 1 && !layer.local_dropout_allowed, has.dropout,
         "dropout by global indices (its own drops others at another number of ranks; "
         "local_dropout_allowed takes it)");
    auto const cut = [&](std::int64_t chunk) {
        auto const kv_heads = head_chunk::of(layer, chunk).kv_heads.size();
        return kv_heads * (layer.heads / layer.kv_heads) % ranks != 0;
    };
    // The first chunk is as small as any, the last as large; heads of other windows weigh
    // differently.
    auto const cuts = !layer.head_windows.empty() || cut(0) || cut(layer.chunks - 1);
    need(layer.assignment == assignment::balanced && ranks > 1 && cuts, has.row_range,
         "row_range (or use assignment::whole_heads)");
}

/// *Throws* `unsupported` naming what a step asks of a functor that has not got it.
template <class Attention>
void check_step_features(plan const& moves, where at) {
    constexpr attention_features has = Attention::features;
    auto const need = [&](bool asked, bool present, std::string_view feature) {
        if (asked && !present)
            raise(errc::unsupported, at, "pipeline",
                  "the attention functor lacks a feature the step asks for", feature);
    };
    auto const& rule = moves.visible();
    need(!rule.documents.empty(), has.documents, "documents");
    need(std::any_of(rule.samples.begin(), rule.samples.end(),
                     [&](sample_keys const& own) {
                         return own.begin != 0 || own.end != rule.keys ||
                                own.position != rule.keys - rule.queries;
                     }),
         has.padding, "padding");
    need(!rule.present.empty(), has.holes, "holes");
    need(rule.mask == mask::causal && rule.queries != rule.keys, has.padding,
         "padding (a causal mask with queries that do not stand at the first keys)");
}

}  // namespace ulysses::inline ULYSSES_ABI
