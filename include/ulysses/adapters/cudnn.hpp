#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cuda.hpp>
#include <ulysses/adapters/cudnn/sdpa_attention.hpp>
#include <ulysses/adapters/cudnn/sdpa_key.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

/// cuDNN's attention as the functor of a pipeline over `cuda_space`:
///
///     uly::cudnn_engine engine;                      // one a rank, on its device
///     uly::pipeline layer{ranks, uly::sequence_local{}, uly::cudnn_attention{engine}, shape};
///
/// What needs cuDNN's frontend, which takes a compiler half a minute, is declared here and defined in
/// `cudnn/engine.hpp`, which one file of the program includes.
namespace ulysses::inline ULYSSES_ABI {

class cudnn_device;

/// cuDNN on a device, and the plans that it has made, which all layers of a rank share.
///
/// *Thread safety*: one thread at a time. CUDA graphs that were captured from its calls read from it.
class cudnn_engine {
   public:
    using space_type = cuda_space;
    template <class T>
    static constexpr bool takes = dtype_of<T> == dtype::f16 || dtype_of<T> == dtype::bf16;
    static constexpr std::int64_t row_bytes = 16;

    /// On the current device. *Throws* `unsupported` with cuDNN's own words.
    explicit cudnn_engine(where at = where::here());
    /// Makes plans for a device that is described, and runs none.
    explicit cudnn_engine(cudnn_device const& device);
    ~cudnn_engine();
    cudnn_engine(cudnn_engine const&) = delete;
    cudnn_engine& operator=(cudnn_engine const&) = delete;

    /// Of a plan, which is made when it is first asked for: that takes up to seconds.
    /// *Throws* `unsupported` with cuDNN's own words where there is none.
    std::size_t workspace_bytes(sdpa_key const& key);
    std::size_t workspace_bytes(sum_key const& key);

    /// Enqueues a plan. *Throws* `functor_failed` with cuDNN's own words.
    void run(cuda_space::queue queue, sdpa_key const& key, sdpa_operands const& operands,
             void* workspace);
    void run(cuda_space::queue queue, sum_key const& key, sdpa_operands const& operands,
             void* workspace);

    /// Copies bytes of the host, which the caller may change on return.
    void write(cuda_space::queue queue, void* to, std::span<std::byte const> bytes);

    /// *Throws* `invalid_tensor` unless the bytes from `first` to `last` are memory of the device, if it is
    /// there.
    void expect_memory(std::string_view name, void const* first, void const* last) const;

    /// Plans that are held.
    std::size_t plans() const;

   private:
    struct state;
    std::unique_ptr<state> state_;
};

static_assert(sdpa_engine<cudnn_engine>);

using cudnn_attention = sdpa_attention<cudnn_engine>;

}  // namespace ulysses::inline ULYSSES_ABI
