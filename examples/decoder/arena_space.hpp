#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "sharded.hpp"

#include <array>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

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

// All that meets in a pipeline names the same space.
// [snippet names]
template <class Kernel>
struct InArena : Kernel {
    using space_type = ArenaSpace;
};
struct ArenaSteps {
    using space_type = ArenaSpace;
};
struct ArenaHeads : engine::Heads {};
// [/snippet]

/// Ranks whose windows lie in the arenas of their workers. `table`, one for the group, is where
/// they show each other their parts.
// [snippet ranks]
class ArenaRanks : public ulysses::threads::communicator {
   public:
    using space_type = ArenaSpace;
    using Parts = std::vector<std::shared_ptr<std::byte>>;  // of every rank
    struct Window {
        Parts parts;
        std::size_t bytes;
    };
    using window_type = std::shared_ptr<Window const>;

    ArenaRanks(ulysses::threads::communicator ranks, engine::Arena& arena,
               std::shared_ptr<Parts> table)
        : communicator(ranks), arena_(&arena), table_(std::move(table)) {}

    ArenaSpace::queue queue() const { return {{}, arena_}; }

    window_type make_window(std::size_t bytes) const {
        auto& mine = (*table_)[static_cast<std::size_t>(rank())];
        mine = {static_cast<std::byte*>(arena_->take(bytes)),
                [arena = arena_, bytes](std::byte* part) { arena->give_back(part, bytes); }};
        fence({.call = begin_call()});
        auto const window = std::make_shared<Window const>(Window{*table_, bytes});
        fence({.call = begin_call()});
        mine.reset();
        return window;
    }
    window_type shared_window(ulysses::arena which, std::size_t bytes) const {
        auto& window = (*shared_)[static_cast<std::size_t>(which)];
        if (!window || window->bytes < bytes) window = make_window(bytes);
        return window;
    }
    std::size_t shared_window_bytes(ulysses::arena which) const {
        auto const& window = (*shared_)[static_cast<std::size_t>(which)];
        return window ? window->bytes : 0;
    }
    std::byte* address(window_type const& window, int rank) const {
        return window->parts[static_cast<std::size_t>(rank)].get();
    }

   private:
    engine::Arena* arena_;
    std::shared_ptr<Parts> table_;
    std::shared_ptr<std::array<window_type, 2>> shared_ =
        std::make_shared<std::array<window_type, 2>>();
};
// [/snippet]
static_assert(ulysses::reaches_memory<ArenaRanks>);

template <class Kernel>
using ArenaAttention = Attention<InArena<Kernel>, ArenaRanks, ArenaSteps, ArenaHeads>;

}  // namespace sharded

template <>
struct ulysses::tensor_traits<sharded::ArenaHeads> : ulysses::tensor_traits<engine::Heads> {
    using space_type = sharded::ArenaSpace;
};
