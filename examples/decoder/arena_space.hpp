#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "sharded.hpp"

#include <cstddef>
#include <memory>

/// The library's memory out of the engine's arenas: scratch, contexts and windows of a rank lie in
/// the arena of its worker, and are counted there. Optional; sharded.hpp does without.
namespace sharded {

// Where data lives is the host; whose memory it is, the queue says.
// [snippet space]
struct ArenaSpace : ulysses::host_space {
    struct queue : ulysses::host_space::queue {
        engine::Arena* arena = nullptr;
    };
    static void* allocate(queue from, std::size_t bytes) { return from.arena->take(bytes); }
    static void deallocate(queue to, void* memory, std::size_t bytes) {
        to.arena->give_back(memory, bytes);
    }
};
// [/snippet]
static_assert(ulysses::space<ArenaSpace>);

/// Ranks whose windows and scratch memory lie in the arenas of their workers.
// [snippet ranks]
class ArenaRanks : public ulysses::threads::communicator {
   public:
    using space_type = ArenaSpace;

    ArenaRanks(ulysses::threads::communicator ranks, engine::Arena& arena)
        : communicator(ranks), arena_(&arena) {
        set_window_maker([&arena](std::size_t bytes) {
            return std::shared_ptr<std::byte>(
                static_cast<std::byte*>(arena.take(bytes)),
                [&arena, bytes](std::byte* part) { arena.give_back(part, bytes); });
        });
    }
    ArenaSpace::queue queue() const { return {{}, arena_}; }

   private:
    engine::Arena* arena_;
};
// [/snippet]
static_assert(ulysses::reaches_memory<ArenaRanks>);

}  // namespace sharded
