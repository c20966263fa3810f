#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/explain.hpp>
#include <ulysses/core/operand.hpp>
#include <ulysses/core/tensor.hpp>
#include <ulysses/plan/sequence.hpp>

namespace ulysses::inline ULYSSES_ABI {

namespace detail {

template <class Global, class Local, class Copy>
void for_own_rows(token_orders const& orders, int rank,
                  tensor_view<Global, replicated> const& global, token_view<Local> const& local,
                  Copy const& copy) {
    std::int64_t token = 0;
    for (auto const& run : orders.runs(rank))
        for (std::int64_t i = 0; i < run.count; ++i, ++token)
            for (std::int64_t b = 0; b < local.batch(); ++b)
                for (std::int64_t h = 0; h < local.heads(); ++h)
                    copy(global.row(b, run.at(i), h), local.row(b, token, h));
}

template <class Global, class Local>
concept whole_and_own =
    has_layout_or_none<Global, replicated> && has_layout_or_none<Local, sequence_local>;

template <class Global, class Local>
consteval bool explain_whole_and_own() {
    static_assert(whole_and_own<Global, Local>,
                  "ulysses: shard and unshard go between the whole sequence, which a view names "
                  "replicated, and a rank's own tokens, which it names sequence_local.");
    return false;
}

}  // namespace detail

/// Step 1: a rank's own tokens, replicated ones among them, of a tensor that holds the whole sequence.
/// *Shape*: global [B, S, C] -> local [B, s, C]. *Throws* `invalid_tensor` when extents do not fit.
template <class Global, class Local>
void shard(sequence const& step, int rank, Global const& global, Local const& local,
           where at = where::here()) {
    static_assert(tensor_like<Global> || explain_tensor<Global>());
    static_assert(tensor_like<Local> || explain_tensor<Local>());
    static_assert(detail::whole_and_own<Global, Local> ||
                  detail::explain_whole_and_own<Global, Local>());
    auto const from = view_of_tokens<replicated>(global, "shard: global", at);
    auto const to = view_of_tokens<sequence_local>(local, "shard: local", at);
    check_operand("shard", "global", from, {step.batch(), step.queries().total(), 1, from.dim()},
                  at);
    check_output("shard", "local", to, {step.batch(), step.queries().count(rank), 1, from.dim()},
                 at);
    detail::for_own_rows(step.queries(), rank, from, to, [&](auto const* source, auto* target) {
        for (std::int64_t c = 0; c < to.dim(); ++c) target[c] = source[c];
    });
}

/// The inverse: writes a rank's own tokens to their places in a tensor of the whole sequence; other
/// places are left as they are.
/// *Shape*: local [B, s, C] -> global [B, S, C].
template <class Local, class Global>
void unshard(sequence const& step, int rank, Local const& local, Global const& global,
             where at = where::here()) {
    static_assert(tensor_like<Local> || explain_tensor<Local>());
    static_assert(tensor_like<Global> || explain_tensor<Global>());
    static_assert(detail::whole_and_own<Global, Local> ||
                  detail::explain_whole_and_own<Global, Local>());
    auto const from = view_of_tokens<sequence_local>(local, "unshard: local", at);
    auto const to = view_of_tokens<replicated>(global, "unshard: global", at);
    check_operand("unshard", "local", from, {step.batch(), step.queries().count(rank), 1, to.dim()},
                  at);
    check_output("unshard", "global", to, {step.batch(), step.queries().total(), 1, to.dim()}, at);
    detail::for_own_rows(step.queries(), rank, to, from, [&](auto* target, auto const* source) {
        for (std::int64_t c = 0; c < to.dim(); ++c) target[c] = source[c];
    });
}

}  // namespace ulysses::inline ULYSSES_ABI
