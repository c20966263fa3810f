#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/logits.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/exchange/regions.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace ulysses::inline ULYSSES_ABI {

/// Where log-sum-exps lie from query row `row` on, one accumulator a row.
template <class T>
region lse_region(std::int64_t row) {
    constexpr std::int64_t size = sizeof(accumulator_t<T>);
    return {static_cast<std::size_t>(row * size), size, size};
}

/// What a forward call leaves in a context, and its backward call must fit.
struct context_filling {
    std::uint64_t plan = 0;     ///< hash of the plan
    dtype type = dtype::none;   ///< of the operands
    bool whole = false;         ///< six steps, not steps 3 to 5 alone
    std::string_view layout{};  ///< name of the layout policy
};

/// What one layer's backward needs of its forward. Made by `pipeline::make_context`, one per layer
/// and micro-batch in flight; filled by a forward call, consumed by the backward call, then reused.
///
/// *Thread safety*: belongs to its rank's thread. Destroying it is not collective.
template <class Comm>
class context {
   public:
    using space_type = typename Comm::space_type;

    context() = default;
    context(context&& other) noexcept { swap(other); }
    context& operator=(context&& other) noexcept {
        swap(other);
        return *this;
    }
    void swap(context& other) noexcept {
        std::swap(q, other.q);
        std::swap(k, other.k);
        std::swap(v, other.v);
        std::swap(o, other.o);
        std::swap(lse, other.lse);
        std::swap(inbox_, other.inbox_);
        std::swap(outbox_, other.outbox_);
        std::swap(ranks_, other.ranks_);
        std::swap(filled_, other.filled_);
        std::swap(filling_, other.filling_);
        std::swap(dropout_, other.dropout_);
    }

    /// True between a forward call and its backward.
    bool filled() const { return filled_; }

    /// Forgets a forward call whose backward will not come. On every rank alike.
    void discard() { filled_ = false; }

    /// Bytes this context holds on this rank.
    std::size_t bytes() const {
        return inbox_.bytes + outbox_.bytes + q.bytes() + k.bytes() + v.bytes() + o.bytes() +
               lse.bytes();
    }

    /// Log-sum-exp of the rows of work item `i` of this rank, [B, rows, heads, 1], while filled.
    /// `moves` is `pipeline::planned`'s: of one of its chunks, where a call runs in several.
    /// *Throws* `invalid_call` when nothing is kept (keep::nothing).
    template <class T>
    head_view<accumulator_t<T> const> log_sum_exp(plan const& moves, std::size_t i,
                                                  where at = where::here()) const {
        if (!filled_ || lse.data() == nullptr)
            raise(errc::invalid_call, at, "context", "log_sum_exp needs a context that kept it",
                  filled_ ? "the layer has keep::nothing" : "the context is empty");
        if (dtype_of<T> != filling_.type || moves.hash() != filling_.plan ||
            i >= moves.items().size())
            raise(errc::invalid_call, at, "context",
                  "log_sum_exp takes the element type, plan and an item of the forward call",
                  "item ", i, " of ", moves.items().size(), ", ", name(dtype_of<T>), " of ",
                  name(filling_.type));
        auto const place = lse_region<T>(moves.chunk().first_query_row);
        return head_operand<accumulator_t<T> const>(lse.data(), place, 1)
            .queries(moves, moves.items()[i]);
    }

    // What follows is for the pipeline.

    /// *Throws* `invalid_call` when a forward call still waits for its backward, or the context was
    /// used on another group.
    void expect_empty(Comm const& ranks, where at) const {
        if (filled_)
            raise(errc::invalid_call, at, "context", "a forward call needs a consumed context",
                  "the last forward still waits for its backward (or discard)");
        expect_group(ranks, at);
    }

    /// *Throws* `invalid_call` when there was no forward call, or one of another step, element
    /// type, kind, layout or group.
    void expect_filled(context_filling const& with, Comm const& ranks, where at) const {
        if (!filled_)
            raise(errc::invalid_call, at, "context",
                  "a backward call needs a forward call before it", "the context is empty");
        expect_group(ranks, at);
        if (with.plan != filling_.plan)
            raise(errc::invalid_call, at, "context",
                  "a backward call takes the step of its forward call", "forward ran plan ",
                  filling_.plan, ", backward plan ", with.plan);
        if (with.type != filling_.type)
            raise(errc::invalid_call, at, "context",
                  "a backward call takes the element type of its forward call", "forward ran ",
                  name(filling_.type), ", backward ", name(with.type));
        if (with.whole != filling_.whole)
            raise(errc::invalid_call, at, "context",
                  "backward belongs to forward, attend_backward to attend",
                  filling_.whole ? "forward was `forward`, backward is `attend_backward`"
                                 : "forward was `attend`, backward is `backward`");
        if (with.layout != filling_.layout)
            raise(errc::invalid_call, at, "context",
                  "a backward call takes the layout of its forward call", "forward ran ",
                  filling_.layout, ", backward ", with.layout);
    }

    /// *Throws* `invalid_call` when a backward call would drop others than its forward did.
    void expect_dropout(std::optional<dropout_key> const& key, where at) const {
        auto const text = [](std::optional<dropout_key> const& of) {
            return of ? concat("seed ", of->seed, ", step ", of->step, ", layer ", of->layer,
                               ", first sample ", of->first_sample)
                      : std::string("none");
        };
        if (key != dropout_)
            raise(errc::invalid_call, at, "context",
                  "a backward call takes the dropout key of its forward call", "forward ran ",
                  text(dropout_), ", backward ", text(key));
    }

    void fill(context_filling const& with, std::optional<dropout_key> const& dropout,
              Comm const& ranks) {
        filled_ = true;
        filling_ = with;
        dropout_ = dropout;
        ranks_ = ranks;
    }

    /// True when the windows must grow, which is collective, before they hold so many bytes.
    bool grows(std::size_t inbox_bytes, std::size_t outbox_bytes) const {
        return !inbox_.made || !outbox_.made || inbox_.bytes < inbox_bytes ||
               outbox_.bytes < outbox_bytes;
    }
    typename Comm::window_type const& inbox(Comm const& ranks, std::size_t bytes,
                                            std::uint64_t call) {
        return grown(inbox_, ranks, bytes, call);
    }
    typename Comm::window_type const& outbox(Comm const& ranks, std::size_t bytes,
                                             std::uint64_t call) {
        return grown(outbox_, ranks, bytes, call);
    }

    /// The calls in which the windows were made: equal on all ranks when all use the same context.
    std::int64_t inbox_number() const { return static_cast<std::int64_t>(inbox_.call); }
    std::int64_t outbox_number() const { return static_cast<std::int64_t>(outbox_.call); }

    buffer<space_type> q, k, v,
        o;                   ///< sequence-local, [B, s, H, D], where the keep policy asks for them
    buffer<space_type> lse;  ///< head-local, one number a row

   private:
    struct window {
        typename Comm::window_type memory{};
        bool made = false;
        std::size_t bytes = 0;
        std::uint64_t call = 0;
    };

    typename Comm::window_type const& grown(window& own, Comm const& ranks, std::size_t bytes,
                                            std::uint64_t call) {
        if (own.bytes < bytes || !own.made) {
            own = {};
            own.memory = ranks.make_window(bytes);
            own.made = true;
            own.bytes = bytes;
            own.call = call;
            ranks_ = ranks;
        }
        return own.memory;
    }

    /// Windows and what they hold belong to one group; where handles compare, another one is
    /// refused.
    void expect_group(Comm const& ranks, where at) const {
        if constexpr (std::equality_comparable<Comm>)
            if (ranks_ && !(*ranks_ == ranks))
                raise(errc::invalid_call, at, "context",
                      "a context belongs to the group of its first call", "rank ", ranks_->rank(),
                      " of ", ranks_->size(), " then, rank ", ranks.rank(), " of ", ranks.size(),
                      " of another group now");
    }

    window inbox_, outbox_;
    std::optional<Comm> ranks_;
    bool filled_ = false;
    context_filling filling_;
    std::optional<dropout_key> dropout_;
};

}  // namespace ulysses::inline ULYSSES_ABI
