#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/core/communicator.hpp>
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

template <class S>
consteval bool explain_space() {
    if constexpr (requires { requires std::copyable<typename S::queue>; }) {
        using queue = typename S::queue;
        static_assert(
            requires(queue q, std::size_t n) {
                { S::allocate(q, n) } -> std::same_as<void*>;
            },
            "ulysses: a space must have a static member `void* allocate(queue, std::size_t "
            "bytes)`.");
        static_assert(
            requires(queue q, void* memory, std::size_t n) { S::deallocate(q, memory, n); },
            "ulysses: a space must have a static member `deallocate(queue, void* memory, "
            "std::size_t bytes)`.");
        static_assert(
            requires(queue q, std::span<block_copy const> blocks, std::size_t n) {
                S::copy(q, blocks, n);
            },
            "ulysses: a space must have a static member `copy(queue, std::span<block_copy const>, "
            "std::size_t group_bytes)`.");
        static_assert(
            requires(queue q, std::span<block_sum const> sums) {
                S::template add<float, float>(q, sums);
            },
            "ulysses: a space must have a static member template `add<To, From>(queue, "
            "std::span<block_sum const>)`.");
    } else {
        static_assert(
            requires { requires std::copyable<typename S::queue>; },
            "ulysses: a space must name what orders its work as the copyable member type `queue`.");
    }
    return false;
}

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

template <class C>
consteval bool explain_gathers() {
    if constexpr (!communicator<C>) return explain_communicator<C>();
    static_assert(
        requires(C const& c, std::span<std::byte const> mine, std::span<std::byte> all) {
            c.all_gather(mine, all);
        },
        "ulysses: a communicator that gathers must have a const collective member "
        "`all_gather(std::span<std::byte const> mine, std::span<std::byte> all)`.");
    static_assert(
        requires(C const& c, std::span<std::byte> data) { c.broadcast(data, 0); },
        "ulysses: a communicator that gathers must have a const collective member "
        "`broadcast(std::span<std::byte> data, int root)`.");
    return false;
}

template <class C>
consteval bool explain_reduces() {
    if constexpr (!communicator<C>) return explain_communicator<C>();
    static_assert(
        requires(C const& c, std::span<float> values) { c.all_reduce(values, reduction::sum); },
        "ulysses: a communicator that reduces must have a const collective member "
        "`all_reduce(std::span<float>, reduction)`.");
    static_assert(
        requires(C const& c, std::span<double> values) { c.all_reduce(values, reduction::sum); },
        "ulysses: a communicator that reduces must have a const collective member "
        "`all_reduce(std::span<double>, reduction)`.");
    static_assert(
        requires(C const& c, std::span<std::int64_t> values) {
            c.all_reduce(values, reduction::max);
        },
        "ulysses: a communicator that reduces must have a const collective member "
        "`all_reduce(std::span<std::int64_t>, reduction)`.");
    return false;
}

template <class C>
consteval bool explain_splits() {
    if constexpr (!communicator<C>) return explain_communicator<C>();
    static_assert(
        requires(C const& c) {
            { c.split(0, 0) } -> std::same_as<C>;
        },
        "ulysses: a communicator that splits must have a const collective member `split(int color, "
        "int key)` that returns a communicator of its own type.");
    return false;
}

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
        requires(G const& gemm, gemm_call<T> const& call) { gemm(call); },
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

/// True when the communicator sends messages or does not mean to, which it says by naming a ticket;
/// else explains.
template <class C>
consteval bool sends_messages_or_none() {
    if constexpr (requires { typename C::ticket_type; }) {
        static_assert(std::movable<typename C::ticket_type>,
                      "ulysses: a communicator's `ticket_type` must be movable.");
        static_assert(
            requires(C const& c, std::span<outgoing const> out, std::span<incoming const> in) {
                { c.start(out, in) } -> std::same_as<typename C::ticket_type>;
            },
            "ulysses: a communicator whose ranks send messages must have a const member "
            "`ticket_type start(std::span<outgoing const>, std::span<incoming const>)`.");
        static_assert(
            requires(C const& c, typename C::ticket_type ticket) { c.wait(std::move(ticket)); },
            "ulysses: a communicator whose ranks send messages must have a const member "
            "`wait(ticket_type)`.");
    }
    return true;
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
        requires(Pr const& projection, projection_call const& call, token_view<T const> in,
                 token_view<T> out, Weights const& weights) {
            projection.project_in(call, in, weights, out, out, out);
        },
        "ulysses: a projection must have a const member `project_in(projection_call, x, weights, "
        "q, k, v)` for these weights and token_views of the operands' element type (see "
        "ulysses::dense); a pipeline without a projection has `attend`.");
    static_assert(
        requires(Pr const& projection, projection_call const& call, token_view<T const> in,
                 token_view<T> out,
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
        requires(Pr const& projection, projection_call const& call, token_view<T const> in,
                 token_view<T> out, Weights const& weights, Gradients const& gradients) {
            projection.project_in_backward(call, in, weights, out, out, out, out, gradients);
        },
        "ulysses: backward needs a projection with a const member "
        "`project_in_backward(projection_call, x, weights, dq, dk, dv, dx, gradients)` for these "
        "weights and gradients (see ulysses::dense).");
    static_assert(
        requires(Pr const& projection, projection_call const& call, token_view<T const> in,
                 token_view<T> out, Weights const& weights) {
            projection.project_out_backward(call, weights, in, out);
        },
        "ulysses: backward needs a projection with a const member "
        "`project_out_backward(projection_call, weights, dy, dout)` for these weights (see "
        "ulysses::dense).");
    static_assert(
        requires(Pr const& projection, projection_call const& call, token_view<T const> in,
                 Gradients const& gradients) {
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

template <class A, class B>
consteval bool same_space() {
    static_assert(std::same_as<A, B>, "ulysses: communicator, operands, attention and projection "
                                      "must live in the same space; two of "
                                      "their `space_type`s differ.");
    return true;
}

}  // namespace ulysses::inline ULYSSES_ABI
