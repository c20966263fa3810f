#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>

/// A double of the CUDA runtime, for tests of host code without a GPU: device memory is memory of the
/// host, a stream is a thread that runs its work in order, an event is set by the stream it was recorded
/// on. What is not ordered by a stream or an event is a race that the thread sanitizer reports.
///
/// There are `device_count` devices, all of which reach each other. What CUDA refuses while a stream is
/// captured is refused; a captured graph runs its work one after the other.
namespace doubles {

inline constexpr int device_count = 2;

/// Runs `work` on the stream's thread, after what the stream has: a kernel or a host function.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);

/// Streams are numbered from 0 as they are created. The stream of that number does not wait the `wait`th
/// time that it is told to; -1: all do.
void drop_wait(int stream, int wait);
/// How often a stream has been told to wait.
int waits(cudaStream_t stream);

/// Calls that made the host wait for the device, or gave or took memory at once, since the start.
std::uint64_t synchronisations();
/// Bytes of device memory that are allocated.
std::size_t allocated_bytes();
/// Makes the allocation after next `after` others fail for lack of memory; -1: none.
void fail_allocation(int after);

}  // namespace doubles
