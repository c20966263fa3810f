#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/exchange/regions.hpp>
#include <ulysses/pipeline/context.hpp>
#include <ulysses/pipeline/running_call.hpp>
#include <ulysses/plan/plan.hpp>

#include <algorithm>
#include <cstddef>
#include <span>

/// The windows that the chunks of a call move through: whose they are, and where a chunk lies.
namespace ulysses::inline ULYSSES_ABI {

/// How the chunks of a call share an arena: chunk c takes slot c % count.
struct window_slots {
    std::size_t count = 1;
    std::size_t inbox_bytes = 0, outbox_bytes = 0;  ///< of one slot: of the largest chunk

    /// *Throws* `invalid_shape` for windows that no memory holds.
    template <class Regions, class T>
    static window_slots of(std::span<plan const> chunks, std::size_t count) {
        window_slots slots{count};
        for (auto const& moves : chunks) {
            auto const places = Regions::template of<T>(moves);
            slots.inbox_bytes = std::max(slots.inbox_bytes, places.inbox_bytes);
            slots.outbox_bytes = std::max(slots.outbox_bytes, places.outbox_bytes);
        }
        if (std::max(slots.inbox_bytes, slots.outbox_bytes) >= (std::size_t{1} << 62) / count)
            raise(errc::invalid_shape, {}, "exchange", "an arena must stay below 2^62 bytes", count,
                  " chunks of ", std::max(slots.inbox_bytes, slots.outbox_bytes), " bytes");
        return slots;
    }

    arena_begins of_chunk(std::size_t c) const {
        return {c % count * inbox_bytes, c % count * outbox_bytes};
    }
    std::size_t inbox() const { return count * inbox_bytes; }
    std::size_t outbox() const { return count * outbox_bytes; }
};

/// Slots of the windows that the calls of a group share.
inline std::size_t shared_slots(plan const& moves) { return moves.layer().overlap ? 2 : 1; }

/// The windows of a call: the group's, or its context's.
template <reaches_memory Comm>
struct call_windows {
    typename Comm::window_type inbox{}, outbox{};

    /// Opens the group's windows when `saved` is null, else the context's. They grow collectively,
    /// so ranks first make sure that all are in the same call and none has failed; also when that
    /// is `needed` before a rank writes to another. None in a call that has failed.
    static call_windows open(Comm const& ranks, running_call& call, context<Comm>* saved,
                             window_slots const& slots, bool needed = false) {
        auto const inbox_bytes = slots.inbox(), outbox_bytes = slots.outbox();
        auto const grows = saved != nullptr
                               ? saved->grows(inbox_bytes, outbox_bytes)
                               : ranks.shared_window_bytes(arena::inbox) < inbox_bytes ||
                                     ranks.shared_window_bytes(arena::outbox) < outbox_bytes;
        auto& status = call.status;
        if (grows || needed) ranks.fence(status);
        if (status.code != errc::none) return {};
        if (saved == nullptr)
            return {ranks.shared_window(arena::inbox, inbox_bytes),
                    ranks.shared_window(arena::outbox, outbox_bytes)};
        call_windows own{saved->inbox(ranks, inbox_bytes, status.call),
                         saved->outbox(ranks, outbox_bytes, status.call)};
        call.set(term::inbox, saved->inbox_number());
        call.set(term::outbox, saved->outbox_number());
        return own;
    }
};

}  // namespace ulysses::inline ULYSSES_ABI
