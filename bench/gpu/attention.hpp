#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "attention_rows.hpp"

#include <ulysses/adapters/cuda.hpp>
#include <ulysses/core/attention.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

/// Attention of `attention_rows.hpp` as a functor of pipelines.
namespace ulysses_bench {

/// Causal or full attention of float elements; without `computes`, nothing: what is left of a call is the
/// pipeline's.
struct device_attention {
    using space_type = ulysses::cuda_space;
    static constexpr ulysses::attention_features features{
        .causal = true, .full = true, .grouped = true, .value_dim = true, .row_range = true};
    bool computes = true;

    static std::int64_t row_multiple() { return 1; }
    template <ulysses::element T>
    static std::size_t workspace_bytes(ulysses::attention_extents const&) {
        return 0;
    }

    template <class Call>
    void forward(Call const& call, ulysses::head_view<float const> q,
                 ulysses::head_view<float const> k, ulysses::head_view<float const> v,
                 ulysses::head_view<float> o, ulysses::head_view<float> lse) const {
        forward_rows rows;
        set(rows, call, q, k, v);
        rows.o = rows_of(o);
        rows.lse = rows_of(lse);
        run(call.queue.stream, rows);
    }
    template <class Call>
    void backward(Call const& call, ulysses::attention_backward_views<float> const& views) const {
        backward_rows rows;
        set(rows, call, views.q, views.k, views.v);
        rows.o = rows_of(views.o);
        rows.dout = rows_of(views.dout);
        rows.lse = rows_of(views.lse);
        rows.dq = rows_of(views.dq);
        rows.dk = rows_of(views.dk);
        rows.dv = rows_of(views.dv);
        run(call.queue.stream, rows);
        rows.keys = true;
        run(call.queue.stream, rows);
    }

   private:
    template <class T>
    static device_rows<T> rows_of(ulysses::head_view<T> const& view) {
        return {view.data,    view.batch(), view.tokens(),
                view.heads(), view.dim(),   {view.strides[0], view.strides[1], view.strides[2]}};
    }
    static void set(attention_rows& rows, ulysses::attention_call const& call,
                    ulysses::head_view<float const> const& q,
                    ulysses::head_view<float const> const& k,
                    ulysses::head_view<float const> const& v) {
        rows.q = rows_of(q);
        rows.k = rows_of(k);
        rows.v = rows_of(v);
        rows.query_begin = call.query_begin;
        rows.key_begin = call.key_begin;
        rows.causal = call.visible.mask == ulysses::mask::causal;
        rows.scale = call.scale;
    }
    template <class Rows>
    void run(cudaStream_t stream, Rows const& rows) const {
        if (!computes || rows.threads() == 0) return;
        ulysses::detail::expect_cuda(launch(stream, rows), "attention kernel");
    }
};

}  // namespace ulysses_bench
