#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/mpi/calls.hpp>
#include <ulysses/adapters/mpi/meeting.hpp>
#include <ulysses/adapters/mpi/resources.hpp>
#include <ulysses/comm/host_window.hpp>
#include <ulysses/core/communicator.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

/// Memory that the processes of one host share.
namespace ulysses::inline ULYSSES_ABI::mpi::detail {

/// One window: where each rank's part lies for this one.
struct window_parts : resource {
    std::vector<std::byte*> memory;  ///< null: not reached
    std::size_t bytes = 0;
    MPI_Win window = MPI_WIN_NULL;
    std::shared_ptr<std::byte> own;  ///< where no other rank is on this host

    /// Collective over the ranks of the host.
    void release() override {
        if (window == MPI_WIN_NULL) return;
        MPI_Win_unlock_all(window);
        MPI_Win_free(&window);
    }
    void synchronise() override {
        if (window != MPI_WIN_NULL) MPI_Win_sync(window);
    }
};

/// Which ranks of a group share a host, and the windows that they make there.
class host_memory {
   public:
    /// `hosts` has a number for each rank.
    explicit host_memory(std::vector<int> hosts) : hosts_(std::move(hosts)) {}

    int host_of(int rank) const { return hosts_[static_cast<std::size_t>(rank)]; }
    bool reach(int rank, int other) const { return host_of(rank) == host_of(other); }

    /// Makes this rank's part; `status` tells what went wrong. Collective, between two meetings.
    void make(meeting const& ranks, window_parts& parts, std::size_t bytes, fence_status& status) {
        parts.bytes = bytes;
        auto const me = ranks.rank();
        auto const is_alone = [&](int host) { return std::ranges::count(hosts_, host) == 1; };
        auto const failed = [&](int code, errc kind) {
            if (code != MPI_SUCCESS && status.code == errc::none)
                status.fail(kind, concat("ulysses: make_window: MPI must share memory: ", bytes,
                                         " bytes: ", text_of(code)));
            return code != MPI_SUCCESS;
        };
        // Of all ranks, also of one that is alone on its host, unless all are.
        if (comm_ == MPI_COMM_NULL && !std::ranges::all_of(hosts_, is_alone)) {
            if (failed(MPI_Comm_split(ranks.comm(), host_of(me), me, &comm_), errc::transport))
                return;
            MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN);
        }
        if (is_alone(host_of(me)))
            return guarded(status, [&] {
                parts.own = ulysses::detail::host_window_part(bytes);
                parts.memory[static_cast<std::size_t>(me)] = parts.own.get();
            });
        MPI_Info info = MPI_INFO_NULL;
        MPI_Info_create(&info);
        MPI_Info_set(info, "alloc_shared_noncontig", "true");
        void* base = nullptr;
        // Parts are aligned here, whatever MPI aligns them to.
        auto const code = MPI_Win_allocate_shared(static_cast<MPI_Aint>(bytes + alignment), 1, info,
                                                  comm_, &base, &parts.window);
        MPI_Info_free(&info);
        if (failed(code, errc::out_of_memory)) return;
        MPI_Win_set_errhandler(parts.window, MPI_ERRORS_RETURN);
        if (failed(MPI_Win_lock_all(MPI_MODE_NOCHECK, parts.window), errc::transport)) return;
        int host_rank = 0;
        for (int r = 0; r < ranks.size(); ++r) {
            if (!reach(me, r)) continue;
            MPI_Aint extent = 0;
            int unit = 0;
            if (failed(MPI_Win_shared_query(parts.window, host_rank++, &extent, &unit, &base),
                       errc::transport))
                return;
            parts.memory[static_cast<std::size_t>(r)] = aligned(base);
        }
    }

    /// True when every rank of this host brought no failure to the last meeting.
    bool succeeded(meeting const& ranks) const {
        auto const shown = ranks.shown();
        for (int r = 0; r < ranks.size(); ++r)
            if (reach(ranks.rank(), r) &&
                shown[static_cast<std::size_t>(r)].status.code != errc::none)
                return false;
        return true;
    }

    /// Collective; nobody uses a window any more.
    void release() {
        if (comm_ != MPI_COMM_NULL) MPI_Comm_free(&comm_);
    }

   private:
    static constexpr std::size_t alignment = 64;
    static std::byte* aligned(void* base) {
        auto const address = reinterpret_cast<std::uintptr_t>(base);
        return static_cast<std::byte*>(base) + (alignment - address % alignment) % alignment;
    }

    std::vector<int> hosts_;  ///< of each rank: the lowest rank of its host
    MPI_Comm comm_ = MPI_COMM_NULL;
};

}  // namespace ulysses::inline ULYSSES_ABI::mpi::detail
