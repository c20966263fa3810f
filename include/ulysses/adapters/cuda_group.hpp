#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cuda.hpp>
#include <ulysses/adapters/cuda_flags.hpp>
#include <ulysses/adapters/cuda_windows.hpp>
#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/guarded.hpp>

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

/// What a rank of `cuda_peers` holds, and how ranks find each other's memory: those of one process by
/// its addresses, those of others through handles that CUDA opens.
namespace ulysses::inline ULYSSES_ABI::cuda_peers {

/// How the streams of ranks are ordered at a fence.
enum class fence_way : std::uint8_t {
    events,  ///< each stream waits for an event of every other; ranks of one process only
    flags,   ///< a kernel writes flags into the others' memory, one waits for theirs
};

struct options {
    /// Ranks of several processes, and calls that are captured into graphs, need `flags`.
    fence_way fence = fence_way::events;
    /// Flags and windows go between all ranks as between processes, also within one.
    bool as_processes = false;
    copy_way way = copy_way::kernel;
    int in_flight = 4;  ///< of `copy_way::engine`
    cuda_memory const* memory =
        nullptr;  ///< of scratch memory and contexts; windows are cudaMalloc's
    /// How long a stream waits for a flag before its rank's next fence is `timed_out`.
    std::chrono::milliseconds deadline = std::chrono::seconds(600);
};

namespace detail {

using ulysses::detail::fence_part;
using ulysses::detail::flag_fence;

class event {
   public:
    event() {
        expect_cuda(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming),
                    "cudaEventCreateWithFlags");
    }
    event(event const&) = delete;
    event& operator=(event const&) = delete;
    ~event() { tolerate(cudaEventDestroy(event_)); }
    cudaEvent_t get() const { return event_; }

   private:
    cudaEvent_t event_ = nullptr;
};

/// What the ranks of one process share.
struct process_group {
    struct slot {
        std::shared_ptr<std::byte> part;  ///< of the window that is being made
        std::shared_ptr<event> fences[2];
    };

    explicit process_group(int ranks) : references(ranks), slots(static_cast<std::size_t>(ranks)) {}
    static void release(process_group* group, int count) {
        if (group->references.fetch_sub(count) == count) delete group;
    }

    std::atomic<int> references;  ///< one for each rank of the group, until its members are known
    std::vector<slot> slots;
};

/// What a rank says of itself. Bytes that other ranks read.
struct rank_record {
    std::uint64_t process = 0;  ///< a number of its process's own
    process_group* group = nullptr;
    std::int32_t device = 0, by_flags = 0;
};

/// Another in each process, also in one that fork made of this.
inline std::uint64_t number_of_process() {
    static std::uint64_t const drawn =
        (std::uint64_t{std::random_device{}()} << 32) ^ std::random_device{}();
    return drawn + static_cast<std::uint64_t>(getpid());
}

/// What the handles of one rank share.
class rank_state {
   public:
    rank_state(int rank, int ranks, cudaStream_t on, options const& with)
        : stream(on),
          given(with),
          work({.way = with.way, .in_flight = with.in_flight, .rank = rank, .ranks = ranks}),
          rank_(rank),
          ranks_(ranks),
          by_flags_(with.fence == fence_way::flags || with.as_processes),
          candidate_(std::make_unique<process_group>(ranks)) {
        device_ = current_device();
        for (auto& each : fences_) each = std::make_shared<event>();
        auto const result = cudaEventRecord(fences_[0]->get(), stream);
        tolerate(result);
        if (result == cudaErrorInvalidResourceHandle)
            raise(errc::invalid_call, {}, "cuda_peers",
                  "the stream must be one of the rank's current device", "device ", device_);
        expect_cuda(result, "cudaEventRecord");
    }
    rank_state(rank_state const&) = delete;
    rank_state& operator=(rank_state const&) = delete;
    ~rank_state() {
        close();
        boards_.reset();
        if (silent_ != nullptr) tolerate(cudaFreeHost(silent_));
        if (group_ != nullptr) process_group::release(group_, 1);
    }

    /// From here on others may read what is offered, so that it is not taken back.
    rank_record introduction() {
        return {given.as_processes ? static_cast<std::uint64_t>(rank_) : number_of_process(),
                candidate_.release(), device_, by_flags_};
    }

    /// *Throws* `unsupported`, `transport_error`.
    void meet(std::span<rank_record const> all) {
        auto const process = all[index(rank_)].process;
        int members = 0;
        for (int r = 0; r < ranks_; ++r) {
            here_.push_back(all[index(r)].process == process);
            if (!here_.back()) others_elsewhere_ = true;
            if (here_.back() && members++ == 0) group_ = all[index(r)].group;
            by_flags_ = by_flags_ || all[index(r)].by_flags != 0 || others_elsewhere_;
        }
        // Each rank is one of the references of the first's offer; those of other processes are not.
        if (all[index(rank_)].group == group_)
            process_group::release(group_, ranks_ - members);
        else
            delete all[index(rank_)].group;
        std::copy_n(fences_, 2, own_slot().fences);
        for (int r = 0; r < ranks_; ++r)
            if (here_[index(r)]) reach(r, all[index(r)].device);
        if (by_flags_ && ranks_ > ulysses::detail::most_flag_ranks)
            raise(errc::unsupported, {}, "cuda_peers", "a fence by flags has room for fewer ranks",
                  ranks_, " ranks, at most ", ulysses::detail::most_flag_ranks);
    }

    bool by_flags() const { return by_flags_ && ranks_ > 1; }
    std::size_t board_bytes() const {
        return static_cast<std::size_t>(flag_fence::words(ranks_)) * sizeof(std::uint64_t);
    }
    /// A window of zeros from here on, once the group has met again.
    void take_boards(std::shared_ptr<window_parts const> boards) {
        boards_ = std::move(boards);
        void* word = nullptr;
        expect_cuda(cudaHostAlloc(&word, sizeof *silent_, cudaHostAllocMapped), "cudaHostAlloc");
        silent_ = static_cast<std::uint64_t*>(word);
        *silent_ = 0;
        flags_.rank = rank_;
        flags_.ranks = ranks_;
        flags_.silent = silent_;
        flags_.deadline = static_cast<std::uint64_t>(deadline() / std::chrono::nanoseconds(1));
        for (int r = 0; r < ranks_; ++r)
            flags_.boards[r] = reinterpret_cast<std::uint64_t*>(boards_->memory[index(r)].get());
        expect_cuda(cudaMemsetAsync(flags_.boards[rank_], 0, board_bytes(), stream),
                    "cudaMemsetAsync");
        drain();
    }

    /// Before ranks meet at a fence: shows where the stream is. What fails goes into the status.
    void arrive(fence_status& status) {
        if (ranks_ == 1) return;
        if (auto const silent = by_flags_ ? ulysses::detail::load_acquire(silent_) : 0;
            ended_ || silent != 0)
            return fail_ended(status, silent);
        auto capture = cudaStreamCaptureStatusNone;
        auto result = cudaStreamIsCapturing(stream, &capture);
        if (capture != cudaStreamCaptureStatusNone) {
            if (!by_flags_)
                return status.fail(
                    errc::unsupported,
                    concat("ulysses: fence: calls are captured with fence_way::flags only: rank ",
                           rank_, " orders its stream by events"));
            status.terms[static_cast<std::size_t>(term::recording)] = 1;
            guarded(status, [&] { keep_for_graphs(); });
        }
        if (result == cudaSuccess)
            result = by_flags_ ? ulysses::detail::launch_flags(stream, flags_)
                               : cudaEventRecord(fences_[parity_]->get(), stream);
        told_ = result == cudaSuccess && capture == cudaStreamCaptureStatusNone;
        tolerate(result);
        if (result != cudaSuccess)
            status.fail(errc::transport, concat("ulysses: fence: a call of CUDA must succeed: ",
                                                cudaGetErrorName(result), " (",
                                                static_cast<int>(result), ") on rank ", rank_));
    }

    /// When every rank has arrived and none has failed. *Throws* `transport_error`.
    void pass() {
        if (ranks_ == 1) return;
        told_ = false;
        if (by_flags_) return launch(fence_part::wait);
        for (int r = 0; r < ranks_; ++r)
            if (r != rank_)
                expect_cuda(
                    cudaStreamWaitEvent(stream, group_->slots[index(r)].fences[parity_]->get(), 0),
                    "cudaStreamWaitEvent");
        // Recorded again after a fence that every rank comes to when it has waited for this.
        parity_ ^= 1u;
    }

    /// Waits for what the stream has. *Throws* `transport_error`.
    void drain() const {
        if (!ulysses::detail::captured(stream))
            expect_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    }
    /// When all ranks' streams are done: takes back what this rank has told at a fence that none has
    /// passed, as not all may have arrived there. *Throws* `transport_error`.
    void begin_again() {
        if (!std::exchange(told_, false) || !by_flags_) return;
        launch(fence_part::take_back);
        drain();
    }
    /// When the group cannot go on: ends what waits for flags on this rank's stream, unless they come soon:
    /// those of calls that have returned have been told.
    void give_up() {
        if (std::exchange(ended_, true) || silent_ == nullptr) return;
        auto const patience =
            std::min<std::chrono::milliseconds>(deadline() / 4, std::chrono::seconds(10));
        auto const end = std::chrono::steady_clock::now() + patience;
        while (is_busy() && std::chrono::steady_clock::now() < end)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        ulysses::detail::store_release(silent_, flag_fence::gave_up);
    }

    /// This rank's part of a window, and what others need to reach it.
    window_record offer(std::size_t bytes) {
        if (ulysses::detail::captured(stream))
            raise(errc::invalid_call, {}, "make_window",
                  "windows must not grow while a stream is captured: make the call once before",
                  bytes, " bytes");
        if (auto const here = current_device(); here != device_)
            raise(errc::invalid_call, {}, "make_window",
                  "the rank's device must be the thread's current one", "device ", here,
                  ", the rank is on device ", device_);
        window_record mine;
        mine.bytes = bytes;
        mine.released = exported.untold();
        // Of a smaller one the other process maps what CUDA has put beside it as well.
        constexpr std::size_t own_block = std::size_t{2} << 20;
        auto const whole = (bytes + own_block - 1) / own_block * own_block;
        auto part = device_memory(others_elsewhere_ ? std::max({bytes, whole, own_block}) : bytes);
        if (others_elsewhere_)
            expect_cuda(cudaIpcGetMemHandle(&mine.handle, part.get()), "cudaIpcGetMemHandle");
        own_slot().part = std::move(part);
        return mine;
    }
    std::shared_ptr<window_parts> new_window(std::size_t bytes) {
        auto parts = std::make_shared<window_parts>();
        parts->memory.resize(static_cast<std::size_t>(ranks_));
        parts->bytes = bytes;
        parts->stream = stream;
        std::erase_if(windows_, [](auto const& each) { return each.expired(); });
        windows_.push_back(parts);
        return parts;
    }
    /// Takes hold of every rank's part.
    void open(std::shared_ptr<window_parts> const& parts, std::span<window_record const> all) {
        if (others_elsewhere_) exported.add(parts, own_slot().part);
        for (int r = 0; r < ranks_; ++r)
            parts->memory[index(r)] = here_[index(r)] ? group_->slots[index(r)].part
                                                      : mapped_memory(all[index(r)].handle);
    }
    /// When every rank has, or none will.
    void withdraw() { own_slot().part.reset(); }

    /// Lets go of windows that no call of a user names.
    void close() {
        for (auto& window : shared) window.reset();
        in_graphs_.clear();
    }

    cudaStream_t stream;
    options given;
    cuda_work work;
    std::shared_ptr<window_parts const> shared[2];
    exported_windows exported;

   private:
    static int current_device() {
        int device = 0;
        expect_cuda(cudaGetDevice(&device), "cudaGetDevice");
        return device;
    }
    static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

    std::chrono::milliseconds deadline() const {
        return std::clamp<std::chrono::milliseconds>(given.deadline, std::chrono::milliseconds(0),
                                                     std::chrono::hours(24 * 365));
    }
    bool is_busy() const {
        auto capture = cudaStreamCaptureStatusNone;
        auto result = cudaStreamIsCapturing(stream, &capture);
        if (result == cudaSuccess && capture == cudaStreamCaptureStatusNone)
            result = cudaStreamQuery(stream);
        tolerate(result);
        return result == cudaErrorNotReady;
    }
    void launch(fence_part part) const {
        auto fence = flags_;
        fence.part = part;
        expect_cuda(ulysses::detail::launch_flags(stream, fence), "fence kernel");
    }
    void fail_ended(fence_status& status, std::uint64_t silent) const {
        if (ended_)
            return status.fail(errc::peer_failed,
                               concat("ulysses: fence: a group that has ended is not used: rank ",
                                      rank_, " gave up after an error"));
        status.fail(errc::timed_out,
                    concat("ulysses: fence: a stream must arrive within the deadline: rank ", rank_,
                           " waited ", given.deadline.count(), " ms for rank ", silent - 1));
    }
    /// Windows that a captured call may name live as long as the group, or until it is closed.
    void keep_for_graphs() {
        for (auto const& each : windows_)
            if (auto window = each.lock()) in_graphs_.push_back(std::move(window));
        windows_.clear();
    }
    process_group::slot& own_slot() { return group_->slots[index(rank_)]; }

    void reach(int peer, int device) {
        if (device == device_) return;
        int can = 0;
        expect_cuda(cudaDeviceCanAccessPeer(&can, device_, device), "cudaDeviceCanAccessPeer");
        if (can == 0)
            raise(errc::unsupported, {}, "cuda_peers", "devices must reach each other's memory",
                  "rank ", rank_, " on device ", device_, ", rank ", peer, " on device ", device);
        auto const result = cudaDeviceEnablePeerAccess(device, 0);
        if (result == cudaErrorPeerAccessAlreadyEnabled)
            static_cast<void>(cudaGetLastError());
        else
            expect_cuda(result, "cudaDeviceEnablePeerAccess");
    }

    int rank_, ranks_, device_ = 0;
    bool by_flags_, others_elsewhere_ = false;
    bool told_ = false;   ///< at a fence that the stream has not passed, and is not captured
    bool ended_ = false;  ///< the group cannot go on
    unsigned parity_ = 0;
    std::unique_ptr<process_group> candidate_;
    process_group* group_ = nullptr;
    std::vector<bool> here_;
    std::shared_ptr<event> fences_[2];
    std::vector<std::weak_ptr<window_parts const>> windows_;  ///< but those of graphs
    std::vector<std::shared_ptr<window_parts const>> in_graphs_;
    std::shared_ptr<window_parts const> boards_;
    std::uint64_t* silent_ = nullptr;
    flag_fence flags_{};
};

}  // namespace detail

}  // namespace ulysses::inline ULYSSES_ABI::cuda_peers
