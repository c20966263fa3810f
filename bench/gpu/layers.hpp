#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "attention.hpp"
#include "processes.hpp"

#include <ulysses/adapters/cuda_peers.hpp>
#include <ulysses/pipeline.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

/// A causal layer of float elements whose ranks share the device.
namespace ulysses_bench {

using ranks_type = ulysses::cuda_peers::communicator<host_ranks>;
using layer_type = ulysses::pipeline<ranks_type, ulysses::sequence_local, device_attention>;

struct sizes {
    std::int64_t tokens = 512, heads = 8, kv_heads = 8, dim = 64;

    ulysses::shape shape() const {
        return {
            .heads = heads, .kv_heads = kv_heads, .head_dim = dim, .mask = ulysses::mask::causal};
    }
    /// Of q, k, v, dO and of o, dq, dk, dv.
    std::int64_t row(std::size_t operand) const {
        return (operand == 1 || operand == 2 ? kv_heads : heads) * dim;
    }
};

class stream_owner {
   public:
    stream_owner() {
        ulysses::detail::expect_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
                                     "cudaStreamCreateWithFlags");
    }
    stream_owner(stream_owner const&) = delete;
    stream_owner& operator=(stream_owner const&) = delete;
    ~stream_owner() { cudaStreamDestroy(stream_); }
    cudaStream_t get() const { return stream_; }
    void wait() const {
        ulysses::detail::expect_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    }

   private:
    cudaStream_t stream_ = nullptr;
};

/// Milliseconds of a stream between two of its places.
class event_pair {
   public:
    event_pair() {
        for (auto& each : events_)
            ulysses::detail::expect_cuda(cudaEventCreateWithFlags(&each, 0),
                                         "cudaEventCreateWithFlags");
    }
    event_pair(event_pair const&) = delete;
    event_pair& operator=(event_pair const&) = delete;
    ~event_pair() {
        for (auto const each : events_) cudaEventDestroy(each);
    }
    void begin(stream_owner const& stream) const { record(0, stream); }
    double end(stream_owner const& stream) const {
        record(1, stream);
        stream.wait();
        float taken = 0;
        ulysses::detail::expect_cuda(cudaEventElapsedTime(&taken, events_[0], events_[1]),
                                     "cudaEventElapsedTime");
        return static_cast<double>(taken);
    }

   private:
    void record(std::size_t which, stream_owner const& stream) const {
        ulysses::detail::expect_cuda(cudaEventRecord(events_[which], stream.get()),
                                     "cudaEventRecord");
    }
    std::array<cudaEvent_t, 2> events_{};
};

/// Memory of the device, as long as the stream has not come to the owner's end.
template <class T>
class device_array {
   public:
    device_array(cudaStream_t stream, std::int64_t count)
        : stream_(stream),
          bytes_(std::max<std::size_t>(static_cast<std::size_t>(count), 1) * sizeof(T)) {
        data_ = static_cast<T*>(ulysses::cuda_space::allocate({.stream = stream}, bytes_));
    }
    device_array(device_array const&) = delete;
    device_array& operator=(device_array const&) = delete;
    ~device_array() { ulysses::cuda_space::deallocate({.stream = stream_}, data_, bytes_); }
    T* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }
    /// Zeros.
    void clear() const {
        ulysses::detail::expect_cuda(cudaMemsetAsync(data_, 0, bytes_, stream_), "cudaMemsetAsync");
    }
    /// Elements from `at` on from the host, and to it. *Blocking*.
    void put(std::span<T const> from, std::int64_t at = 0) const {
        copy(data_ + at, from.data(), from.size_bytes());
    }
    void get(std::span<T> to, std::int64_t at = 0) const {
        copy(to.data(), data_ + at, to.size_bytes());
    }

   private:
    void copy(void* to, void const* from, std::size_t bytes) const {
        ulysses::detail::expect_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_),
                                     "cudaMemcpyAsync");
        ulysses::detail::expect_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    }

    cudaStream_t stream_;
    std::size_t bytes_;
    T* data_;
};

/// Element `index` of operand `operand`, in [-1, 1].
inline float value_of(std::size_t operand, std::int64_t index) {
    auto mixed = (static_cast<std::uint64_t>(index) * 8 + operand + 1) * 0x9e3779b97f4a7c15u;
    mixed ^= mixed >> 29;
    return static_cast<float>(static_cast<std::int64_t>(mixed * 0xbf58476d1ce4e5b9u >> 40) -
                              (1 << 23)) /
           static_cast<float>(1 << 23);
}

/// Where a rank's tokens begin, and how many they are.
inline std::pair<std::int64_t, std::int64_t> share(std::int64_t tokens, int rank, int ranks) {
    auto const begin = tokens * rank / ranks;
    return {begin, tokens * (rank + 1) / ranks - begin};
}
inline std::vector<std::vector<ulysses::token_run>> shares(std::int64_t tokens, int ranks) {
    std::vector<std::vector<ulysses::token_run>> all;
    for (int r = 0; r < ranks; ++r) {
        auto const [begin, count] = share(tokens, r, ranks);
        all.push_back({{begin, count}});
    }
    return all;
}

/// An operand of pipelines: packed, [B, s, H, D] or [B, s, C].
template <class T, std::size_t Rank = 4, class Space = ulysses::cuda_space>
struct device_operand {
    using space_type = Space;
    T* memory;
    std::array<std::int64_t, Rank> sizes;
    T* data() const { return memory; }
    std::array<std::int64_t, Rank> const& extents() const { return sizes; }
};

/// One rank of the layer: its own share of the tokens, forward and backward.
class rank_of_layer {
   public:
    rank_of_layer(ranks_type const& ranks, sizes const& of, bool computes)
        : ranks_(ranks),
          of_(of),
          step_(ulysses::sequence::of(1, shares(of.tokens, ranks.size()))),
          layer_(ranks, {}, device_attention{computes}, of.shape()),
          saved_(layer_.make_context()) {
        auto const [begin, count] = share(of.tokens, ranks.rank(), ranks.size());
        for (std::size_t i = 0; i < 8; ++i) {
            auto const elements = count * of.row(i % 4);
            memory_.push_back(std::make_unique<device_array<float>>(stream(), elements));
            std::vector<float> values(static_cast<std::size_t>(elements));
            for (std::int64_t j = 0; j < elements; ++j)
                values[static_cast<std::size_t>(j)] = value_of(i, begin * of.row(i % 4) + j);
            memory_[i]->put(values);
        }
    }

    cudaStream_t stream() const { return ranks_.queue().stream; }
    void attend() { layer_.attend(step_, view(0), view(1), view(2), view(4)); }
    void train() {
        layer_.attend(step_, saved_, view(0), view(1), view(2), view(4));
        layer_.attend_backward(step_, saved_, view(3), view(5), view(6), view(7));
    }
    /// This rank's part of o, dq, dk or dv, into the whole.
    void get(std::size_t which, std::span<float> whole) const {
        auto const [begin, count] = share(of_.tokens, ranks_.rank(), ranks_.size());
        auto const row = of_.row(which);
        memory_[4 + which]->get(whole.subspan(static_cast<std::size_t>(begin * row),
                                              static_cast<std::size_t>(count * row)));
    }

   private:
    /// Operands of the layer: q, k, v, dO, o, dq, dk, dv.
    device_operand<float> view(std::size_t i) const {
        auto const tokens = share(of_.tokens, ranks_.rank(), ranks_.size()).second;
        return {memory_[i]->data(), {1, tokens, of_.row(i % 4) / of_.dim, of_.dim}};
    }

    ranks_type ranks_;
    sizes of_;
    ulysses::sequence step_;
    layer_type layer_;
    ulysses::context<ranks_type> saved_;
    std::vector<std::unique_ptr<device_array<float>>> memory_;
};

/// A stream that waits in vain ends before the part of the benchmark does.
inline ulysses::cuda_peers::options
group_options(ulysses::cuda_peers::fence_way fence,
              ulysses::copy_way way = ulysses::copy_way::kernel) {
    return {.fence = fence, .way = way, .deadline = std::chrono::seconds(10)};
}
inline char const* text_of(ulysses::copy_way way) {
    return way == ulysses::copy_way::kernel ? "kernel" : "engine";
}

/// Until the streams of all ranks are done.
inline void wait_for(ranks_type const& ranks) {
    ulysses::detail::expect_cuda(cudaStreamSynchronize(ranks.queue().stream),
                                 "cudaStreamSynchronize");
    ranks.host().fence({});
}

/// Runs `body(ranks)` on rank threads with a stream each.
template <class Body>
void on_threads(int ranks, ulysses::cuda_peers::options const& given, Body const& body) {
    std::vector<stream_owner> streams(static_cast<std::size_t>(ranks));
    ulysses::threads::run(ranks, [&](ulysses::threads::communicator host) {
        body(ranks_type(host, streams[static_cast<std::size_t>(host.rank())].get(), given));
    });
}
/// On processes, which open each other's memory. *Throws* what one of them said, as `unsupported` where
/// the device takes one process at a time or has no memory that several open.
template <class Body>
void on_processes(int ranks, ulysses::cuda_peers::options const& given, Body const& body) {
    auto const failed = run_processes(ranks, [&](process_ranks const& host) {
        stream_owner const stream;
        body(ranks_type(host, stream.get(), given));
    });
    if (failed.empty()) return;
    auto const says = [&](char const* what) { return failed.find(what) != failed.npos; };
    ulysses::throw_error(says("cudaErrorDevicesUnavailable") || says("cudaErrorNotSupported")
                             ? ulysses::errc::unsupported
                             : ulysses::errc::transport,
                         failed);
}

/// A call's work as a graph, launched in place of the call.
class graph_of_call {
   public:
    template <class Call>
    graph_of_call(cudaStream_t stream, Call const& call) : stream_(stream) {
        using ulysses::detail::expect_cuda;
        cudaGraph_t graph = nullptr;
        expect_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                    "cudaStreamBeginCapture");
        call();
        expect_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
        auto const made = cudaGraphInstantiate(&replay_, graph, 0);
        cudaGraphDestroy(graph);
        expect_cuda(made, "cudaGraphInstantiate");
        // Now, as a kernel that waits for another rank's holds up what needs an idle device.
        expect_cuda(cudaGraphUpload(replay_, stream), "cudaGraphUpload");
        expect_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    }
    graph_of_call(graph_of_call const&) = delete;
    graph_of_call& operator=(graph_of_call const&) = delete;
    ~graph_of_call() { cudaGraphExecDestroy(replay_); }
    void launch() const {
        ulysses::detail::expect_cuda(cudaGraphLaunch(replay_, stream_), "cudaGraphLaunch");
    }

   private:
    cudaStream_t stream_;
    cudaGraphExec_t replay_ = nullptr;
};

struct seconds_of_calls {
    double all = 0, host = 0;
};

/// Of one of `calls` calls, until the stream has done them, and until the host has.
template <class Call, class Wait>
seconds_of_calls timed(int calls, Call const& call, Wait const& wait) {
    wait();
    auto const start = std::chrono::steady_clock::now();
    auto const since = [&] {
        std::chrono::duration<double> const taken = std::chrono::steady_clock::now() - start;
        return taken.count() / calls;
    };
    for (int i = 0; i < calls; ++i) call();
    auto const host = since();
    wait();
    return {since(), host};
}

/// Seconds of one of a few launches. Between graphs ranks' hosts do not meet: were there so many that a stream has no room
/// for the next, its host could wait for launches that another's is kept from.
template <class Wait>
double seconds_of_launch(graph_of_call const& graph, int calls, Wait const& wait) {
    return timed(
               std::min(calls, 10), [&] { graph.launch(); }, wait)
        .all;
}

/// A number in four digits.
inline std::string brief(double number) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.4g", number);
    return text.data();
}

/// Operations of causal attention with a head dim of 128, forward: half of 4 S^2 D a head; 2.5 times that backward.
inline double causal_tflop(std::int64_t tokens, std::int64_t heads) {
    auto const s = static_cast<double>(tokens);
    return 2 * s * s * 128 * static_cast<double>(heads) / 1e12;
}

/// Of the slowest rank.
inline seconds_of_calls slowest(std::vector<seconds_of_calls> const& ranks) {
    seconds_of_calls most;
    for (auto const& each : ranks) {
        most.all = std::max(most.all, each.all);
        most.host = std::max(most.host, each.host);
    }
    return most;
}

}  // namespace ulysses_bench
