#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/explain.hpp>
#include <ulysses/core/observer.hpp>
#include <ulysses/core/operand.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/core/tensor.hpp>
#include <ulysses/pipeline/attention_pass.hpp>
#include <ulysses/pipeline/cache.hpp>
#include <ulysses/pipeline/context.hpp>
#include <ulysses/pipeline/describe.hpp>
#include <ulysses/pipeline/features.hpp>
#include <ulysses/pipeline/operand_types.hpp>
#include <ulysses/pipeline/operands.hpp>
#include <ulysses/pipeline/workspace.hpp>
#include <ulysses/plan/chunk_plans.hpp>
#include <ulysses/projection/none.hpp>
#include <ulysses/stage/project_in.hpp>
#include <ulysses/stage/project_out.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace ulysses::inline ULYSSES_ABI {

/// The six steps of one attention layer, composed at compile time.
///
///     ulysses::pipeline layer{ranks, ulysses::sequence_local{}, attention, shape};
///     auto step = ulysses::sequence::agree(ranks, {.batch = 1, .tokens = tokens});
///     layer.attend(step, q, k, v, o);               // steps 3-5
///     layer.forward(step, context, x, weights, y);  // steps 2-6, with a projection
///
/// Step 1, giving each rank its tokens, is the caller's (see `shard`). With sequence-local operands
/// every call is collective: all ranks make the same calls in the same order, with the same shape
/// and step; with head-local ones nothing moves and an error stays on its rank. A wrong operand, a
/// call out of order or an exception in a functor on one rank leaves the call on every rank with
/// the same error, and the group stays usable; only what follows a call's last fence, a
/// projection's part of it, fails on its rank alone. A steady state allocates nothing.
///
/// *Template parameters*: who (communicator), how the operands lie (layout policy), what runs on
/// the heads (attention functor), steps 2 and 6 (projection), who watches (observer), `shape` or
/// `fixed_shape<...>`. It owns no weights.
/// *Thread safety*: one pipeline serves one thread at a time.
template <class Comm, class Layout, class Attention, class Projection = no_projection,
          class Observer = no_observer, class Shape = shape>
class pipeline {
    static_assert(reaches_memory<Comm> || explain_reach<Comm>());
    static_assert(sends_messages_or_none<Comm>());
    static_assert(space<typename Comm::space_type> || explain_space<typename Comm::space_type>());
    static_assert(queue_is_known<Comm>());
    static_assert(layout_policy<Layout> || explain_layout_policy<Layout>());
    static_assert(std::is_same_v<Layout, sequence_local> || std::is_same_v<Layout, head_local>,
                  "ulysses: a pipeline's operands are sequence_local or head_local.");
    static_assert(attends_some_element<Attention>());
    static_assert(runs_in_space<typename Comm::space_type, typename Attention::space_type>());
    static_assert(explain_space_of_projection<Projection>());
    static_assert(runs_in_space<typename Comm::space_type, typename Projection::space_type>());
    static_assert(ulysses::observer<Observer> || explain_observer<Observer>());
    static_assert(std::is_same_v<Shape, shape> || detail::is_fixed_shape<Shape>,
                  "ulysses: a pipeline's shape is ulysses::shape or ulysses::fixed<...>.");

    /// The element type of a call's operands, once they are seen to fit.
    template <class... X>
    using operand_type = typename decltype(operand_type_of<typename Comm::space_type, Layout,
                                                           Attention, X...>())::type;
    /// Where a backward call with these operands adds the gradients of what its scores learn.
    template <class... X>
    using gradients_of = logit_gradients<accumulator_t<operand_type<X...>>>;

   public:
    using space_type = typename Comm::space_type;
    using context_type = context<Comm>;
    using cache_type = kv_cache<Comm>;

    /// *Throws* `invalid_shape` for a shape no plan exists for; `unsupported` naming the feature
    /// that the attention functor lacks.
    pipeline(Comm ranks, Layout, Attention attention, Shape layer, Projection projection = {},
             Observer seen = {}, where at = where::here())
        : layer_(ulysses::checked(layer, at)),
          pass_(std::move(ranks), std::move(attention)),
          projection_(std::move(projection)),
          observer_(std::move(seen)) {
        if constexpr (detail::is_fixed_shape<Shape>)
            static_assert(fixed_shape_fits<Shape, Attention>());
        if (pass_.ranks().size() < 1)
            raise(errc::invalid_call, at, "pipeline", "a communicator must name a group",
                  "its size is ", pass_.ranks().size());
        auto exchanged = layer_;
        if constexpr (std::is_same_v<Layout, head_local>) exchanged.chunks = 1;
        check_features<Attention>(exchanged, pass_.ranks().size(), at);
    }

    Comm const& ranks() const { return pass_.ranks(); }
    shape const& layer() const { return layer_; }
    Observer& observer() { return observer_; }

    /// What backward needs of forward; one a layer (and a micro-batch in flight), reused.
    context_type make_context() const { return {}; }

    /// What inference keeps of the tokens so far: room for `capacity` keys of `batch` samples, of
    /// elements T. *Blocking*: two fences and a window, whatever the layout policy. *Throws* on every
    /// rank `invalid_shape` when a head would be cut (use assignment::whole_heads) or the memory is
    /// beyond what is counted, `disagreement` when ranks ask for different caches.
    template <element T>
    cache_type make_cache(std::int64_t batch, std::int64_t capacity,
                          where at = where::here()) const {
        return cache_type::template make<T>(ranks(), layer_, batch, capacity, at);
    }

    /// Steps 3 to 5 for inference: o = attention(q, k, v). `logits` has what the layer's scores take
    /// beside q and k; with a dropout key, the call drops as in training.
    ///
    /// *Shape*: sequence_local: q [B, s, Hq, D], k [B, s, Hkv, D], v [B, s, Hkv, Dv], o [B, s, Hq,
    /// Dv], where s are the tokens `step` gives this rank; head_local: all tokens, the heads of
    /// this rank. *Blocking*: two fences over more than one rank, or those of its chunks. *Throws*
    /// `invalid_tensor` on every rank when an operand on any of them does not fit.
    template <class Q, class K, class V, class O>
    void attend(sequence const& step, Q const& q, K const& k, V const& v, O const& o,
                logit_inputs const& logits = {}, where at = where::here()) {
        attend_with(step, nullptr, nullptr, q, k, v, o, logits, at);
    }

    /// Steps 3 to 5 over a cache: the step's keys and values go into it behind those that are there,
    /// and its rows see them all. The step's `past` is `cache.lengths()`.
    ///
    /// *Shape*: as above, of the step's own tokens. *Blocking*: two fences over more than one rank;
    /// one more after the cache was used without (head_local, `truncate`). *Throws* besides, before
    /// anything moves, `invalid_sequence` when the step does not continue the cache or the cache has
    /// no room for it, `invalid_call` when it was made for other operands. After an error it holds
    /// what it held.
    template <class Q, class K, class V, class O>
    void attend(sequence const& step, cache_type& cache, Q const& q, K const& k, V const& v,
                O const& o, logit_inputs const& logits = {}, where at = where::here()) {
        attend_with(step, nullptr, &cache, q, k, v, o, logits, at);
    }

    /// Steps 3 to 5 for training: also fills `saved`. With keep::exchanged the caller's tensors are
    /// free for reuse afterwards. *Throws* `invalid_call` when `saved` still waits for its
    /// backward.
    template <class Q, class K, class V, class O>
    void attend(sequence const& step, context_type& saved, Q const& q, K const& k, V const& v,
                O const& o, logit_inputs const& logits = {}, where at = where::here()) {
        attend_with(step, &saved, nullptr, q, k, v, o, logits, at);
    }

    /// Backward of `attend` with keep::exchanged: dO [B, s, Hq, Dv] -> dq, dk, dv, overwritten. `logits`
    /// as in forward; the gradients that `dlogits` wants are added to, each rank's part of them.
    /// *Throws* `invalid_call` when `saved` is empty, belongs to another step, or kept too little.
    template <class DO, class DQ, class DK, class DV>
    void attend_backward(sequence const& step, context_type& saved, DO const& dout, DQ const& dq,
                         DK const& dk, DV const& dv, logit_inputs const& logits = {},
                         gradients_of<DO, DQ, DK, DV> const& dlogits = {},
                         where at = where::here()) {
        using T = operand_type<DO, DQ, DK, DV>;
        static_assert(mutable_outputs<DQ, DK, DV>());
        static_assert(differentiable_attention_for<Attention, T> ||
                      explain_differentiable_attention<Attention, T>());
        observed_call const call(observer_, pass_kind::attend_backward);
        auto const& moves = planned_by_all(step, pass_kind::attend_backward, at);
        pass_.template backward<T>(
            plans_.all(), pass_kind::attend_backward, saved, observer_, at, [&](auto& local) {
                if (layer_.keep != keep::exchanged)
                    raise(errc::invalid_call, at, "attend_backward",
                          "keep::local and keep::nothing need q, k, v and o again",
                          "they were not given, the layer has keep::", kept());
                take_gradients(local, moves, dout, dq, dk, dv, at);
                take_logits(local, moves, "attend_backward", logits, dlogits, at);
                if (!pass_.exchanging(moves)) {
                    local.q = packed<T>(saved.q, query_extents<Layout>(moves, layer_.head_dim));
                    local.k = packed<T>(saved.k, key_extents<Layout>(moves, layer_.head_dim));
                    local.v = packed<T>(saved.v, key_extents<Layout>(moves, layer_.value_dim));
                    local.o = packed<T>(saved.o, query_extents<Layout>(moves, layer_.value_dim));
                }
            });
    }

    /// Backward of `attend` under keep::local or keep::nothing: takes forward's operands again,
    /// unchanged (o is only read under keep::local).
    template <class Q, class K, class V, class O, class DO, class DQ, class DK, class DV>
    void attend_backward(sequence const& step, context_type& saved, Q const& q, K const& k,
                         V const& v, O const& o, DO const& dout, DQ const& dq, DK const& dk,
                         DV const& dv, logit_inputs const& logits = {},
                         gradients_of<Q, K, V, O, DO, DQ, DK, DV> const& dlogits = {},
                         where at = where::here()) {
        using T = operand_type<Q, K, V, O, DO, DQ, DK, DV>;
        static_assert(mutable_outputs<DQ, DK, DV>());
        static_assert(differentiable_attention_for<Attention, T> ||
                      explain_differentiable_attention<Attention, T>());
        observed_call const call(observer_, pass_kind::attend_backward);
        auto const& moves = planned_by_all(step, pass_kind::attend_backward, at);
        pass_.template backward<T>(
            plans_.all(), pass_kind::attend_backward, saved, observer_, at, [&](auto& local) {
                if (layer_.keep == keep::exchanged)
                    raise(errc::invalid_call, at, "attend_backward",
                          "keep::exchanged has kept q, k, v and o",
                          "they were given again, the layer has keep::", kept());
                take_inputs(local, moves, "attend_backward", q, k, v, at);
                auto const kept_o = heads_of<T, Layout>(o, "attend_backward: o", at);
                check_operand("attend_backward", "o", kept_o,
                              query_extents<Layout>(moves, layer_.value_dim), at);
                // Under keep::nothing o is computed again, beside the caller's.
                if (layer_.keep == keep::local)
                    local.o = {const_cast<T*>(kept_o.data), kept_o.extents, kept_o.strides};
                take_gradients(local, moves, dout, dq, dk, dv, at);
                take_logits(local, moves, "attend_backward", logits, dlogits, at);
            });
    }

    /// Steps 2 to 6 for inference: y = project_out(attention(project_in(x))).
    /// *Shape*: x [B, s, C] -> y [B, s, C]; weights as the projection defines them. *Blocking*,
    /// *Throws* as `attend`.
    template <class X, class Weights, class Y>
    void forward(sequence const& step, X const& x, Weights const& weights, Y const& y,
                 logit_inputs const& logits = {}, where at = where::here()) {
        forward_with(step, nullptr, nullptr, x, weights, y, logits, at);
    }

    /// Steps 2 to 6 over a cache, as `attend` over one.
    template <class X, class Weights, class Y>
    void forward(sequence const& step, cache_type& cache, X const& x, Weights const& weights,
                 Y const& y, logit_inputs const& logits = {}, where at = where::here()) {
        forward_with(step, nullptr, &cache, x, weights, y, logits, at);
    }

    /// Steps 2 to 6 for training: also fills `saved`.
    template <class X, class Weights, class Y>
    void forward(sequence const& step, context_type& saved, X const& x, Weights const& weights,
                 Y const& y, logit_inputs const& logits = {}, where at = where::here()) {
        forward_with(step, &saved, nullptr, x, weights, y, logits, at);
    }

    /// Backward of `forward`. `x` and `weights` as they were; dx is overwritten, gradients are
    /// added to: this rank's part of the gradient of the token-sum loss. *Shape*: x, dy, dx [B, s,
    /// C].
    template <class X, class Weights, class DY, class DX, class Gradients>
    void backward(sequence const& step, context_type& saved, X const& x, Weights const& weights,
                  DY const& dy, DX const& dx, Gradients const& gradients,
                  logit_inputs const& logits = {}, gradients_of<X, DY, DX> const& dlogits = {},
                  where at = where::here()) {
        using T = operand_type<X, DY, DX>;
        static_assert(mutable_outputs<DX>());
        static_assert(differentiable_attention_for<Attention, T> ||
                      explain_differentiable_attention<Attention, T>());
        static_assert(std::is_same_v<Layout, sequence_local>,
                      "ulysses: a projection accepts sequence_local views only; head_local "
                      "pipelines have `attend`.");
        static_assert(differentiable_projection_for<Projection, T, Weights, Gradients> ||
                      explain_differentiable_projection<Projection, T, Weights, Gradients>());
        observed_call const call(observer_, pass_kind::backward);
        auto const& moves = planned_by_all(step, pass_kind::backward, at);
        auto const rank = ranks().rank();
        token_view<T const> x_view, dy_view;
        token_view<T> dx_view, dq, dk, dv, o;
        pass_.template backward<T>(
            plans_.all(), pass_kind::backward, saved, observer_, at, [&](auto& local) {
                x_view = tokens_of<T>(x, "backward: x", at);
                dy_view = tokens_of<T>(dy, "backward: dy", at);
                dx_view = tokens_of<T>(dx, "backward: dx", at);
                extents4 const tokens{step.batch(), step.queries().count(rank), 1, x_view.dim()};
                check_operand("backward", "x", x_view, tokens, at);
                check_operand("backward", "dy", dy_view, tokens, at);
                check_output("backward", "dx", dx_view, tokens, at);
                check_apart("backward", "dx", dx_view, "x", x_view, at);
                check_apart("backward", "dx", dx_view, "dy", dy_view, at);
                take_logits(local, moves, "backward", logits, dlogits, at);
                auto const query = query_extents<Layout>(moves, layer_.head_dim),
                           key = key_extents<Layout>(moves, layer_.head_dim);
                dq = packed<T>(scratch_.dq, query);
                dk = packed<T>(scratch_.dk, key);
                dv = packed<T>(scratch_.dv, key_extents<Layout>(moves, layer_.value_dim));
                auto const dout =
                    packed<T>(scratch_.dout, query_extents<Layout>(moves, layer_.value_dim));
                local.dout = dout;
                local.dq = dq;
                local.dk = dk;
                local.dv = dv;
                auto const memory = six_step_memory(&saved);
                o = packed<T>(layer_.keep == keep::nothing ? scratch_.o : saved.o,
                              query_extents<Layout>(moves, layer_.value_dim));
                local.o = o;
                if (layer_.keep != keep::exchanged || !pass_.exchanging(moves)) {
                    auto const q = packed<T>(*memory.q, query);
                    auto const k = packed<T>(*memory.k, key);
                    auto const v =
                        packed<T>(*memory.v, key_extents<Layout>(moves, layer_.value_dim));
                    if (layer_.keep == keep::nothing)
                        ulysses::project_in(projection_, step, rank, x_view, weights, q, k, v,
                                            queue());
                    local.q = q;
                    local.k = k;
                    local.v = v;
                }
                observer_.begin(step_id::project_out);
                ulysses::project_out_backward(projection_, step, rank, weights, dy_view, dout,
                                              queue());
                observer_.end(step_id::project_out);
            });
        alone(pass_kind::backward, at, [&] {
            observer_.begin(step_id::project_in);
            ulysses::project_out_gradients(projection_, step, rank, token_view<T const>(o), dy_view,
                                           gradients, queue());
            ulysses::project_in_backward(projection_, step, rank, x_view, weights, dq, dk, dv,
                                         dx_view, gradients, queue());
            observer_.end(step_id::project_in);
        });
    }

    /// How many chunks of heads the calls of a step run in: `shape::chunks`, or 1 where nothing is
    /// exchanged.
    std::int64_t chunks(sequence const& step, where at = where::here()) {
        plan_all(step, at);
        return static_cast<std::int64_t>(plans_.all().size());
    }

    /// The plan of a step on this rank, or of one of its chunks: items, blocks, rows for each peer. Valid
    /// until the next call.
    plan const& planned(sequence const& step, std::int64_t chunk = 0, where at = where::here()) {
        plan_all(step, at);
        if (chunk < 0 || chunk >= static_cast<std::int64_t>(plans_.all().size()))
            raise(errc::invalid_call, at, "pipeline",
                  "a chunk must be one that the step's calls run", "chunk ", chunk, " of ",
                  plans_.all().size());
        return plans_.all()[static_cast<std::size_t>(chunk)];
    }

    /// Text: shape, items, bytes and the way each step takes, for elements of `type`.
    std::string describe(sequence const& step, dtype type = dtype::f32, where at = where::here()) {
        plan_all(step, at);
        return ulysses::describe(plans_.all(), Layout::name, type, pass_.exchanging(plans_.first()),
                                 workspace(type));
    }

    /// Bytes of memory that the calls of a step need on this rank for elements of `type`: the group's
    /// windows, which its other pipelines use as well, and what this pipeline holds once it has made
    /// each call that it can make, forward and backward. Operands and contexts are not counted; with a
    /// projection, q, k, v, o and their gradients are, which all chunks share. Until the group has
    /// exchanged once it is not known who reaches whom: where messages may be sent, they are counted.
    /// Not collective. *Throws* `unsupported` for elements that the functor does not take.
    std::size_t workspace_bytes(sequence const& step, dtype type = dtype::f32,
                                where at = where::here()) {
        plan_all(step, at);
        auto const use = workspace(type);
        if (!use)
            raise(errc::unsupported, at, "workspace_bytes",
                  "the attention functor must take the elements", name(type));
        return use->total();
    }

    /// Bytes of scratch memory this pipeline holds on this rank, shared windows and contexts not
    /// counted.
    std::size_t scratch_bytes() const { return pass_.scratch_bytes() + scratch_.bytes(); }

   private:
    using memory_type = buffer<space_type>;

    struct scratch {
        memory_type q, k, v, o, dout, dq, dk, dv;
        std::size_t bytes() const {
            std::size_t sum = 0;
            for (auto const* each : {&q, &k, &v, &o, &dout, &dq, &dk, &dv}) sum += each->bytes();
            return sum;
        }
    };

    /// Where the six steps put q, k, v and o: in the context when they are kept sequence-local,
    /// else in scratch.
    struct local_memory {
        memory_type *q, *k, *v, *o;
    };
    local_memory six_step_memory(context_type* saved) {
        auto const kept = saved != nullptr && layer_.keep != keep::nothing;
        auto const kept_local =
            kept && (layer_.keep == keep::local || !pass_.exchanging(plans_.first()));
        auto& qkv_q = kept_local ? saved->q : scratch_.q;
        auto& qkv_k = kept_local ? saved->k : scratch_.k;
        auto& qkv_v = kept_local ? saved->v : scratch_.v;
        return {&qkv_q, &qkv_k, &qkv_v, kept ? &saved->o : &scratch_.o};
    }

    static constexpr bool six_steps = !std::is_same_v<Projection, no_projection>;

    /// `cache_capacity`: of the cache that a call is over, whose heads are dealt at once; 0: none.
    void plan_all(sequence const& step, where at, std::int64_t cache_capacity = 0) {
        auto const chunked =
            pass_.exchanging(step) && cache_capacity == 0 && !step.packed().has_past();
        if (!plans_.fit(step, cache_capacity))
            plans_.rebuild(layer_, chunked ? layer_.chunks : 1, step, ranks().size(),
                           ranks().rank(), pass_.attention().row_multiple(), cache_capacity, at,
                           [&](plan const& first) { check_step_features<Attention>(first, at); });
        if constexpr (std::is_same_v<Layout, head_local>)
            for (auto const& item : plans_.first().items())
                if (item.work.rows() != plans_.first().queries())
                    raise(errc::invalid_shape, at, "pipeline",
                          "head_local operands need whole heads on every rank "
                          "(assignment::whole_heads)",
                          layer_.heads, " heads on ", ranks().size(), " ranks");
    }

    /// Of the step that is planned; nothing for elements that the functor does not take.
    std::optional<workspace_use> workspace(dtype type) const {
        switch (type) {
            case dtype::f64: return workspace_of<double>();
            case dtype::f32: return workspace_of<float>();
            case dtype::f16: return workspace_of<half>();
            case dtype::bf16: return workspace_of<bf16>();
            case dtype::none: break;
        }
        return {};
    }
    template <class T>
    std::optional<workspace_use> workspace_of() const {
        if constexpr (attention_for<Attention, T>) {
            auto use = pass_.template workspace<T>(plans_.all(), six_steps);
            if (!six_steps) return use;
            constexpr auto backward = differentiable_attention_for<Attention, T>;
            auto const& moves = plans_.first();
            auto const both = layer_.head_dim + layer_.value_dim;
            auto const elements =
                moves.batch() * both *
                (moves.own_queries() * layer_.heads + moves.own_keys() * layer_.kv_heads);
            use.scratch += static_cast<std::size_t>(elements) * sizeof(T) * (backward ? 2 : 1);
            return use;
        } else {
            return {};
        }
    }

    /// The plan, of the first chunk, of a collective call: a step that has none on this rank, or that does not continue its
    /// cache, is an error on every rank.
    plan const& planned_by_all(sequence const& step, pass_kind kind, where at,
                               cache_type const* cache = nullptr, dtype type = dtype::none) {
        fence_status status;
        guarded(status, name(kind), at, [&] {
            if (cache != nullptr)
                cache->expect_fits(step, layer_, type, ranks(), at);
            else if (step.packed().has_past())
                raise(errc::invalid_call, at, "pipeline", "a step with past needs its cache",
                      "none was given");
            plan_all(step, at, cache != nullptr ? cache->capacity() : 0);
        });
        if (status.code != errc::none) pass_.refuse(status);
        return plans_.first();
    }

    template <class T>
    static void take_logits(local_operands<T, Layout>& local, plan const& moves,
                            std::string_view call, logit_inputs const& logits,
                            logit_gradients<accumulator_t<T>> const& dlogits, where at) {
        check_logits(moves, call, logits, true, at);
        check_logit_gradients(moves, call, dlogits, at);
        local.logits = logits;
        local.dlogits = dlogits;
    }

    /// Runs what follows a call's last fence: an error in it leaves the call on this rank alone.
    template <class Body>
    void alone(pass_kind kind, where at, Body const& body) const {
        fence_status status;
        guarded(status, name(kind), at, body);
        if (status.code != errc::none) throw_error(status.code, status.text, ranks().rank());
    }

    auto queue() const { return queue_of(ranks()); }

    std::string kept() const { return text_of(term::keep, static_cast<std::int64_t>(layer_.keep)); }

    template <class T>
    tensor_view<T, Layout> packed(memory_type& memory, extents4 const& extents) const {
        return packed_in<T, Layout>(memory, extents, queue());
    }

    template <class Q, class K, class V, class O>
    void attend_with(sequence const& step, context_type* saved, cache_type* cache, Q const& q,
                     K const& k, V const& v, O const& o, logit_inputs const& logits, where at) {
        using T = operand_type<Q, K, V, O>;
        static_assert(mutable_outputs<O>());
        observed_call const call(observer_, pass_kind::attend);
        auto const& moves = planned_by_all(step, pass_kind::attend, at, cache, dtype_of<T>);
        pass_.template forward<T>(
            plans_.all(), pass_kind::attend, saved, cache, observer_, at, [&](auto& local) {
                take_inputs(local, moves, "attend", q, k, v, at);
                local.o = heads_of<T, Layout>(o, "o", at);
                check_output("attend", "o", local.o, query_extents<Layout>(moves, layer_.value_dim),
                             at);
                check_apart("attend", "o", local.o, "q", local.q, at);
                check_apart("attend", "o", local.o, "k", local.k, at);
                check_apart("attend", "o", local.o, "v", local.v, at);
                check_logits(moves, "attend", logits, saved != nullptr, at);
                local.logits = logits;
            });
    }

    template <class X, class Weights, class Y>
    void forward_with(sequence const& step, context_type* saved, cache_type* cache, X const& x,
                      Weights const& weights, Y const& y, logit_inputs const& logits, where at) {
        using T = operand_type<X, Y>;
        static_assert(mutable_outputs<Y>());
        static_assert(std::is_same_v<Layout, sequence_local>,
                      "ulysses: a projection accepts sequence_local views only; head_local "
                      "pipelines have `attend`.");
        static_assert(projection_for<Projection, T, Weights> ||
                      explain_projection<Projection, T, Weights>());
        observed_call const call(observer_, pass_kind::forward);
        auto const& moves = planned_by_all(step, pass_kind::forward, at, cache, dtype_of<T>);
        auto const rank = ranks().rank();
        token_view<T> y_view, o;
        pass_.template forward<T>(
            plans_.all(), pass_kind::forward, saved, cache, observer_, at, [&](auto& local) {
                token_view<T const> const x_view = tokens_of<T>(x, "forward: x", at);
                y_view = tokens_of<T>(y, "forward: y", at);
                extents4 const tokens{step.batch(), step.queries().count(rank), 1, x_view.dim()};
                check_operand("forward", "x", x_view, tokens, at);
                check_output("forward", "y", y_view, tokens, at);
                check_apart("forward", "y", y_view, "x", x_view, at);
                check_logits(moves, "forward", logits, saved != nullptr, at);
                local.logits = logits;
                if (step.cross())
                    raise(errc::invalid_sequence, at, "forward",
                          "q, k and v are projected from one x", "the step has ",
                          step.queries().total(), " queries and ", step.keys().total(),
                          " keys of their own; project them and use attend");
                auto const memory = six_step_memory(saved);
                auto const q = packed<T>(*memory.q, query_extents<Layout>(moves, layer_.head_dim));
                auto const k = packed<T>(*memory.k, key_extents<Layout>(moves, layer_.head_dim));
                auto const v = packed<T>(*memory.v, key_extents<Layout>(moves, layer_.value_dim));
                o = packed<T>(*memory.o, query_extents<Layout>(moves, layer_.value_dim));
                observer_.begin(step_id::project_in);
                ulysses::project_in(projection_, step, rank, x_view, weights, q, k, v, queue());
                observer_.end(step_id::project_in);
                local.q = q;
                local.k = k;
                local.v = v;
                local.o = o;
            });
        alone(pass_kind::forward, at, [&] {
            observer_.begin(step_id::project_out);
            ulysses::project_out(projection_, step, rank, token_view<T const>(o), weights, y_view,
                                 queue());
            observer_.end(step_id::project_out);
        });
    }

    detail::kept_shape layer_;
    attention_pass<Comm, Layout, Attention, Observer> pass_;
    [[no_unique_address]] Projection projection_;
    [[no_unique_address]] Observer observer_;
    chunk_plans plans_;
    scratch scratch_;
};

template <class Comm, class Layout, class Attention>
pipeline(Comm, Layout, Attention, shape) -> pipeline<Comm, Layout, Attention>;
template <class Comm, class Layout, class Attention, shape Shape>
pipeline(Comm, Layout, Attention, fixed_shape<Shape>)
    -> pipeline<Comm, Layout, Attention, no_projection, no_observer, fixed_shape<Shape>>;
template <class Comm, class Layout, class Attention, class Projection>
pipeline(Comm, Layout, Attention, shape, Projection)
    -> pipeline<Comm, Layout, Attention, Projection>;
template <class Comm, class Layout, class Attention, class Projection, class Observer>
pipeline(Comm, Layout, Attention, shape, Projection, Observer)
    -> pipeline<Comm, Layout, Attention, Projection, Observer>;

}  // namespace ulysses::inline ULYSSES_ABI
