#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/core/communicator.hpp>
#include <ulysses/core/observer.hpp>
#include <ulysses/core/projection.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/tensor.hpp>

#include <concepts>
#include <type_traits>

/// Why a type does not fit, one sentence for each broken clause. Concepts stay friendly to overload
/// resolution; where a user's type enters, the false branch calls one of these.
namespace ulysses::inline ULYSSES_ABI {

template <class C>
consteval bool explain_communicator() {
    static_assert(std::copyable<C>, "ulysses: a communicator must be a copyable handle.");
    static_assert(
        requires { typename C::space_type; },
        "ulysses: a communicator must name the memory it moves as its member type `space_type`.");
    static_assert(
        requires(C const& c) {
            { c.rank() } -> std::same_as<int>;
            requires noexcept(c.rank());
        },
        "ulysses: a communicator must have a const noexcept member `int rank()`.");
    static_assert(
        requires(C const& c) {
            { c.size() } -> std::same_as<int>;
            requires noexcept(c.size());
        },
        "ulysses: a communicator must have a const noexcept member `int size()`.");
    static_assert(
        requires(C const& c) {
            { c.begin_call() } -> std::same_as<std::uint64_t>;
        },
        "ulysses: a communicator must count calls in a const member `std::uint64_t begin_call()`.");
    static_assert(
        requires(C const& c, fence_status const& s) { c.fence(s); },
        "ulysses: a communicator must have a const collective member `fence(fence_status "
        "const&)`.");
    return false;
}

template <class C>
consteval bool explain_reach() {
    if constexpr (!communicator<C>) return explain_communicator<C>();
    static_assert(
        requires { requires std::copyable<typename C::window_type>; },
        "ulysses: a communicator whose ranks reach each other's memory must name its window handle "
        "as "
        "the copyable member type `window_type`.");
    static_assert(
        requires(C const& c, std::size_t n) { c.make_window(n); },
        "ulysses: a communicator whose ranks reach each other's memory must have a collective "
        "member "
        "`window_type make_window(std::size_t bytes)`.");
    static_assert(
        requires(C const& c, std::size_t n) { c.shared_window(arena::inbox, n); },
        "ulysses: a communicator whose ranks reach each other's memory must have a collective "
        "member "
        "`window_type shared_window(arena, std::size_t bytes)`.");
    static_assert(
        requires(C const& c) {
            { c.shared_window_bytes(arena::inbox) } -> std::same_as<std::size_t>;
        },
        "ulysses: a communicator whose ranks reach each other's memory must have a member "
        "`std::size_t shared_window_bytes(arena)`.");
    static_assert(
        requires(C const& c, typename C::window_type const& w) {
            { c.address(w, 0) } -> std::same_as<std::byte*>;
        },
        "ulysses: a communicator whose ranks reach each other's memory must have a member "
        "`std::byte* address(window_type const&, int rank)`.");
    return false;
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
        requires(A const& a, attention_call const& c, head_view<T const> in, head_view<T> out,
                 head_view<accumulator_t<T>> lse) { a.forward(c, in, in, in, out, lse); },
        "ulysses: an attention functor must have a const member `forward(attention_call, q, k, v, "
        "o, lse)` "
        "over head_local views of the operands' element type.");
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

template <class X>
consteval bool explain_tensor() {
    static_assert(
        detail::tensor_by_traits<X> || detail::tensor_by_members<X> || detail::tensor_by_mdspan<X>,
        "ulysses: a type becomes an operand by a specialisation of ulysses::tensor_traits with "
        "`data` and "
        "`extents`, by members `data()` and `extents()`, or by the interface of std::mdspan.");
    static_assert(
        tensor_like<X>,
        "ulysses: the elements of an operand must be double, float, ulysses::half or ulysses::bf16 "
        "(or a type for which ulysses::dtype_of is specialised).");
    return false;
}

/// Views that an attention functor must refuse: one of them is not head_local.
template <class... Views>
concept other_layout = (requires { typename Views::layout; } && ...) &&
                       !(std::same_as<typename Views::layout, head_local> && ...);

/// For functors, in an overload for `other_layout` views: says why they are refused.
template <class... Views>
consteval bool explain_layout() {
    static_assert((std::same_as<typename Views::layout, head_local> && ...),
                  "ulysses: attention accepts head_local views only; a sequence_local shard holds "
                  "a part of the "
                  "keys: exchange it first (pipeline::attend) or the result would be wrong.");
    return false;
}

template <class A, class B>
consteval bool same_space() {
    static_assert(std::same_as<A, B>, "ulysses: communicator, operands, attention and projection "
                                      "must live in the same space; two of "
                                      "their `space_type`s differ.");
    return true;
}

}  // namespace ulysses::inline ULYSSES_ABI
