#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/logits.hpp>
#include <ulysses/core/observer.hpp>
#include <ulysses/core/projection.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/pipeline/attention_pass.hpp>
#include <ulysses/pipeline/cache.hpp>
#include <ulysses/pipeline/context.hpp>
#include <ulysses/pipeline/describe.hpp>
#include <ulysses/pipeline/features.hpp>
#include <ulysses/pipeline/operand_types.hpp>
#include <ulysses/pipeline/operands.hpp>
#include <ulysses/pipeline/projected_pass.hpp>
#include <ulysses/pipeline/running_call.hpp>
#include <ulysses/pipeline/workspace.hpp>
#include <ulysses/plan/chunk_plans.hpp>
#include <ulysses/projection/none.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
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
    static_assert(runs_in_space<typename Comm::space_type,
                                std::conditional_t<std::is_same_v<Projection, no_projection>,
                                                   typename Comm::space_type,
                                                   typename Projection::space_type>>());
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
          six_steps_(std::move(projection)),
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
    /// elements T. *Blocking*: two fences and a window, whatever the layout policy. *Throws* on
    /// every rank `invalid_shape` when a head would be cut (use assignment::whole_heads) or the
    /// memory is beyond what is counted, `disagreement` when ranks ask for different caches.
    template <element T>
    cache_type make_cache(std::int64_t batch, std::int64_t capacity,
                          where at = where::here()) const {
        return cache_type::template make<T>(ranks(), layer_, batch, capacity, at);
    }

    /// Steps 3 to 5 for inference: o = attention(q, k, v). `logits` has what the layer's scores
    /// take beside q and k; with a dropout key, the call drops as in training.
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

    /// Steps 3 to 5 over a cache: the step's keys and values go into it behind those that are
    /// there, and its rows see them all. The step's `past` is `cache.lengths()`.
    ///
    /// *Shape*: as above, of the step's own tokens. *Blocking*: two fences over more than one rank;
    /// one more after the cache was used without (head_local, `truncate`). *Throws* besides, before
    /// anything moves, `invalid_sequence` when the step does not continue the cache or the cache
    /// has no room for it, `invalid_call` when it was made for other operands. After an error it
    /// holds what it held.
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

    /// Backward of `attend` with keep::exchanged: dO [B, s, Hq, Dv] -> dq, dk, dv, overwritten.
    /// `logits` as in forward; the gradients that `dlogits` wants are added to, each rank's part of
    /// them. *Throws* `invalid_call` when `saved` is empty, belongs to another step, or kept too
    /// little.
    template <class DO, class DQ, class DK, class DV>
    void attend_backward(sequence const& step, context_type& saved, DO const& dout, DQ const& dq,
                         DK const& dk, DV const& dv, logit_inputs const& logits = {},
                         gradients_of<DO, DQ, DK, DV> const& dlogits = {},
                         where at = where::here()) {
        using T = operand_type<DO, DQ, DK, DV>;
        attend_backward_with<T>(step, saved, dout, dq, dk, dv, logits, dlogits, at, [&](auto&) {
            if (layer_.keep != keep::exchanged)
                raise(errc::invalid_call, at, "attend_backward",
                      "keep::local and keep::nothing need q, k, v and o again",
                      "they were not given, the layer has keep::", kept());
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
        attend_backward_with<T>(
            step, saved, dout, dq, dk, dv, logits, dlogits, at, [&](auto& local) {
                if (layer_.keep == keep::exchanged)
                    raise(errc::invalid_call, at, "attend_backward",
                          "keep::exchanged has kept q, k, v and o",
                          "they were given again, the layer has keep::", kept());
                take_inputs(local, plans_.first(), "attend_backward", q, k, v, at);
                take_output_again(local, plans_.first(), o, at);
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
        static_assert(differentiates<T>());
        static_assert(projects<Layout>());
        static_assert(differentiable_projection_for<Projection, T, Weights, Gradients> ||
                      explain_differentiable_projection<Projection, T, Weights, Gradients>());
        observed_call const call(observer_, pass_kind::backward);
        plan_by_all(step, pass_kind::backward, at);
        six_steps_.template backward<T>(pass_, plans_.all(), step, saved, observer_, x, weights, dy,
                                        dx, gradients, logits, dlogits, at);
    }

    /// How many chunks of heads the calls of a step run in: `shape::chunks`, or 1 where nothing is
    /// exchanged.
    std::int64_t chunks(sequence const& step, where at = where::here()) {
        plan_all(step, at);
        return static_cast<std::int64_t>(plans_.all().size());
    }

    /// The plan of a step on this rank, or of one of its chunks: items, blocks, rows for each peer.
    /// Valid until the next call.
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

    /// Bytes of memory that the calls of a step need on this rank for elements of `type`: the
    /// group's windows, which its other pipelines use as well, and what this pipeline holds once it
    /// has made each call that it can make, forward and backward. Operands and contexts are not
    /// counted; with a projection, q, k, v, o and their gradients are, which all chunks share.
    /// Until the group has exchanged once it is not known who reaches whom: where messages may be
    /// sent, they are counted. Not collective. *Throws* `unsupported` for elements that the functor
    /// does not take.
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
    std::size_t scratch_bytes() const { return pass_.scratch_bytes() + six_steps_.scratch_bytes(); }

   private:
    template <class T>
    static consteval bool differentiates() {
        static_assert(differentiable_attention_for<Attention, T> ||
                      explain_differentiable_attention<Attention, T>());
        return true;
    }

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
        return use_of_elements<Attention>(type, [&]<class T>(std::type_identity<T>) {
            constexpr auto backward = differentiable_attention_for<Attention, T>;
            auto use = pass_.template workspace<T>(plans_.all(), six_steps_.present);
            use.scratch += six_steps_.template scratch_bytes<T>(plans_.first(), backward);
            return use;
        });
    }

    /// Plans a collective call: a step that has no plan on this rank, or that does not continue its
    /// cache, is an error on every rank.
    void plan_by_all(sequence const& step, pass_kind kind, where at,
                     cache_type const* cache = nullptr, dtype type = dtype::none) {
        running_call call(kind, at);
        call.guard([&] {
            if (cache != nullptr)
                cache->expect_fits(step, layer_, type, ranks(), at);
            else if (step.packed().has_past())
                raise(errc::invalid_call, at, "pipeline", "a step with past needs its cache",
                      "none was given");
            plan_all(step, at, cache != nullptr ? cache->capacity() : 0);
        });
        if (call.status.code != errc::none) pass_.refuse(call.status);
    }

    std::string kept() const { return text_of(term::keep, static_cast<std::int64_t>(layer_.keep)); }

    template <class Q, class K, class V, class O>
    void attend_with(sequence const& step, context_type* saved, cache_type* cache, Q const& q,
                     K const& k, V const& v, O const& o, logit_inputs const& logits, where at) {
        using T = operand_type<Q, K, V, O>;
        static_assert(mutable_outputs<O>());
        observed_call const call(observer_, pass_kind::attend);
        plan_by_all(step, pass_kind::attend, at, cache, dtype_of<T>);
        pass_.template forward<T>(
            plans_.all(), pass_kind::attend, saved, cache, observer_, at, [&](auto& local) {
                auto const& moves = plans_.first();
                take_inputs(local, moves, "attend", q, k, v, at);
                take_output(local, moves, o, at);
                take_logits(local, moves, "attend", logits, saved != nullptr, at);
            });
    }

    /// `take_forward(operands)` takes forward's q, k, v and o, unless the context has them.
    template <class T, class DO, class DQ, class DK, class DV, class TakeForward>
    void attend_backward_with(sequence const& step, context_type& saved, DO const& dout,
                              DQ const& dq, DK const& dk, DV const& dv, logit_inputs const& logits,
                              logit_gradients<accumulator_t<T>> const& dlogits, where at,
                              TakeForward const& take_forward) {
        static_assert(mutable_outputs<DQ, DK, DV>());
        static_assert(differentiates<T>());
        observed_call const call(observer_, pass_kind::attend_backward);
        plan_by_all(step, pass_kind::attend_backward, at);
        pass_.template backward<T>(
            plans_.all(), pass_kind::attend_backward, saved, observer_, at, [&](auto& local) {
                auto const& moves = plans_.first();
                take_forward(local);
                take_gradients(local, moves, dout, dq, dk, dv, at);
                take_logits(local, moves, "attend_backward", logits, true, at);
                take_logit_gradients(local, moves, "attend_backward", dlogits, at);
            });
    }

    template <class X, class Weights, class Y>
    void forward_with(sequence const& step, context_type* saved, cache_type* cache, X const& x,
                      Weights const& weights, Y const& y, logit_inputs const& logits, where at) {
        using T = operand_type<X, Y>;
        static_assert(mutable_outputs<Y>());
        static_assert(projects<Layout>());
        static_assert(projection_for<Projection, T, Weights> ||
                      explain_projection<Projection, T, Weights>());
        observed_call const call(observer_, pass_kind::forward);
        plan_by_all(step, pass_kind::forward, at, cache, dtype_of<T>);
        six_steps_.template forward<T>(pass_, plans_.all(), step, saved, cache, observer_, x,
                                       weights, y, logits, at);
    }

    detail::kept_shape layer_;
    attention_pass<Comm, Layout, Attention, Observer> pass_;
    projected_pass<Comm, Projection> six_steps_;
    [[no_unique_address]] Observer observer_;
    chunk_plans plans_;
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
