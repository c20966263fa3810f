#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/operand.hpp>
#include <ulysses/core/view_copy.hpp>
#include <ulysses/pipeline/cache.hpp>
#include <ulysses/pipeline/context.hpp>
#include <ulysses/pipeline/operands.hpp>
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
/// keep policies. Two fences a pass when ranks exchange; none when every rank already holds its
/// heads.
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
    void forward(plan const& moves, pass_kind kind, context_type* saved, cache_type* cache,
                 Observer& seen, where at, Prepare const& prepare) {
        collectively([&] { run_forward<T>(moves, kind, saved, cache, seen, at, prepare); });
    }

    /// `prepare(operands)` as in `forward`; q, k, v, o are needed unless a context kept them
    /// exchanged. With keep::nothing, o is computed again and, when it has data, written.
    template <class T, class Prepare>
    void backward(plan const& moves, pass_kind kind, context_type& saved, Observer& seen, where at,
                  Prepare const& prepare) {
        collectively([&] { run_backward<T>(moves, kind, saved, seen, at, prepare); });
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
    void run_forward(plan const& moves, pass_kind kind, context_type* saved, cache_type* cache,
                     Observer& seen, where at, Prepare const& prepare) {
        auto const whole = kind == pass_kind::forward;
        auto const policy = moves.layer().keep;
        forward_regions places;
        auto const own_window = saved != nullptr && policy == keep::exchanged;
        moving_.begin(seen);
        auto status = begin(moves, kind, dtype_of<T>);
        if (cache != nullptr) set(status, term::cache, cache->number());
        // Before windows grow: what a filled context holds must survive a refused call.
        guarded(status, name(kind), at, [&] {
            places = forward_regions::of<T>(moves);
            if (saved != nullptr) saved->expect_empty(ranks_, at);
        });
        auto const memory = open(moves, status, own_window ? saved : nullptr, places.inbox_bytes,
                                 places.outbox_bytes, cache != nullptr && cache->used_alone());
        if (cache != nullptr && exchanging(moves)) cache->settle();
        auto const &inbox = memory.inbox, &outbox = memory.outbox;
        local_operands<T, Layout> local;
        attend_operands<T> operands;
        guarded_on(status, name(kind), at, [&] {
            prepare(local);
            workspace_.reserve(attend_workspace_bytes<T>(attention_, moves), queue());
            auto& lse = saved != nullptr && policy != keep::nothing ? saved->lse : lse_;
            operands.lse = lse_operand<T>(lse, moves);
            if (!exchanging(moves)) return;
            seen.begin(step_id::to_heads);
            if constexpr (std::is_same_v<Layout, sequence_local>) {
                if (cache != nullptr)
                    to_heads(moving_, moves, inbox, places, cache->memory(), cache->places(),
                             local.q, local.k, local.v);
                else
                    to_heads(moving_, moves, inbox, places, local.q, local.k, local.v);
            }
            moving_.send(queue());
        });
        publish(moves, status, 1);
        guarded(status, name(kind), at, [&] {
            if (exchanging(moves)) {
                moving_.receive(queue());
                seen.end(step_id::to_heads);
                auto* in = ranks_.address(inbox, ranks_.rank());
                set_queries_keys_values(operands, in, places, moves.layer());
                operands.o = {ranks_.address(outbox, ranks_.rank()), places.o,
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
            ulysses::attend(attention_, moves, operands, workspace(), queue());
            seen.end(step_id::attend);
            // What is kept must not depend on the caller's tensors.
            if (!exchanging(moves) && own_window && !whole) keep_copies<T>(*saved, local);
            if constexpr (std::is_same_v<Layout, sequence_local>)
                if (exchanging(moves)) {
                    seen.begin(step_id::to_tokens);
                    to_tokens(moving_, moves, outbox, places.o, local.o);
                    moving_.send(queue());
                }
        });
        publish(moves, status, 2);
        if (exchanging(moves)) {
            moving_.receive(queue());
            seen.end(step_id::to_tokens);
        }
        if (saved != nullptr) saved->fill(filling<T>(moves, whole), ranks_);
        if (cache != nullptr) cache->extend(moves);
    }

    template <class T, class Prepare>
    void run_backward(plan const& moves, pass_kind kind, context_type& saved, Observer& seen,
                      where at, Prepare const& prepare) {
        auto const whole = kind == pass_kind::backward;
        auto const policy = moves.layer().keep;
        backward_regions places;
        forward_regions kept;
        moving_.begin(seen);
        auto status = begin(moves, kind, dtype_of<T>);
        guarded(status, name(kind), at, [&] {
            places = backward_regions::of<T>(moves);
            kept = forward_regions::of<T>(moves);
            saved.expect_filled(filling<T>(moves, whole), ranks_, at);
        });
        auto const memory = open(moves, status, nullptr, places.inbox_bytes, places.outbox_bytes);
        auto const &inbox = memory.inbox, &outbox = memory.outbox;
        // A context filled by this plan holds its windows: nothing grows here.
        auto const kept_windows =
            policy == keep::exchanged
                ? open(moves, status, &saved, kept.inbox_bytes, kept.outbox_bytes)
                : windows{};
        local_operands<T, Layout> local;
        attend_operands<T> operands;
        guarded_on(status, name(kind), at, [&] {
            prepare(local);
            workspace_.reserve(attend_workspace_bytes<T>(attention_, moves), queue());
            operands.lse = lse_operand<T>(policy == keep::nothing ? lse_ : saved.lse, moves);
            if (!exchanging(moves)) return;
            seen.begin(step_id::to_tokens);
            if constexpr (std::is_same_v<Layout, sequence_local>) {
                to_tokens_backward(moving_, moves, inbox, places.dout, local.dout);
                if (policy != keep::exchanged)
                    to_heads(moving_, moves, inbox, places, local.q, local.k, local.v);
                if (policy == keep::local)
                    to_tokens_backward(moving_, moves, inbox, places.o, std::as_const(local).o);
            }
            moving_.send(queue());
        });
        publish(moves, status, 1);
        guarded(status, name(kind), at, [&] {
            if (exchanging(moves)) {
                moving_.receive(queue());
                seen.end(step_id::to_tokens);
                auto const me = ranks_.rank();
                auto* in = ranks_.address(inbox, me);
                auto* out = ranks_.address(outbox, me);
                auto const& layer = moves.layer();
                if (policy == keep::exchanged) {
                    set_queries_keys_values(operands, ranks_.address(kept_windows.inbox, me), kept,
                                            layer);
                    operands.o = {ranks_.address(kept_windows.outbox, me), kept.o, layer.value_dim};
                } else {
                    set_queries_keys_values(operands, in, places, layer);
                    operands.o = {policy == keep::local ? in : out, places.o, layer.value_dim};
                }
                operands.dout = {in, places.dout, layer.value_dim};
                operands.dq = {out, places.dq, layer.head_dim};
                operands.dk = {out, places.dk, layer.head_dim};
                operands.dv = {out, places.dv, layer.value_dim};
                zero_rows<accumulator_t<T>>(out, places.dk, moves.own_key_rows(), layer.head_dim);
                zero_rows<accumulator_t<T>>(out, places.dv, moves.own_key_rows(), layer.value_dim);
            } else {
                set_backward_in_place(operands, local, moves);
            }
            seen.begin(step_id::attend);
            if (policy == keep::nothing)
                ulysses::attend(attention_, moves, operands, workspace(), queue());
            ulysses::attend_backward(attention_, moves, operands, workspace(), queue());
            seen.end(step_id::attend);
            if constexpr (std::is_same_v<Layout, sequence_local>)
                if (exchanging(moves)) {
                    seen.begin(step_id::to_heads);
                    to_heads_backward(moving_, moves, outbox, places, local.dq, local.dk, local.dv);
                    if (policy == keep::nothing && whole)
                        to_tokens(moving_, moves, outbox, places.o, local.o);
                    moving_.send(queue());
                }
        });
        publish(moves, status, 2);
        if (exchanging(moves)) {
            moving_.receive(queue());
            moving_.template add<T, accumulator_t<T>>(queue());
            seen.end(step_id::to_heads);
        } else {
            round_in_place(local);
        }
        saved.discard();
    }

    static void set(fence_status& status, term which, std::int64_t value) {
        status.terms[static_cast<std::size_t>(which)] = value;
    }

    template <class T>
    static context_filling filling(plan const& moves, bool whole) {
        return {moves.hash(), dtype_of<T>, whole, Layout::name};
    }

    fence_status begin(plan const& moves, pass_kind kind, dtype type) {
        fence_status status;
        if (exchanging(moves)) status.call = ranks_.begin_call();
        status.plan = moves.hash();
        status.terms = moves.terms();
        set(status, term::call, static_cast<std::int64_t>(kind));
        set(status, term::element_type, static_cast<std::int64_t>(type));
        return status;
    }

    struct windows {
        window inbox{}, outbox{};
    };

    /// The windows of a call: the context's, or the group's. They grow collectively, so ranks first
    /// make sure that all are in the same call and none has failed; also when that is `needed` before
    /// a rank writes to another.
    windows open(plan const& moves, fence_status& status, context_type* saved,
                 std::size_t inbox_bytes, std::size_t outbox_bytes, bool needed = false) {
        if (!exchanging(moves)) return {};
        auto const grows = saved != nullptr
                               ? saved->grows(inbox_bytes, outbox_bytes)
                               : ranks_.shared_window_bytes(arena::inbox) < inbox_bytes ||
                                     ranks_.shared_window_bytes(arena::outbox) < outbox_bytes;
        if (grows || needed) ranks_.fence(status);
        if (status.code != errc::none) return {};
        if (saved == nullptr)
            return {ranks_.shared_window(arena::inbox, inbox_bytes),
                    ranks_.shared_window(arena::outbox, outbox_bytes)};
        windows own{saved->inbox(ranks_, inbox_bytes, status.call),
                    saved->outbox(ranks_, outbox_bytes, status.call)};
        set(status, term::inbox, saved->inbox_number());
        set(status, term::outbox, saved->outbox_number());
        return own;
    }

    /// `guarded`, unless the call has failed already.
    template <class Body>
    static void guarded_on(fence_status& status, std::string_view call, where at,
                           Body const& body) {
        if (status.code == errc::none) guarded(status, call, at, body);
    }

    /// The call's first or second fence.
    void publish(plan const& moves, fence_status& status, std::int64_t which) {
        set(status, term::fence, which);
        if (exchanging(moves))
            moving_.publish(status);
        else if (status.code != errc::none)
            throw_error(status.code, status.text, ranks_.rank());
    }

    std::span<std::byte> workspace() const { return {workspace_.data(), workspace_.bytes()}; }

    template <class U>
    static head_operand<U> in_place(tensor_view<U, Layout> const& local) {
        return head_operand<U>(head_view<U>(local.data, local.extents, local.strides));
    }

    template <class T>
    head_operand<accumulator_t<T>> lse_operand(buffer<space_type>& memory, plan const& moves) {
        auto const place = context_type::template lse_region<T>();
        memory.reserve(static_cast<std::size_t>(moves.own_query_rows() * place.pitch), queue());
        return {memory.data(), place, 1};
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
    exchange<Comm, Observer> moving_;
    buffer<space_type> workspace_, lse_, o_, dk_, dv_;
};

}  // namespace ulysses::inline ULYSSES_ABI
