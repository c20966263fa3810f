#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cuda_call.hpp>
#include <ulysses/adapters/cuda_engine.hpp>
#include <ulysses/config/macros.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/space.hpp>

#include <cuda_runtime_api.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
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
    engine,  ///< blocks of peers by the copy engines, several in flight; own ones by one launch
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

/// Each executes its list on the stream, by as few launches as hold it. Defined in cuda_kernels.cuh.
cudaError_t launch_copies(cudaStream_t stream, std::span<block_copy const> blocks);
cudaError_t launch_bytes(cudaStream_t stream, void* to, std::span<std::byte const> bytes);
/// *Shape*: types as `dtype_of` has them; no sum of more than `largest_device_sum` sources.
cudaError_t launch_sums(cudaStream_t stream, dtype to, dtype from, std::span<block_sum const> sums);

inline constexpr std::size_t largest_device_sum = 768;

/// Epilogues of `dense`; see projection/rope.hpp and projection/qk_norm.hpp.
struct rope_turns;
struct norm_rows;
cudaError_t launch_epilogue(cudaStream_t stream, dtype type, rope_turns const& turns);
cudaError_t launch_epilogue(cudaStream_t stream, dtype type, norm_rows const& work);

/// One half of a fence by flags; see cuda_flags.hpp.
struct flag_fence;
cudaError_t launch_flags(cudaStream_t stream, flag_fence const& half);

}  // namespace detail

struct cuda_options {
    copy_way way = copy_way::kernel;
    int in_flight = 4;  ///< lanes of `copy_way::engine`
    /// By `copy_way::engine` rank r of P begins with peer r + 1: ranks do not meet at one.
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

    bool by_engine() const { return options_.way == copy_way::engine; }

    /// Peers' blocks by the copy engines, beside the launch of the others.
    void copy(cudaStream_t stream, std::span<block_copy const> blocks) {
        own_.clear();
        for (auto const& block : blocks)
            if (!of_peer(block)) own_.push_back(block);
        auto const remote = blocks.size() - own_.size();
        detail::cuda_fork lanes(lanes_, stream, remote);
        for (int i = 1; i < options_.ranks && remote > 0; ++i) {
            auto const peer = (options_.rank + i) % options_.ranks;
            for (auto const& block : blocks)
                if (block.peer == peer) detail::engine_copy(lanes.next(), block);
        }
        if (!own_.empty()) detail::expect_cuda(detail::launch_copies(stream, own_), "copy kernel");
        lanes.join();
    }

   private:
    static int checked(cuda_options const& given, where at) {
        if (given.in_flight < 1 || given.ranks < 1 || given.rank < 0 || given.rank >= given.ranks)
            raise(errc::invalid_call, at, "cuda_work",
                  "in_flight must be positive and rank one of ranks", "in_flight ", given.in_flight,
                  ", rank ", given.rank, " of ", given.ranks);
        return given.way == copy_way::engine ? given.in_flight : 0;
    }
    bool of_peer(block_copy const& block) const {
        return block.peer >= 0 && block.peer < options_.ranks && block.peer != options_.rank;
    }

    cuda_options options_;
    detail::cuda_lanes lanes_;
    std::vector<block_copy> own_;
};

/// Device memory of the current device.
struct cuda_space {
    struct queue {
        cudaStream_t stream = nullptr;
        cuda_work* work = nullptr;          ///< null: the kernel copies
        cuda_memory const* from = nullptr;  ///< null: cudaMallocAsync
    };

    /// Whether the stream is captured.
    static bool records(queue on) { return detail::captured(on.stream); }

    /// Aligned to 64 and more. *Throws* `out_of_memory`, `transport_error`; `invalid_call` while the
    /// stream is captured, as memory of a graph is not the pipeline's to keep.
    static void* allocate(queue on, std::size_t bytes, where at = where::here()) {
        if (records(on))
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
            detail::tolerate(cudaFreeAsync(memory, on.stream));
    }

    static void copy(queue on, std::span<block_copy const> blocks, std::size_t) {
        if (on.work != nullptr && on.work->by_engine()) return on.work->copy(on.stream, blocks);
        detail::expect_cuda(detail::launch_copies(on.stream, blocks), "copy kernel");
    }

    /// Copies bytes of the host, few of them, which may change on return: they travel as parameters of
    /// kernels, by which the host waits for nothing and a captured call holds them.
    static void write(queue on, void* to, std::span<std::byte const> bytes) {
        detail::expect_cuda(detail::launch_bytes(on.stream, to, bytes), "byte kernel");
    }

    /// *Throws* `invalid_tensor` unless the operand's first and last bytes are memory of the calling
    /// thread's device, or the host's that CUDA has mapped for it.
    static void expect_memory(std::string_view call, std::string_view name, void const* first,
                              void const* last, where at = where::here()) {
        int here = 0;
        detail::expect_cuda(cudaGetDevice(&here), "cudaGetDevice", at);
        for (auto const* const each : {first, last}) {
            cudaPointerAttributes found{};
            detail::expect_cuda(cudaPointerGetAttributes(&found, each), "cudaPointerGetAttributes",
                                at);
            auto const elsewhere = found.type == cudaMemoryTypeDevice && found.device != here;
            if (found.devicePointer == nullptr || elsewhere)
                raise(errc::invalid_tensor, at, concat(call, ": ", name),
                      "an operand must be memory of the rank's device",
                      elsewhere ? concat("memory of device ", found.device)
                                : std::string("the host's, which CUDA does not know"),
                      ", the rank is on device ", here);
        }
    }

    /// *Throws* `unsupported` for more sources than a launch holds.
    template <element To, element From>
        requires(dtype_of<From> == dtype_of<To> || std::same_as<From, accumulator_t<To>> ||
                 std::same_as<To, accumulator_t<From>>)
    static void add(queue on, std::span<block_sum const> sums) {
        for (auto const& sum : sums)
            if (sum.from.size() > detail::largest_device_sum)
                raise(errc::unsupported, {}, "cuda_space::add",
                      "a sum must have no more sources than a launch holds", sum.from.size(),
                      " sources, at most ", detail::largest_device_sum);
        detail::expect_cuda(detail::launch_sums(on.stream, dtype_of<To>, dtype_of<From>, sums),
                            "sum kernel");
    }

    /// What an epilogue of `dense` does to rows of elements of a type.
    template <class Work>
    static void run(queue on, dtype type, Work const& work) {
        detail::expect_cuda(detail::launch_epilogue(on.stream, type, work), "epilogue kernel");
    }
};

static_assert(space<cuda_space>);

}  // namespace ulysses::inline ULYSSES_ABI
