#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/observer.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/exchange/regions.hpp>
#include <ulysses/plan/plan.hpp>

#include <cstddef>
#include <span>
#include <vector>

/// Executes a plan between ranks that reach each other's memory.
///
/// Four verbs: `target` is where a block is written, `publish` makes everything written visible to
/// the group, `source` is where a block is read, `release` gives the memory back. Between ranks
/// that reach each other, targets and sources are the peer's memory in its final layout: nothing is
/// packed.
///
///     forward    put q, k, v | publish | attend: inbox -> o outbox           | publish | get o
///     backward   put dO      | publish | backward: inbox -> dq, dk, dv outbox | publish | get, sum
///
/// Peers write an inbox only between passing a second fence and arriving at the next first one;
/// owners write outboxes only between first and second. Inboxes and outboxes never share memory. So
/// calls of any pipelines over one group follow each other safely with two fences each.
namespace ulysses::inline ULYSSES_ABI {

template <reaches_memory Comm, observer Observer>
class exchange {
   public:
    using space_type = typename Comm::space_type;
    using window = typename Comm::window_type;

    explicit exchange(Comm ranks) : ranks_(std::move(ranks)) {}

    /// Begins a call: forgets what a failed one may have left listed.
    void begin(Observer& seen) {
        seen_ = &seen;
        release();
    }

    /// Where `peer`'s part of a region begins, for writing.
    std::byte* target(window const& memory, region const& place, int peer) const {
        return reached(memory, peer) + place.offset;
    }

    /// Makes what was written visible and every rank's status known. *Blocking*. *Throws* the
    /// verdict.
    void publish(fence_status const& status) {
        ranks_.fence(status);
        seen_->fence();
    }

    /// Where `peer`'s part of a region begins, for reading.
    std::byte const* source(window const& memory, region const& place, int peer) const {
        return reached(memory, peer) + place.offset;
    }

    /// Ends the reading of sources: the call's next `publish` does it for all ranks, at no cost
    /// here.
    void release() {
        copies_.clear();
        bytes_ = 0;
        forget();
    }

    /// Lists the copies of a local operand [B, s, H, D] into the peers' regions.
    template <class T>
    void put(std::span<plan_block const> blocks, window const& memory, region const& place,
             token_view<T> const& local) {
        for (auto const& block : blocks) {
            auto copy = sized(block, local, place);
            copy.from = reinterpret_cast<std::byte const*>(local.row(0, block.token, block.head));
            copy.from_strides = byte_strides(local);
            copy.to = target(memory, place, block.peer) + block.row * place.pitch;
            copy.to_strides = byte_strides(block.row_strides, place);
            copy.to_padding = place.pitch - place.row_bytes;
            list(copy, ranks_.rank(), block.peer);
        }
    }

    /// Lists the copies of the peers' regions into a local operand [B, s, H, D].
    template <class T>
    void get(std::span<plan_block const> blocks, window const& memory, region const& place,
             token_view<T> const& local) {
        for (auto const& block : blocks) {
            auto copy = sized(block, local, place);
            copy.to = reinterpret_cast<std::byte*>(local.row(0, block.token, block.head));
            copy.to_strides = byte_strides(local);
            copy.from = source(memory, place, block.peer) + block.row * place.pitch;
            copy.from_strides = byte_strides(block.row_strides, place);
            list(copy, block.peer, ranks_.rank());
        }
    }

    /// Lists sums of the peers' regions into a local operand; their elements are of the accumulator
    /// type.
    template <class T>
    void sum(std::span<plan_sum const> sums, std::span<plan_source const> sources,
             window const& memory, region const& place, token_view<T> const& local) {
        for (auto const& each : sums)
            list_sum(each, sources.subspan(each.first_source, each.sources), memory, place, local);
    }
    /// As `get`, for regions whose elements are wider than the local operand's.
    template <class T>
    void get_rounded(std::span<plan_block const> blocks, window const& memory, region const& place,
                     token_view<T> const& local) {
        for (auto const& block : blocks) {
            plan_source const source{block.peer, block.row};
            list_sum({block.token, block.tokens, block.head, block.heads, 0, 1, block.row_strides},
                     {&source, 1}, memory, place, local);
        }
    }

    /// Executes all listed copies together.
    void move(typename space_type::queue queue) {
        space_type::copy(queue, copies_, bytes_ * static_cast<std::size_t>(ranks_.size()));
        copies_.clear();
        bytes_ = 0;
    }

    /// Executes all listed sums.
    template <class To, class From>
    void add(typename space_type::queue queue) {
        // Addresses are only stable once all are listed.
        std::size_t next = 0;
        for (std::size_t i = 0; i < sums_.size(); next += counts_[i++])
            sums_[i].from = std::span<std::byte const* const>(addresses_).subspan(next, counts_[i]);
        space_type::template add<To, From>(queue, sums_);
        forget();
    }

   private:
    std::byte* reached(window const& memory, int peer) const {
        auto* const part = ranks_.address(memory, peer);
        if (part == nullptr)
            raise(errc::unsupported, {}, "exchange", "every rank must reach its peers' memory",
                  "rank ", ranks_.rank(), " does not reach rank ", peer);
        return part;
    }

    template <class T>
    block_copy sized(plan_block const& block, token_view<T> const& local,
                     region const& place) const {
        block_copy copy;
        copy.extents = {local.batch(), block.tokens, block.heads};
        copy.row_bytes = place.row_bytes;
        return copy;
    }

    template <class T>
    static std::array<std::int64_t, 3> byte_strides(token_view<T> const& local) {
        constexpr auto size = static_cast<std::int64_t>(sizeof(T));
        return {local.strides[0] * size, local.strides[1] * size, local.strides[2] * size};
    }
    static std::array<std::int64_t, 3> byte_strides(std::array<std::int64_t, 3> const& rows,
                                                    region const& place) {
        return {rows[0] * place.pitch, rows[1] * place.pitch, rows[2] * place.pitch};
    }

    void forget() {
        sums_.clear();
        counts_.clear();
        addresses_.clear();
    }

    void list(block_copy const& copy, int from, int to) {
        copies_.push_back(merged(copy));
        bytes_ += static_cast<std::size_t>(copy.bytes());
        seen_->moved(from, to, static_cast<std::size_t>(copy.bytes()));
    }

    template <class T>
    void list_sum(plan_sum const& each, std::span<plan_source const> sources, window const& memory,
                  region const& place, token_view<T> const& local) {
        for (auto const& from : sources) {
            addresses_.push_back(source(memory, place, from.peer) + from.row * place.pitch);
            seen_->moved(from.peer, ranks_.rank(),
                         static_cast<std::size_t>(local.batch() * each.tokens * each.heads *
                                                  place.row_bytes));
        }
        block_sum sum;
        sum.to = reinterpret_cast<std::byte*>(local.row(0, each.token, each.head));
        sum.extents = {local.batch(), each.tokens, each.heads};
        sum.to_strides = byte_strides(local);
        sum.from_strides = byte_strides(each.row_strides, place);
        sum.elements = local.dim();
        sums_.push_back(sum);
        counts_.push_back(sources.size());
    }

    Comm ranks_;
    Observer* seen_ = nullptr;
    std::vector<block_copy> copies_;
    std::size_t bytes_ = 0;
    std::vector<block_sum> sums_;
    std::vector<std::size_t> counts_;
    std::vector<std::byte const*> addresses_;
};

}  // namespace ulysses::inline ULYSSES_ABI
