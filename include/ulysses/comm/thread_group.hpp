#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/collectives.hpp>
#include <ulysses/comm/thread_fence.hpp>
#include <ulysses/comm/thread_post.hpp>
#include <ulysses/core/communicator.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

/// What the rank threads of one group share: a slot for each rank, the barrier, the groups split off.
namespace ulysses::inline ULYSSES_ABI::threads {

/// Makes a rank's part of a window: so many bytes, aligned to 64, that go back when the last rank has
/// let go of them, on whichever thread that is. *Throws*, or returns null, when there is no memory.
using window_maker = std::function<std::shared_ptr<std::byte>(std::size_t bytes)>;

namespace detail {

/// One rank's part of a window, and the parts of all ranks: each handle keeps all parts alive, so
/// memory is freed when the last rank lets go, without any collective call.
struct window_parts {
    std::vector<std::shared_ptr<std::byte>> memory;
    std::size_t bytes = 0;
};

using ulysses::detail::collective;

struct group_state : std::enable_shared_from_this<group_state> {
    /// What a rank brings to a collective call.
    struct offer : ulysses::detail::collective_offer {
        std::byte* data = nullptr;  ///< where others read it, `bytes` of it
    };

    struct alignas(64) slot {
        /// Two offers in turn: a slow rank may still read the last call's while this one is
        /// written.
        offer offers[2];
        unsigned parity = 0;
        std::uint64_t calls = 0;
        std::atomic<bool> reading{false};  ///< this rank reads other ranks' data
        window_maker make_part;            ///< null: operator new
        std::shared_ptr<std::byte> memory;
        std::shared_ptr<group_state> child;
        std::vector<fence_status> seen;
        std::shared_ptr<window_parts const> shared[2];
    };

    group_state(int size, options const& given)
        : settings(given),
          barrier(size, given),
          post(size, barrier),
          slots(static_cast<std::size_t>(size)) {
        for (auto& s : slots) s.seen.resize(slots.size());
    }

    /// Fails the group and every group split from it.
    void fail(errc code, std::string const& text, int rank) {
        barrier.fail(code, text, rank);
        std::lock_guard lock(descendants_mutex);
        for (auto const& weak : descendants)
            if (auto const part = weak.lock()) part->barrier.fail(code, text, rank);
    }

    bool reach(int rank, int other) const {
        auto const& hosts = settings.hosts;
        return hosts.empty() ||
               hosts[static_cast<std::size_t>(rank)] == hosts[static_cast<std::size_t>(other)];
    }

    /// Waits in a failed group until nobody reads what a rank has shown: its caller may free it
    /// now.
    void await_readers() const {
        if (!barrier.failed()) return;
        for (auto const& s : slots)
            while (s.reading) std::this_thread::yield();
        post.await_readers();
    }

    /// A rank makes no further call here, nor in the groups that it is a member of by splits.
    void finish(int rank) {
        barrier.finish(rank);
        std::lock_guard lock(descendants_mutex);
        for (auto const& weak : descendants)
            if (auto const part = weak.lock()) part->finish_ancestor(this, rank);
    }

    /// Made by a split of `parent`.
    void descend_from(std::shared_ptr<group_state> const& parent,
                      ulysses::detail::split_members const& members) {
        for (auto const& each : parent->ancestors) {
            ancestors.push_back({each.group, each.address, {}});
            for (int r = 0; r < members.size(); ++r)
                ancestors.back().ranks.push_back(
                    each.ranks[static_cast<std::size_t>(members.old_rank(r))]);
        }
        ancestors.push_back({parent, parent.get(), {}});
        for (int r = 0; r < members.size(); ++r)
            ancestors.back().ranks.push_back(members.old_rank(r));
        for (auto const& each : ancestors)
            if (auto const group = each.group.lock()) group->adopt(shared_from_this());
    }

    void finish_ancestor(group_state const* group, int rank) {
        for (auto const& each : ancestors)
            for (std::size_t mine = 0; each.address == group && mine < each.ranks.size(); ++mine)
                if (each.ranks[mine] == rank) barrier.finish(static_cast<int>(mine));
    }

    /// Lets failures of this group reach one that was split from it or from its parts: directly,
    /// for a group in between may be gone by then.
    void adopt(std::shared_ptr<group_state> const& descendant) {
        std::lock_guard lock(descendants_mutex);
        std::erase_if(descendants, [](auto const& weak) { return weak.expired(); });
        descendants.push_back(descendant);
    }

    options settings;
    breakable_barrier barrier;
    thread_post post;
    std::vector<slot> slots;
    /// A group that this one was split from, and the ranks that its members have there.
    struct ancestor {
        std::weak_ptr<group_state> group;
        group_state const* address;
        std::vector<int> ranks;
    };
    std::vector<ancestor> ancestors;
    std::mutex descendants_mutex;
    std::vector<std::weak_ptr<group_state>> descendants;
};

}  // namespace detail

}  // namespace ulysses::inline ULYSSES_ABI::threads
