#pragma once
// SPDX-License-Identifier: Apache-2.0

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
#include <vector>

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
        // Equal sizes are not enough: ranks must mean the same operation on the same kind of number.
        constexpr auto kind =
            static_cast<int>(sizeof(T)) * 4 + std::is_floating_point_v<T> * 2 + std::is_signed_v<T>;
        publish(detail::collective::all_reduce, std::as_writable_bytes(values),
                kind * 4 + static_cast<int>(op), {}, [](int argument) {
                    constexpr std::string_view operations[] = {"sum", "min", "max"};
                    return concat(operations[argument % 4], " of ", argument / 4 / 4, "-byte ",
                                  argument / 8 % 2 != 0   ? "floating-point numbers"
                                  : argument / 4 % 2 != 0 ? "signed integers"
                                                          : "unsigned integers");
                });
        // Rank r reduces the r-th chunk of every rank into its own; then all copy the chunks.
        auto const ranks = static_cast<std::size_t>(size_);
        auto const chunk = [&](std::size_t r) { return values.size() * r / ranks; };
        auto const me = static_cast<std::size_t>(rank_);
        read([&] {
            for (auto i = chunk(me); i < chunk(me + 1); ++i) {
                T result = data_of<T>(0)[i];
                for (int r = 1; r < size_; ++r)
                    result = detail::combined(op, result, data_of<T>(r)[i]);
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
        if (status.code == errc::none &&
            all.size() != part.size() * static_cast<std::size_t>(size_))
            status.fail(errc::invalid_call,
                        concat("ulysses: all_gather: all must hold one part for each rank: ",
                               all.size(), " bytes for ", size_, " parts of ", part.size()));
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
        if (root < 0 || root >= size_)
            status.fail(errc::invalid_call, concat("ulysses: broadcast: root must be a rank: root ",
                                                   root, " of ", size_, " ranks"));
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
        std::vector<std::pair<int, int>> members;  // key, old rank
        guarded(status, [&] { members.reserve(static_cast<std::size_t>(size_)); });
        auto& mine_now = next_offer(detail::collective::split);
        mine_now.argument = color;
        mine_now.key = key;
        set_status(mine_now, status);
        meet();
        throw_offered();
        unless_shown const refused{slot};
        for (int r = 0; r < size_; ++r)
            if (shown(r).argument == color) members.emplace_back(shown(r).key, r);
        std::sort(members.begin(), members.end());
        auto const leader = members.front().second;
        if (rank_ == leader)
            guarded(status, [&] {
                auto settings = group_->settings;
                if (!settings.hosts.empty()) {
                    settings.hosts.clear();
                    for (auto const& [order, old_rank] : members)
                        settings.hosts.push_back(
                            group_->settings.hosts[static_cast<std::size_t>(old_rank)]);
                }
                slot.child = std::make_shared<detail::group_state>(static_cast<int>(members.size()),
                                                                   settings);
                for (std::size_t i = 0; i < members.size(); ++i)
                    slot.child->slots[i].make_part = at(members[i].second).make_part;
                slot.child->descend_from(group_, members);
            });
        set_status(next_offer(detail::collective::split), status);
        meet();
        throw_offered();
        refused.shown = true;
        auto child = at(leader).child;
        wait();
        slot.child.reset();
        auto const place = std::find(members.begin(), members.end(), std::pair{key, rank_});
        return {std::move(child), static_cast<int>(place - members.begin())};
    }

    /// Leaves the group: every other rank's waiting or next collective call throws `peer_failed`
    /// with `text`. Returns once nobody reads what this rank has shown. For engines that run their own
    /// threads; `run` does it by itself.
    void leave(std::string_view text) const {
        exposure const until_read{state()};
        state().fail(errc::peer_failed,
                     concat("ulysses: fence: a rank left the group: rank ", rank_, ": ", text),
                     rank_);
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
    template <class T>
    T const* data_of(int rank) const {
        return reinterpret_cast<T const*>(shown(rank).data.data());
    }

    /// Waits for the offers of all, whose counts of calls become one; every rank throws alike when
    /// their calls differ.
    void meet() const {
        wait();
        for (int r = 0; r < size_; ++r) mine().calls = std::max(mine().calls, shown(r).calls);
        for (int r = 1; r < size_; ++r)
            if (shown(r).call != shown(0).call)
                throw_error(errc::disagreement,
                            concat("ulysses: fence: ranks must make the same calls in the same "
                                   "order, with the same shapes: rank 0 is in ",
                                   name(shown(0).call), ", rank ", r, " in ", name(shown(r).call)),
                            r);
    }

    /// The status with an offer; its text only where it has one, for it is long.
    static void set_status(offer& with, fence_status const& status) {
        with.status.code = status.code;
        if (status.code != errc::none) with.status = status;
    }

    /// Throws, on every rank alike, what the lowest failing rank offered to the call.
    void throw_offered() const {
        for (int r = 0; r < size_; ++r)
            if (auto const& theirs = shown(r).status; theirs.code != errc::none)
                throw_error(theirs.code, concat(theirs.text, " (rank ", r, ")"), r);
    }

    /// Shows `data` to the group; every rank throws alike when one of them failed, or when sizes or
    /// arguments differ.
    void publish(detail::collective call, std::span<std::byte> data, int argument = 0,
                 fence_status const& status = {}, std::string (*text_of)(int) = nullptr) const {
        auto& mine_now = next_offer(call);
        mine_now.data = data;
        mine_now.argument = argument;
        set_status(mine_now, status);
        meet();
        throw_offered();
        auto const& first = shown(0);
        auto const differ = [&](std::string_view rule, auto const& of_first, int r,
                                auto const& other) {
            throw_error(errc::disagreement,
                        concat("ulysses: ", name(call), ": ", rule, ": rank 0 passes ", of_first,
                               ", rank ", r, " ", other),
                        r);
        };
        for (int r = 1; r < size_; ++r) {
            auto const& theirs = shown(r);
            if (theirs.data.size() != first.data.size())
                differ("every rank must pass as many bytes", first.data.size(), r,
                       theirs.data.size());
            if (theirs.argument == first.argument) continue;
            if (text_of != nullptr)
                differ("every rank must pass the same operation and type", text_of(first.argument),
                       r, text_of(theirs.argument));
            differ("every rank must pass the same root", first.argument, r, theirs.argument);
        }
    }

    std::shared_ptr<detail::group_state> group_;
    int rank_ = 0;
    int size_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI::threads
