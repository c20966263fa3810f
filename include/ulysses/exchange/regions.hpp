#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/shape.hpp>
#include <ulysses/core/tensor_view.hpp>
#include <ulysses/plan/plan.hpp>

#include <cstddef>
#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

/// One operand's place in an arena, the same on every rank: `rows` rows of `dim` elements, the
/// pitch a multiple of 64 bytes so that no two rows share a cache line.
struct region {
    std::size_t offset = 0;      ///< bytes from the arena's start
    std::int64_t pitch = 0;      ///< bytes from row to row
    std::int64_t row_bytes = 0;  ///< bytes of a row that are moved
};

/// Lays regions one behind the other.
class arena_layout {
   public:
    /// Regions from `begin` on.
    explicit arena_layout(std::size_t begin = 0) : bytes_(begin) {}

    template <element T>
    region add(std::int64_t rows, std::int64_t dim) {
        constexpr std::int64_t line_bytes = 64;
        constexpr std::int64_t size = sizeof(T);
        auto const pitch = (dim * size + line_bytes - 1) / line_bytes * line_bytes;
        if (rows > (limit - static_cast<std::int64_t>(bytes_)) / pitch)
            raise(errc::invalid_shape, {}, "exchange", "an arena must stay below 2^62 bytes", rows,
                  " rows of ", pitch, " bytes");
        region const result{bytes_, pitch, dim * size};
        bytes_ += static_cast<std::size_t>(rows * pitch);
        return result;
    }
    std::size_t bytes() const { return bytes_; }

   private:
    static constexpr std::int64_t limit = std::int64_t{1} << 62;
    std::size_t bytes_ = 0;
};

/// Where in the two arenas a call's regions begin.
struct arena_begins {
    std::size_t inbox = 0, outbox = 0;
};

/// Where the operands of a forward call lie: q, k, v in the inbox, o in the outbox. With a cache k and
/// v lie there.
struct forward_regions {
    region q, k, v, o;
    std::size_t inbox_bytes = 0, outbox_bytes = 0;  ///< where they end

    template <class T>
    static forward_regions of(plan const& moves, arena_begins begin = {}) {
        auto const& layer = moves.layer();
        auto const key_rows = moves.caching() ? 0 : moves.key_region_rows();
        arena_layout inbox(begin.inbox), outbox(begin.outbox);
        forward_regions all;
        all.q = inbox.add<T>(moves.query_region_rows(), layer.head_dim);
        all.k = inbox.add<T>(key_rows, layer.head_dim);
        all.v = inbox.add<T>(key_rows, layer.value_dim);
        all.o = outbox.add<T>(moves.query_region_rows(), layer.value_dim);
        all.inbox_bytes = inbox.bytes();
        all.outbox_bytes = outbox.bytes();
        return all;
    }
};

/// Where the keys and values of a cache lie: `rows` of each, [head, sample, key].
struct cache_regions {
    region k, v;
    std::size_t bytes = 0;

    template <class T>
    static cache_regions of(shape const& layer, std::int64_t rows) {
        arena_layout memory;
        cache_regions all;
        all.k = memory.add<T>(rows, layer.head_dim);
        all.v = memory.add<T>(rows, layer.value_dim);
        all.bytes = memory.bytes();
        return all;
    }
};

/// Where the operands of a backward call lie: dO in the inbox, with every rank's part of that of
/// replicated tokens, a slot a rank, and with what the context did not keep;
/// dq, dk and dv in the outbox, with o when it is computed again. dk and dv are of the accumulator
/// type, so that parts from several ranks are rounded once.
struct backward_regions {
    region dout, dout_slots, q, k, v, o;
    region dq, dk, dv;
    std::size_t inbox_bytes = 0, outbox_bytes = 0;  ///< where they end

    template <class T>
    static backward_regions of(plan const& moves, arena_begins begin = {}) {
        auto const& layer = moves.layer();
        auto const rows = moves.query_region_rows(), key_rows = moves.key_region_rows();
        arena_layout inbox(begin.inbox), outbox(begin.outbox);
        backward_regions all;
        all.dout = inbox.add<T>(rows, layer.value_dim);
        all.dout_slots = inbox.add<T>(moves.slot_rows(), layer.value_dim);
        if (layer.keep != keep::exchanged) {
            all.q = inbox.add<T>(rows, layer.head_dim);
            all.k = inbox.add<T>(key_rows, layer.head_dim);
            all.v = inbox.add<T>(key_rows, layer.value_dim);
        }
        if (layer.keep == keep::local) all.o = inbox.add<T>(rows, layer.value_dim);
        all.dq = outbox.add<T>(rows, layer.head_dim);
        all.dk = outbox.add<accumulator_t<T>>(key_rows, layer.head_dim);
        all.dv = outbox.add<accumulator_t<T>>(key_rows, layer.value_dim);
        if (layer.keep == keep::nothing) all.o = outbox.add<T>(rows, layer.value_dim);
        all.inbox_bytes = inbox.bytes();
        all.outbox_bytes = outbox.bytes();
        return all;
    }
};

/// A head-local operand of one rank, cut into work items: either its region of a window, or a
/// tensor that already holds all tokens of the rank's heads.
template <class T>
class head_operand {
   public:
    head_operand() = default;

    /// Rows of `dim` elements in this rank's own part of a window.
    head_operand(std::byte* base, region const& place, std::int64_t dim)
        : data_(reinterpret_cast<T*>(base + place.offset)),
          pitch_(place.pitch / static_cast<std::int64_t>(sizeof(T))),
          dim_(dim) {}

    /// [B, S, h, D]: all tokens, the heads of the rank's items in order.
    explicit head_operand(tensor_view<T, head_local> const& tensor)
        : data_(tensor.data), tensor_(tensor) {}

    /// Refuses a shard.
    template <class View>
        requires other_layout<View>
    explicit head_operand(View const&) { static_assert(explain_layout<View>()); }

    /// [B, rows, heads, dim] of an item's queries.
    head_view<T> queries(plan const& moves, planned_item const& item) const {
        auto const& work = item.work;
        if (pitch_ == 0)
            return tensor_.slice_tokens(work.row_begin, work.rows())
                .slice_heads(work.head_begin - moves.items()[0].work.head_begin, work.heads());
        auto const head = moves.batch() * work.rows() * pitch_;
        return {data_ + item.query_row * pitch_,
                {moves.batch(), work.rows(), work.heads(), dim_},
                {work.rows() * pitch_, pitch_, head, 1}};
    }

    /// [B, keys, kv heads, dim] of an item's keys.
    head_view<T> keys(plan const& moves, planned_item const& item) const {
        auto const& work = item.work;
        if (pitch_ == 0)
            return tensor_.slice_tokens(work.key_begin, work.keys())
                .slice_heads(work.kv_begin - moves.items()[0].work.kv_begin, work.kv_heads());
        auto const sample = moves.key_capacity() * pitch_;
        return {data_ + item.key_row * pitch_,
                {moves.batch(), work.keys(), work.kv_heads(), dim_},
                {sample, pitch_, moves.batch() * sample, 1}};
    }

   private:
    T* data_ = nullptr;
    std::int64_t pitch_ = 0;  ///< elements from row to row; 0: a tensor
    std::int64_t dim_ = 0;
    head_view<T> tensor_{};
};

}  // namespace ulysses::inline ULYSSES_ABI
