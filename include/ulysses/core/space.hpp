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

}  // namespace ulysses::inline ULYSSES_ABI
