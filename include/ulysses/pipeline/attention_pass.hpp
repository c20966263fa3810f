#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/guarded.hpp>
#include <ulysses/core/operand.hpp>
#include <ulysses/core/view_copy.hpp>
#include <ulysses/pipeline/cache.hpp>
#include <ulysses/pipeline/call_windows.hpp>
#include <ulysses/pipeline/chunk_schedule.hpp>
#include <ulysses/pipeline/context.hpp>
#include <ulysses/pipeline/in_place.hpp>
#include <ulysses/pipeline/operands.hpp>
#include <ulysses/pipeline/running_call.hpp>
#include <ulysses/pipeline/workspace.hpp>
#include <ulysses/stage/attend.hpp>
#include <ulysses/stage/to_heads.hpp>
#include <ulysses/stage/to_tokens.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

/// Steps 3 to 5 as one pass, forward and backward: the part of the pipeline that knows contexts and
/// keep policies. Two fences a pass when ranks exchange, or those of its chunks; none when every
/// rank already holds its heads.
namespace ulysses::inline ULYSSES_ABI {

template <class Comm, class Layout, class Attention, class Observer>
class attention_pass {
   public:
    using space_type = typename Comm::space_type;
    using context_type = context<Comm>;
    using cache_type = kv_cache<Comm>;

    attention_pass(Comm ranks, Attention attention)
        : ranks_(ranks), attention_(attention), moving_(ranks) {}

    Comm const& ranks() const { return ranks_; }
    Attention const& attention() const { return attention_; }

    /// True when steps 3 and 5 move anything: operands local to tokens, over more than one rank or
    /// not in global order.
    bool exchanging(plan const& moves) const {
        return std::is_same_v<Layout, sequence_local> &&
               (ranks_.size() > 1 || !moves.holds_all_in_order());
    }

    bool exchanging(sequence const& step) const {
        return std::is_same_v<Layout, sequence_local> &&
               (ranks_.size() > 1 || !plan::holds_all_in_order(step, ranks_.rank()));
    }

    /// What the passes of a step need on this rank, forward and backward.
    template <class T>
    workspace_use workspace(std::span<plan const> chunks, bool six_steps) const {
        if (exchanging(chunks[0]))
            return exchanged_use<T>(attention_, chunks, six_steps,
                                    [&](int peer) { return moving_.sends_to(peer); });
        return in_place_use<T, Layout>(attention_, chunks[0], six_steps);
    }

    /// Bytes of scratch memory held on this rank, shared windows not counted.
    std::size_t scratch_bytes() const {
        return workspace_.bytes() + lse_.bytes() + in_place_.bytes() + moving_.message_bytes();
    }

    /// Leaves a call that has failed on this rank before it began: with the same error on every
    /// rank.
    [[noreturn]] void refuse(fence_status status) {
        if (std::is_same_v<Layout, sequence_local> && ranks_.size() > 1) {
            collectively([&] {
                status.call = ranks_.begin_call();
                ranks_.fence(status);
            });
        }
        throw_error(status.code, status.text, ranks_.rank());
    }

    /// `prepare(operands)` fills in the local operands and may throw: its error leaves the call on
    /// every rank. With a cache, which fits the step, there is no context.
    template <class T, class Prepare>
    void forward(std::span<plan const> chunks, pass_kind kind, context_type* saved,
                 cache_type* cache, Observer& seen, where at, Prepare const& prepare) {
        collectively([&] { run_forward<T>(chunks, kind, saved, cache, seen, at, prepare); });
    }

    /// `prepare(operands)` as in `forward`; q, k, v and o are needed unless the policy is
    /// keep::exchanged. With keep::nothing, o is computed again and, when it has data, written.
    template <class T, class Prepare>
    void backward(std::span<plan const> chunks, pass_kind kind, context_type& saved, Observer& seen,
                  where at, Prepare const& prepare) {
        collectively([&] { run_backward<T>(chunks, kind, saved, seen, at, prepare); });
    }

   private:
    using windows = call_windows<Comm>;

    auto queue() const { return queue_of(ranks_); }

    /// Runs a call, which only with sequence-local operands is one of the whole group.
    template <class Body>
    void collectively(Body const& body) {
        if constexpr (std::is_same_v<Layout, sequence_local>)
            leaving_on_failure(ranks_, body);
        else
            body();
    }

    template <class T, class Prepare>
    void run_forward(std::span<plan const> chunks, pass_kind kind, context_type* saved,
                     cache_type* cache, Observer& seen, where at, Prepare const& prepare) {
        auto const& moves = chunks[0];
        auto const& layer = moves.layer();
        auto const whole = kind == pass_kind::forward;
        auto const own_window = saved != nullptr && layer.keep == keep::exchanged;
        auto const keeps_lse = saved != nullptr && layer.keep != keep::nothing;
        window_slots slots;
        moving_.begin(seen);
        auto call = begin(moves, kind, dtype_of<T>, at);
        if (cache != nullptr) call.set(term::cache, cache->number());
        // Before windows grow: what a filled context holds must survive a refused call.
        call.guard([&] {
            slots = window_slots::of<forward_regions, T>(chunks, own_window ? chunks.size()
                                                                            : shared_slots(moves));
            if (saved != nullptr) saved->expect_empty(ranks_, at);
        });
        auto const memory = open(moves, call, own_window ? saved : nullptr, slots,
                                 cache != nullptr && cache->used_alone());
        if (cache != nullptr && exchanging(moves)) cache->settle();
        auto const &inbox = memory.inbox, &outbox = memory.outbox;
        auto& lse = keeps_lse ? saved->lse : lse_;
        auto const places = [&](std::size_t c) {
            return forward_regions::of<T>(chunks[c], slots.of_chunk(c));
        };
        local_operands<T, Layout> local;
        auto const operands_of = [&](std::size_t c) {
            auto operands = begin_operands(local, lse, chunks[c], keeps_lse);
            if (exchanging(moves))
                set_forward(operands, own_part(inbox), own_part(outbox), places(c), layer);
            else
                in_place_.set_forward(operands, local);
            if (cache != nullptr) {
                operands.k = {cache->own_part(), cache->places().k, layer.head_dim};
                operands.v = {cache->own_part(), cache->places().v, layer.value_dim};
            }
            return operands;
        };
        call.guard([&] {
            prepare(local);
            check_memory<space_type>(name(kind), local, at);
            if (local.logits.dropout) call.set_dropout(*local.logits.dropout);
            reserve<T>(chunks, lse, keeps_lse);
            reserve_workspace<T>(chunks, operands_of, true, false);
        });
        auto const compute = [&](std::size_t c) {
            if (cache != nullptr && !exchanging(moves))
                cache->append(queue(), moves, local.k, local.v);
            seen.begin(step_id::attend);
            ulysses::attend(attention_, chunks[c], operands_of(c), functor_workspace(), queue(),
                            progress(layer));
            seen.end(step_id::attend);
        };
        if (exchanging(moves)) {
            if constexpr (std::is_same_v<Layout, sequence_local>)
                moving_.run(
                    call, chunks.size(), layer.overlap,
                    [&](auto& moving, std::size_t c) {
                        if (cache != nullptr)
                            to_heads(moving, chunks[c], inbox, places(c), cache->memory(),
                                     cache->places(), local.q, local.k, local.v);
                        else
                            to_heads(moving, chunks[c], inbox, places(c), local.q, local.k,
                                     local.v);
                    },
                    compute,
                    [&](auto& moving, std::size_t c) {
                        to_tokens(moving, chunks[c], outbox, places(c).o, local.o);
                    },
                    [](auto&) {});
        } else {
            call.alone(ranks_.rank(), [&] {
                compute(0);
                if (own_window && !whole) in_place_.keep_copies(*saved, local, queue());
            });
        }
        if (saved != nullptr) saved->fill(filling<T>(moves, whole), local.logits.dropout, ranks_);
        if (cache != nullptr) cache->extend(moves);
    }

    template <class T, class Prepare>
    void run_backward(std::span<plan const> chunks, pass_kind kind, context_type& saved,
                      Observer& seen, where at, Prepare const& prepare) {
        auto const& moves = chunks[0];
        auto const& layer = moves.layer();
        auto const whole = kind == pass_kind::backward;
        auto const policy = layer.keep;
        auto const keeps_lse = policy != keep::nothing;
        window_slots slots, kept_slots;
        moving_.begin(seen);
        auto call = begin(moves, kind, dtype_of<T>, at);
        call.guard([&] {
            slots = window_slots::of<backward_regions, T>(chunks, shared_slots(moves));
            kept_slots = window_slots::of<forward_regions, T>(chunks, chunks.size());
            saved.expect_filled(filling<T>(moves, whole), ranks_, at);
        });
        auto const memory = open(moves, call, nullptr, slots);
        auto const &inbox = memory.inbox, &outbox = memory.outbox;
        // A context filled by this plan holds its windows: nothing grows here.
        auto const kept =
            policy == keep::exchanged ? open(moves, call, &saved, kept_slots) : windows{};
        auto& lse = keeps_lse ? saved.lse : lse_;
        auto const places = [&](std::size_t c) {
            return backward_regions::of<T>(chunks[c], slots.of_chunk(c));
        };
        local_operands<T, Layout> local;
        auto const operands_of = [&](std::size_t c) {
            auto operands = begin_operands(local, lse, chunks[c], keeps_lse);
            if (!exchanging(moves)) {
                in_place_.set_backward(operands, local, policy, queue());
                return operands;
            }
            auto* const in = own_part(inbox);
            auto* const out = own_part(outbox);
            auto const place = places(c);
            if (policy == keep::exchanged)
                set_forward(operands, own_part(kept.inbox), own_part(kept.outbox),
                            forward_regions::of<T>(chunks[c], kept_slots.of_chunk(c)), layer);
            else
                set_forward(operands, in, policy == keep::local ? in : out, place, layer);
            set_gradients(operands, in, out, place, layer);
            return operands;
        };
        call.guard([&] {
            if (policy == keep::exchanged && !exchanging(moves))
                in_place_.take_copies(local, saved, moves, queue());
            prepare(local);
            check_memory<space_type>(name(kind), local, at);
            if (local.logits.dropout) call.set_dropout(*local.logits.dropout);
            saved.expect_dropout(local.logits.dropout, at);
            reserve<T>(chunks, lse, keeps_lse);
            reserve_workspace<T>(chunks, operands_of, policy == keep::nothing, true);
        });
        auto const compute = [&](std::size_t c) {
            auto const operands = operands_of(c);
            if (exchanging(moves)) {
                auto const place = places(c);
                moving_.template add_slots<T>(chunks[c].output_gradient(), inbox, place.dout,
                                              place.dout_slots, moves.batch(), layer.value_dim);
                clear_gradients<T>(own_part(outbox), place, chunks[c]);
            } else {
                in_place_.clear_gradients(local, queue());
            }
            seen.begin(step_id::attend);
            if (policy == keep::nothing)
                ulysses::attend(attention_, chunks[c], operands, functor_workspace(), queue(),
                                progress(layer));
            ulysses::attend_backward(attention_, chunks[c], operands, functor_workspace(), queue(),
                                     progress(layer));
            seen.end(step_id::attend);
        };
        if (exchanging(moves)) {
            if constexpr (std::is_same_v<Layout, sequence_local>)
                moving_.run(
                    call, chunks.size(), layer.overlap,
                    [&](auto& moving, std::size_t c) {
                        auto const place = places(c);
                        to_tokens_backward(moving, chunks[c], inbox, place, local.dout);
                        if (policy != keep::exchanged)
                            to_heads(moving, chunks[c], inbox, place, local.q, local.k, local.v);
                        if (policy == keep::local)
                            moving.put(chunks[c].query_moves(), inbox, place.o,
                                       std::as_const(local).o);
                    },
                    compute,
                    [&](auto& moving, std::size_t c) {
                        auto const place = places(c);
                        to_heads_backward(moving, chunks[c], outbox, place, local.dq, local.dk,
                                          local.dv);
                        if (policy == keep::nothing && whole)
                            to_tokens(moving, chunks[c], outbox, place.o, local.o);
                    },
                    [&](auto& moving) { moving.template add<T, accumulator_t<T>>(queue()); });
        } else {
            call.alone(ranks_.rank(), [&] { compute(0); });
            in_place_.round(local, queue());
        }
        saved.discard();
    }

    /// Between two chunks' fences messages of other chunks are under way.
    progress_hook progress(shape const& layer) const {
        if constexpr (progresses<Comm>)
            if (layer.overlap) return progress_hook::of(ranks_);
        return {};
    }

    template <class T>
    static context_filling filling(plan const& moves, bool whole) {
        return {moves.hash(), dtype_of<T>, whole, Layout::name};
    }

    running_call begin(plan const& moves, pass_kind kind, dtype type, where at) {
        running_call call(kind, at, moves, type);
        if (exchanging(moves)) call.status.call = ranks_.begin_call();
        return call;
    }

    windows open(plan const& moves, running_call& call, context_type* saved,
                 window_slots const& slots, bool needed = false) {
        if (!exchanging(moves)) return {};
        return windows::open(ranks_, call, saved, slots, needed);
    }

    /// Log-sum-exps of all chunks of a call.
    template <class T>
    void reserve(std::span<plan const> chunks, buffer<space_type>& lse, bool keeps_lse) {
        lse.reserve(lse_bytes<T>(chunks, keeps_lse), queue());
    }

    /// The functor's workspace for all chunks of a call, of which it attends forward, backward or both.
    template <class T, class OperandsOf>
    void reserve_workspace(std::span<plan const> chunks, OperandsOf const& operands_of,
                           bool forward, bool backward) {
        std::size_t bytes = 0;
        if constexpr (prepared_attention_for<Attention, T>) {
            for (std::size_t c = 0; c < chunks.size(); ++c)
                for (auto const back : {false, true})
                    if (back ? backward : forward)
                        bytes = std::max(bytes, prepare_attend(attention_, chunks[c],
                                                               operands_of(c), back, queue()));
        } else {
            bytes = most_workspace_bytes<T>(attention_, chunks);
        }
        workspace_.reserve(bytes, queue());
    }

    std::span<std::byte> functor_workspace() const {
        return {workspace_.data(), workspace_.bytes()};
    }

    std::byte* own_part(typename Comm::window_type const& memory) const {
        return ranks_.address(memory, ranks_.rank());
    }

    /// What step 4 takes that is not moved. Log-sum-exps that are kept lie chunk by chunk.
    template <class T>
    static attend_operands<T> begin_operands(local_operands<T, Layout> const& local,
                                             buffer<space_type> const& lse, plan const& moves,
                                             bool keeps_lse) {
        attend_operands<T> operands;
        operands.logits = local.logits;
        operands.dlogits = local.dlogits;
        operands.lse = {lse.data(), lse_region<T>(keeps_lse ? moves.chunk().first_query_row : 0),
                        1};
        return operands;
    }

    /// q, k, v and o of a pass in this rank's parts of windows, o from `o_base` on.
    template <class T, class Regions>
    static void set_forward(attend_operands<T>& operands, std::byte* base, std::byte* o_base,
                            Regions const& places, shape const& layer) {
        operands.q = {base, places.q, layer.head_dim};
        operands.k = {base, places.k, layer.head_dim};
        operands.v = {base, places.v, layer.value_dim};
        operands.o = {o_base, places.o, layer.value_dim};
    }

    /// Gradients, likewise.
    template <class T>
    static void set_gradients(attend_operands<T>& operands, std::byte* in, std::byte* out,
                              backward_regions const& places, shape const& layer) {
        operands.dout = {in, places.dout, layer.value_dim};
        operands.dq = {out, places.dq, layer.head_dim};
        operands.dk = {out, places.dk, layer.head_dim};
        operands.dv = {out, places.dv, layer.value_dim};
    }

    /// Makes dk and dv zero, to be added to.
    template <class T>
    void clear_gradients(std::byte* out, backward_regions const& places, plan const& moves) {
        auto const& layer = moves.layer();
        zero_rows<accumulator_t<T>>(out, places.dk, moves.own_key_rows(), layer.head_dim);
        zero_rows<accumulator_t<T>>(out, places.dv, moves.own_key_rows(), layer.value_dim);
    }

    /// The first `rows` rows of a region in this rank's own part.
    template <class U>
    void zero_rows(std::byte* base, region const& place, std::int64_t rows, std::int64_t dim) {
        zero_view<space_type>(
            queue(), head_view<U>(reinterpret_cast<U*>(base + place.offset), {1, 1, rows, dim},
                                  {0, 0, place.pitch / static_cast<std::int64_t>(sizeof(U)), 1}));
    }

    Comm ranks_;
    [[no_unique_address]] Attention attention_;
    chunk_schedule<Comm, Observer> moving_;
    in_place_operands<space_type, Layout> in_place_;
    buffer<space_type> workspace_, lse_;
};

}  // namespace ulysses::inline ULYSSES_ABI
