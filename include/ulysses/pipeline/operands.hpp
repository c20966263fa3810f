#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/operand.hpp>
#include <ulysses/core/tensor.hpp>
#include <ulysses/plan/plan.hpp>

#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>

/// The operands of one call on one rank: what the plan expects of them, and the checks before
/// anything moves.
namespace ulysses::inline ULYSSES_ABI {

/// A rank's operands of one pass, as the layout policy lays them.
template <class T, class Layout>
struct local_operands {
    tensor_view<T const, Layout> q, k, v;  // [B, s, Hq, D], [B, s, Hkv, D], [B, s, Hkv, Dv]
    tensor_view<T, Layout> o;              // [B, s, Hq, Dv]
    tensor_view<T const, Layout> dout;     // o's
    tensor_view<T, Layout> dq, dk, dv;     // q's, k's, v's
    logit_inputs logits;                   // of all heads
    logit_gradients<accumulator_t<T>> dlogits;
};

/// `view_of_heads` of an operand of elements T. One that does not fit has been refused by a
/// sentence and becomes an empty view, so that nothing follows from it.
template <class T, class Layout, class X>
auto heads_of(X const& x, std::string_view name, where at) {
    if constexpr (requires { requires std::is_same_v<std::remove_cv_t<element_of_t<X>>, T>; })
        return view_of_heads<Layout>(x, name, at);
    else
        return tensor_view<T, Layout>{};
}
/// `view_of_tokens`, likewise.
template <class T, class X>
auto tokens_of(X const& x, std::string_view name, where at) {
    if constexpr (requires { requires std::is_same_v<std::remove_cv_t<element_of_t<X>>, T>; })
        return view_of_tokens<sequence_local>(x, name, at);
    else
        return token_view<T>{};
}

/// A packed operand in memory that grows to hold it.
template <class T, class Layout, class Space>
tensor_view<T, Layout> packed_in(buffer<Space>& memory, extents4 const& extents,
                                 typename Space::queue queue) {
    tensor_view<T, Layout> view(nullptr, extents);
    memory.reserve(static_cast<std::size_t>(view.size()) * sizeof(T), queue);
    view.data = reinterpret_cast<T*>(memory.data());
    return view;
}

/// Extents of an operand with query heads on the plan's rank, as the layout policy lays it.
template <class Layout>
extents4 query_extents(plan const& moves, std::int64_t dim) {
    if constexpr (std::is_same_v<Layout, head_local>) {
        auto const& items = moves.items();
        auto const heads =
            items.empty() ? 0 : items.back().work.head_end - items.front().work.head_begin;
        return {moves.batch(), moves.queries(), heads, dim};
    } else {
        return {moves.batch(), moves.own_queries(), moves.layer().heads, dim};
    }
}

/// Extents of an operand with key-value heads.
template <class Layout>
extents4 key_extents(plan const& moves, std::int64_t dim) {
    if constexpr (std::is_same_v<Layout, head_local>) {
        auto const& items = moves.items();
        auto const heads =
            items.empty() ? 0 : items.back().work.kv_end - items.front().work.kv_begin;
        return {moves.batch(), moves.step_keys(), heads, dim};
    } else {
        return {moves.batch(), moves.own_keys(), moves.layer().kv_heads, dim};
    }
}

/// *Throws* `invalid_tensor` unless a bias, or its gradient, has extents of 1 or of the whole
/// sequence.
inline void check_bias(plan const& moves, std::string_view call, std::string_view name,
                       bias_layout const& layout, where at) {
    extents4 const whole{moves.batch(), moves.layer().heads, moves.queries(), moves.keys()};
    auto const& [b, h, i, j] = layout.extents;
    for (std::size_t axis = 0; axis < 4; ++axis)
        if (layout.extents[axis] != 1 && layout.extents[axis] != whole[axis])
            raise(errc::invalid_tensor, at, call,
                  "a bias has the whole sequence's extents [B, Hq, Sq, Sk], or 1", name, " has [",
                  b, ", ", h, ", ", i, ", ", j, "], the step [", whole[0], ", ", whole[1], ", ",
                  whole[2], ", ", whole[3], "]");
}

/// Takes q, k and v, once they fit.
template <class T, class Layout, class Q, class K, class V>
void take_inputs(local_operands<T, Layout>& local, plan const& moves, std::string_view call,
                 Q const& q, K const& k, V const& v, where at) {
    auto const& layer = moves.layer();
    local.q = heads_of<T, Layout>(q, "q", at);
    local.k = heads_of<T, Layout>(k, "k", at);
    local.v = heads_of<T, Layout>(v, "v", at);
    check_operand(call, "q", local.q, query_extents<Layout>(moves, layer.head_dim), at);
    check_operand(call, "k", local.k, key_extents<Layout>(moves, layer.head_dim), at);
    check_operand(call, "v", local.v, key_extents<Layout>(moves, layer.value_dim), at);
}

/// Takes where `attend` puts o, once it fits and lies apart from q, k and v.
template <class T, class Layout, class O>
void take_output(local_operands<T, Layout>& local, plan const& moves, O const& o, where at) {
    local.o = heads_of<T, Layout>(o, "o", at);
    check_output("attend", "o", local.o, query_extents<Layout>(moves, moves.layer().value_dim), at);
    check_apart("attend", "o", local.o, "q", local.q, at);
    check_apart("attend", "o", local.o, "k", local.k, at);
    check_apart("attend", "o", local.o, "v", local.v, at);
}

/// Takes o of a forward call again, which is only read; where it is computed again, it only must
/// fit.
template <class T, class Layout, class O>
void take_output_again(local_operands<T, Layout>& local, plan const& moves, O const& o, where at) {
    auto const& layer = moves.layer();
    auto const given = heads_of<T, Layout>(o, "attend_backward: o", at);
    check_operand("attend_backward", "o", given, query_extents<Layout>(moves, layer.value_dim), at);
    if (layer.keep == keep::local)
        local.o = {const_cast<T*>(given.data), given.extents, given.strides};
}

/// Takes what a call brings for its layer's scores: all of what the layer asks for and nothing
/// else. `trains`: a backward will follow, or is this.
template <class T, class Layout>
void take_logits(local_operands<T, Layout>& local, plan const& moves, std::string_view call,
                 logit_inputs const& given, bool trains, where at) {
    auto const& layer = moves.layer();
    auto const both = [&](std::string_view what, bool asked, bool brought) {
        if (asked != brought)
            raise(errc::invalid_call, at, call,
                  "a call brings the logit inputs that its layer asks for", what,
                  asked ? ": the layer asks for it, the call has none"
                        : ": the call has it, the layer does not ask for it");
    };
    both("slopes", layer.logits.alibi, !given.slopes.empty());
    both("sinks", layer.logits.sinks, !given.sinks.empty());
    both("bias", layer.logits.bias, !given.bias.empty());
    if (given.dropout || trains)
        both("a dropout key", layer.dropout != real{}, given.dropout.has_value());
    auto const one_a_head = [&](std::string_view name, auto const& values) {
        if (!values.empty() && values.size() != layer.heads)
            raise(errc::invalid_tensor, at, call, "slopes and sinks have one number a query head",
                  name, " have ", values.size(), ", heads ", layer.heads);
    };
    one_a_head("slopes", given.slopes);
    one_a_head("sinks", given.sinks);
    local.logits = given;
    if (given.bias.empty()) return;
    check_bias(moves, call, "bias", given.bias.layout(), at);
    if (given.bias.data() == nullptr)
        raise(errc::invalid_tensor, at, concat(call, ": bias"), "data must not be null", "extents ",
              detail::text_of(given.bias.layout().extents));
}

/// Takes where a backward call adds the gradients of its logit inputs.
template <class T, class Layout>
void take_logit_gradients(local_operands<T, Layout>& local, plan const& moves,
                          std::string_view call, logit_gradients<accumulator_t<T>> const& wanted,
                          where at) {
    auto const& layer = moves.layer();
    auto const sinks = !wanted.sinks.empty() && !layer.logits.sinks;
    if (sinks || (!wanted.bias.empty() && !layer.logits.bias))
        raise(errc::invalid_call, at, call, "a gradient belongs to a logit input of the layer",
              sinks ? "of sinks" : "of a bias", ", the layer has none");
    if (!wanted.sinks.empty() && wanted.sinks.size() != static_cast<std::size_t>(layer.heads))
        raise(errc::invalid_tensor, at, call, "slopes and sinks have one number a query head",
              "the gradient of sinks has ", wanted.sinks.size(), ", heads ", layer.heads);
    if (!wanted.bias.empty()) check_bias(moves, call, "dbias", wanted.bias.layout(), at);
    local.dlogits = wanted;
}

/// Takes dO, dq, dk and dv, once they fit and lie apart from each other and from what was taken.
template <class T, class Layout, class DO, class DQ, class DK, class DV>
void take_gradients(local_operands<T, Layout>& local, plan const& moves, DO const& dout,
                    DQ const& dq, DK const& dk, DV const& dv, where at) {
    auto const& layer = moves.layer();
    constexpr std::string_view call = "attend_backward";
    local.dout = heads_of<T, Layout>(dout, "dout", at);
    local.dq = heads_of<T, Layout>(dq, "dq", at);
    local.dk = heads_of<T, Layout>(dk, "dk", at);
    local.dv = heads_of<T, Layout>(dv, "dv", at);
    check_operand(call, "dout", local.dout, query_extents<Layout>(moves, layer.value_dim), at);
    check_output(call, "dq", local.dq, query_extents<Layout>(moves, layer.head_dim), at);
    check_output(call, "dk", local.dk, key_extents<Layout>(moves, layer.head_dim), at);
    check_output(call, "dv", local.dv, key_extents<Layout>(moves, layer.value_dim), at);
    auto const apart = [&](std::string_view name, auto const& output, auto const& other_name,
                           auto const& other) {
        check_apart(call, name, output, other_name, other, at);
    };
    apart("dq", local.dq, "dout", local.dout);
    apart("dk", local.dk, "dout", local.dout);
    apart("dv", local.dv, "dout", local.dout);
    apart("dq", local.dq, "dk", local.dk);
    apart("dq", local.dq, "dv", local.dv);
    apart("dk", local.dk, "dv", local.dv);
    tensor_view<T const, Layout> const kept_o = local.o;
    auto const apart_from = [&](std::string_view name, auto const& input) {
        apart("dq", local.dq, name, input);
        apart("dk", local.dk, name, input);
        apart("dv", local.dv, name, input);
    };
    apart_from("q", local.q);
    apart_from("k", local.k);
    apart_from("v", local.v);
    apart_from("o", kept_o);
}

/// Checks that what was taken is memory of the space.
template <class Space, class T, class Layout>
void check_memory(std::string_view call, local_operands<T, Layout> const& local, where at) {
    auto const check = [&](std::string_view name, auto const& operand) {
        check_memory<Space>(call, name, operand, at);
    };
    check("q", local.q);
    check("k", local.k);
    check("v", local.v);
    check("dout", local.dout);
    check("o", local.o);
    check("dq", local.dq);
    check("dk", local.dk);
    check("dv", local.dv);
}

}  // namespace ulysses::inline ULYSSES_ABI
