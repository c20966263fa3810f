#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/observer.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/core/tensor.hpp>
#include <ulysses/pipeline/cache.hpp>
#include <ulysses/pipeline/context.hpp>
#include <ulysses/pipeline/operands.hpp>
#include <ulysses/pipeline/running_call.hpp>
#include <ulysses/plan/plan.hpp>
#include <ulysses/plan/sequence.hpp>
#include <ulysses/projection/none.hpp>
#include <ulysses/stage/project_in.hpp>
#include <ulysses/stage/project_out.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

namespace ulysses::inline ULYSSES_ABI {

/// Steps 2 to 6 as one pass, forward and backward: a projection around an `attention_pass`, with
/// the memory for q, k, v, o and their gradients where no context keeps them.
template <class Comm, class Projection>
class projected_pass {
   public:
    using context_type = context<Comm>;
    using space_type = typename Comm::space_type;

    /// False of a pipeline that only ever runs steps 3 to 5.
    static constexpr bool present = !std::is_same_v<Projection, no_projection>;

    explicit projected_pass(Projection projection) : projection_(std::move(projection)) {}

    /// x [B, s, C] -> y [B, s, C]. `pass` runs steps 3 to 5.
    template <class T, class Pass, class Observer, class X, class Weights, class Y>
    void forward(Pass& pass, std::span<plan const> chunks, sequence const& step,
                 context_type* saved, kv_cache<Comm>* cache, Observer& seen, X const& x,
                 Weights const& weights, Y const& y, logit_inputs const& logits, where at) {
        auto const& moves = chunks[0];
        auto const rank = moves.rank();
        auto const queue = queue_of(pass.ranks());
        token_view<T> y_view, o;
        pass.template forward<T>(
            chunks, pass_kind::forward, saved, cache, seen, at, [&](auto& local) {
                token_view<T const> const x_view = tokens_of<T>(x, "forward: x", at);
                y_view = tokens_of<T>(y, "forward: y", at);
                auto const tokens = token_extents(moves, x_view.dim());
                check_operand("forward", "x", x_view, tokens, at);
                check_output("forward", "y", y_view, tokens, at);
                check_apart("forward", "y", y_view, "x", x_view, at);
                check_memory<space_type>("forward", "x", x_view, at);
                check_memory<space_type>("forward", "y", y_view, at);
                take_logits(local, moves, "forward", logits, saved != nullptr, at);
                if (step.cross())
                    raise(errc::invalid_sequence, at, "forward",
                          "q, k and v are projected from one x", "the step has ",
                          step.queries().total(), " queries and ", step.keys().total(),
                          " keys of their own; project them and use attend");
                auto const memory = memory_for(saved, moves.layer().keep, pass.exchanging(moves));
                auto const [q, k, v] = packed<T>(memory.q, memory.k, memory.v, moves, queue);
                o = packed_queries<T>(memory.o, moves, moves.layer().value_dim, queue);
                seen.begin(step_id::project_in);
                ulysses::project_in(projection_, step, rank, x_view, weights, q, k, v, queue);
                seen.end(step_id::project_in);
                local.q = q;
                local.k = k;
                local.v = v;
                local.o = o;
            });
        running_call(pass_kind::forward, at).alone(rank, [&] {
            seen.begin(step_id::project_out);
            ulysses::project_out(projection_, step, rank, token_view<T const>(o), weights, y_view,
                                 queue);
            seen.end(step_id::project_out);
        });
    }

    /// dy [B, s, C] -> dx [B, s, C], overwritten, and `gradients`, added to.
    template <class T, class Pass, class Observer, class X, class Weights, class DY, class DX,
              class Gradients>
    void backward(Pass& pass, std::span<plan const> chunks, sequence const& step,
                  context_type& saved, Observer& seen, X const& x, Weights const& weights,
                  DY const& dy, DX const& dx, Gradients const& gradients,
                  logit_inputs const& logits, logit_gradients<accumulator_t<T>> const& dlogits,
                  where at) {
        auto const& moves = chunks[0];
        auto const policy = moves.layer().keep;
        auto const rank = moves.rank();
        auto const queue = queue_of(pass.ranks());
        token_view<T const> x_view, dy_view;
        token_view<T> dx_view, o;
        projected<T> gradient;
        pass.template backward<T>(chunks, pass_kind::backward, saved, seen, at, [&](auto& local) {
            x_view = tokens_of<T>(x, "backward: x", at);
            dy_view = tokens_of<T>(dy, "backward: dy", at);
            dx_view = tokens_of<T>(dx, "backward: dx", at);
            auto const tokens = token_extents(moves, x_view.dim());
            check_operand("backward", "x", x_view, tokens, at);
            check_operand("backward", "dy", dy_view, tokens, at);
            check_output("backward", "dx", dx_view, tokens, at);
            check_apart("backward", "dx", dx_view, "x", x_view, at);
            check_apart("backward", "dx", dx_view, "dy", dy_view, at);
            check_memory<space_type>("backward", "x", x_view, at);
            check_memory<space_type>("backward", "dy", dy_view, at);
            check_memory<space_type>("backward", "dx", dx_view, at);
            take_logits(local, moves, "backward", logits, true, at);
            take_logit_gradients(local, moves, "backward", dlogits, at);
            auto const value_dim = moves.layer().value_dim;
            auto const dout = packed_queries<T>(dout_, moves, value_dim, queue);
            gradient = packed<T>(dq_, dk_, dv_, moves, queue);
            local.dout = dout;
            local.dq = gradient.q;
            local.dk = gradient.k;
            local.dv = gradient.v;
            auto const memory = memory_for(&saved, policy, pass.exchanging(moves));
            // Under keep::nothing it is computed again.
            o = packed_queries<T>(memory.o, moves, value_dim, queue);
            local.o = o;
            if (policy != keep::exchanged) {
                auto const [q, k, v] = packed<T>(memory.q, memory.k, memory.v, moves, queue);
                if (policy == keep::nothing)
                    ulysses::project_in(projection_, step, rank, x_view, weights, q, k, v, queue);
                local.q = q;
                local.k = k;
                local.v = v;
            }
            seen.begin(step_id::project_out);
            ulysses::project_out_backward(projection_, step, rank, weights, dy_view, dout, queue);
            seen.end(step_id::project_out);
        });
        running_call(pass_kind::backward, at).alone(rank, [&] {
            seen.begin(step_id::project_in);
            ulysses::project_out_gradients(projection_, step, rank, token_view<T const>(o), dy_view,
                                           gradients, queue);
            ulysses::project_in_backward(projection_, step, rank, x_view, weights, gradient.q,
                                         gradient.k, gradient.v, dx_view, gradients, queue);
            seen.end(step_id::project_in);
        });
    }

    /// Bytes that the passes of a step need here: q, k, v and o, and as much for their gradients.
    template <class T>
    static std::size_t scratch_bytes(plan const& moves, bool backward) {
        if (!present) return 0;
        auto const& layer = moves.layer();
        auto const elements =
            moves.batch() * (layer.head_dim + layer.value_dim) *
            (moves.own_queries() * layer.heads + moves.own_keys() * layer.kv_heads);
        return static_cast<std::size_t>(elements) * sizeof(T) * (backward ? 2 : 1);
    }
    /// Bytes held here.
    std::size_t scratch_bytes() const {
        std::size_t sum = 0;
        for (auto const* each : {&q_, &k_, &v_, &o_, &dout_, &dq_, &dk_, &dv_})
            sum += each->bytes();
        return sum;
    }

   private:
    using memory_type = buffer<space_type>;
    using queue_type = typename space_type::queue;

    /// q, k, v, or their gradients.
    template <class T>
    struct projected {
        token_view<T> q, k, v;
    };

    struct memory_of_inputs {
        memory_type &q, &k, &v, &o;
    };
    /// Where q, k, v and o lie: in the context where it keeps them sequence-local, else here.
    memory_of_inputs memory_for(context_type* saved, keep policy, bool exchanging) {
        auto const kept = saved != nullptr && policy != keep::nothing;
        auto const kept_local = kept && (policy == keep::local || !exchanging);
        auto& o = kept ? saved->o : o_;
        if (kept_local) return {saved->q, saved->k, saved->v, o};
        return {q_, k_, v_, o};
    }

    static extents4 token_extents(plan const& moves, std::int64_t dim) {
        return {moves.batch(), moves.own_queries(), 1, dim};
    }

    template <class T>
    static token_view<T> packed_queries(memory_type& memory, plan const& moves, std::int64_t dim,
                                        queue_type queue) {
        return packed_in<T, sequence_local>(memory, query_extents<sequence_local>(moves, dim),
                                            queue);
    }
    template <class T>
    static projected<T> packed(memory_type& q, memory_type& k, memory_type& v, plan const& moves,
                               queue_type queue) {
        auto const& layer = moves.layer();
        auto const keys = [&](memory_type& memory, std::int64_t dim) {
            return packed_in<T, sequence_local>(memory, key_extents<sequence_local>(moves, dim),
                                                queue);
        };
        return {packed_queries<T>(q, moves, layer.head_dim, queue), keys(k, layer.head_dim),
                keys(v, layer.value_dim)};
    }

    [[no_unique_address]] Projection projection_;
    memory_type q_, k_, v_, o_, dout_, dq_, dk_, dv_;
};

}  // namespace ulysses::inline ULYSSES_ABI
