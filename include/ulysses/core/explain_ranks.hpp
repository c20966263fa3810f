#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/space.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

/// Why a space or a communicator does not fit, one sentence for each broken clause; see explain.hpp.
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
        requires { requires std::semiregular<typename C::window_type>; },
        "ulysses: a communicator whose ranks reach each other's memory must name its window handle "
        "as "
        "the default-constructible, copyable member type `window_type`.");
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

/// For pipelines: a space's queues are told apart only where they hold something, and then the default
/// one is none to work on.
template <class C>
consteval bool queue_is_known() {
    static_assert(
        std::is_empty_v<typename C::space_type::queue> ||
            requires(C const& c) {
                { c.queue() } -> std::convertible_to<typename C::space_type::queue>;
            },
        "ulysses: where the `queue` of a communicator's space is not an empty type, the handle "
        "must "
        "have a const member `queue()` that returns the one to use.");
    return true;
}

/// True when what lives in `B` can be used with a communicator of `A`: equal spaces, or one derived
/// from the other, as an engine's space that allocates host memory in its own way is from
/// `host_space`.
template <class A, class B>
inline constexpr bool one_space = std::derived_from<A, B> || std::derived_from<B, A>;

/// For operands, and for functors, which also take the communicator's queue.
template <class A, class B>
consteval bool same_space() {
    static_assert(one_space<A, B>, "ulysses: communicator, operands, attention and projection must "
                                   "live in the same space; two of their `space_type`s differ.");
    return true;
}
template <class A, class B>
consteval bool runs_in_space() {
    if constexpr (one_space<A, B>)
        static_assert(std::derived_from<A, B>,
                      "ulysses: attention and projection run on the communicator's queue; their "
                      "`space_type` must be the communicator's or one that it derives from.");
    return same_space<A, B>();
}

}  // namespace ulysses::inline ULYSSES_ABI
