#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/core/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

/// What host attention functors share: the checks of a call, and dealing out workspace.
namespace ulysses::inline ULYSSES_ABI::detail {

inline attention_extents extents_of(extents4 const& q, extents4 const& k, extents4 const& v) {
    return {.batch = q[0],
            .rows = q[1],
            .heads = q[2],
            .keys = k[1],
            .kv_heads = k[2],
            .head_dim = q[3],
            .value_dim = v[3]};
}

/// True when the dims of a row lie side by side.
template <class View>
constexpr bool has_contiguous_rows(View const& view) {
    return view.strides[3] == 1 || view.extents[3] <= 1;
}

/// *Throws* `invalid_tensor` unless extents agree and [key_begin, key_begin + keys) holds all that
/// the rows see; `invalid_call` when the workspace is smaller than `needed` bytes.
template <class Q, class K, class V, class O, class L>
void check_attention(attention_call const& call, Q const& q, K const& k, V const& v, O const& o,
                     L const& lse, std::size_t needed) {
    auto const refuse = [](char const* rule, auto const&... values) {
        raise(errc::invalid_tensor, where{}, "attention", rule, values...);
    };
    if (q.batch() != k.batch() || q.batch() != v.batch() || q.batch() != o.batch())
        refuse("q, k, v and o must have one batch", q.batch(), ", ", k.batch(), ", ", v.batch(),
               ", ", o.batch());
    if (k.tokens() != v.tokens() || k.heads() != v.heads())
        refuse("k and v must have the same keys and heads", k.tokens(), " x ", k.heads(), ", ",
               v.tokens(), " x ", v.heads());
    if (q.dim() != k.dim() || v.dim() != o.dim() || lse.dim() != 1)
        refuse("dims of q and k, of v and o must agree, lse's is 1", q.dim(), " and ", k.dim(),
               ", ", v.dim(), " and ", o.dim(), ", ", lse.dim());
    if (q.tokens() != o.tokens() || q.heads() != o.heads() || q.tokens() != lse.tokens() ||
        q.heads() != lse.heads() || q.batch() != lse.batch())
        refuse("o and lse must have q's rows and heads", q.tokens(), " x ", q.heads(), ", ",
               o.tokens(), " x ", o.heads(), ", ", lse.tokens(), " x ", lse.heads());
    if (q.size() == 0) return;
    if (k.heads() < 1 || q.heads() % k.heads() != 0)
        refuse("key-value heads must divide query heads", q.heads(), ", ", k.heads());
    if (!has_contiguous_rows(q) || !has_contiguous_rows(k) || !has_contiguous_rows(v) ||
        !has_contiguous_rows(o))
        refuse("rows must be contiguous", "strides of dim ", q.strides[3], ", ", k.strides[3], ", ",
               v.strides[3], ", ", o.strides[3]);
    if (call.query_begin < 0 || call.query_begin + q.tokens() > call.visible.queries)
        refuse("query rows must lie in the sequence", call.query_begin, " + ", q.tokens(), ", ",
               call.visible.queries);
    if (!call.visible.uniform() &&
        call.visible.samples.size() != static_cast<std::size_t>(q.batch()))
        refuse("what rows see must be said for each sample", call.visible.samples.size(),
               " samples, batch ", q.batch());
    if (!call.visible.present.empty() &&
        call.visible.present.size() != static_cast<std::size_t>(q.batch() * call.visible.keys))
        refuse("which keys are there must be said for each sample", call.visible.present.size(),
               " of ", q.batch(), " samples of ", call.visible.keys, " keys");
    for (std::int64_t b = 0; b < (call.visible.uniform() ? 1 : q.batch()); ++b) {
        auto const seen =
            call.visible.keys_of_rows(b, call.query_begin, call.query_begin + q.tokens());
        if (call.key_begin < 0 || call.key_begin + k.tokens() > call.visible.keys ||
            (seen.size() > 0 &&
             (seen.begin < call.key_begin || seen.end > call.key_begin + k.tokens())))
            refuse("keys must hold all that the rows see", "keys [", call.key_begin, ", ",
                   call.key_begin + k.tokens(), ") of ", call.visible.keys, ", rows see [",
                   seen.begin, ", ", seen.end, ")");
    }
    if (call.workspace.size() < needed)
        raise(errc::invalid_call, where{}, "attention", "workspace must hold workspace_bytes()",
              call.workspace.size(), " bytes, needed are ", needed);
}

/// *Throws* `invalid_tensor` unless gradients have the extents of what they are gradients of, and
/// rows of dk and dv that a product can add to.
template <class T>
void check_gradients(attention_backward_views<T> const& views) {
    auto const& [q, k, v, o, dout, lse, dq, dk, dv, dlogits] = views;
    auto const overlaps = [](auto const& view) {
        return view.tokens() > 1 && view.strides[1] < view.dim();
    };
    if (dq.extents != q.extents || dk.extents != k.extents || dv.extents != v.extents ||
        dout.extents != o.extents)
        raise(errc::invalid_tensor, where{}, "attention",
              "a gradient must have its operand's extents", "rows ", dq.tokens(), ", ", q.tokens(),
              ", keys ", dk.tokens(), ", ", dv.tokens(), ", ", k.tokens(), ", dims ", dq.dim(),
              ", ", dk.dim(), ", ", q.dim(), ", ", dv.dim(), ", ", dout.dim(), ", ", v.dim());
    if (!has_contiguous_rows(dq) || !has_contiguous_rows(dk) || !has_contiguous_rows(dv) ||
        !has_contiguous_rows(dout) || overlaps(dk) || overlaps(dv))
        raise(errc::invalid_tensor, where{}, "attention",
              "rows of gradients must be contiguous and must not overlap", "strides of dk ",
              dk.strides[1], ", of dv ", dv.strides[1]);
}

/// Deals out a workspace in arrays that start on 64 bytes. Without memory it only counts.
class workspace_cursor {
   public:
    workspace_cursor() = default;
    explicit workspace_cursor(std::span<std::byte> memory) : memory_(memory.data()) {}

    template <class T>
    T* take(std::int64_t count) {
        auto* const place = memory_ != nullptr ? memory_ + used_ : nullptr;
        used_ += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
        return reinterpret_cast<T*>(place);
    }

    std::size_t bytes() const { return used_; }

   private:
    std::byte* memory_ = nullptr;
    std::size_t used_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI::detail
