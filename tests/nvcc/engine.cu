// SPDX-License-Identifier: Apache-2.0
// What a .cu file of an engine may include, and make of it: the whole library. Compiled, not run.
#include <ulysses/adapters/cublas.hpp>
#include <ulysses/adapters/cuda_peers.hpp>
#include <ulysses/adapters/cudnn.hpp>
#include <ulysses/adapters/nvtx.hpp>
#include <ulysses/ulysses.hpp>

#include <array>
#include <cstdint>
#include <vector>

namespace uly = ulysses;

namespace {

/// Memory of the space that a group's is.
template <class T, class Space>
struct tensor {
    T* data;
    std::array<std::int64_t, 4> extents;
};

}  // namespace

template <class T, class Space>
struct ulysses::tensor_traits<tensor<T, Space>> {
    using space_type = Space;
    static T* data(tensor<T, Space> const& x) { return x.data; }
    static std::array<std::int64_t, 4> extents(tensor<T, Space> const& x) { return x.extents; }
};

namespace {

constexpr uly::shape heads6{.heads = 6, .kv_heads = 2, .head_dim = 32, .mask = uly::mask::causal};

/// Six steps and their backward, and steps 3 to 5 with a cache, of every element type that is asked for.
template <class T, class Group, class Attention, class Gemm>
void run(Group const& group, Attention const& attention, Gemm const& gemm, T* memory) {
    uly::dense const projection{gemm, uly::epilogues{uly::qk_norm{}, uly::rope{32}}};
    uly::pipeline layer{group, uly::sequence_local{}, attention, heads6, projection};
    auto const step = uly::sequence::agree(group, {.batch = 1, .tokens = 16});
    auto saved = layer.make_context();
    using operand = tensor<T, typename Group::space_type>;
    operand const x{memory, {1, 16, 1, 64}}, q{memory, {1, 16, 6, 32}}, k{memory, {1, 16, 2, 32}};
    uly::dense_weights<T> const weights{};
    layer.forward(step, saved, x, weights, x);
    layer.backward(step, saved, x, weights, x, x, uly::dense_gradients<T>{});
    layer.attend(step, saved, q, k, k, q);
    layer.attend_backward(step, saved, q, q, k, k);
    auto cache = layer.template make_cache<T>(1, 64);
    layer.attend(step, cache, q, k, k, q);
}

}  // namespace

void run_on_host(std::vector<float>& memory) {
    uly::threads::run(2, [&](uly::threads::communicator group) {
        run(group, uly::blocked_attention{uly::builtin_gemm{}}, uly::builtin_gemm{}, memory.data());
    });
}

void run_on_device(uly::cudnn_engine& engine, cudaStream_t stream, uly::bf16* memory) {
    uly::threads::run(2, [&](uly::threads::communicator host) {
        run(uly::cuda_peers::communicator{host, stream}, uly::cudnn_attention{engine}, uly::cublas{}, memory);
    });
}
