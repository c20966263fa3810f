#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/collectives.hpp>
#include <ulysses/comm/host_window.hpp>
#include <ulysses/comm/thread_group.hpp>
#include <ulysses/core/communicator.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

namespace ulysses::inline ULYSSES_ABI::threads {

/// Handle to one rank of a group of threads.
///
/// *Thread safety*: a handle and its copies belong to the thread of their rank. All collective
/// calls must be made by every rank in the same order.
class communicator {
   public:
    using space_type = host_space;
    using window_type = std::shared_ptr<detail::window_parts const>;
    using ticket_type = detail::thread_post::ticket;

    communicator() = default;
    communicator(std::shared_ptr<detail::group_state> group, int rank)
        : group_(std::move(group)), rank_(rank), size_(static_cast<int>(group_->slots.size())) {}

    /// True for handles to the same rank of the same group.
    friend bool operator==(communicator const&, communicator const&) = default;

    int rank() const noexcept { return rank_; }
    int size() const noexcept { return size_; }
    std::uint64_t begin_call() const { return ++mine().calls; }

    /// *Blocking*: until every rank has arrived. *Throws* the verdict of all statuses;
    /// `peer_failed` when a rank has left the group; `timed_out` after the group's deadline.
    void fence(fence_status const& status) const {
        auto& mine_now = next_offer(detail::collective::fence);
        mine_now.status = status;
        meet();
        auto& slot = mine();
        for (int r = 0; r < size_; ++r) slot.seen[static_cast<std::size_t>(r)] = shown(r).status;
        throw_verdict(slot.seen);
    }

    window_type make_window(std::size_t bytes) const {
        state().barrier.expect_intact();
        auto& slot = mine();
        fence_status status;
        std::shared_ptr<detail::window_parts> parts;
        guarded(status, [&] {
            slot.memory =
                slot.make_part ? slot.make_part(bytes) : ulysses::detail::host_window_part(bytes);
            expect_part(slot.memory.get(), bytes);
            parts = std::make_shared<detail::window_parts>();
            parts->memory.resize(static_cast<std::size_t>(size_));
        });
        unless_shown const refused{slot};
        publish(detail::collective::make_window, {static_cast<std::byte*>(nullptr), bytes}, 0,
                status);
        refused.shown = true;
        for (int r = 0; r < size_; ++r) parts->memory[static_cast<std::size_t>(r)] = at(r).memory;
        parts->bytes = bytes;
        wait();
        slot.memory.reset();
        return parts;
    }

    /// This rank's parts of windows are made by `maker` from now on, in an engine's own memory; also
    /// in groups split from this one.
    void set_window_maker(window_maker maker) const { mine().make_part = std::move(maker); }

    window_type shared_window(arena which, std::size_t bytes) const {
        auto& window = mine().shared[static_cast<std::size_t>(which)];
        if (!window || window->bytes < bytes) window = make_window(bytes);
        return window;
    }

    /// Null for a rank of another host.
    std::byte* address(window_type const& window, int rank) const {
        if (!state().reach(rank_, rank)) return nullptr;
        return window->memory[static_cast<std::size_t>(rank)].get();
    }

    /// Bytes of this rank's part of a shared window, as large as any call has needed.
    std::size_t shared_window_bytes(arena which) const {
        auto const& window = mine().shared[static_cast<std::size_t>(which)];
        return window ? window->bytes : 0;
    }

    /// Lets go of the group's shared windows on this rank. On every rank between the same two calls:
    /// while only some have closed, a pipeline's call is a `disagreement` on all that says so.
    void close() const {
        for (auto& window : mine().shared) window.reset();
    }

    /// Begins messages, to ranks of any host. *Throws* `invalid_call` for a peer that is no rank.
    ticket_type start(std::span<outgoing const> out, std::span<incoming const> in) const {
        exposure const until_read{state()};
        return state().post.start(rank_, out, in);
    }

    /// *Blocking*: until all messages of the ticket have arrived at both ends. *Throws* as `fence`;
    /// `disagreement` on every rank when the two ends of a message name different sizes.
    void wait(ticket_type ticket) const {
        exposure const until_read{state()};
        state().post.wait(rank_, ticket);
    }

    /// *Shape*: `values` of one size on every rank; in place. Combined in rank order.
    template <class T>
        requires std::is_arithmetic_v<T>
    void all_reduce(std::span<T> values, reduction op) const {
        exposure const until_read{state()};
        publish(detail::collective::all_reduce, std::as_writable_bytes(values),
                ulysses::detail::reduction_argument<T>(op));
        // Rank r reduces the r-th chunk of every rank into its own; then all copy the chunks.
        auto const ranks = static_cast<std::size_t>(size_);
        auto const chunk = [&](std::size_t r) { return values.size() * r / ranks; };
        auto const me = static_cast<std::size_t>(rank_);
        read([&] {
            for (auto i = chunk(me); i < chunk(me + 1); ++i) {
                T result = data_of<T>(0)[i];
                for (int r = 1; r < size_; ++r)
                    result = ulysses::detail::combined(op, result, data_of<T>(r)[i]);
                values[i] = result;
            }
        });
        read([&] {
            for (std::size_t r = 0; r < ranks; ++r)
                if (r != me && chunk(r + 1) > chunk(r))
                    std::memcpy(values.data() + chunk(r),
                                data_of<T>(static_cast<int>(r)) + chunk(r),
                                (chunk(r + 1) - chunk(r)) * sizeof(T));
        });
    }

    /// A rank that cannot take part brings a `status` that says why: every rank throws it.
    void all_gather(std::span<std::byte const> part, std::span<std::byte> all,
                    fence_status status = {}) const {
        ulysses::detail::check_parts(status, part.size(), all.size(), size_);
        exposure const until_read{state()};
        publish(detail::collective::all_gather, {const_cast<std::byte*>(part.data()), part.size()},
                0, status);
        read([&] {
            for (int r = 0; r < size_ && !part.empty(); ++r)
                std::memcpy(all.data() + static_cast<std::size_t>(r) * part.size(),
                            data_of<std::byte>(r), part.size());
        });
    }

    void broadcast(std::span<std::byte> data, int root) const {
        fence_status status;
        ulysses::detail::check_root(status, root, size_);
        exposure const until_read{state()};
        publish(detail::collective::broadcast, data, root, status);
        read([&] {
            if (rank_ != root && !data.empty())
                std::memcpy(data.data(), data_of<std::byte>(root), data.size());
        });
    }

    communicator split(int color, int key) const {
        auto& slot = mine();
        fence_status status;
        ulysses::detail::split_members members;
        guarded(status, [&] { members.reserve(size_); });
        auto& mine_now = next_offer(detail::collective::split);
        mine_now.argument = color;
        mine_now.key = key;
        set_status(mine_now, status);
        meet();
        throw_offered();
        unless_shown const refused{slot};
        members.list(size_, color, all_shown{*this});
        auto const leader = members.old_rank(0);
        if (rank_ == leader)
            guarded(status, [&] {
                auto settings = group_->settings;
                if (!settings.hosts.empty()) {
                    settings.hosts.clear();
                    for (int r = 0; r < members.size(); ++r)
                        settings.hosts.push_back(
                            group_->settings.hosts[static_cast<std::size_t>(members.old_rank(r))]);
                }
                slot.child = std::make_shared<detail::group_state>(members.size(), settings);
                for (int r = 0; r < members.size(); ++r)
                    slot.child->slots[static_cast<std::size_t>(r)].make_part =
                        at(members.old_rank(r)).make_part;
                slot.child->descend_from(group_, members);
            });
        set_status(next_offer(detail::collective::split), status);
        meet();
        throw_offered();
        refused.shown = true;
        auto child = at(leader).child;
        wait();
        slot.child.reset();
        return {std::move(child), members.new_rank(rank_)};
    }

    /// Leaves the group: every other rank's waiting or next collective call throws `peer_failed`
    /// with `text`. Returns once nobody reads what this rank has shown. For engines that run their own
    /// threads; `run` does it by itself.
    void leave(std::string_view text) const {
        exposure const until_read{state()};
        state().fail(errc::peer_failed, ulysses::detail::left_text(rank_, text), rank_);
    }

    /// This rank makes no further collective call on the group, nor on those split from it: a rank that
    /// still does gets `peer_failed` at once. `run` does it when a body returns.
    void finish() const { state().finish(rank_); }

   private:
    using slot_type = detail::group_state::slot;

    /// *Throws* `invalid_call` for a handle that names no group.
    detail::group_state& state() const {
        if (!group_)
            raise(errc::invalid_call, {}, "threads::communicator", "a handle must name a group",
                  "it was made without one");
        return *group_;
    }
    static void expect_part(std::byte const* part, std::size_t bytes) {
        if (part == nullptr && bytes > 0)
            raise(errc::out_of_memory, {}, "make_window", "memory must be available", bytes,
                  " bytes");
        if (reinterpret_cast<std::uintptr_t>(part) % 64 != 0)
            raise(errc::invalid_call, {}, "make_window", "a part must be aligned to 64",
                  "address modulo 64 is ", reinterpret_cast<std::uintptr_t>(part) % 64);
    }

    slot_type& at(int rank) const { return state().slots[static_cast<std::size_t>(rank)]; }
    slot_type& mine() const { return at(rank_); }
    void wait() const { state().barrier.arrive_and_wait(rank_); }

    using offer = detail::group_state::offer;

    /// Held while a caller's memory is shown: keeps it until nobody reads it, when the group fails
    /// between two waits.
    struct exposure {
        detail::group_state& group;
        ~exposure() { group.await_readers(); }
    };

    /// Lets go of what a call was to show, when all ranks have refused it.
    struct unless_shown {
        slot_type& own;
        mutable bool shown = false;
        ~unless_shown() {
            if (shown) return;
            own.memory.reset();
            own.child.reset();
        }
    };

    /// Reads other ranks' data by `body`, then waits until every rank has read.
    template <class Body>
    void read(Body const& body) const {
        auto& reading = mine().reading;
        reading =
            true;  // before the look at the failure, as `await_readers` looks the other way round
        if (!group_->barrier.failed()) body();
        reading = false;
        wait();
    }

    /// This rank's offer for the call that begins. None in a group that has failed: its barrier
    /// holds nobody back, so that a slow rank may still be reading either of the two.
    offer& next_offer(detail::collective call) const {
        state().barrier.expect_intact();
        auto& slot = mine();
        auto& next = slot.offers[slot.parity ^= 1u];
        next.call = call;
        next.calls = slot.calls;
        return next;
    }

    /// What `rank` offered to the call that every rank is in.
    offer const& shown(int rank) const { return at(rank).offers[mine().parity]; }
    struct all_shown {
        communicator const& own;
        offer const& operator()(int rank) const { return own.shown(rank); }
    };
    template <class T>
    T const* data_of(int rank) const {
        return reinterpret_cast<T const*>(shown(rank).data);
    }

    /// Waits for the offers of all, whose counts of calls become one; every rank throws alike when
    /// their calls differ.
    void meet() const {
        wait();
        for (int r = 0; r < size_; ++r) mine().calls = std::max(mine().calls, shown(r).calls);
        ulysses::detail::expect_same_collective(size_, all_shown{*this});
    }

    /// The status with an offer; its text only where it has one, for it is long.
    static void set_status(offer& with, fence_status const& status) {
        with.status.code = status.code;
        if (status.code != errc::none) with.status = status;
    }

    /// Throws, on every rank alike, what the lowest failing rank offered to the call.
    void throw_offered() const { ulysses::detail::throw_offered(size_, all_shown{*this}); }

    /// Shows `data` to the group; every rank throws alike when one of them failed, or when sizes or
    /// arguments differ.
    void publish(detail::collective call, std::span<std::byte> data, int argument = 0,
                 fence_status const& status = {}) const {
        auto& mine_now = next_offer(call);
        mine_now.data = data.data();
        mine_now.bytes = data.size();
        mine_now.argument = argument;
        set_status(mine_now, status);
        meet();
        throw_offered();
        ulysses::detail::expect_alike(size_, all_shown{*this});
    }

    std::shared_ptr<detail::group_state> group_;
    int rank_ = 0;
    int size_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI::threads
