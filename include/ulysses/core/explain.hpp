#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/core/explain_ranks.hpp>
#include <ulysses/core/gemm.hpp>
#include <ulysses/core/layout.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/observer.hpp>
#include <ulysses/core/projection.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/tensor.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

/// Why a type does not fit, one sentence for each broken clause. Concepts stay friendly to overload
/// resolution; where a user's type enters, the false branch calls one of these.
///
///     static_assert(ulysses::reduces<C> || ulysses::explain_reduces<C>());
namespace ulysses::inline ULYSSES_ABI {

template <class L>
consteval bool explain_layout_policy() {
    static_assert(layout_policy<L>,
                  "ulysses: a layout policy is ulysses::sequence_local, ulysses::head_local or "
                  "ulysses::replicated; each is a move that the plan knows.");
    return false;
}

template <class G, class T>
consteval bool explain_gemm() {
    static_assert(
        requires { typename G::space_type; },
        "ulysses: a GEMM must name the memory it reads as its member type `space_type`.");
    static_assert(
        requires(G const& gemm, functor_call_t<gemm_call<T>, G> const& call) { gemm(call); },
        "ulysses: a GEMM must have a const call operator that takes a `gemm_call<T>` of the "
        "operands' element type.");
    static_assert(
        requires {
            { G::rows_independent } -> std::convertible_to<bool>;
        },
        "ulysses: a GEMM must say whether a row's bits depend on the number of rows in the call as "
        "`static constexpr bool rows_independent`.");
    return false;
}

/// True when the GEMM multiplies one of the element types; else explains with float.
template <class G>
consteval bool multiplies_some_element() {
    if constexpr (gemm_for<G, float> || gemm_for<G, double> || gemm_for<G, half> ||
                  gemm_for<G, bf16>)
        return true;
    else
        return explain_gemm<G, float>();
}

template <class A, class T>
consteval bool explain_attention() {
    static_assert(
        requires { typename A::space_type; }, "ulysses: an attention functor must name the memory "
                                              "it reads as its member type `space_type`.");
    static_assert(
        requires {
            { A::features } -> std::convertible_to<attention_features>;
        },
        "ulysses: an attention functor must declare what it can do as `static constexpr "
        "attention_features features`.");
    static_assert(
        requires(A const& a) {
            { a.row_multiple() } -> std::convertible_to<std::int64_t>;
        },
        "ulysses: an attention functor must say on which rows heads may be cut in a member "
        "`std::int64_t row_multiple()`.");
    static_assert(
        requires(A const& a, attention_extents const& e) {
            { a.template workspace_bytes<T>(e) } -> std::convertible_to<std::size_t>;
        },
        "ulysses: an attention functor must say what memory it needs in a member template "
        "`std::size_t workspace_bytes<T>(attention_extents const&)`.");
    static_assert(
        requires(A const& a, functor_call_t<attention_call, A> const& c, head_view<T const> in,
                 head_view<T> out,
                 head_view<accumulator_t<T>> lse) { a.forward(c, in, in, in, out, lse); },
        "ulysses: an attention functor must have a const member `forward(attention_call, q, k, v, "
        "o, lse)` over head_local views of the operands' element type; where its space has queues "
        "it is given a `queued<attention_call, space_type>`.");
    return false;
}

/// True when the functor takes one of the element types; else explains with float. (Not an `||`
/// with an explanation of float: g++ evaluates a consteval call that is never reached.)
template <class A>
consteval bool attends_some_element() {
    if constexpr (attention_for<A, float> || attention_for<A, double> || attention_for<A, half> ||
                  attention_for<A, bf16>)
        return true;
    else
        return explain_attention<A, float>();
}

template <class A, class T>
consteval bool explain_differentiable_attention() {
    if constexpr (!attention_for<A, T>) return explain_attention<A, T>();
    static_assert(differentiable_attention_for<A, T>,
                  "ulysses: backward needs an attention functor with a const member "
                  "`backward(attention_call, "
                  "attention_backward_views<T>)`.");
    return false;
}

/// True, or an explanation; a pipeline asks for no more before a call brings weights.
template <class Pr>
consteval bool explain_space_of_projection() {
    static_assert(
        requires { typename Pr::space_type; },
        "ulysses: a projection must name the memory it reads as its member type `space_type`.");
    return true;
}

template <class Pr, class T, class Weights>
consteval bool explain_projection() {
    explain_space_of_projection<Pr>();
    static_assert(
        requires(Pr const& projection, functor_call_t<projection_call, Pr> const& call,
                 token_view<T const> in, token_view<T> out, Weights const& weights) {
            projection.project_in(call, in, weights, out, out, out);
        },
        "ulysses: a projection must have a const member `project_in(projection_call, x, weights, "
        "q, k, v)` for these weights and token_views of the operands' element type (see "
        "ulysses::dense); a pipeline without a projection has `attend`.");
    static_assert(
        requires(Pr const& projection, functor_call_t<projection_call, Pr> const& call,
                 token_view<T const> in, token_view<T> out,
                 Weights const& weights) { projection.project_out(call, in, weights, out); },
        "ulysses: a projection must have a const member `project_out(projection_call, o, weights, "
        "y)` for these weights and token_views of the operands' element type (see ulysses::dense); "
        "a pipeline without a projection has `attend`.");
    return false;
}

template <class Pr, class T, class Weights, class Gradients>
consteval bool explain_differentiable_projection() {
    if constexpr (!projection_for<Pr, T, Weights>) return explain_projection<Pr, T, Weights>();
    static_assert(
        requires(Pr const& projection, functor_call_t<projection_call, Pr> const& call,
                 token_view<T const> in, token_view<T> out, Weights const& weights,
                 Gradients const& gradients) {
            projection.project_in_backward(call, in, weights, out, out, out, out, gradients);
        },
        "ulysses: backward needs a projection with a const member "
        "`project_in_backward(projection_call, x, weights, dq, dk, dv, dx, gradients)` for these "
        "weights and gradients (see ulysses::dense).");
    static_assert(
        requires(Pr const& projection, functor_call_t<projection_call, Pr> const& call,
                 token_view<T const> in, token_view<T> out, Weights const& weights) {
            projection.project_out_backward(call, weights, in, out);
        },
        "ulysses: backward needs a projection with a const member "
        "`project_out_backward(projection_call, weights, dy, dout)` for these weights (see "
        "ulysses::dense).");
    static_assert(
        requires(Pr const& projection, functor_call_t<projection_call, Pr> const& call,
                 token_view<T const> in, Gradients const& gradients) {
            projection.project_out_gradients(call, in, in, gradients);
        },
        "ulysses: backward needs a projection with a const member "
        "`project_out_gradients(projection_call, o, dy, gradients)` for these gradients (see "
        "ulysses::dense).");
    return false;
}

template <class O>
consteval bool explain_observer() {
    static_assert(std::copyable<O>,
                  "ulysses: an observer must be copyable: a pipeline holds it by value; let it "
                  "point to what it fills.");
    static_assert(
        requires(O & seen, step_id step) {
            { seen.begin(step) }
            noexcept;
        },
        "ulysses: an observer must have a noexcept member `begin(step_id)`.");
    static_assert(
        requires(O & seen, step_id step) {
            { seen.end(step) }
            noexcept;
        },
        "ulysses: an observer must have a noexcept member `end(step_id)`.");
    static_assert(
        requires(O & seen, std::size_t bytes) {
            { seen.moved(0, 0, bytes) }
            noexcept;
        },
        "ulysses: an observer must have a noexcept member `moved(int from, int to, std::size_t "
        "bytes)`.");
    static_assert(
        requires(O & seen) {
            { seen.fence() }
            noexcept;
        },
        "ulysses: an observer must have a noexcept member `fence()`.");
    static_assert(detail::observes_calls_or_not<O>,
                  "ulysses: an observer of whole calls must have both noexcept members "
                  "`begin(pass_kind)` and `end(pass_kind)`; one that has neither is not told.");
    return false;
}

/// Says the first thing that is wrong: what follows from it would only be noise.
template <class X>
consteval bool explain_tensor() {
    using namespace detail;
    constexpr bool by_traits = traits_name_access<X> || tensor_by_traits<X>;
    constexpr bool by_members = !by_traits && names_data<X> && names_extents<X>;
    if constexpr (!by_traits && !by_members && !tensor_by_mdspan<X>)
        static_assert(tensor_like<X>,
                      "ulysses: a type becomes an operand by a specialisation of "
                      "ulysses::tensor_traits with `data` and `extents`, by members `data()` and "
                      "`extents()`, or by the interface of std::mdspan.");
    else if constexpr ((by_traits && !data_by_traits<X>) || (by_members && !requires(X const& x) {
                           { x.data() } -> points;
                       }))
        static_assert(tensor_like<X>,
                      "ulysses: `data` of an operand (in its tensor_traits, or its member) takes "
                      "the tensor as const and returns a pointer to its elements, not to void.");
    else if constexpr ((by_traits && !extents_by_traits<X>) ||
                       (by_members && !requires(X const& x) {
                           { x.extents() } -> counted;
                       }))
        static_assert(tensor_like<X>,
                      "ulysses: `extents` of an operand (in its tensor_traits, or its member) "
                      "returns a list of integers with `size()` and `[]`, as std::array, std::span "
                      "and std::vector are.");
    else if constexpr (traits_misname<X>)
        static_assert(tensor_like<X>,
                      "ulysses: tensor_traits has `data`, `extents`, `strides`, `order` and "
                      "`space_type`; a member `stride`, `strides_`, `axis_order`, `layout` or "
                      "`space` is never looked at, and the tensor would be read wrongly.");
    else if constexpr (!strides_fit<X>)
        static_assert(tensor_like<X>,
                      "ulysses: `strides` of an operand (in its tensor_traits, or its member "
                      "`strides()`) returns a list of integers with `[]`, one in elements for each "
                      "axis, not a single number; only a packed tensor leaves it out.");
    else if constexpr (!order_fits<X>)
        static_assert(tensor_like<X>,
                      "ulysses: `order` of an operand is a `static constexpr ulysses::axes`.");
    else if constexpr (!space_fits<X>)
        static_assert(tensor_like<X>, "ulysses: `space_type` of an operand is a type.");
    else
        static_assert(tensor_like<X>,
                      "ulysses: the elements of an operand must be double, float, ulysses::half or "
                      "ulysses::bf16 (or a type for which ulysses::dtype_of is specialised).");
    return false;
}

/// Views that a stage or functor for `Layout` must refuse: one of them names another layout.
template <class Layout, class... Views>
concept other_layout_than = (requires { typename Views::layout; } && ...) &&
                            !(std::same_as<typename Views::layout, Layout> && ...);

/// Views that an attention functor must refuse: one of them is not head_local.
template <class... Views>
concept other_layout = other_layout_than<head_local, Views...>;

/// For functors, in an overload for `other_layout` views: says why they are refused.
template <class... Views>
consteval bool explain_layout() {
    static_assert((std::same_as<typename Views::layout, head_local> && ...),
                  "ulysses: attention accepts head_local views only; a sequence_local shard holds "
                  "a part of the "
                  "keys: exchange it first (pipeline::attend) or the result would be wrong.");
    return false;
}

/// For the stages around a projection, in an overload for views of another layout.
template <class... Views>
consteval bool explain_projection_layout() {
    static_assert((std::same_as<typename Views::layout, sequence_local> && ...),
                  "ulysses: a projection accepts sequence_local views only: it is local to a "
                  "rank's tokens; a head_local view holds all tokens of some heads.");
    return false;
}

/// For the exchanging stages, in an overload for views of another layout.
template <class... Views>
consteval bool explain_exchange_layout() {
    static_assert((std::same_as<typename Views::layout, sequence_local> && ...),
                  "ulysses: to_heads and to_tokens take a rank's own tokens, sequence_local views; "
                  "a head_local view already holds what they bring together.");
    return false;
}

}  // namespace ulysses::inline ULYSSES_ABI
