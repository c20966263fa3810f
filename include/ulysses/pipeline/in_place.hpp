#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/operand.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/core/view_copy.hpp>
#include <ulysses/exchange/regions.hpp>
#include <ulysses/pipeline/operands.hpp>
#include <ulysses/plan/plan.hpp>
#include <ulysses/stage/attend.hpp>

#include <cstddef>
#include <type_traits>

namespace ulysses::inline ULYSSES_ABI {

/// Step 4 on a rank that holds its heads: on the caller's own tensors, or on a context's copies,
/// with the memory that this takes beside them.
template <class Space, class Layout>
class in_place_operands {
   public:
    using queue_type = typename Space::queue;

    /// q, k, v and o of a forward pass.
    template <class T>
    static void set_forward(attend_operands<T>& operands, local_operands<T, Layout> const& local) {
        operands.q = heads(local.q);
        operands.k = heads(local.k);
        operands.v = heads(local.v);
        operands.o = heads(local.o);
    }

    /// All of a backward pass. o has room here where it is computed again and nobody wants it; dk
    /// and dv are accumulated where they are wanted, or here, when they must be rounded.
    template <class T>
    void set_backward(attend_operands<T>& operands, local_operands<T, Layout>& local, keep policy,
                      queue_type queue) {
        if (policy == keep::nothing && local.o.data == nullptr)
            local.o = packed_in<T, Layout>(o_, local.dout.extents, queue);
        set_forward(operands, local);
        operands.dout = heads(local.dout);
        operands.dq = heads(local.dq);
        operands.dk = heads(accumulator(local.dk, dk_, queue));
        operands.dv = heads(accumulator(local.dv, dv_, queue));
    }

    /// Makes dk and dv zero, to be added to.
    template <class T>
    void clear_gradients(local_operands<T, Layout> const& local, queue_type queue) {
        zero_view<Space>(queue, accumulator(local.dk, dk_, queue));
        zero_view<Space>(queue, accumulator(local.dv, dv_, queue));
    }

    /// Brings dk and dv, once they are complete, to where they are wanted.
    template <class T>
    void round(local_operands<T, Layout> const& local, queue_type queue) {
        if constexpr (!std::is_same_v<T, accumulator_t<T>>) {
            round_view<Space>(queue, local.dk, accumulator(local.dk, dk_, queue));
            round_view<Space>(queue, local.dv, accumulator(local.dv, dv_, queue));
        }
    }

    /// With keep::exchanged, what backward needs must not depend on the caller's tensors: q, k, v
    /// and o are copied to a context, and taken from there.
    template <class T, class Context>
    static void keep_copies(Context& saved, local_operands<T, Layout> const& local,
                            queue_type queue) {
        auto const keep_copy = [&](buffer<Space>& memory,
                                   tensor_view<T const, Layout> const& from) {
            copy_view<Space>(queue, packed_in<T, Layout>(memory, from.extents, queue), from);
        };
        keep_copy(saved.q, local.q);
        keep_copy(saved.k, local.k);
        keep_copy(saved.v, local.v);
        keep_copy(saved.o, local.o);
    }
    template <class T, class Context>
    static void take_copies(local_operands<T, Layout>& local, Context& saved, plan const& moves,
                            queue_type queue) {
        auto const& layer = moves.layer();
        auto const copy = [&](buffer<Space>& memory, extents4 const& extents) {
            return packed_in<T, Layout>(memory, extents, queue);
        };
        local.q = copy(saved.q, query_extents<Layout>(moves, layer.head_dim));
        local.k = copy(saved.k, key_extents<Layout>(moves, layer.head_dim));
        local.v = copy(saved.v, key_extents<Layout>(moves, layer.value_dim));
        local.o = copy(saved.o, query_extents<Layout>(moves, layer.value_dim));
    }

    std::size_t bytes() const { return o_.bytes() + dk_.bytes() + dv_.bytes(); }

   private:
    template <class U>
    static head_operand<U> heads(tensor_view<U, Layout> const& local) {
        return head_operand<U>(head_view<U>(local.data, local.extents, local.strides));
    }

    template <class T>
    static tensor_view<accumulator_t<T>, Layout>
    accumulator(tensor_view<T, Layout> const& wanted, buffer<Space>& beside, queue_type queue) {
        if constexpr (std::is_same_v<T, accumulator_t<T>>)
            return wanted;
        else
            return packed_in<accumulator_t<T>, Layout>(beside, wanted.extents, queue);
    }

    buffer<Space> o_, dk_, dv_;
};

}  // namespace ulysses::inline ULYSSES_ABI
