#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/operand.hpp>
#include <ulysses/core/view_copy.hpp>
#include <ulysses/pipeline/cache.hpp>
#include <ulysses/pipeline/chunk_schedule.hpp>
#include <ulysses/pipeline/context.hpp>
#include <ulysses/pipeline/operands.hpp>
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
    using window = typename Comm::window_type;

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
        return workspace_.bytes() + lse_.bytes() + o_.bytes() + dk_.bytes() + dv_.bytes() +
               moving_.message_bytes();
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

    /// `prepare(operands)` as in `forward`; q, k, v, o are needed unless a context kept them
    /// exchanged. With keep::nothing, o is computed again and, when it has data, written.
    template <class T, class Prepare>
    void backward(std::span<plan const> chunks, pass_kind kind, context_type& saved, Observer& seen,
                  where at, Prepare const& prepare) {
        collectively([&] { run_backward<T>(chunks, kind, saved, seen, at, prepare); });
    }

   private:
    using queue_type = typename space_type::queue;
    queue_type queue() const { return queue_of(ranks_); }

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
        auto const whole = kind == pass_kind::forward;
        auto const policy = moves.layer().keep;
        window_slots slots;
        auto const own_window = saved != nullptr && policy == keep::exchanged;
        auto const keeps_lse = saved != nullptr && policy != keep::nothing;
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
        call.guard([&] {
            prepare(local);
            take_dropout(call, local.logits);
            reserve<T>(chunks, lse, keeps_lse);
        });
        auto const compute = [&](std::size_t c) {
            attend_operands<T> operands;
            operands.logits = local.logits;
            operands.dlogits = local.dlogits;
            operands.lse = lse_operand<T>(lse, chunks[c], keeps_lse);
            if (exchanging(moves)) {
                auto const place = places(c);
                set_queries_keys_values(operands, ranks_.address(inbox, ranks_.rank()), place,
                                        moves.layer());
                operands.o = {ranks_.address(outbox, ranks_.rank()), place.o,
                              moves.layer().value_dim};
            } else {
                set_queries_keys_values(operands, local);
                operands.o = in_place(local.o);
                if (cache != nullptr) cache->append(queue(), moves, local.k, local.v);
            }
            if (cache != nullptr) {
                operands.k = {cache->own_part(), cache->places().k, moves.layer().head_dim};
                operands.v = {cache->own_part(), cache->places().v, moves.layer().value_dim};
            }
            seen.begin(step_id::attend);
            ulysses::attend(attention_, chunks[c], operands, functor_workspace(), queue());
            seen.end(step_id::attend);
        };
        if (exchanging(moves)) {
            if constexpr (std::is_same_v<Layout, sequence_local>)
                moving_.run(
                    call, chunks.size(), moves.layer().overlap,
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
            alone(call, [&] {
                compute(0);
                // What is kept must not depend on the caller's tensors.
                if (own_window && !whole) keep_copies<T>(*saved, local);
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
        call.guard([&] {
            prepare(local);
            take_dropout(call, local.logits);
            saved.expect_dropout(local.logits.dropout, at);
            reserve<T>(chunks, lse, keeps_lse);
        });
        auto const compute = [&](std::size_t c) {
            attend_operands<T> operands;
            operands.logits = local.logits;
            operands.dlogits = local.dlogits;
            operands.lse = lse_operand<T>(lse, chunks[c], keeps_lse);
            if (exchanging(moves)) {
                auto const me = ranks_.rank();
                auto* in = ranks_.address(inbox, me);
                auto* out = ranks_.address(outbox, me);
                auto const place = places(c);
                if (policy == keep::exchanged) {
                    auto const of_forward =
                        forward_regions::of<T>(chunks[c], kept_slots.of_chunk(c));
                    set_queries_keys_values(operands, ranks_.address(kept.inbox, me), of_forward,
                                            layer);
                    operands.o = {ranks_.address(kept.outbox, me), of_forward.o, layer.value_dim};
                } else {
                    set_queries_keys_values(operands, in, place, layer);
                    operands.o = {policy == keep::local ? in : out, place.o, layer.value_dim};
                }
                moving_.template add_slots<T>(chunks[c].output_gradient(), inbox, place.dout,
                                              place.dout_slots, moves.batch(), layer.value_dim);
                operands.dout = {in, place.dout, layer.value_dim};
                operands.dq = {out, place.dq, layer.head_dim};
                operands.dk = {out, place.dk, layer.head_dim};
                operands.dv = {out, place.dv, layer.value_dim};
                auto const rows = chunks[c].own_key_rows();
                zero_rows<accumulator_t<T>>(out, place.dk, rows, layer.head_dim);
                zero_rows<accumulator_t<T>>(out, place.dv, rows, layer.value_dim);
            } else {
                set_backward_in_place(operands, local, moves);
            }
            seen.begin(step_id::attend);
            if (policy == keep::nothing)
                ulysses::attend(attention_, chunks[c], operands, functor_workspace(), queue());
            ulysses::attend_backward(attention_, chunks[c], operands, functor_workspace(), queue());
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
            alone(call, [&] { compute(0); });
            round_in_place(local);
        }
        saved.discard();
    }

    template <class T>
    static context_filling filling(plan const& moves, bool whole) {
        return {moves.hash(), dtype_of<T>, whole, Layout::name};
    }

    running_call begin(plan const& moves, pass_kind kind, dtype type, where at) {
        running_call call{{}, kind, at};
        if (exchanging(moves)) call.status.call = ranks_.begin_call();
        call.status.plan = moves.hash();
        call.status.terms = moves.terms();
        call.set(term::call, static_cast<std::int64_t>(kind));
        call.set(term::element_type, static_cast<std::int64_t>(type));
        return call;
    }

    static void take_dropout(running_call& call, logit_inputs const& logits) {
        if (!logits.dropout) return;
        auto const& key = *logits.dropout;
        word_hash hash;
        for (auto const word : {key.seed, key.step, key.layer, key.first_sample}) hash.add(word);
        call.set(term::dropout_key, static_cast<std::int64_t>(hash.value()));
    }

    struct windows {
        window inbox{}, outbox{};
    };

    /// The windows of a call: the context's, or the group's. They grow collectively, so ranks first
    /// make sure that all are in the same call and none has failed; also when that is `needed`
    /// before a rank writes to another.
    windows open(plan const& moves, running_call& call, context_type* saved,
                 window_slots const& slots, bool needed = false) {
        if (!exchanging(moves)) return {};
        auto const inbox_bytes = slots.inbox(), outbox_bytes = slots.outbox();
        auto const grows = saved != nullptr
                               ? saved->grows(inbox_bytes, outbox_bytes)
                               : ranks_.shared_window_bytes(arena::inbox) < inbox_bytes ||
                                     ranks_.shared_window_bytes(arena::outbox) < outbox_bytes;
        auto& status = call.status;
        if (grows || needed) ranks_.fence(status);
        if (status.code != errc::none) return {};
        if (saved == nullptr)
            return {ranks_.shared_window(arena::inbox, inbox_bytes),
                    ranks_.shared_window(arena::outbox, outbox_bytes)};
        windows own{saved->inbox(ranks_, inbox_bytes, status.call),
                    saved->outbox(ranks_, outbox_bytes, status.call)};
        call.set(term::inbox, saved->inbox_number());
        call.set(term::outbox, saved->outbox_number());
        return own;
    }

    /// Computes without an exchange: an error stays on this rank.
    template <class Body>
    void alone(running_call& call, Body const& body) const {
        call.guard(body);
        auto const& status = call.status;
        if (status.code != errc::none) throw_error(status.code, status.text, ranks_.rank());
    }

    /// Scratch and log-sum-exp for all chunks of a call.
    template <class T>
    void reserve(std::span<plan const> chunks, buffer<space_type>& lse, bool keeps_lse) {
        workspace_.reserve(most_workspace_bytes<T>(attention_, chunks), queue());
        lse.reserve(lse_bytes<T>(chunks, keeps_lse), queue());
    }

    std::span<std::byte> functor_workspace() const {
        return {workspace_.data(), workspace_.bytes()};
    }

    template <class U>
    static head_operand<U> in_place(tensor_view<U, Layout> const& local) {
        return head_operand<U>(head_view<U>(local.data, local.extents, local.strides));
    }

    /// Chunks that are kept lie one behind the other.
    template <class T>
    static head_operand<accumulator_t<T>> lse_operand(buffer<space_type> const& memory,
                                                      plan const& moves, bool kept) {
        return {memory.data(), lse_region<T>(kept ? moves.chunk().first_query_row : 0), 1};
    }

    template <class T, class Regions>
    static void set_queries_keys_values(attend_operands<T>& operands, std::byte* base,
                                        Regions const& places, shape const& layer) {
        operands.q = {base, places.q, layer.head_dim};
        operands.k = {base, places.k, layer.head_dim};
        operands.v = {base, places.v, layer.value_dim};
    }
    template <class T>
    static void set_queries_keys_values(attend_operands<T>& operands,
                                        local_operands<T, Layout> const& local) {
        operands.q = in_place(local.q);
        operands.k = in_place(local.k);
        operands.v = in_place(local.v);
    }

    /// Without an exchange dk and dv are accumulated where they are wanted, or beside, when they
    /// must be rounded.
    template <class T>
    void set_backward_in_place(attend_operands<T>& operands, local_operands<T, Layout>& local,
                               plan const& moves) {
        set_queries_keys_values(operands, local);
        if (moves.layer().keep == keep::nothing && local.o.data == nullptr)
            local.o = packed_in<T, Layout>(o_, local.dout.extents, queue());
        operands.o = in_place(local.o);
        operands.dout = in_place(local.dout);
        operands.dq = in_place(local.dq);
        auto const accumulator = [&](auto const& view, buffer<space_type>& beside) {
            if constexpr (std::is_same_v<T, accumulator_t<T>>)
                return view;
            else
                return packed_in<accumulator_t<T>, Layout>(beside, view.extents, queue());
        };
        auto const dk = accumulator(local.dk, dk_), dv = accumulator(local.dv, dv_);
        zero_view<space_type>(queue(), dk);
        zero_view<space_type>(queue(), dv);
        operands.dk = in_place(dk);
        operands.dv = in_place(dv);
    }

    template <class T>
    void round_in_place(local_operands<T, Layout> const& local) {
        using wide = accumulator_t<T>;
        if constexpr (!std::is_same_v<T, wide>) {
            round_view<space_type>(queue(), local.dk,
                                   packed_in<wide, Layout>(dk_, local.dk.extents, queue()));
            round_view<space_type>(queue(), local.dv,
                                   packed_in<wide, Layout>(dv_, local.dv.extents, queue()));
        }
    }

    /// The first `rows` rows of a region in this rank's own part.
    template <class U>
    void zero_rows(std::byte* base, region const& place, std::int64_t rows, std::int64_t dim) {
        zero_view<space_type>(
            queue(), head_view<U>(reinterpret_cast<U*>(base + place.offset), {1, 1, rows, dim},
                                  {0, 0, place.pitch / static_cast<std::int64_t>(sizeof(U)), 1}));
    }

    template <class T>
    void keep_copies(context_type& saved, local_operands<T, Layout> const& local) {
        auto const keep_copy = [&](buffer<space_type>& memory,
                                   tensor_view<T const, Layout> const& from) {
            copy_view<space_type>(queue(), packed_in<T, Layout>(memory, from.extents, queue()),
                                  from);
        };
        keep_copy(saved.q, local.q);
        keep_copy(saved.k, local.k);
        keep_copy(saved.v, local.v);
        keep_copy(saved.o, local.o);
    }

    Comm ranks_;
    [[no_unique_address]] Attention attention_;
    chunk_schedule<Comm, Observer> moving_;
    buffer<space_type> workspace_, lse_, o_, dk_, dv_;
};

}  // namespace ulysses::inline ULYSSES_ABI
