#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/exchange/regions.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>

namespace ulysses::inline v0 {

/// What one layer's backward needs of its forward. Made by `pipeline::make_context`, one per layer
/// and micro-batch in flight; filled by a forward call, consumed by the backward call, then reused.
///
/// *Thread safety*: belongs to its rank's thread. Destroying it is not collective.
template <class Comm>
class context {
   public:
    using space_type = typename Comm::space_type;

    /// True between a forward call and its backward.
    bool filled() const { return filled_; }

    /// Forgets a forward call whose backward will not come. On every rank alike.
    void discard() { filled_ = false; }

    /// Bytes this context holds on this rank.
    std::size_t bytes() const {
        return (inbox_ ? inbox_bytes_ : 0) + (outbox_ ? outbox_bytes_ : 0) + q.bytes() + k.bytes() +
               v.bytes() + o.bytes() + lse.bytes();
    }

    /// Log-sum-exp of the rows of work item `i` of this rank, [B, rows, heads, 1], while filled.
    /// *Throws* `invalid_call` when nothing is kept (keep::nothing).
    template <class T>
    head_view<accumulator_t<T> const> log_sum_exp(plan const& moves, std::size_t i,
                                                  where at = where::here()) const {
        if (!filled_ || lse.data() == nullptr)
            raise(errc::invalid_call, at, "context", "log_sum_exp needs a context that kept it",
                  filled_ ? "the layer has keep::nothing" : "the context is empty");
        return head_operand<accumulator_t<T> const>(lse.data(), lse_region<T>(), 1)
            .queries(moves, moves.items()[i]);
    }

    template <class T>
    static region lse_region() {
        constexpr std::int64_t size = sizeof(accumulator_t<T>);
        return {0, size, size};
    }

    // What follows is for the pipeline.

    /// *Throws* `invalid_call` when a forward call still waits for its backward.
    void expect_empty(where at) const {
        if (filled_)
            raise(errc::invalid_call, at, "context", "a forward call needs a consumed context",
                  "the last forward still waits for its backward (or discard)");
    }

    /// *Throws* `invalid_call` when there was no forward call or another step's or element type's.
    void expect_filled(std::uint64_t hash, dtype type, bool whole, where at) const {
        if (!filled_)
            raise(errc::invalid_call, at, "context",
                  "a backward call needs a forward call before it", "the context is empty");
        if (hash != hash_)
            raise(errc::invalid_call, at, "context",
                  "a backward call takes the step of its forward call", "forward ran plan ", hash_,
                  ", backward plan ", hash);
        if (type != type_)
            raise(errc::invalid_call, at, "context",
                  "a backward call takes the element type of its forward call", "forward ran ",
                  name(type_), ", backward ", name(type));
        if (whole != whole_)
            raise(errc::invalid_call, at, "context",
                  "backward belongs to forward, attend_backward to attend",
                  whole_ ? "forward was `forward`" : "forward was `attend`");
    }

    void fill(std::uint64_t hash, dtype type, bool whole) {
        filled_ = true;
        hash_ = hash;
        type_ = type;
        whole_ = whole;
    }

    /// True when the windows must grow, which is collective, before they hold so many bytes.
    bool grows(std::size_t inbox_bytes, std::size_t outbox_bytes) const {
        return !inbox_ || !outbox_ || inbox_bytes_ < inbox_bytes || outbox_bytes_ < outbox_bytes;
    }
    typename Comm::window_type const& inbox(Comm const& ranks, std::size_t bytes) {
        return grown(inbox_, inbox_bytes_, ranks, bytes);
    }
    typename Comm::window_type const& outbox(Comm const& ranks, std::size_t bytes) {
        return grown(outbox_, outbox_bytes_, ranks, bytes);
    }

    buffer<space_type> q, k, v,
        o;                   ///< sequence-local, [B, s, H, D], where the keep policy asks for them
    buffer<space_type> lse;  ///< head-local, one number a row

   private:
    using window = std::optional<typename Comm::window_type>;

    static typename Comm::window_type const& grown(window& memory, std::size_t& have,
                                                   Comm const& ranks, std::size_t bytes) {
        if (!memory || have < bytes) {
            memory.reset();
            have = 0;
            memory = ranks.make_window(bytes);
            have = bytes;
        }
        return *memory;
    }

    window inbox_, outbox_;
    std::size_t inbox_bytes_ = 0, outbox_bytes_ = 0;
    bool filled_ = false, whole_ = false;
    std::uint64_t hash_ = 0;
    dtype type_ = dtype::none;
};

}  // namespace ulysses::inline v0
