#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/fence.hpp>
#include <ulysses/core/guarded.hpp>
#include <ulysses/core/space.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

/// Communicators: one small concept per capability. A handle is cheap to copy, non-owning, and
/// names one rank of one group; a stage requires only the capabilities that it calls.
namespace ulysses::inline ULYSSES_ABI {

/// A group of ranks, seen from one of them.
///
/// Requirements:
/// 1. `rank()` in 0 .. size() - 1 and `size()` are cached and noexcept.
/// 2. `fence(status)` is collective. Memory written by a rank before it is visible to every rank
///    after it. Every rank leaves it with the verdict of all statuses (`throw_verdict`).
/// 3. `begin_call()` counts calls on this rank of the group and returns the new count. A fence brings
///    it to the largest count of any rank, so that ranks that fell out of step can go on.
/// 4. A handle may be copied; copies on one rank name the same group and share its call count.
/// 5. A handle may have a member `queue()`, see `queue_of`.
template <class C>
concept communicator = std::copyable<C> && requires(C const& ranks, fence_status const& status) {
    typename C::space_type;
    requires noexcept(ranks.rank());
    requires noexcept(ranks.size());
    { ranks.rank() } -> std::same_as<int>;
    { ranks.size() } -> std::same_as<int>;
    { ranks.begin_call() } -> std::same_as<std::uint64_t>;
    ranks.fence(status);
};

/// The queue that a pipeline's calls over this handle are ordered on: the handle's `queue()` where
/// it has one, else the space's own.
template <communicator C>
typename C::space_type::queue queue_of(C const& ranks) {
    if constexpr (requires { ranks.queue(); })
        return ranks.queue();
    else
        return {};
}

/// Which of the two arenas a call uses: an inbox is written by peers and read by its owner, an
/// outbox is written by its owner and read by peers.
enum class arena : std::uint8_t { inbox, outbox };

/// A communicator whose ranks can address each other's memory, all or some of it.
///
/// Requirements:
/// 1. `make_window(bytes)` is collective with equal `bytes`: every rank contributes that much
///    memory, aligned to 64, and gets a cheap handle. The memory lives until every rank has dropped
///    its handle or closed the group.
/// 2. `shared_window(which, bytes)` is the group's own window of that kind, grown collectively
///    (equal `bytes` on every rank) when it is smaller. All pipelines on the group use it in turn.
///    `shared_window_bytes(which)` is its size, 0 before the first.
/// 3. `address(window, rank)` is where `rank`'s part lies for the caller, or null where it cannot
///    reach it: never for its own part, and for a peer only if the peer does not reach it either. Between
///    such ranks a communicator that also `sends_messages` has them sent.
template <class C>
concept reaches_memory = communicator<C> &&
    requires(C const& ranks, std::size_t bytes, typename C::window_type const& window) {
    requires std::semiregular<typename C::window_type>;
    { ranks.make_window(bytes) } -> std::same_as<typename C::window_type>;
    { ranks.shared_window(arena::inbox, bytes) } -> std::same_as<typename C::window_type>;
    { ranks.shared_window_bytes(arena::inbox) } -> std::same_as<std::size_t>;
    { ranks.address(window, 0) } -> std::same_as<std::byte*>;
};

/// Bytes that a peer is sent.
struct outgoing {
    int peer = 0;
    std::span<std::byte const> data{};
};
/// Memory for the bytes that a peer sends.
struct incoming {
    int peer = 0;
    std::span<std::byte> data{};
};

/// A communicator whose ranks send each other messages, for ranks that do not reach each other's
/// memory.
///
/// Requirements:
/// 1. `start(out, in)` begins a group of messages and returns a ticket, `wait(ticket)` returns when
///    what was to be received is there and what was sent may be overwritten. The lists are read by
///    `start` alone; the memory that they name is untouched by the caller until `wait` has returned
///    or thrown. A rank makes no other collective call between the two, but may start more groups.
/// 2. A message has any number of bytes, 2^31 and more included. At most one message a peer and list;
///    those from one rank to another are matched in the order in which they were started, and their
///    sizes must agree.
/// 3. A rank that fails or is silent releases those who wait for it, as at a fence.
/// 4. A steady state allocates nothing.
template <class C>
concept sends_messages = communicator<C> &&
    requires(C const& ranks, std::span<outgoing const> out, std::span<incoming const> in,
             typename C::ticket_type ticket) {
    requires std::movable<typename C::ticket_type>;
    { ranks.start(out, in) } -> std::same_as<typename C::ticket_type>;
    ranks.wait(std::move(ticket));
};

/// A communicator that a rank can leave: `leave(text)` makes what the other ranks wait for, or call
/// next, end with `peer_failed` and the text. Not collective, noexcept in effect: never waits.
template <class C>
concept can_leave = communicator<C> && requires(C const& ranks, std::string_view text) {
    ranks.leave(text);
};

/// How `all_reduce` combines two numbers.
enum class reduction : std::uint8_t { sum, min, max };

/// `all_reduce(values, op)`: every rank gets the element-wise result over all ranks, combined in
/// rank order, the same bits everywhere. In place; equal counts on every rank.
template <class C>
concept reduces = communicator<C> &&
    requires(C const& ranks, std::span<float> f, std::span<double> d, std::span<std::int64_t> i) {
    ranks.all_reduce(f, reduction::sum);
    ranks.all_reduce(d, reduction::sum);
    ranks.all_reduce(i, reduction::max);
};

/// `all_gather(mine, all)`: `all` receives every rank's `mine` in rank order; all.size() is
/// size() * mine.size() bytes. `broadcast(data, root)`: every rank gets root's bytes.
///
/// It may have `all_gather(mine, all, status)` as well: a rank that cannot take part brings a status
/// that says why, and every rank throws the lowest failing rank's, as at a fence. `sequence::agree`
/// uses it where it is, so that a rank without memory fails all alike; without it, such a rank
/// leaves the group.
template <class C>
concept gathers = communicator<C> &&
    requires(C const& ranks, std::span<std::byte const> mine, std::span<std::byte> all) {
    ranks.all_gather(mine, all);
    ranks.broadcast(all, 0);
};

/// `split(color, key)`: collective; ranks of equal color form a new group, ordered by key, then
/// rank.
template <class C>
concept splits = communicator<C> && requires(C const& ranks) {
    { ranks.split(0, 0) } -> std::same_as<C>;
};

}  // namespace ulysses::inline ULYSSES_ABI
