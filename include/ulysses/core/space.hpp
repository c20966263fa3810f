#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/block.hpp>
#include <ulysses/core/number.hpp>

#include <concepts>
#include <cstddef>
#include <span>

namespace ulysses::inline ULYSSES_ABI {

/// One operand of a sum of rows; strides as in `block_copy`.
struct sum_source {
    std::byte const* rows = nullptr;
    std::array<std::int64_t, 3> strides{};
};

/// A sum of rows: `to = from[0] + from[1] + ...` in the order given, added in the source type's
/// accumulator and rounded once to the destination type. `from` points into a list that outlives the call;
/// `elements` counts one row.
struct block_sum {
    std::byte* to = nullptr;
    std::span<sum_source const> from{};  ///< empty: the rows are set to zero
    std::array<std::int64_t, 3> extents{};
    std::array<std::int64_t, 3> to_strides{};
    std::int64_t elements = 0;
};

/// Where data lives and how work on it is ordered.
///
/// Requirements, with the smallest conforming type in `tests/archetypes.hpp`:
/// 1. `queue` is a cheap copyable handle; every call below is ordered on the one it is given. The
///    host's queue is empty and its calls have finished when they return.
/// 2. `allocate(queue, bytes)` returns memory aligned to 64 bytes; `deallocate` takes it back.
/// 3. `copy(queue, blocks, group_bytes)` executes the blocks in any order; no two overlap.
///    `group_bytes` is what all ranks together move in the same exchange, for choosing how to
///    store.
/// 4. `add<To, From>(queue, sums)` executes the sums in any order; no two destinations overlap.
/// 5. It may have `expect_memory(call, name, first, last, at)`, which throws `invalid_tensor` unless
///    the bytes of the operand from `first` to `last` are its memory.
/// 6. It may have `records(queue)`: whether what the queue is given is kept to be run later, again and
///    again, with the memory that it names. Then `allocate` on it throws.
template <class S>
concept space = requires(typename S::queue queue, void* memory, std::size_t bytes,
                         std::span<block_copy const> blocks, std::span<block_sum const> sums) {
    requires std::copyable<typename S::queue>;
    { S::allocate(queue, bytes) } -> std::same_as<void*>;
    S::deallocate(queue, memory, bytes);
    S::copy(queue, blocks, bytes);
    S::template add<float, float>(queue, sums);
};

/// A call, such as `attention_call`, that a functor orders on a queue. Functors of the host, whose
/// calls have finished when they return, take the call alone.
template <class Call, class Space>
struct queued : Call {
    typename Space::queue queue{};
};

/// Host memory; defined in `space/host.hpp`.
struct host_space;

namespace detail {

template <class Call, class Functor>
struct functor_call {
    using type = Call;
};
template <class Call, class Functor>
    requires(!std::same_as<typename Functor::space_type, host_space>)
&&requires { typename Functor::space_type::queue; }
struct functor_call<Call, Functor> {
    using type = queued<Call, typename Functor::space_type>;
};

template <class Call>
struct space_of_call {
    using type = host_space;
};
template <class Call, class Space>
struct space_of_call<queued<Call, Space>> {
    using type = Space;
};

}  // namespace detail

/// `Call` as a functor is given it: on the queue of its space, and on the host alone.
template <class Call, class Functor>
using functor_call_t = typename detail::functor_call<Call, Functor>::type;

template <class Call>
using space_of_call_t = typename detail::space_of_call<Call>::type;

/// The queue that a functor's call is ordered on.
template <class Space, class Call>
typename Space::queue queue_of_call(Call const& call) {
    if constexpr (requires { call.queue; })
        return call.queue;
    else
        return {};
}

}  // namespace ulysses::inline ULYSSES_ABI
