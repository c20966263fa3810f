#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/block.hpp>
#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/observer.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/view_copy.hpp>
#include <ulysses/exchange/messages.hpp>
#include <ulysses/exchange/regions.hpp>
#include <ulysses/plan/plan.hpp>

#include <array>
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
            auto copy = sized(block, local.batch(), place);
            set_from(copy, local_rows(block, local));
            if (auto* const begin = region_of(block.peer)) {
                set_to(copy, region_rows(block, begin, place));
                copy.to_padding = place.pitch - place.row_bytes;
                copy.peer = block.peer;
                list(outward_, copy);
            } else {
                copy.to_strides = row_strides(block.message_strides, place.row_bytes);
                packs_.push_back({copy, message_rows(out_, block, place)});
            }
            saw(ranks_.rank(), block.peer, copy);
        }
        auto* const own = region_of(ranks_.rank());
        for (auto const& block : moves.arrivals) {
            if (region_of(block.peer) != nullptr) continue;
            auto copy = sized(block, local.batch(), place);
            set_to(copy, region_rows(block, own, place));
            copy.to_padding = place.pitch - place.row_bytes;
            copy.from_strides = row_strides(block.message_strides, place.row_bytes);
            unpacks_.push_back({copy, message_rows(in_, block, place)});
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
        slot_sums_.clear();
        slot_sources_.clear();
        auto* const own = ranks_.address(memory, ranks_.rank());
        auto const ranks = static_cast<std::size_t>(ranks_.size());
        for (auto const& block : moves.sums) {
            block_sum sum;
            sum.to = own + place.offset + block.row * place.pitch;
            sum.extents = {batch, block.tokens, block.heads};
            sum.to_strides = row_strides(block.row_strides, place.pitch);
            sum.elements = dim;
            slot_sums_.push_back(sum);
            for (std::int64_t rank = 0; rank < ranks_.size(); ++rank)
                slot_sources_.push_back(
                    {own + slots.offset +
                         (rank * moves.slot_rows + block.message_row) * slots.pitch,
                     row_strides(block.message_strides, slots.pitch)});
        }
        for (std::size_t i = 0; i < slot_sums_.size(); ++i)
            slot_sums_[i].from =
                std::span<sum_source const>(slot_sources_).subspan(i * ranks, ranks);
        space_type::template add<T, T>(queue, slot_sums_);
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
        for (auto& each : packs_) {
            each.copy.to = out_.at(each.place);
            list(outward_, each.copy);
        }
        for (auto& each : unpacks_) {
            each.copy.from = in_.at(each.place);
            list(inward_, each.copy);
        }
        for (auto const& each : late_sources_) sources_[each.index].rows = in_.at(each.place);
    }
    /// The other half.
    void write(queue_type queue) { execute(outward_, queue); }

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
        execute(inward_, queue);
        packs_.clear();
        unpacks_.clear();
        out_.clear();
        in_.clear();
    }

    /// Executes all listed sums.
    template <class To, class From>
    void add(queue_type queue) {
        // Addresses are only stable once all are listed.
        std::size_t next = 0;
        for (std::size_t i = 0; i < sums_.size(); next += counts_[i++])
            sums_[i].from = std::span<sum_source const>(sources_).subspan(next, counts_[i]);
        space_type::template add<To, From>(queue, sums_);
        forget_sums();
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
    using strides3 = std::array<std::int64_t, 3>;
    using messages = message_buffer<space_type>;

    /// One side of a copy.
    struct rows {
        std::byte* first;
        strides3 strides;
    };
    /// A copy one side of which lies in a message.
    struct message_copy {
        block_copy copy;
        message_place place;
    };
    /// A source of a sum that comes as a message.
    struct late_source {
        std::size_t index;
        message_place place;
    };
    struct copies {
        std::vector<block_copy> blocks;
        std::size_t bytes = 0;

        void clear() {
            blocks.clear();
            bytes = 0;
        }
    };

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
        packs_.clear();
        unpacks_.clear();
        out_.clear();
        in_.clear();
        forget_sums();
    }

    static block_copy sized(plan_block const& block, std::int64_t batch, region const& place) {
        block_copy copy;
        copy.extents = {block.samples_of(batch), block.tokens, block.heads};
        copy.row_bytes = place.row_bytes;
        return copy;
    }
    static void set_to(block_copy& copy, rows const& side) {
        copy.to = side.first;
        copy.to_strides = side.strides;
    }
    static void set_from(block_copy& copy, rows const& side) {
        copy.from = side.first;
        copy.from_strides = side.strides;
    }

    template <class T>
    static rows local_rows(plan_block const& block, token_view<T> const& local) {
        auto* const first =
            const_cast<std::remove_const_t<T>*>(local.row(block.sample, block.token, block.head));
        return {reinterpret_cast<std::byte*>(first), byte_strides(local)};
    }
    static rows region_rows(plan_block const& block, std::byte* begin, region const& place) {
        return {begin + block.row * place.pitch, row_strides(block.row_strides, place.pitch)};
    }
    template <class Block>
    static message_place message_rows(messages const& all, Block const& block,
                                      region const& place) {
        auto at = all.next(block.peer);
        at.offset += static_cast<std::size_t>(block.message_row * place.row_bytes);
        return at;
    }

    static strides3 row_strides(strides3 const& in_rows, std::int64_t pitch) {
        return {in_rows[0] * pitch, in_rows[1] * pitch, in_rows[2] * pitch};
    }

    /// Packs this rank's region for the peers that cannot read it.
    void answer(plan_moves const& moves, std::int64_t batch, region const& place) {
        auto* const own = region_of(ranks_.rank());
        for (auto const& block : moves.arrivals) {
            if (region_of(block.peer) != nullptr) continue;
            auto copy = sized(block, batch, place);
            set_from(copy, region_rows(block, own, place));
            copy.to_strides = row_strides(block.message_strides, place.row_bytes);
            packs_.push_back({copy, message_rows(out_, block, place)});
        }
        end_operand(out_, moves.arrivals, batch, place);
    }

    template <class T>
    void fetch(plan_block const& block, region const& place, token_view<T> const& local) {
        auto copy = sized(block, local.batch(), place);
        set_to(copy, local_rows(block, local));
        if (auto* const begin = region_of(block.peer)) {
            set_from(copy, region_rows(block, begin, place));
            copy.peer = block.peer;
            list(inward_, copy);
        } else {
            copy.from_strides = row_strides(block.message_strides, place.row_bytes);
            unpacks_.push_back({copy, message_rows(in_, block, place)});
        }
        saw(block.peer, ranks_.rank(), copy);
    }

    template <class T>
    void list_sum(plan_sum const& each, std::span<plan_source const> from, region const& place,
                  token_view<T> const& local) {
        block_sum sum;
        sum.to = reinterpret_cast<std::byte*>(local.row(0, each.token, each.head));
        sum.extents = {local.batch(), each.tokens, each.heads};
        sum.to_strides = byte_strides(local);
        sum.elements = local.dim();
        sums_.push_back(sum);
        counts_.push_back(from.size());
        for (auto const& part : from) {
            if (auto const* const begin = region_of(part.peer)) {
                sources_.push_back(
                    {begin + part.row * place.pitch, row_strides(each.row_strides, place.pitch)});
            } else {
                late_sources_.push_back({sources_.size(), message_rows(in_, part, place)});
                sources_.push_back({nullptr, row_strides(part.message_strides, place.row_bytes)});
            }
            seen_->moved(part.peer, ranks_.rank(),
                         static_cast<std::size_t>(sum.extents[0] * each.tokens * each.heads *
                                                  place.row_bytes));
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

    static void list(copies& all, block_copy const& copy) {
        all.blocks.push_back(merged(copy));
        all.bytes += static_cast<std::size_t>(copy.bytes());
    }
    void execute(copies& all, queue_type queue) {
        space_type::copy(queue, all.blocks, all.bytes * static_cast<std::size_t>(ranks_.size()));
        all.clear();
    }
    void saw(int from, int to, block_copy const& copy) {
        seen_->moved(from, to, static_cast<std::size_t>(copy.bytes()));
    }

    void forget_sums() {
        sums_.clear();
        counts_.clear();
        sources_.clear();
        late_sources_.clear();
    }

    Comm ranks_;
    Observer* seen_ = nullptr;
    copies outward_, inward_;  ///< to execute before and after `publish`
    std::vector<message_copy> packs_, unpacks_;
    messages out_, in_;
    std::vector<outgoing> outgoing_;
    std::vector<incoming> incoming_;
    std::vector<block_sum> sums_;
    std::vector<std::size_t> counts_;
    std::vector<sum_source> sources_;
    std::vector<late_source> late_sources_;
    std::vector<block_sum> slot_sums_;
    std::vector<sum_source> slot_sources_;
    std::optional<ticket_type> ticket_;  ///< of messages on their way
    std::vector<std::byte*> parts_;      ///< of the operand that is being listed, by rank
};

}  // namespace ulysses::inline ULYSSES_ABI
