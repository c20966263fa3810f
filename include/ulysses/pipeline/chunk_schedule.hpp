#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/observer.hpp>
#include <ulysses/exchange/exchange.hpp>
#include <ulysses/exchange/regions.hpp>
#include <ulysses/pipeline/running_call.hpp>
#include <ulysses/plan/blocks.hpp>

#include <cstddef>
#include <cstdint>

/// In which order the chunks of a call move and are computed, and which slots of the windows
/// (`window_slots`) they take.
///
/// One after the other, a chunk is what a call of fewer heads would be, with two fences of its own.
/// Overlapped, there is a fence before each chunk and one after the last, and windows have two
/// slots, which chunks take in turn. Between fence c and fence c + 1 of chunks 0, 1, ... a rank
///
///     writes peers' inboxes      of chunk c + 1, slot (c + 1) % 2
///     reads its own inbox and
///     writes its own outbox      of chunk c,     slot c % 2
///     reads peers' outboxes      of chunk c - 1, slot (c - 1) % 2
///
/// so nothing that one rank writes is read by another before a fence, nor was read by another after
/// the last. Seen from other calls, the first fence is a call's first, and the last its second:
/// inboxes are also written before the first, outboxes also read after the last, and neither is
/// otherwise.
namespace ulysses::inline ULYSSES_ABI {

template <reaches_memory Comm, observer Observer>
class chunk_schedule {
   public:
    using moving_type = exchange<Comm, Observer>;

    explicit chunk_schedule(Comm ranks) : ranks_(ranks), forth_(ranks), back_(ranks) {}

    /// Begins a call: forgets what a failed one may have left.
    void begin(Observer& seen) {
        seen_ = &seen;
        forth_.begin(seen);
        back_.begin(seen);
    }

    /// Calls for each chunk c, in this order, `put(exchange, c)`, which lists what goes to the
    /// ranks of its heads; `compute(c)`; `get(exchange, c)`, which lists what comes back;
    /// `finish(exchange)`, when it is there. *Blocking*. *Throws* the verdict of a fence.
    template <class Put, class Compute, class Get, class Finish>
    void run(running_call& call, std::size_t chunks, bool overlap, Put const& put,
             Compute const& compute, Get const& get, Finish const& finish) {
        auto const is_forward = call.kind == pass_kind::attend || call.kind == pass_kind::forward;
        auto const first = is_forward ? step_id::to_heads : step_id::to_tokens;
        auto const last = is_forward ? step_id::to_tokens : step_id::to_heads;
        if (overlap)
            overlapped(call, chunks, first, last, put, compute, get, finish);
        else
            in_turn(call, chunks, first, last, put, compute, get, finish);
    }

    /// See `exchange`; of a chunk that has arrived.
    template <class T>
    void add_slots(plan_output_gradient const& moves, typename Comm::window_type const& memory,
                   region const& place, region const& slots, std::int64_t batch, std::int64_t dim) {
        forth_.template add_slots<T>(moves, memory, place, slots, batch, dim, queue());
    }

    /// Bytes of memory for messages held on this rank.
    std::size_t message_bytes() const { return forth_.message_bytes() + back_.message_bytes(); }
    /// See `exchange`.
    bool sends_to(int peer) const { return forth_.sends_to(peer); }

   private:
    auto queue() const { return queue_of(ranks_); }

    template <class Put, class Compute, class Get, class Finish>
    void in_turn(running_call& call, std::size_t chunks, step_id first, step_id last,
                 Put const& put, Compute const& compute, Get const& get, Finish const& finish) {
        auto& moving = forth_;
        std::int64_t fences = 0;
        for (std::size_t c = 0; c < chunks; ++c) {
            call.guard([&] {
                seen_->begin(first);
                put(moving, c);
                moving.send(queue());
            });
            call.set(term::fence, ++fences);
            moving.publish(call.status);
            call.guard([&] {
                moving.receive(queue());
                seen_->end(first);
                compute(c);
                seen_->begin(last);
                get(moving, c);
                moving.send(queue());
            });
            call.set(term::fence, ++fences);
            moving.publish(call.status);
            moving.receive(queue());
            finish(moving);
            seen_->end(last);
        }
    }

    /// What may fail on one rank alone comes before a fence and is told at it: messages are only
    /// begun when no rank has failed, and are waited for even if one has since.
    template <class Put, class Compute, class Get, class Finish>
    void overlapped(running_call& call, std::size_t chunks, step_id first, step_id last,
                    Put const& put, Compute const& compute, Get const& get, Finish const& finish) {
        std::int64_t fences = 0;
        call.guard([&] {
            during(first, [&] {
                // What returns has nothing to do yet.
                put(back_, 0);
                back_.send(queue());
                put(forth_, 1);
                forth_.reserve(queue());
            });
        });
        call.set(term::fence, ++fences);
        back_.publish(call.status);
        call.guard([&] { during(first, [&] { back_.receive(queue()); }); });
        for (std::size_t c = 0; c < chunks; ++c) {
            auto const returning = c > 0, arriving = c + 1 < chunks;
            if (returning) back_.start();
            if (arriving) {
                call.guard([&] { during(first, [&] { forth_.write(queue()); }); });
                forth_.start();
            }
            call.guard([&] { compute(c); });
            back_.wait();
            forth_.wait();
            call.guard([&] {
                if (returning) complete(last, finish);
                if (arriving) during(first, [&] { forth_.receive(queue()); });
                during(last, [&] {
                    get(back_, c);
                    back_.send(queue());
                });
                if (c + 2 < chunks)
                    during(first, [&] {
                        put(forth_, c + 2);
                        forth_.reserve(queue());
                    });
            });
            call.set(term::fence, ++fences);
            back_.fence(call.status);
        }
        back_.start();
        back_.wait();
        complete(last, finish);
    }

    template <class Finish>
    void complete(step_id last, Finish const& finish) {
        during(last, [&] {
            back_.receive(queue());
            finish(back_);
        });
    }

    /// A part of a step that is told by itself: no two steps are open at a time.
    template <class Body>
    void during(step_id step, Body const& body) {
        seen_->begin(step);
        body();
        seen_->end(step);
    }

    Comm ranks_;
    Observer* seen_ = nullptr;
    moving_type forth_;  ///< to the ranks of the heads; in turn, both ways
    moving_type back_;   ///< to the ranks of the tokens
};

}  // namespace ulysses::inline ULYSSES_ABI
