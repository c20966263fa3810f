#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cuda_runtime_api.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

/// A double of the CUDA runtime, for tests of host code without a GPU: device memory is memory of the
/// host, a stream is a thread that runs its work in order, an event is set by the stream it was recorded
/// on. What is not ordered by a stream or an event is a race that the thread sanitizer reports.
///
/// There are `device_count` devices, all of which reach each other. What CUDA refuses while a stream is
/// captured is refused, and a stream's device is that which its events and kernels must have; a captured
/// graph runs its work one after the other.
namespace doubles {

inline constexpr int device_count = 2;

/// Runs `work` on the stream's thread, after what the stream has: a kernel or a host function.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);

/// What a launch on the stream returns: an error for one of another device, or that was asked for.
cudaError_t launched_on(cudaStream_t stream);

/// Streams are numbered from 0 as they are created.
int number(cudaStream_t stream);

/// A stream's being told to wait for another.
struct wait {
    int stream, number;  ///< since the last call of `waits`, the stream's how many-th, from 0
    int source;          ///< the stream that is waited for
};
/// Those since the last call.
std::vector<wait> waits();
/// Makes none of a stream's `number`th wait from here on, from 0; -1: all wait.
void drop_wait(int stream, int number);
/// For waits that are not made by an event: counts one, and says whether to wait.
bool told_to_wait(cudaStream_t stream, int source);

/// Waits for all streams.
void finish();

/// Makes each work of a stream begin so much later; -1: of none.
void slow_down(int stream, std::chrono::microseconds by);

/// Kernels launched since the start.
int launches();

/// Where the copy engines were told to write since the last call, in the order of the calls.
std::vector<void const*> copies();

/// Calls that made the host wait for the device, or gave or took memory at once, since the start.
std::uint64_t synchronisations();
/// Bytes of device memory that are allocated.
std::size_t allocated_bytes();
/// Makes the allocation after next `after` others fail for lack of memory; -1: none.
void fail_allocation(int after);
/// Whether devices do not reach each other's memory.
void set_apart(bool apart);
/// Makes calls of this thread fail with cudaErrorUnknown: `count` of them, after next `after` others; -1:
/// none. Those that free or destroy are not counted.
void fail_calls(int after, int count = 1);
/// Whether one of them has come.
bool calls_have_failed();

}  // namespace doubles
