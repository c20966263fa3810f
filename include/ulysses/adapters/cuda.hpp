#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/space.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

/// Device memory of CUDA, with work ordered on streams: no call waits for the device.
///
/// The block kernels are declared here and defined in `cuda_kernels.cuh`, which one `.cu` file of the
/// program includes; everything else takes a plain C++ compiler.
namespace ulysses::inline ULYSSES_ABI {

/// How blocks are copied.
enum class copy_way : std::uint8_t {
    kernel,  ///< all blocks of a call by one launch
    engine,  ///< each block by the copy engines, several in flight
};

/// Memory of an engine in place of cudaMallocAsync: `allocate(context, bytes, stream)` returns memory
/// aligned to 64, or null; `deallocate` takes it back when the stream gets there. Outlives its users.
struct cuda_memory {
    void* context = nullptr;
    void* (*allocate)(void* context, std::size_t bytes, cudaStream_t stream) = nullptr;
    void (*deallocate)(void* context, void* memory, std::size_t bytes,
                       cudaStream_t stream) noexcept = nullptr;
};

namespace detail {

/// *Throws* `transport_error` with CUDA's own name and number of the error.
inline void expect_cuda(cudaError_t result, std::string_view call, where at = {}) {
    if (result == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());  // else the next call reports it again
    raise(errc::transport, at, "cuda", "a call of CUDA must succeed", call, ": ",
          cudaGetErrorName(result), " (", static_cast<int>(result), ")");
}

inline bool captured(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    expect_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

/// Each executes its list on the stream, by as few launches as hold it. Defined in cuda_kernels.cuh.
cudaError_t launch_copies(cudaStream_t stream, std::span<block_copy const> blocks);
/// *Shape*: types as `dtype_of` has them; no sum of more than `largest_device_sum` sources.
cudaError_t launch_sums(cudaStream_t stream, dtype to, dtype from, std::span<block_sum const> sums);

inline constexpr std::size_t largest_device_sum = 768;

/// One half of a fence by flags; see cuda_flags.hpp.
struct flag_fence;
cudaError_t launch_flags(cudaStream_t stream, flag_fence const& half);

/// Work that runs beside a stream: begins after what the stream has, and the stream goes on after it.
class cuda_lanes {
   public:
    cuda_lanes() = default;
    /// *Throws* `transport_error`.
    explicit cuda_lanes(int count) {
        lanes_.reserve(static_cast<std::size_t>(count));
        for (int i = 0; i < count; ++i) {
            auto& lane = lanes_.emplace_back();
            expect_cuda(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking),
                        "cudaStreamCreateWithFlags");
            expect_cuda(cudaEventCreateWithFlags(&lane.done, cudaEventDisableTiming),
                        "cudaEventCreateWithFlags");
        }
        expect_cuda(cudaEventCreateWithFlags(&begun_, cudaEventDisableTiming),
                    "cudaEventCreateWithFlags");
    }
    cuda_lanes(cuda_lanes const&) = delete;
    cuda_lanes& operator=(cuda_lanes const&) = delete;
    ~cuda_lanes() {
        for (auto const& lane : lanes_) {
            if (lane.done != nullptr) cudaEventDestroy(lane.done);
            if (lane.stream != nullptr) cudaStreamDestroy(lane.stream);
        }
        if (begun_ != nullptr) cudaEventDestroy(begun_);
    }

    std::size_t size() const { return lanes_.size(); }
    cudaStream_t stream(std::size_t lane) const { return lanes_[lane].stream; }

    void fork(cudaStream_t from) {
        expect_cuda(cudaEventRecord(begun_, from), "cudaEventRecord");
        for (auto const& lane : lanes_)
            expect_cuda(cudaStreamWaitEvent(lane.stream, begun_, 0), "cudaStreamWaitEvent");
    }
    void join(cudaStream_t to) {
        for (auto const& lane : lanes_) {
            expect_cuda(cudaEventRecord(lane.done, lane.stream), "cudaEventRecord");
            expect_cuda(cudaStreamWaitEvent(to, lane.done, 0), "cudaStreamWaitEvent");
        }
    }

   private:
    struct lane_type {
        cudaStream_t stream = nullptr;
        cudaEvent_t done = nullptr;
    };
    std::vector<lane_type> lanes_;
    cudaEvent_t begun_ = nullptr;
};

/// One axis of a strided copy, in bytes.
struct copy_axis {
    std::int64_t extent, to, from;
};

/// `block` by the copy engine: axes that lie back to back on both sides become one, and what is
/// left is one copy, or one for each index of the axes that a pitched copy cannot take.
inline void engine_copy(cudaStream_t stream, block_copy const& block) {
    if (block.bytes() == 0) return;
    auto row = block.row_bytes;
    std::array<copy_axis, 3> axes{};  // from the innermost
    std::size_t count = 0;
    for (std::size_t axis = 3; axis-- > 0;) {
        copy_axis const next{block.extents[axis], block.to_strides[axis], block.from_strides[axis]};
        if (next.extent == 1) continue;
        if (count == 0 && next.to == row && next.from == row) {
            row *= next.extent;
        } else if (count > 0 && next.to == axes[count - 1].to * axes[count - 1].extent &&
                   next.from == axes[count - 1].from * axes[count - 1].extent) {
            axes[count - 1].extent *= next.extent;
        } else {
            axes[count++] = next;
        }
    }
    // The longest axis is pitched, as the others take a call for each index. A row that is read again
    // and again, by a stride of 0, has no pitch.
    copy_axis pitched{1, row, row};
    std::size_t longest = count;
    for (std::size_t i = 0; i < count; ++i)
        if (std::min(axes[i].to, axes[i].from) >= row && axes[i].extent > pitched.extent) {
            pitched = axes[i];
            longest = i;
        }
    if (longest < count) axes[longest] = {};
    for (auto& each : axes)
        if (each.extent == 0) each = {1, 0, 0};
    auto const size = [](std::int64_t bytes) { return static_cast<std::size_t>(bytes); };
    for (std::int64_t i = 0; i < axes[2].extent; ++i)
        for (std::int64_t j = 0; j < axes[1].extent; ++j)
            for (std::int64_t k = 0; k < axes[0].extent; ++k) {
                auto const to = i * axes[2].to + j * axes[1].to + k * axes[0].to;
                auto const from = i * axes[2].from + j * axes[1].from + k * axes[0].from;
                expect_cuda(cudaMemcpy2DAsync(block.to + to, size(pitched.to), block.from + from,
                                              size(pitched.from), size(row), size(pitched.extent),
                                              cudaMemcpyDefault, stream),
                            "cudaMemcpy2DAsync");
            }
}

}  // namespace detail

struct cuda_options {
    copy_way way = copy_way::kernel;
    int in_flight = 4;  ///< lanes of `copy_way::engine`
    /// Which part of a list of blocks goes first by `copy_way::engine`, as rank r of P: ranks that
    /// begin with different peers do not meet at one.
    int rank = 0, ranks = 1;
};

/// How copies on one rank's stream are made. Outlives the calls on queues that name it.
///
/// *Thread safety*: one thread at a time.
class cuda_work {
   public:
    /// *Throws* `invalid_call`, `transport_error`.
    explicit cuda_work(cuda_options const& given = {}, where at = where::here())
        : options_(given), lanes_(checked(given, at)) {}

    cuda_options const& options() const { return options_; }
    detail::cuda_lanes& lanes() { return lanes_; }

   private:
    static int checked(cuda_options const& given, where at) {
        if (given.in_flight < 1 || given.ranks < 1 || given.rank < 0 || given.rank >= given.ranks)
            raise(errc::invalid_call, at, "cuda_work",
                  "in_flight must be positive and rank one of ranks", "in_flight ", given.in_flight,
                  ", rank ", given.rank, " of ", given.ranks);
        return given.way == copy_way::engine ? given.in_flight : 0;
    }

    cuda_options options_;
    detail::cuda_lanes lanes_;
};

/// Device memory of the current device.
struct cuda_space {
    struct queue {
        cudaStream_t stream = nullptr;
        cuda_work* work = nullptr;          ///< null: the kernel copies
        cuda_memory const* from = nullptr;  ///< null: cudaMallocAsync
    };

    /// Aligned to 64 and more. *Throws* `out_of_memory`, `transport_error`; `invalid_call` while the
    /// stream is captured, as memory of a graph is not the pipeline's to keep.
    static void* allocate(queue on, std::size_t bytes, where at = where::here()) {
        if (detail::captured(on.stream))
            raise(errc::invalid_call, at, "cuda_space::allocate",
                  "memory must not grow while a stream is captured: make the call once before",
                  bytes, " bytes");
        if (auto const* const own = on.from) {
            auto* const memory = own->allocate(own->context, bytes, on.stream);
            if (memory == nullptr)
                raise(errc::out_of_memory, at, "cuda_space::allocate", "memory must be available",
                      bytes, " bytes");
            return memory;
        }
        void* memory = nullptr;
        auto const result = cudaMallocAsync(&memory, bytes, on.stream);
        if (result == cudaErrorMemoryAllocation) {
            static_cast<void>(cudaGetLastError());
            raise(errc::out_of_memory, at, "cuda_space::allocate", "memory must be available",
                  bytes, " bytes");
        }
        detail::expect_cuda(result, "cudaMallocAsync", at);
        return memory;
    }

    /// Freed when the stream gets there.
    static void deallocate(queue on, void* memory, std::size_t bytes) noexcept {
        if (auto const* const own = on.from)
            own->deallocate(own->context, memory, bytes, on.stream);
        else
            static_cast<void>(cudaFreeAsync(memory, on.stream));
    }

    static void copy(queue on, std::span<block_copy const> blocks, std::size_t) {
        if (on.work == nullptr || on.work->options().way == copy_way::kernel) {
            detail::expect_cuda(detail::launch_copies(on.stream, blocks), "copy kernel");
            return;
        }
        if (blocks.empty()) return;
        auto const& options = on.work->options();
        auto& lanes = on.work->lanes();
        lanes.fork(on.stream);
        auto const first = blocks.size() * static_cast<std::size_t>(options.rank) /
                           static_cast<std::size_t>(options.ranks);
        for (std::size_t i = 0; i < blocks.size(); ++i)
            detail::engine_copy(lanes.stream(i % lanes.size()),
                                blocks[(first + i) % blocks.size()]);
        lanes.join(on.stream);
    }

    /// *Throws* `unsupported` for more sources than a launch holds.
    template <element To, element From>
        requires(dtype_of<From> == dtype_of<To> || std::same_as<From, accumulator_t<To>>)
    static void add(queue on, std::span<block_sum const> sums) {
        for (auto const& sum : sums)
            if (sum.from.size() > detail::largest_device_sum)
                raise(errc::unsupported, {}, "cuda_space::add",
                      "a sum must have no more sources than a launch holds", sum.from.size(),
                      " sources, at most ", detail::largest_device_sum);
        detail::expect_cuda(detail::launch_sums(on.stream, dtype_of<To>, dtype_of<From>, sums),
                            "sum kernel");
    }
};

static_assert(space<cuda_space>);

}  // namespace ulysses::inline ULYSSES_ABI
