#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/block.hpp>
#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/observer.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/view_copy.hpp>
#include <ulysses/exchange/block_rows.hpp>
#include <ulysses/exchange/copy_list.hpp>
#include <ulysses/exchange/messages.hpp>
#include <ulysses/exchange/regions.hpp>
#include <ulysses/exchange/sum_list.hpp>
#include <ulysses/plan/plan.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

/// Executes a plan: `begin` once a call, then for each of its two fences
///
/// 1. `put` lists the copies of an operand into the peers' regions, `get` those of the peers' regions
///    into an operand, `sum` those of partial gradients that are to be added up, `zero` the rows of
///    which there is none;
/// 2. `send` does what is to be done before the fence, `publish` is the fence and moves the messages,
///    `receive` does what is to be done after it, and `add` the sums.
///
/// What is put is written before the fence, what is got or summed is read after it. Between ranks that
/// reach each other a copy goes between the operand and the peer's memory in its final layout: nothing
/// is packed. Between others it goes to or from a place in a message, one message a peer for all
/// operands together; the owner of a region then packs or unpacks its own rows.
///
///     forward    put q, k, v | send, publish, receive | attend: inbox -> o outbox
///                get o       | send, publish, receive
///     backward   put dO      | send, publish, receive, add_slots | backward: inbox -> dq, dk, dv outbox
///                get, sum    | send, publish, receive, add
///
/// A pass in several chunks of heads is that for each chunk, or overlaps them: see
/// pipeline/chunk_schedule.hpp.
///
/// Peers write an inbox only between passing a second fence and arriving at the next first one;
/// owners write outboxes only between first and second. Inboxes and outboxes never share memory. So
/// calls of any pipelines over one group follow each other safely with two fences each.
namespace ulysses::inline ULYSSES_ABI {

template <reaches_memory Comm, observer Observer>
class exchange {
   public:
    using space_type = typename Comm::space_type;
    using queue_type = typename space_type::queue;
    using window = typename Comm::window_type;

    explicit exchange(Comm ranks)
        : ranks_(std::move(ranks)),
          out_(ranks_.size()),
          in_(ranks_.size()),
          parts_(static_cast<std::size_t>(ranks_.size())) {}

    /// Begins a call: forgets what a failed one may have left listed.
    void begin(Observer& seen) {
        seen_ = &seen;
        ticket_.reset();
        clear();
    }

    /// Lists the copies of a local operand [B, s, H, D] into the peers' regions.
    template <class T>
    void put(plan_moves const& moves, window const& memory, region const& place,
             token_view<T> const& local) {
        locate(memory, place);
        for (auto const& block : moves.blocks) {
            auto copy = detail::copy_of(block, local.batch(), place);
            detail::set_from(copy, detail::local_rows(block, local));
            if (auto* const begin = region_of(block.peer)) {
                detail::set_to(copy, detail::region_rows(block, begin, place));
                copy.to_padding = place.pitch - place.row_bytes;
                copy.peer = block.peer;
                outward_.list(copy);
            } else {
                copy.to_strides = detail::message_strides(block, place);
                outward_.pack(copy, message_rows(out_, block, place));
            }
            saw(ranks_.rank(), block.peer, copy);
        }
        auto* const own = region_of(ranks_.rank());
        for (auto const& block : moves.arrivals) {
            if (region_of(block.peer) != nullptr) continue;
            auto copy = detail::copy_of(block, local.batch(), place);
            detail::set_to(copy, detail::region_rows(block, own, place));
            copy.to_padding = place.pitch - place.row_bytes;
            copy.from_strides = detail::message_strides(block, place);
            inward_.unpack(copy, message_rows(in_, block, place));
        }
        end_operand(out_, moves.blocks, local.batch(), place);
        end_operand(in_, moves.arrivals, local.batch(), place);
    }

    /// Lists the copies of a gradient of the output [B, s, H, Dv]; the parts that all ranks bring of
    /// replicated tokens go to slots, for `add_slots`.
    template <class T>
    void put(plan_output_gradient const& moves, window const& memory, region const& place,
             region const& slots, token_view<T> const& local) {
        put(moves.sharded, memory, place, local);
        put(moves.partials, memory, slots, local);
    }

    /// Adds up, in rank order, what `put` has brought into this rank's slots. Owner's memory alone, so
    /// it is done at once.
    template <class T>
    void add_slots(plan_output_gradient const& moves, window const& memory, region const& place,
                   region const& slots, std::int64_t batch, std::int64_t dim, queue_type queue) {
        auto* const own = ranks_.address(memory, ranks_.rank());
        slot_sums_.clear();
        for (auto const& block : moves.sums) {
            slot_sums_.begin(detail::sum_of(detail::region_rows(block, own + place.offset, place),
                                            {batch, block.tokens, block.heads}, dim));
            for (std::int64_t rank = 0; rank < ranks_.size(); ++rank) {
                auto const row = rank * moves.slot_rows + block.message_row;
                slot_sums_.from(own + slots.offset + row * slots.pitch,
                                detail::pitched_strides(block.message_strides, slots.pitch));
            }
        }
        slot_sums_.template add<T, T>(queue);
    }

    /// Lists the copies of the peers' regions into a local operand [B, s, H, D].
    template <class T>
    void get(plan_moves const& moves, window const& memory, region const& place,
             token_view<T> const& local) {
        locate(memory, place);
        answer(moves, local.batch(), place);
        for (auto const& block : moves.blocks) fetch(block, place, local);
        end_operand(in_, moves.blocks, local.batch(), place);
    }

    /// Lists the return of the gradients of keys or values into a local operand [B, s, H, D]. Their
    /// elements are of the accumulator type.
    template <class T>
    void sum(plan_returns const& returns, window const& memory, region const& place,
             token_view<T> const& local) {
        locate(memory, place);
        answer(returns.moves, local.batch(), place);
        for (auto const& block : returns.single)
            if constexpr (std::is_same_v<T, accumulator_t<T>>) {
                fetch(block, place, local);
            } else {
                plan_source const from{block.peer, block.row, block.message_row,
                                       block.message_strides};
                list_sum(
                    {block.token, block.tokens, block.head, block.heads, 0, 1, block.row_strides},
                    {&from, 1}, place, local);
            }
        for (auto const& each : returns.sums)
            list_sum(each, returns.sources.subspan(each.first_source, each.sources), place, local);
        end_operand(in_, returns.moves.blocks, local.batch(), place);
    }

    /// Lists rows of a local operand that are set to zero.
    template <class T>
    void zero(std::span<plan_sum const> places, token_view<T> const& local) {
        for (auto const& each : places) list_sum(each, {}, {}, local);
    }

    /// Writes what was listed for the peers. *Throws* `out_of_memory`.
    void send(queue_type queue) {
        reserve(queue);
        write(queue);
    }
    /// The first half of `send`: all of it that may fail. *Throws* `out_of_memory`.
    void reserve(queue_type queue) {
        out_.reserve(queue);
        in_.reserve(queue);
        outgoing_.reserve(parts_.size());
        incoming_.reserve(parts_.size());
        outward_.locate(out_);
        inward_.locate(in_);
        sums_.locate(in_);
    }
    /// The other half.
    void write(queue_type queue) { outward_.execute(queue, ranks_.size()); }

    /// Makes what was written visible and every rank's status known; then moves the messages.
    /// *Blocking*. *Throws* the verdict, or what the transport reports.
    void publish(fence_status const& status) {
        fence(status);
        start();
        wait();
    }
    /// The three parts of `publish`: the rendezvous, the begin of the messages, and their end. Between
    /// the last two only messages of other exchanges may be begun.
    void fence(fence_status const& status) {
        ranks_.fence(status);
        seen_->fence();
    }
    void start() {
        if constexpr (sends_messages<Comm>) {
            if (out_.empty() && in_.empty()) return;
            outgoing_.clear();
            incoming_.clear();
            out_.for_each([&](int peer, auto bytes) { outgoing_.push_back({peer, bytes}); });
            in_.for_each([&](int peer, auto bytes) { incoming_.push_back({peer, bytes}); });
            ticket_ = ranks_.start(outgoing_, incoming_);
        }
    }
    void wait() {
        if constexpr (sends_messages<Comm>)
            if (ticket_) {
                auto started = *std::exchange(ticket_, std::nullopt);
                ranks_.wait(std::move(started));
            }
    }

    /// Reads what was listed from the peers.
    void receive(queue_type queue) {
        inward_.execute(queue, ranks_.size());
        out_.clear();
        in_.clear();
    }

    /// Executes all listed sums.
    template <class To, class From>
    void add(queue_type queue) {
        sums_.template add<To, From>(queue);
    }

    /// Bytes of memory for messages held on this rank.
    std::size_t message_bytes() const { return out_.held_bytes() + in_.held_bytes(); }

    /// Whether messages go to `peer`, as the last call saw it; before the first, whether they may.
    bool sends_to(int peer) const {
        return sends_messages<Comm> && peer != ranks_.rank() &&
               parts_[static_cast<std::size_t>(peer)] == nullptr;
    }

   private:
    /// What `start` returns, where there are messages.
    static constexpr auto ticket_of() {
        if constexpr (sends_messages<Comm>)
            return std::type_identity<typename Comm::ticket_type>{};
        else
            return std::type_identity<std::nullptr_t>{};
    }
    using ticket_type = typename decltype(ticket_of())::type;
    using messages = message_buffer<space_type>;

    /// Asks where every rank's part of an operand's region begins.
    void locate(window const& memory, region const& place) {
        for (int peer = 0; peer < ranks_.size(); ++peer) {
            auto* const part = ranks_.address(memory, peer);
            parts_[static_cast<std::size_t>(peer)] =
                part == nullptr ? nullptr : part + place.offset;
        }
    }
    /// Where `peer`'s part of the located region begins; null when messages go there.
    std::byte* region_of(int peer) const {
        auto* const part = parts_[static_cast<std::size_t>(peer)];
        if constexpr (!sends_messages<Comm>)
            if (part == nullptr)
                raise(errc::unsupported, {}, "exchange",
                      "ranks must reach each other's memory or send messages", "rank ",
                      ranks_.rank(), " does not reach rank ", peer);
        return part;
    }

    /// Forgets what is listed.
    void clear() {
        outward_.clear();
        inward_.clear();
        out_.clear();
        in_.clear();
        sums_.clear();
    }

    template <class Block>
    static message_place message_rows(messages const& all, Block const& block,
                                      region const& place) {
        auto at = all.next(block.peer);
        at.offset += static_cast<std::size_t>(block.message_row * place.row_bytes);
        return at;
    }

    /// Packs this rank's region for the peers that cannot read it.
    void answer(plan_moves const& moves, std::int64_t batch, region const& place) {
        auto* const own = region_of(ranks_.rank());
        for (auto const& block : moves.arrivals) {
            if (region_of(block.peer) != nullptr) continue;
            auto copy = detail::copy_of(block, batch, place);
            detail::set_from(copy, detail::region_rows(block, own, place));
            copy.to_strides = detail::message_strides(block, place);
            outward_.pack(copy, message_rows(out_, block, place));
        }
        end_operand(out_, moves.arrivals, batch, place);
    }

    template <class T>
    void fetch(plan_block const& block, region const& place, token_view<T> const& local) {
        auto copy = detail::copy_of(block, local.batch(), place);
        detail::set_to(copy, detail::local_rows(block, local));
        if (auto* const begin = region_of(block.peer)) {
            detail::set_from(copy, detail::region_rows(block, begin, place));
            copy.peer = block.peer;
            inward_.list(copy);
        } else {
            copy.from_strides = detail::message_strides(block, place);
            inward_.unpack(copy, message_rows(in_, block, place));
        }
        saw(block.peer, ranks_.rank(), copy);
    }

    template <class T>
    void list_sum(plan_sum const& each, std::span<plan_source const> from, region const& place,
                  token_view<T> const& local) {
        auto* const to = reinterpret_cast<std::byte*>(local.row(0, each.token, each.head));
        sums_.begin(detail::sum_of({to, byte_strides(local)},
                                   {local.batch(), each.tokens, each.heads}, local.dim()));
        auto const rows = local.batch() * each.tokens * each.heads;
        for (auto const& part : from) {
            if (auto const* const begin = region_of(part.peer))
                sums_.from(begin + part.row * place.pitch,
                           detail::pitched_strides(each.row_strides, place.pitch));
            else
                sums_.from(message_rows(in_, part, place), detail::message_strides(part, place));
            seen_->moved(part.peer, ranks_.rank(),
                         static_cast<std::size_t>(rows * place.row_bytes));
        }
    }

    /// Ends an operand's part of the messages.
    void end_operand(messages& all, std::span<plan_block const> blocks, std::int64_t batch,
                     region const& place) const {
        for (auto const& block : blocks)
            if (region_of(block.peer) == nullptr)
                all.extend(block.peer,
                           static_cast<std::size_t>(block.samples_of(batch) * block.tokens *
                                                    block.heads * place.row_bytes));
    }

    void saw(int from, int to, block_copy const& copy) {
        seen_->moved(from, to, static_cast<std::size_t>(copy.bytes()));
    }

    Comm ranks_;
    Observer* seen_ = nullptr;
    copy_list<space_type> outward_, inward_;  ///< to execute before and after `publish`
    messages out_, in_;
    std::vector<outgoing> outgoing_;
    std::vector<incoming> incoming_;
    sum_list<space_type> sums_, slot_sums_;
    std::optional<ticket_type> ticket_;  ///< of messages on their way
    std::vector<std::byte*> parts_;      ///< of the operand that is being listed, by rank
};

}  // namespace ulysses::inline ULYSSES_ABI
