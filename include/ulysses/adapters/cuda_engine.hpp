#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cuda_call.hpp>
#include <ulysses/core/block.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

/// Blocks by the copy engines, which move bytes while the multiprocessors do other work.
namespace ulysses::inline ULYSSES_ABI::detail {

/// Work that runs beside a stream: begins after what the stream has, and the stream goes on after it.
class cuda_lanes {
   public:
    cuda_lanes() = default;
    /// *Throws* `transport_error`.
    explicit cuda_lanes(int count) : cuda_lanes() {
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
            if (lane.done != nullptr) tolerate(cudaEventDestroy(lane.done));
            if (lane.stream != nullptr) tolerate(cudaStreamDestroy(lane.stream));
        }
        if (begun_ != nullptr) tolerate(cudaEventDestroy(begun_));
    }

    cudaStream_t stream(std::size_t lane) const { return lanes_[lane].stream; }

    /// Begins as many lanes as have something to do; returns how many.
    std::size_t fork(cudaStream_t from, std::size_t works) {
        auto const count = std::min(works, lanes_.size());
        if (count == 0) return 0;
        expect_cuda(cudaEventRecord(begun_, from), "cudaEventRecord");
        for (std::size_t i = 0; i < count; ++i)
            expect_cuda(cudaStreamWaitEvent(lanes_[i].stream, begun_, 0), "cudaStreamWaitEvent");
        return count;
    }
    /// Ends that many, each whatever becomes of the others.
    cudaError_t join(cudaStream_t to, std::size_t count) {
        auto first = cudaSuccess;
        for (std::size_t i = 0; i < count; ++i) {
            auto const& lane = lanes_[i];
            auto result = cudaEventRecord(lane.done, lane.stream);
            if (result == cudaSuccess) result = cudaStreamWaitEvent(to, lane.done, 0);
            if (result == cudaSuccess) continue;
            // The host waits in place of the stream.
            tolerate(result);
            tolerate(cudaStreamSynchronize(lane.stream));
            if (first == cudaSuccess) first = result;
        }
        return first;
    }

   private:
    struct lane_type {
        cudaStream_t stream = nullptr;
        cudaEvent_t done = nullptr;
    };
    std::vector<lane_type> lanes_;
    cudaEvent_t begun_ = nullptr;
};

/// Lanes beside a stream while this lives: it goes on after them also when an error comes between.
class cuda_fork {
   public:
    cuda_fork(cuda_lanes& lanes, cudaStream_t stream, std::size_t works)
        : lanes_(lanes), stream_(stream), count_(lanes.fork(stream, works)) {}
    cuda_fork(cuda_fork const&) = delete;
    cuda_fork& operator=(cuda_fork const&) = delete;
    ~cuda_fork() { lanes_.join(stream_, count_); }

    /// Lanes in turn.
    cudaStream_t next() { return lanes_.stream(next_++ % count_); }
    void join() { expect_cuda(lanes_.join(stream_, std::exchange(count_, 0)), "cudaEventRecord"); }

   private:
    cuda_lanes& lanes_;
    cudaStream_t stream_;
    std::size_t count_, next_ = 0;
};

/// A block as the copy engines see it: axes that lie back to back on both sides are one, and the rest
/// are dealt to what a call of CUDA takes. What no axis was dealt to has an extent of 1.
struct engine_layout {
    struct axis {
        std::int64_t extent = 1, to = 0, from = 0;  ///< strides in bytes
    };
    std::int64_t row_bytes = 0;
    axis rows{};                 ///< rows of one call, a pitch apart
    axis planes{};               ///< planes of rows of one call, whole pitches apart
    std::array<axis, 3> rest{};  ///< each index is a call of its own
};

/// CUDA's bound on a pitch.
inline constexpr std::int64_t largest_pitch = 0x7fffffff;

inline engine_layout engine_layout_of(block_copy const& block) {
    using axis = engine_layout::axis;
    engine_layout result;
    auto& axes = result.rest;  // from the innermost
    auto& row = result.row_bytes;
    row = block.row_bytes;
    std::size_t count = 0;
    for (std::size_t i = 3; i-- > 0;) {
        axis const next{block.extents[i], block.to_strides[i], block.from_strides[i]};
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
    // The longest axes, as those that are left take a call for each index. A row that is read again
    // and again, by a stride of 0, has no pitch.
    auto const take = [&](auto const& fits) {
        axis* longest = nullptr;
        for (auto& each : axes)
            if (each.extent > 1 && fits(each) &&
                (longest == nullptr || each.extent > longest->extent))
                longest = &each;
        return longest == nullptr ? axis{} : std::exchange(*longest, axis{});
    };
    auto const& rows = result.rows = take([&](axis const& each) {
        return std::min(each.to, each.from) >= row && std::max(each.to, each.from) <= largest_pitch;
    });
    if (rows.extent > 1)
        result.planes = take([&](axis const& each) {
            return each.to % rows.to == 0 && each.from % rows.from == 0 &&
                   std::min(each.to / rows.to, each.from / rows.from) >= rows.extent;
        });
    return result;
}

/// `block` by as few calls as CUDA's pitched copies allow.
inline void engine_copy(cudaStream_t stream, block_copy const& block) {
    if (block.bytes() == 0) return;
    auto const layout = engine_layout_of(block);
    auto const size = [](std::int64_t bytes) { return static_cast<std::size_t>(bytes); };
    auto const &rows = layout.rows, &planes = layout.planes;
    auto const width = size(layout.row_bytes), height = size(rows.extent);
    auto const copy = [&](std::byte* to, std::byte const* from) {
        if (rows.extent == 1)
            return expect_cuda(cudaMemcpyAsync(to, from, width, cudaMemcpyDefault, stream),
                               "cudaMemcpyAsync");
        if (planes.extent == 1)
            return expect_cuda(cudaMemcpy2DAsync(to, size(rows.to), from, size(rows.from), width,
                                                 height, cudaMemcpyDefault, stream),
                               "cudaMemcpy2DAsync");
        cudaMemcpy3DParms call{};
        call.srcPtr = {const_cast<std::byte*>(from), size(rows.from), width,
                       size(planes.from / rows.from)};
        call.dstPtr = {to, size(rows.to), width, size(planes.to / rows.to)};
        call.extent = {width, height, size(planes.extent)};
        call.kind = cudaMemcpyDefault;
        expect_cuda(cudaMemcpy3DAsync(&call, stream), "cudaMemcpy3DAsync");
    };
    auto const& rest = layout.rest;
    for (std::int64_t i = 0; i < rest[2].extent; ++i)
        for (std::int64_t j = 0; j < rest[1].extent; ++j)
            for (std::int64_t k = 0; k < rest[0].extent; ++k)
                copy(block.to + i * rest[2].to + j * rest[1].to + k * rest[0].to,
                     block.from + i * rest[2].from + j * rest[1].from + k * rest[0].from);
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
