#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/error.hpp>

#include <cuda_runtime_api.h>

#include <string_view>

/// Calls of the CUDA runtime.
namespace ulysses::inline ULYSSES_ABI::detail {

/// *Throws* `transport_error` with CUDA's own name and number of the error.
inline void expect_cuda(cudaError_t result, std::string_view call, where at = {}) {
    if (result == cudaSuccess) return;
    static_cast<void>(cudaGetLastError());  // else the next call reports it again
    raise(errc::transport, at, "cuda", "a call of CUDA must succeed", call, ": ",
          cudaGetErrorName(result), " (", static_cast<int>(result), ")");
}

/// Of a call that gives something back: nothing follows from its error, nor is it left for the next call.
inline void tolerate(cudaError_t result) noexcept {
    if (result != cudaSuccess) static_cast<void>(cudaGetLastError());
}

inline bool captured(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    expect_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
