#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "../doubles/cuda_runtime.hpp"
#include "../pipeline/draws.hpp"

#include <ulysses/adapters/cuda.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

/// Layers over memory of the double's devices: the problems of the pipeline's tests, and attention of
/// the host as work of a stream.
namespace cuda_test {

namespace uly = ulysses;
using pipeline_test::builtin_attention;

/// `Attention` of the host, run by the stream when it gets there. What its calls name lives until then.
template <class Attention>
struct on_stream {
    using space_type = uly::cuda_space;
    static constexpr auto features = Attention::features;
    Attention attention{};

    std::int64_t row_multiple() const { return attention.row_multiple(); }
    template <uly::element T>
    std::size_t workspace_bytes(uly::attention_extents const& extents) const {
        return attention.template workspace_bytes<T>(extents);
    }

    template <class Call, uly::element T>
    void forward(Call const& call, uly::head_view<T const> q, uly::head_view<T const> k,
                 uly::head_view<T const> v, uly::head_view<T> o,
                 uly::head_view<uly::accumulator_t<T>> lse) const {
        doubles::enqueue(call.queue.stream, [=, of = attention, on_host = without_hook(call)] {
            of.forward(on_host, q, k, v, o, lse);
        });
    }
    template <class Call, uly::element T>
    void backward(Call const& call, uly::attention_backward_views<T> const& views) const {
        doubles::enqueue(call.queue.stream, [=, of = attention, on_host = without_hook(call)] {
            of.backward(on_host, views);
        });
    }

   private:
    static uly::attention_call without_hook(uly::attention_call call) {
        call.progress = {};  // is for the thread of the call
        return call;
    }
};

/// A packed tensor [B, S, H, D] in memory of the current device, which holds NaN when it is made without
/// values.
template <class T>
class device_tensor {
   public:
    using space_type = uly::cuda_space;

    device_tensor(uly::cuda_space::queue on, uly::extents4 const& sizes) : on_(on), sizes_(sizes) {
        data_ = static_cast<T*>(uly::cuda_space::allocate(on_, std::max<std::size_t>(bytes(), 1)));
    }
    /// `values` are read by the stream.
    device_tensor(uly::cuda_space::queue on, pipeline_test::tensor<T> const& values)
        : device_tensor(on, values.extents()) {
        set(values);
    }
    device_tensor(device_tensor const&) = delete;
    device_tensor& operator=(device_tensor const&) = delete;
    ~device_tensor() { uly::cuda_space::deallocate(on_, data_, bytes()); }

    T* data() const { return data_; }
    uly::extents4 const& extents() const { return sizes_; }
    std::size_t bytes() const {
        return static_cast<std::size_t>(sizes_[0] * sizes_[1] * sizes_[2] * sizes_[3]) * sizeof(T);
    }

    void set(pipeline_test::tensor<T> const& values) {
        cudaMemcpyAsync(data_, values.memory.data(), bytes(), cudaMemcpyDefault, on_.stream);
    }
    /// Into `values`, when the stream gets there.
    void get(pipeline_test::tensor<T>& values) const {
        cudaMemcpyAsync(values.memory.data(), data_, bytes(), cudaMemcpyDefault, on_.stream);
    }

   private:
    uly::cuda_space::queue on_;
    uly::extents4 sizes_;
    T* data_;
};

/// Memory of the host that CUDA has mapped, as long as this lives.
class mapped_memory {
   public:
    template <class T>
    explicit mapped_memory(std::vector<T> const& values) : data_(const_cast<T*>(values.data())) {
        if (values.empty())
            data_ = nullptr;
        else
            cudaHostRegister(data_, values.size() * sizeof(T), cudaHostRegisterMapped);
    }
    mapped_memory(mapped_memory const&) = delete;
    mapped_memory& operator=(mapped_memory const&) = delete;
    ~mapped_memory() {
        if (data_ != nullptr) cudaHostUnregister(data_);
    }

   private:
    void* data_;
};

/// One rank's operands on its device, as `local_problem` has them.
template <class T>
struct device_problem {
    using host_problem = pipeline_test::local_problem<T>;

    device_problem(uly::cuda_space::queue on, host_problem& on_host)
        : host(on_host),
          q(on, on_host.q),
          k(on, on_host.k),
          v(on, on_host.v),
          dout(on, on_host.dout),
          o(on, on_host.o.extents()),
          dq(on, on_host.dq.extents()),
          dk(on, on_host.dk.extents()),
          dv(on, on_host.dv.extents()),
          dsinks(on_host.dsinks.memory),
          dbias(on_host.dbias.memory),
          logits(on_host.logits) {}

    auto dlogits() { return host.dlogits(); }
    void get() const {
        o.get(host.o);
        dq.get(host.dq);
        dk.get(host.dk);
        dv.get(host.dv);
    }

    host_problem& host;
    device_tensor<T> q, k, v, dout, o, dq, dk, dv;
    mapped_memory dsinks, dbias;
    uly::logit_inputs logits;
};

/// `pipeline_test::compute_rank` on the devices of the double.
template <class Comm, class T, class Attention = on_stream<builtin_attention>>
void compute_rank_on_device(Comm const& ranks, pipeline_test::problem<T> const& p,
                            uly::sequence const& step, pipeline_test::results<T>& whole,
                            Attention const& attention = {}) {
    uly::pipeline layer{ranks, uly::sequence_local{}, attention, p.layer};
    auto saved = layer.make_context();
    pipeline_test::local_problem<T> host(p, step, ranks.rank());
    device_problem<T> local(ranks.queue(), host);
    layer.attend(step, saved, local.q, local.k, local.v, local.o, local.logits);
    cudaStreamSynchronize(ranks.queue().stream);
    for (std::int64_t c = 0; c < layer.chunks(step) && p.layer.keep != uly::keep::nothing; ++c)
        pipeline_test::collect_log_sum_exp<T>(saved, layer.planned(step, c), whole.lse);
    pipeline_test::attend_backward(layer, step, saved, local);
    local.get();
    cudaStreamSynchronize(ranks.queue().stream);
    host.put_back_into(whole, step, ranks.rank());
}

/// One rank's results, as `pipeline_test::results_of` has them.
template <class Comm>
pipeline_test::bytes results_on_device(Comm const& ranks,
                                       pipeline_test::drawn_problem const& drawn) {
    pipeline_test::results<double> own(drawn.whole);
    compute_rank_on_device(ranks, drawn.whole, drawn.step(), own);
    return pipeline_test::bytes_of(own);
}

}  // namespace cuda_test
