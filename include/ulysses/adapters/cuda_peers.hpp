#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cuda.hpp>
#include <ulysses/adapters/cuda_group.hpp>
#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/guarded.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

/// Ranks of one host whose memory is on GPUs, over any communicator of their hosts' memory, which
/// carries what ranks tell each other:
///
///     ulysses::threads::run(4, [&](ulysses::threads::communicator host) {
///         cudaSetDevice(host.rank() % gpus);
///         ulysses::cuda_peers::communicator ranks{host, streams[host.rank()]};
///         ulysses::pipeline layer{ranks, ...};
///     });
///
/// Ranks are threads, of one process, or processes, or both; each has a stream, and several may share
/// a GPU. Operands of collectives other than windows are in host memory.
namespace ulysses::inline ULYSSES_ABI::cuda_peers {

/// Handle to one rank of the group.
///
/// *Thread safety*: a handle and its copies belong to the thread of their rank, whose current device
/// stays the one that it had when the first was made. The stream outlives all of them, and windows.
template <gathers Host>
class communicator {
   public:
    using space_type = cuda_space;
    using window_type = std::shared_ptr<detail::window_parts const>;

    communicator() = default;

    /// Collective. *Throws*, on every rank alike, `unsupported` where ranks do not reach each other's
    /// memory or are too many, `invalid_call` for a stream of another device, `out_of_memory`;
    /// `functor_failed` where a call of CUDA fails.
    communicator(Host host, cudaStream_t stream, options const& given = {})
        : host_(std::move(host)) {
        fence_status status;
        guarded(status, [&] {
            state_ =
                std::make_shared<detail::rank_state>(host_.rank(), host_.size(), stream, given);
        });
        meet(status);
    }

    friend bool operator==(communicator const& a, communicator const& b) {
        return a.state_ == b.state_;
    }

    int rank() const noexcept { return host_.rank(); }
    int size() const noexcept { return host_.size(); }
    std::uint64_t begin_call() const { return host_.begin_call(); }
    cuda_space::queue queue() const {
        return {state_->stream, &state_->work, state_->given.memory};
    }
    Host const& host() const { return host_; }

    /// What a rank's stream had been given before is done before what any rank's stream is given after.
    /// *Blocking*: until every rank has arrived, not for the device; for the streams as well when it
    /// throws an error that the group goes on after. *Throws* as the host's fence; `unsupported`
    /// while a stream is captured and ranks order their streams by events.
    void fence(fence_status const& status) const {
        collectively([&] {
            auto told = status;
            state_->arrive(told);
            host_.fence(told);
            state_->pass();
        });
    }

    window_type make_window(std::size_t bytes) const {
        return collectively([&] { return made_window(bytes); });
    }

    window_type shared_window(arena which, std::size_t bytes) const {
        auto& window = state_->shared[static_cast<std::size_t>(which)];
        if (!window || window->bytes < bytes) window = make_window(bytes);
        return window;
    }
    std::size_t shared_window_bytes(arena which) const {
        auto const& window = state_->shared[static_cast<std::size_t>(which)];
        return window ? window->bytes : 0;
    }
    std::byte* address(window_type const& window, int rank) const {
        return window->memory[static_cast<std::size_t>(rank)].get();
    }

    /// Lets go of the group's shared windows on this rank, and of all that graphs name; on every rank
    /// between the same two calls.
    void close() const { state_->close(); }

    void all_gather(std::span<std::byte const> mine, std::span<std::byte> all) const {
        collectively([&] { host_.all_gather(mine, all); });
    }
    void all_gather(std::span<std::byte const> mine, std::span<std::byte> all,
                    fence_status const& status) const requires requires(Host const& host) {
        host.all_gather(mine, all, status);
    }
    {
        collectively([&] { host_.all_gather(mine, all, status); });
    }
    void broadcast(std::span<std::byte> data, int root) const {
        collectively([&] { host_.broadcast(data, root); });
    }
    template <class T>
        requires reduces<Host>
    void all_reduce(std::span<T> values, reduction op) const {
        collectively([&] { host_.all_reduce(values, op); });
    }
    void leave(std::string_view text) const requires can_leave<Host> {
        host_.leave(text);
        state_->give_up();
    }

    /// The new group's streams are those of this one.
    communicator split(int color, int key) const requires splits<Host> {
        return {collectively([&] { return host_.split(color, key); }), state_->stream,
                state_->given};
    }

   private:
    /// Runs a collective call of the host's. After an error that every rank has, whichever call it is
    /// in, the group goes on with streams that have nothing to do, as their fences were not passed
    /// alike; else nobody on this rank waits for flags that may never come.
    template <class Body>
    decltype(auto) collectively(Body const& body) const {
#if ULYSSES_EXCEPTIONS
        try {
            return body();
        } catch (error const& e) {
            if (!ends_group(e.code()))
                settle();
            else
                state_->give_up();
            throw;
        }
#else
        return body();
#endif
    }
    void settle() const {
#if ULYSSES_EXCEPTIONS
        try {
            meet_after([&] { state_->drain(); });
            meet_after([&] {
                state_->withdraw();
                state_->begin_again();
            });
        } catch (...) {
            state_->give_up();
            throw;
        }
#endif
    }
    /// A rank that cannot go on ends the group.
    template <class Body>
    void meet_after(Body const& body) const {
        fence_status status;
        guarded(status, body);
        if (status.code != errc::none) status.code = errc::transport;
        host_.fence(status);
    }
    static bool ends_group(errc code) {
        return code == errc::peer_failed || code == errc::timed_out || code == errc::transport;
    }

    window_type made_window(std::size_t bytes) const {
        auto& own = *state_;
        fence_status status;
        detail::window_record record;
        std::shared_ptr<detail::window_parts> parts;
        guarded(status, [&] {
            record = own.offer(bytes);
            parts = own.new_window(bytes);
        });
        auto const all = gathered(record, status);
        exchange_released(all);
        for (int r = 1; r < size(); ++r)
            if (all[static_cast<std::size_t>(r)].bytes != all[0].bytes)
                throw_error(errc::disagreement,
                            concat("ulysses: make_window: every rank must pass as many bytes: "
                                   "rank 0 passes ",
                                   all[0].bytes, ", rank ", r, " ",
                                   all[static_cast<std::size_t>(r)].bytes),
                            r);
        guarded(status, [&] { own.open(parts, all); });
        // Until every rank has taken hold of every part.
        host_.fence(status);
        own.withdraw();
        return parts;
    }
    void exchange_released(std::span<detail::window_record const> all) const {
        std::uint64_t most = 0;
        for (auto const& each : all) most = std::max(most, each.released);
        if (most == 0) return;
        auto const own = state_->exported.tell(most);
        std::vector<std::uint64_t> numbers(own.size() * all.size());
        host_.all_gather(std::as_bytes(std::span(own)), std::as_writable_bytes(std::span(numbers)));
        state_->exported.hear(numbers, size());
    }

    /// Every rank's record, in rank order; every rank throws alike when one of them brings a failure.
    template <class Record>
    std::vector<Record> gathered(Record const& mine, fence_status const& status) const {
        std::vector<Record> all;
        auto told = status;
        guarded(told, [&] { all.resize(static_cast<std::size_t>(size())); });
        auto const own = std::as_bytes(std::span(&mine, 1));
        auto const rest = std::as_writable_bytes(std::span(all));
        if constexpr (requires { host_.all_gather(own, rest, told); }) {
            host_.all_gather(own, rest, told);
        } else {
            host_.fence(told);
            host_.all_gather(own, rest);
        }
        return all;
    }

    /// Ranks learn of each other.
    void meet(fence_status status) {
        host_.fence(status);
        auto const all = gathered(state_->introduction(), status);
        guarded(status, [&] { state_->meet(all); });
        host_.fence(status);
        if (!state_->by_flags()) return;
        auto const boards = make_window(state_->board_bytes());
        guarded(status, [&] { state_->take_boards(boards); });
        host_.fence(status);
    }

    Host host_{};
    std::shared_ptr<detail::rank_state> state_;
};

template <class Host>
communicator(Host, cudaStream_t) -> communicator<Host>;
template <class Host>
communicator(Host, cudaStream_t, options) -> communicator<Host>;

}  // namespace ulysses::inline ULYSSES_ABI::cuda_peers
