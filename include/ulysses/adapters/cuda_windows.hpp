#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cuda_call.hpp>
#include <ulysses/config/macros.hpp>
#include <ulysses/core/error.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

/// Memory of the windows of `cuda_peers`, and who still holds it.
namespace ulysses::inline ULYSSES_ABI::cuda_peers::detail {

using ulysses::detail::expect_cuda;
using ulysses::detail::tolerate;

/// Device memory of this process. *Throws* `out_of_memory`, `transport_error`.
inline std::shared_ptr<std::byte> device_memory(std::size_t bytes) {
    void* memory = nullptr;
    auto const result = cudaMalloc(&memory, std::max<std::size_t>(bytes, 1));
    if (result == cudaErrorMemoryAllocation) {
        static_cast<void>(cudaGetLastError());
        raise(errc::out_of_memory, {}, "make_window", "memory must be available", bytes, " bytes");
    }
    expect_cuda(result, "cudaMalloc");
    return {static_cast<std::byte*>(memory), [](std::byte* each) { tolerate(cudaFree(each)); }};
}

/// Another process's, as long as it is mapped here. *Throws* `unsupported`, `transport_error`.
inline std::shared_ptr<std::byte> mapped_memory(cudaIpcMemHandle_t const& handle) {
    void* memory = nullptr;
    auto const result = cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess);
    if (result == cudaErrorPeerAccessUnsupported || result == cudaErrorNotSupported) {
        tolerate(result);
        raise(errc::unsupported, {}, "cuda_peers", "devices must reach each other's memory",
              "of another process, ", cudaGetErrorName(result));
    }
    expect_cuda(result, "cudaIpcOpenMemHandle");
    return {static_cast<std::byte*>(memory),
            [](std::byte* each) { tolerate(cudaIpcCloseMemHandle(each)); }};
}

/// The parts of all ranks of a window, as one rank reaches them. The rank lets go of them when its
/// stream is done with them.
struct window_parts {
    std::vector<std::shared_ptr<std::byte>> memory;
    std::size_t bytes = 0;
    cudaStream_t stream = nullptr;

    window_parts() = default;
    window_parts(window_parts const&) = delete;
    window_parts& operator=(window_parts const&) = delete;
    ~window_parts() { tolerate(cudaStreamSynchronize(stream)); }
};

struct window_record {
    std::uint64_t bytes = 0;
    std::uint64_t released = 0;  ///< windows that the rank has let go of and not told yet
    cudaIpcMemHandle_t handle{};
};

/// A rank's parts of windows that other processes have opened: kept until all ranks have told each other that
/// they have let go of the window. Windows are numbered alike on every rank.
class exported_windows {
   public:
    void add(std::weak_ptr<window_parts const> window, std::shared_ptr<std::byte> part) {
        all_.push_back({++number_, std::move(window), std::move(part)});
    }

    /// Windows that this rank has let go of and not told yet.
    std::uint64_t untold() const {
        return static_cast<std::uint64_t>(std::count_if(
            all_.begin(), all_.end(), [](auto const& each) { return each.untold(); }));
    }
    /// Tells their numbers; zeros behind them.
    std::vector<std::uint64_t> tell(std::uint64_t count) {
        std::vector<std::uint64_t> numbers;
        numbers.reserve(count);
        for (auto& each : all_)
            if (each.untold()) {
                numbers.push_back(each.number);
                each.told = true;
            }
        numbers.resize(count);
        return numbers;
    }
    /// Those that all ranks tell.
    void hear(std::span<std::uint64_t const> numbers, int ranks) {
        for (auto const number : numbers)
            for (auto& each : all_) each.released_by += each.number == number;
        std::erase_if(all_, [&](auto const& each) { return each.released_by == ranks; });
    }

   private:
    struct exported_window {
        std::uint64_t number;
        std::weak_ptr<window_parts const> window;
        std::shared_ptr<std::byte> part;
        bool told = false;
        int released_by = 0;

        bool untold() const { return !told && window.expired(); }
    };
    std::vector<exported_window> all_;
    std::uint64_t number_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI::cuda_peers::detail
