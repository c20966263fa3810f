#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/host_window.hpp>
#include <ulysses/core/communicator.hpp>

#include <memory>

namespace ulysses::inline ULYSSES_ABI {

/// The group of one rank: pipelines over it run on views of the caller's tensors. One pipeline code
/// then serves an engine with and without sequence parallelism.
///
///     ulysses::pipeline layer{ulysses::serial{}, ulysses::sequence_local{}, attention, shape};
///
/// *Thread safety*: a handle and its copies belong to one thread at a time.
class serial {
   public:
    using space_type = host_space;

    /// Memory that lives as long as a copy of the handle.
    struct window_type {
        std::shared_ptr<std::byte> memory;
        std::size_t bytes = 0;
    };

    serial() : state_(std::make_shared<state>()) {}

    /// True for copies of one handle.
    friend bool operator==(serial const& a, serial const& b) { return a.state_ == b.state_; }

    int rank() const noexcept { return 0; }
    int size() const noexcept { return 1; }
    std::uint64_t begin_call() const { return ++state_->calls; }
    void fence(fence_status const& status) const { throw_verdict({&status, 1}); }

    window_type make_window(std::size_t bytes) const {
        return {detail::host_window_part(bytes), bytes};
    }
    window_type shared_window(arena which, std::size_t bytes) const {
        auto& window = state_->shared[static_cast<std::size_t>(which)];
        if (window.bytes < bytes) window = make_window(bytes);
        return window;
    }
    std::size_t shared_window_bytes(arena which) const {
        return state_->shared[static_cast<std::size_t>(which)].bytes;
    }
    std::byte* address(window_type const& window, int) const { return window.memory.get(); }

    template <class T>
    void all_reduce(std::span<T>, reduction) const {}
    void all_gather(std::span<std::byte const> mine, std::span<std::byte> all,
                    fence_status const& status = {}) const {
        if (status.code != errc::none) fence(status);
        if (all.size() != mine.size())
            raise(errc::invalid_call, {}, "all_gather", "all must hold one part for each rank",
                  all.size(), " bytes for 1 part of ", mine.size());
        if (!mine.empty()) std::memcpy(all.data(), mine.data(), mine.size());
    }
    void broadcast(std::span<std::byte>, int root) const {
        if (root != 0)
            raise(errc::invalid_call, {}, "broadcast", "root must be a rank", "root ", root,
                  " of 1 rank");
    }
    /// *Throws* `out_of_memory`.
    serial split(int, int) const {
        serial alone{*this};
        fence_status status;
        guarded(status, [&] { alone.state_ = std::make_shared<state>(); });
        if (status.code != errc::none) throw_error(status.code, status.text);
        return alone;
    }

   private:
    struct state {
        std::uint64_t calls = 0;
        window_type shared[2];
    };
    std::shared_ptr<state> state_;
};

}  // namespace ulysses::inline ULYSSES_ABI
