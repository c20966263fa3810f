// SPDX-License-Identifier: Apache-2.0
// Ranks as threads over the GPUs that are here, which they share where they are more: attention by a kernel of
// the engine's own, called once, then captured into a CUDA graph. docs/gpu.md says how to build it.

#include "attention.hpp"

#include <ulysses/adapters/cuda_peers.hpp>
#include <ulysses/ulysses.hpp>

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <random>
#include <stdexcept>
#include <vector>

namespace uly = ulysses;

namespace engine {

void check(cudaError_t result) {
    if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorName(result));
}

// [snippet tensor]
/// Device memory; does not own.
struct tensor {
    float* first;
    std::array<std::int64_t, 4> sizes;  // batch, token, head, dim
};

}  // namespace engine

template <>
struct ulysses::tensor_traits<engine::tensor> {
    using space_type = ulysses::cuda_space;
    static float* data(engine::tensor const& x) { return x.first; }
    static std::array<std::int64_t, 4> extents(engine::tensor const& x) { return x.sizes; }
};
// [/snippet]

namespace engine {

// [snippet attention]
/// Step 4: enqueues a kernel on the stream of the call.
struct attention {
    using space_type = uly::cuda_space;
    static constexpr uly::attention_features features{
        .causal = true, .grouped = true, .value_dim = true, .row_range = true};
    static constexpr std::int64_t row_multiple() { return 1; }
    template <class T>
    static std::size_t workspace_bytes(uly::attention_extents const&) {
        return 0;
    }

    void forward(uly::queued<uly::attention_call, uly::cuda_space> const& call,
                 uly::head_view<float const> q, uly::head_view<float const> k,
                 uly::head_view<float const> v, uly::head_view<float> o,
                 uly::head_view<float> lse) const {
        check(launch(call.queue.stream, {.q = of(q),
                                         .k = of(k),
                                         .v = of(v),
                                         .o = of(o),
                                         .lse = of(lse),
                                         .row_of_key_0 = call.key_begin - call.query_begin,
                                         .scale = static_cast<float>(call.scale)}));
    }

   private:
    template <class T>
    static rows<T> of(uly::head_view<T> const& x) {
        return {x.data,    x.batch(), x.tokens(),
                x.heads(), x.dim(),   {x.strides[0], x.strides[1], x.strides[2]}};
    }
};
static_assert(uly::attention_for<attention, float>);
// [/snippet]

struct stream {
    cudaStream_t handle = nullptr;
    stream() { check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
    stream(stream const&) = delete;
    stream& operator=(stream const&) = delete;
    ~stream() { cudaStreamDestroy(handle); }
};

/// Copies of some rows of the host's, on the device.
struct memory {
    cudaStream_t on;
    float* first = nullptr;
    std::size_t bytes;
    memory(cudaStream_t stream, std::int64_t elements)
        : on(stream), bytes(static_cast<std::size_t>(elements) * sizeof(float)) {
        check(cudaMallocAsync(reinterpret_cast<void**>(&first), bytes, on));
    }
    memory(memory const&) = delete;
    memory& operator=(memory const&) = delete;
    ~memory() { cudaFreeAsync(first, on); }
    void put(float const* from) const {
        check(cudaMemcpyAsync(first, from, bytes, cudaMemcpyHostToDevice, on));
    }
    void get(float* to) const {
        check(cudaMemcpyAsync(to, first, bytes, cudaMemcpyDeviceToHost, on));
        check(cudaStreamSynchronize(on));
    }
};

constexpr uly::shape heads5{.heads = 5, .head_dim = 32, .mask = uly::mask::causal};

/// Attention over the whole sequence q, k, v [S, H, D] of the host on `ranks` ranks: o of a call, and of a graph.
std::array<std::vector<float>, 2> attend(int ranks, std::int64_t tokens,
                                         std::array<std::vector<float>, 3> const& qkv) {
    std::array outputs{qkv[0], qkv[0]};
    int gpus = 0;
    check(cudaGetDeviceCount(&gpus));
    // [snippet ranks]
    uly::threads::run(ranks, [&](uly::threads::communicator host) {
        check(cudaSetDevice(host.rank() % gpus));  // first: the rank stays on this device
        stream const own_stream;                   // outlives what is ordered on it
        uly::cuda_peers::communicator const group{
            host, own_stream.handle, {.fence = uly::cuda_peers::fence_way::flags}};
        uly::pipeline layer{group, uly::sequence_local{}, attention{}, uly::fixed<heads5>};

        auto const begin = tokens * group.rank() / group.size();
        auto const own = tokens * (group.rank() + 1) / group.size() - begin;
        auto const step = uly::sequence::agree(group, {.batch = 1, .tokens = own});
        auto const row = heads5.heads * heads5.head_dim;
        memory const q(own_stream.handle, own * row), k(own_stream.handle, own * row),
            v(own_stream.handle, own * row), o(own_stream.handle, own * row);
        q.put(qkv[0].data() + begin * row);
        k.put(qkv[1].data() + begin * row);
        v.put(qkv[2].data() + begin * row);
        auto const mine = [&](memory const& x) {  // [B, s, H, D]
            return tensor{x.first, {1, own, heads5.heads, heads5.head_dim}};
        };
        layer.attend(step, mine(q), mine(k), mine(v), mine(o));  // enqueued when it returns
        o.get(outputs[0].data() + begin * row);                  // waits
        // [/snippet]

        // [snippet graph]
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t again = nullptr;
        check(cudaStreamBeginCapture(own_stream.handle, cudaStreamCaptureModeThreadLocal));
        layer.attend(step, mine(q), mine(k), mine(v), mine(o));
        check(cudaStreamEndCapture(own_stream.handle, &graph));
        check(cudaGraphInstantiate(&again, graph, 0));
        check(cudaGraphUpload(again, own_stream.handle));
        check(cudaMemsetAsync(o.first, 0, o.bytes, own_stream.handle));
        check(cudaStreamSynchronize(own_stream.handle));
        host.fence({});  // all have theirs before one launches: its kernels wait for the others
        check(cudaGraphLaunch(again, own_stream.handle));  // on every rank, as often
        o.get(outputs[1].data() + begin * row);
        check(cudaGraphExecDestroy(again));
        check(cudaGraphDestroy(graph));
        // [/snippet]
    });
    return outputs;
}

}  // namespace engine

int main() try {
    // Ranks that share a GPU wait for each other's kernels: each stream needs a queue of its own.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    int gpus = 0;
    if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
        std::puts("skipped: there is no GPU here");
        return 77;
    }
    std::int64_t const tokens = 300;
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::array<std::vector<float>, 3> qkv;
    for (auto& each : qkv) {
        each.resize(
            static_cast<std::size_t>(tokens * engine::heads5.heads * engine::heads5.head_dim));
        for (auto& x : each) x = normal(generator);
    }
    auto const alone = engine::attend(1, tokens, qkv), together = engine::attend(4, tokens, qkv);
    auto same = true;
    for (auto const* const each : {&alone[1], &together[0], &together[1]})
        same =
            same && std::memcmp(each->data(), alone[0].data(), each->size() * sizeof(float)) == 0;
    std::printf("%d GPUs, 4 ranks: %s\n", gpus,
                same ? "the bits of one rank, by a graph too" : "other bits than on one rank");
    return same ? 0 : 1;
} catch (std::exception const& e) {
    std::printf("%s\n", e.what());
    return 1;
}
