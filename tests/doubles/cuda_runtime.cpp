// SPDX-License-Identifier: Apache-2.0

#include "cuda_runtime.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using work_type = std::function<void()>;

struct CUgraph_st {
    std::vector<work_type> work;
    bool invalid = false;              // by a call that a capture does not allow
    std::vector<CUstream_st*> joined;  // streams that wait for an event of the capture
};
struct CUgraphExec_st {
    std::shared_ptr<std::vector<work_type>> work;
};

namespace {

/// What one recording of an event stands for.
struct recording {
    std::mutex mutex;
    std::condition_variable changed;
    bool set = false;
    CUgraph_st* capture = nullptr;  // of the capture it was recorded in
    int stream = -1;
    std::chrono::steady_clock::time_point when{};

    void complete() {
        {
            std::lock_guard const lock(mutex);
            when = std::chrono::steady_clock::now();
            set = true;
        }
        changed.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return set; });
    }
};

std::atomic<int> streams_made{0}, slow_stream{-1};
std::atomic<std::chrono::microseconds> slowness{};
std::mutex streams_mutex;
std::set<CUstream_st*> streams;
std::mutex seen_mutex;
std::vector<doubles::wait> waits_seen;
std::map<int, int> waits_of_stream;
int dropped_stream = -1, waits_until_dropped = -1;
std::vector<void const*> copies_seen;
std::atomic<std::uint64_t> synchronised{0};
std::atomic<int> allocations_left{-1};
std::atomic<bool> devices_apart{false};

thread_local int current_device = 0;
thread_local int captures_here = 0;  // of this thread, which may then not allocate at once
thread_local cudaError_t last_error = cudaSuccess;
thread_local int calls_until_failure = -1, calls_to_fail = 0;
thread_local bool a_call_has_failed = false;

cudaError_t failed(cudaError_t error) {
    last_error = error;
    return error;
}

/// What a call that may fail begins with: an error that was asked for.
cudaError_t called() {
    if (calls_until_failure < 0) return cudaSuccess;
    if (calls_until_failure > 0) {
        --calls_until_failure;
        return cudaSuccess;
    }
    if (--calls_to_fail <= 0) calls_until_failure = -1;
    a_call_has_failed = true;
    return failed(cudaErrorUnknown);
}
#define FAILS_IF_ASKED                                                                             \
    if (auto const asked = called(); asked != cudaSuccess) return asked

}  // namespace

struct CUevent_st {
    int const device = current_device;
    std::mutex mutex;
    std::shared_ptr<recording> latest;  // null: never recorded
};

struct CUstream_st {
    int const number = streams_made++;
    int const device = current_device;
    CUgraph_st* capture = nullptr;  // used by the thread that captures

    CUstream_st() : thread_([this] { run(); }) {
        std::lock_guard const lock(streams_mutex);
        streams.insert(this);
    }
    ~CUstream_st() {
        {
            std::lock_guard const lock(streams_mutex);
            streams.erase(this);
        }
        {
            std::lock_guard const lock(mutex_);
            ending_ = true;
        }
        changed_.notify_all();
        thread_.join();
    }

    void push(work_type work) {
        if (capture != nullptr) {
            capture->work.push_back(std::move(work));
            return;
        }
        {
            std::lock_guard const lock(mutex_);
            work_.push_back(std::move(work));
        }
        changed_.notify_all();
    }

    bool idle() {
        std::lock_guard const lock(mutex_);
        return work_.empty() && !working_;
    }
    void synchronise() {
        auto const end = std::make_shared<recording>();
        push([end] { end->complete(); });
        end->wait();
    }

   private:
    void run() {
        for (;;) {
            work_type next;
            {
                std::unique_lock lock(mutex_);
                changed_.wait(lock, [&] { return ending_ || !work_.empty(); });
                if (work_.empty()) return;
                next = std::move(work_.front());
                work_.pop_front();
                working_ = true;
            }
            if (number == slow_stream) std::this_thread::sleep_for(slowness.load());
            next();
            std::lock_guard const lock(mutex_);
            working_ = false;
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<work_type> work_;
    bool ending_ = false, working_ = false;
    std::thread thread_;
};

namespace {

CUstream_st& stream_of(cudaStream_t stream) {
    static CUstream_st default_stream;
    return stream == nullptr ? default_stream : *stream;
}

/// Device memory, by its first byte.
struct allocation {
    std::size_t bytes;
    int device;
    int file;  // -1: no other process may open it
};
std::mutex memory_mutex;
std::map<std::byte*, allocation> memory;
std::map<std::byte*, std::size_t> pinned;    // of the host
std::map<std::byte*, std::size_t> mappings;  // of other processes' memory
std::size_t memory_bytes = 0;

bool no_memory_left() {
    auto left = allocations_left.load();
    return left >= 0 && allocations_left.fetch_sub(1) == 0;
}

std::size_t whole_pages(std::size_t bytes) {
    constexpr std::size_t page = 4096;
    return std::max<std::size_t>(1, (bytes + page - 1) / page) * page;
}

void remember(void* data, std::size_t bytes, int device, int file) {
    std::lock_guard const lock(memory_mutex);
    memory[static_cast<std::byte*>(data)] = {bytes, device, file};
    memory_bytes += bytes;
}
/// The allocation, forgotten; none for an address that is not one.
std::pair<bool, allocation> forget(void* data) {
    std::lock_guard const lock(memory_mutex);
    auto const found = memory.find(static_cast<std::byte*>(data));
    if (found == memory.end()) return {};
    auto const result = found->second;
    memory_bytes -= result.bytes;
    memory.erase(found);
    return {true, result};
}

void remember_copy(void const* to) {
    std::lock_guard const lock(seen_mutex);
    copies_seen.push_back(to);
}

cudaError_t capturing_here() {
    return captures_here > 0 ? failed(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

}  // namespace

namespace doubles {

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
    stream_of(stream).push(std::move(work));
    return cudaSuccess;
}
cudaError_t launched_on(cudaStream_t stream) {
    FAILS_IF_ASKED;
    return stream != nullptr && stream->device != current_device
               ? failed(cudaErrorInvalidResourceHandle)
               : cudaSuccess;
}
int number(cudaStream_t stream) { return stream_of(stream).number; }
bool told_to_wait(cudaStream_t stream, int source) {
    auto const own = number(stream);
    std::lock_guard const lock(seen_mutex);
    waits_seen.push_back({own, waits_of_stream[own]++, source});
    return own != dropped_stream || waits_until_dropped-- != 0;
}
std::vector<wait> waits() {
    std::lock_guard const lock(seen_mutex);
    waits_of_stream.clear();
    return std::exchange(waits_seen, {});
}
void drop_wait(int stream, int number) {
    std::lock_guard const lock(seen_mutex);
    dropped_stream = stream;
    waits_until_dropped = number;
}
void finish() {
    std::lock_guard const lock(streams_mutex);
    for (auto* const each : streams) each->synchronise();
}
void slow_down(int stream, std::chrono::microseconds by) {
    slowness = by;
    slow_stream = stream;
}
std::vector<void const*> copies() {
    std::lock_guard const lock(seen_mutex);
    return std::exchange(copies_seen, {});
}
std::uint64_t synchronisations() { return synchronised; }
std::size_t allocated_bytes() {
    std::lock_guard const lock(memory_mutex);
    return memory_bytes;
}
void fail_allocation(int after) { allocations_left = after; }
void set_apart(bool apart) { devices_apart = apart; }
void fail_calls(int after, int count) {
    calls_until_failure = after;
    calls_to_fail = count;
    a_call_has_failed = false;
}
bool calls_have_failed() { return a_call_has_failed; }

}  // namespace doubles

extern "C" {

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
char const* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorUnknown: return "cudaErrorUnknown";
        case cudaErrorPeerAccessUnsupported: return "cudaErrorPeerAccessUnsupported";
        case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
        case cudaErrorNoDevice: return "cudaErrorNoDevice";
        case cudaErrorInvalidPitchValue: return "cudaErrorInvalidPitchValue";
        case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
        case cudaErrorStreamCaptureIsolation: return "cudaErrorStreamCaptureIsolation";
        default: return "an error of the double";
    }
}

cudaError_t cudaGetDeviceCount(int* count) {
    if (std::getenv("DOUBLES_WITHOUT_DEVICES") != nullptr) {
        *count = 0;
        return failed(cudaErrorNoDevice);
    }
    *count = doubles::device_count;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
    *properties = {};
    std::snprintf(properties->name, sizeof properties->name, "a double of the CUDA runtime");
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }
cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= doubles::device_count) return failed(cudaErrorInvalidDevice);
    current_device = device;
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
    *can = device != peer && !devices_apart;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
    static std::atomic<bool> enabled[doubles::device_count][doubles::device_count];
    if (peer == current_device) return failed(cudaErrorInvalidDevice);
    return enabled[current_device][peer].exchange(true) ? failed(cudaErrorPeerAccessAlreadyEnabled)
                                                        : cudaSuccess;
}

// Memory ------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** data, std::size_t bytes) {
    FAILS_IF_ASKED;
    if (auto const refused = capturing_here(); refused != cudaSuccess) return refused;
    ++synchronised;
    if (no_memory_left()) return failed(cudaErrorMemoryAllocation);
    auto const file = memfd_create("device memory", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(whole_pages(bytes))) != 0)
        return failed(cudaErrorMemoryAllocation);
    *data = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (*data == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
    std::memset(*data, 0xff, bytes);  // NaN, whatever the type
    remember(*data, bytes, current_device, file);
    return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
    if (data == nullptr) return cudaSuccess;
    if (auto const refused = capturing_here(); refused != cudaSuccess) return refused;
    ++synchronised;
    auto const [found, was] = forget(data);
    if (!found || was.file < 0) return failed(cudaErrorInvalidValue);
    munmap(data, whole_pages(was.bytes));
    close(was.file);
    return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** data, std::size_t bytes, cudaStream_t stream) {
    FAILS_IF_ASKED;
    if (stream_of(stream).capture != nullptr) return failed(cudaErrorStreamCaptureUnsupported);
    if (no_memory_left()) return failed(cudaErrorMemoryAllocation);
    constexpr std::size_t alignment = 256;
    *data = std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
    remember(*data, bytes, stream_of(stream).device, -1);
    // As the stream's own work: nobody else may use it before.
    stream_of(stream).push([to = *data, bytes] { std::memset(to, 0xff, bytes); });
    return cudaSuccess;
}
cudaError_t cudaFreeAsync(void* data, cudaStream_t stream) {
    if (data == nullptr) return cudaSuccess;
    // A graph frees what it has allocated.
    if (stream_of(stream).capture != nullptr) return failed(cudaErrorInvalidValue);
    {
        std::lock_guard const lock(memory_mutex);
        auto const found = memory.find(static_cast<std::byte*>(data));
        if (found == memory.end() || found->second.file >= 0) return failed(cudaErrorInvalidValue);
    }
    stream_of(stream).push([data] {
        forget(data);
        std::free(data);
    });
    return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** data, std::size_t bytes, unsigned) {
    FAILS_IF_ASKED;
    if (auto const refused = capturing_here(); refused != cudaSuccess) return refused;
    ++synchronised;
    *data = std::calloc(bytes, 1);
    std::lock_guard const lock(memory_mutex);
    pinned[static_cast<std::byte*>(*data)] = bytes;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* data) {
    ++synchronised;
    {
        std::lock_guard const lock(memory_mutex);
        pinned.erase(static_cast<std::byte*>(data));
    }
    std::free(data);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void* data, std::size_t bytes, unsigned) {
    FAILS_IF_ASKED;
    std::lock_guard const lock(memory_mutex);
    return pinned.emplace(static_cast<std::byte*>(data), bytes).second
               ? cudaSuccess
               : failed(cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void* data) {
    std::lock_guard const lock(memory_mutex);
    return pinned.erase(static_cast<std::byte*>(data)) == 1
               ? cudaSuccess
               : failed(cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, void const* data) {
    FAILS_IF_ASKED;
    *found = {};
    auto* const at = const_cast<std::byte*>(static_cast<std::byte const*>(data));
    std::lock_guard const lock(memory_mutex);
    auto const holds = [&](auto const& all, auto const& bytes_of) {
        auto const next = all.upper_bound(at);
        return next != all.begin() &&
               at < std::prev(next)->first + std::max<std::size_t>(bytes_of(std::prev(next)), 1);
    };
    auto const plain = [](auto const& each) { return each->second; };
    auto const in_device = holds(memory, [](auto const& each) { return each->second.bytes; });
    found->type = in_device              ? cudaMemoryTypeDevice
                  : holds(pinned, plain) ? cudaMemoryTypeHost
                                         : cudaMemoryTypeUnregistered;
    if (in_device) found->device = std::prev(memory.upper_bound(at))->second.device;
    if (found->type != cudaMemoryTypeUnregistered) found->devicePointer = at;
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* data, int value, std::size_t bytes, cudaStream_t stream) {
    FAILS_IF_ASKED;
    return doubles::enqueue(stream, [=] { std::memset(data, value, bytes); });
}
cudaError_t cudaMemcpyAsync(void* to, void const* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
    FAILS_IF_ASKED;
    remember_copy(to);
    return doubles::enqueue(stream, [=] {
        if (bytes > 0) std::memcpy(to, from, bytes);
    });
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, void const* from,
                              std::size_t from_pitch, std::size_t width, std::size_t height,
                              cudaMemcpyKind, cudaStream_t stream) {
    FAILS_IF_ASKED;
    if (width > to_pitch || width > from_pitch || std::max(to_pitch, from_pitch) > 0x7fffffff)
        return failed(cudaErrorInvalidPitchValue);
    remember_copy(to);
    return doubles::enqueue(stream, [=] {
        for (std::size_t i = 0; i < height; ++i)
            std::memcpy(static_cast<std::byte*>(to) + i * to_pitch,
                        static_cast<std::byte const*>(from) + i * from_pitch, width);
    });
}

cudaError_t cudaMemcpy3DAsync(cudaMemcpy3DParms const* call, cudaStream_t stream) {
    FAILS_IF_ASKED;
    auto const &to = call->dstPtr, &from = call->srcPtr;
    auto const [width, height, depth] = call->extent;
    if (width > to.pitch || width > from.pitch) return failed(cudaErrorInvalidPitchValue);
    if (height > to.ysize || height > from.ysize) return failed(cudaErrorInvalidValue);
    remember_copy(to.ptr);
    return doubles::enqueue(stream, [=, width = width, height = height, depth = depth] {
        for (std::size_t i = 0; i < depth; ++i)
            for (std::size_t j = 0; j < height; ++j)
                std::memcpy(static_cast<std::byte*>(to.ptr) + (i * to.ysize + j) * to.pitch,
                            static_cast<std::byte const*>(from.ptr) +
                                (i * from.ysize + j) * from.pitch,
                            width);
    });
}

// The handle names the process and its file, which another process opens again.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* data) {
    FAILS_IF_ASKED;
    std::lock_guard const lock(memory_mutex);
    auto const found = memory.find(static_cast<std::byte*>(data));
    if (found == memory.end() || found->second.file < 0) return failed(cudaErrorInvalidValue);
    std::uint64_t const parts[3] = {static_cast<std::uint64_t>(getpid()),
                                    static_cast<std::uint64_t>(found->second.file),
                                    found->second.bytes};
    *handle = {};
    std::memcpy(handle, parts, sizeof parts);
    return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** data, cudaIpcMemHandle_t handle, unsigned) {
    FAILS_IF_ASKED;
    if (devices_apart) return failed(cudaErrorPeerAccessUnsupported);
    std::uint64_t parts[3];
    std::memcpy(parts, &handle, sizeof parts);
    auto const path = "/proc/" + std::to_string(parts[0]) + "/fd/" + std::to_string(parts[1]);
    auto* const file = std::fopen(path.c_str(), "r+");
    if (file == nullptr) return failed(cudaErrorInvalidValue);
    auto const bytes = whole_pages(parts[2]);
    *data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fileno(file), 0);
    std::fclose(file);
    if (*data == MAP_FAILED) return failed(cudaErrorMapBufferObjectFailed);
    std::lock_guard const lock(memory_mutex);
    mappings[static_cast<std::byte*>(*data)] = bytes;
    return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* data) {
    std::lock_guard const lock(memory_mutex);
    auto const found = mappings.find(static_cast<std::byte*>(data));
    if (found == mappings.end()) return failed(cudaErrorInvalidValue);
    munmap(data, found->second);
    mappings.erase(found);
    return cudaSuccess;
}

// Streams and events ------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    FAILS_IF_ASKED;
    *stream = new CUstream_st;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete stream;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (auto* const graph = stream_of(stream).capture) {
        graph->invalid = true;
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    ++synchronised;
    stream_of(stream).synchronise();
    // A stream that has failed does nothing any more.
    FAILS_IF_ASKED;
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    FAILS_IF_ASKED;
    if (auto* const graph = stream_of(stream).capture) {
        graph->invalid = true;
        return failed(cudaErrorStreamCaptureUnsupported);
    }
    return stream_of(stream).idle() ? cudaSuccess : failed(cudaErrorNotReady);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    FAILS_IF_ASKED;
    *event = new CUevent_st;
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begun, cudaEvent_t done) {
    std::scoped_lock const lock(begun->mutex, done->mutex);
    std::chrono::duration<float, std::milli> const taken = done->latest->when - begun->latest->when;
    *milliseconds = taken.count();
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    FAILS_IF_ASKED;
    auto& on = stream_of(stream);
    if (stream != nullptr && on.device != event->device)
        return failed(cudaErrorInvalidResourceHandle);
    auto const made = std::make_shared<recording>();
    made->capture = on.capture;
    made->stream = on.number;
    {
        std::lock_guard const lock(event->mutex);
        event->latest = made;
    }
    on.push([made] { made->complete(); });
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    FAILS_IF_ASKED;
    auto& on = stream_of(stream);
    std::shared_ptr<recording> seen;
    {
        std::lock_guard const lock(event->mutex);
        seen = event->latest;
    }
    if (seen == nullptr) return cudaSuccess;  // CUDA's rule: what was never recorded is complete
    if (!doubles::told_to_wait(stream, seen->stream)) return cudaSuccess;
    if (on.capture == nullptr && seen->capture != nullptr) {
        on.capture = seen->capture;
        on.capture->joined.push_back(&on);
    }
    if (on.capture != seen->capture) return failed(cudaErrorStreamCaptureIsolation);
    if (on.capture == nullptr) on.push([seen] { seen->wait(); });
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    return doubles::enqueue(stream, [=] { function(data); });
}

// Capture -----------------------------------------------------------------------------------------

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    FAILS_IF_ASKED;
    *status = stream_of(stream).capture != nullptr ? cudaStreamCaptureStatusActive
                                                   : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    auto& on = stream_of(stream);
    if (on.capture != nullptr) return failed(cudaErrorIllegalState);
    on.capture = new CUgraph_st;
    ++captures_here;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    auto& on = stream_of(stream);
    if (on.capture == nullptr) return failed(cudaErrorIllegalState);
    *graph = std::exchange(on.capture, nullptr);
    for (auto* const each : (*graph)->joined) each->capture = nullptr;
    --captures_here;
    if (!(*graph)->invalid) return cudaSuccess;
    delete std::exchange(*graph, nullptr);
    return failed(cudaErrorStreamCaptureInvalidated);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    *made = new CUgraphExec_st{std::make_shared<std::vector<work_type>>(graph->work)};
    return cudaSuccess;
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t stream) {
    return doubles::enqueue(stream, [] {});
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    return doubles::enqueue(stream, [work = graph->work] {
        for (auto const& each : *work) each();
    });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    delete graph;
    return cudaSuccess;
}

}  // extern "C"
