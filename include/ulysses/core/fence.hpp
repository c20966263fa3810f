#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/shape.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

/// What ranks tell each other at a fence, and the verdict that all of them reach from it. The
/// record travels with the fence itself: agreeing costs no further collective call.
namespace ulysses::inline ULYSSES_ABI {

/// The calls of a pipeline.
enum class pass_kind : std::uint8_t { attend, attend_backward, forward, backward, make_cache };

constexpr std::string_view name(pass_kind kind) {
    constexpr std::string_view names[] = {"attend", "attend_backward", "forward", "backward",
                                          "make_cache"};
    return names[static_cast<std::size_t>(kind)];
}

/// What every rank must pass alike to one call.
enum class term : std::uint8_t {
    call,
    element_type,
    heads,
    kv_heads,
    head_dim,
    value_dim,
    mask,
    window_left,
    window_right,
    head_windows,  ///< the hash of the list, 0 without one
    assignment,
    keep,
    chunks,
    overlap,
    scale,
    softcap,
    logits,  ///< which of alibi, bias, sinks: bits 0, 1, 2
    dropout,
    dropout_key,  ///< a hash; 0: the call gives none
    row_multiple,
    batch,
    queries,
    keys,
    fence,   ///< which fence of the call: 0 before windows grow, then 1, 2 and so on
    inbox,   ///< window that peers write: 0 the group's, else the call that made the context's
    outbox,  ///< window that peers read, likewise
    cache,   ///< 0: none, else the call that made it
    capacity,
    recording,  ///< 1: what the rank's queue is given is kept, to be run later
};
inline constexpr std::size_t term_count = 29;

constexpr std::string_view name(term which) {
    constexpr std::string_view names[term_count] = {"call",
                                                    "element type",
                                                    "heads",
                                                    "kv_heads",
                                                    "head_dim",
                                                    "value_dim",
                                                    "mask",
                                                    "window.left",
                                                    "window.right",
                                                    "head_windows (its hash)",
                                                    "assignment",
                                                    "keep",
                                                    "chunks",
                                                    "overlap",
                                                    "scale",
                                                    "softcap",
                                                    "logits",
                                                    "dropout",
                                                    "dropout key",
                                                    "row_multiple",
                                                    "batch",
                                                    "queries",
                                                    "keys",
                                                    "fence",
                                                    "context (its inbox)",
                                                    "context (its outbox)",
                                                    "cache",
                                                    "capacity",
                                                    "recording (1: the stream is captured)"};
    return names[static_cast<std::size_t>(which)];
}

/// One number for each term; the bits of a double for scale, softcap and dropout.
using call_terms = std::array<std::int64_t, term_count>;

/// A term's value as an error shows it.
inline std::string text_of(term which, std::int64_t value) {
    constexpr std::string_view masks[] = {"full", "causal"};
    constexpr std::string_view assignments[] = {"balanced", "whole_heads"};
    constexpr std::string_view keeps[] = {"exchanged", "local", "nothing"};
    constexpr std::string_view logits[] = {"alibi", "bias", "sinks"};
    auto const index = static_cast<std::size_t>(value);
    switch (which) {
        case term::call: return std::string(name(static_cast<pass_kind>(value)));
        case term::element_type: return std::string(name(static_cast<dtype>(value)));
        case term::mask: return std::string(masks[index]);
        case term::assignment: return std::string(assignments[index]);
        case term::keep: return std::string(keeps[index]);
        case term::scale:
        case term::softcap:
        case term::dropout: {
            // All digits: two scales may differ in the last.
            char text[32];
            std::snprintf(text, sizeof text, "%.17g", std::bit_cast<double>(value));
            return value == 0 ? which == term::scale ? "1 / sqrt(head_dim)" : "none" : text;
        }
        case term::logits: {
            std::string text;
            for (std::size_t bit = 0; bit < 3; ++bit)
                if (value >> bit & 1) text += concat(text.empty() ? "" : " and ", logits[bit]);
            return text.empty() ? "none" : text;
        }
        default: return concat(value);
    }
}

/// What a rank brings to a fence. Trivially copyable, the same size on every rank.
struct fence_status {
    std::uint64_t call = 0;  ///< how many pipeline calls this rank has begun on the group
    std::uint64_t plan = 0;  ///< hash of the plan the call runs
    call_terms terms{};      ///< the parts of the call that have names
    errc code = errc::none;  ///< what went wrong on this rank before the fence
    char text[484] = {};     ///< its message, zero-terminated, cut to fit

    void fail(errc failure, std::string_view message) {
        code = failure == errc::none ? errc::functor_failed : failure;
        auto const length = std::min(message.size(), sizeof(text) - 1);
        std::memcpy(text, message.data(), length);
        text[length] = '\0';
    }
};

namespace detail {

[[noreturn]] inline void throw_disagreement(std::size_t rank, std::string_view rule,
                                            std::string_view values) {
    throw_error(errc::disagreement, concat("ulysses: fence: ", rule, ": ", values),
                static_cast<int>(rank));
}

/// Throws when `other`, of `rank`, is not in the same call as `first`, of rank 0.
inline void expect_same_call(fence_status const& first, fence_status const& other,
                             std::size_t rank) {
    if (other.call != first.call)
        throw_disagreement(
            rank, "ranks must make the same calls in the same order",
            concat("rank 0 is in call ", first.call, ", rank ", rank, " in call ", other.call));
    for (std::size_t i = 0; i < term_count; ++i)
        if (other.terms[i] != first.terms[i]) {
            auto const which = static_cast<term>(i);
            auto const rule =
                which == term::fence
                    ? std::string(
                          "every rank must be at the same fence of a call; one whose shared "
                          "windows are smaller, or whose cache was truncated, needs one more, as "
                          "after close() on it alone")
                    : concat("every rank must pass the same ", name(which));
            throw_disagreement(rank, rule,
                               concat("rank 0 has ", text_of(which, first.terms[i]), ", rank ",
                                      rank, " has ", text_of(which, other.terms[i])));
        }
    if (other.plan != first.plan)
        throw_disagreement(
            rank, "every rank must pass the same token orders and packing",
            concat("plan of rank 0 is ", first.plan, ", of rank ", rank, " ", other.plan));
}

}  // namespace detail

/// The verdict every rank reaches from the statuses of all, in rank order: nothing when they agree,
/// else the error of the lowest failing rank, or a disagreement naming the first rank that differs
/// from rank 0, the term and both values. *Throws* the type that belongs to the error's code.
inline void throw_verdict(std::span<fence_status const> statuses) {
    for (std::size_t r = 0; r < statuses.size(); ++r)
        if (statuses[r].code != errc::none)
            throw_error(statuses[r].code, concat(statuses[r].text, " (rank ", r, ")"),
                        static_cast<int>(r));
    for (std::size_t r = 1; r < statuses.size(); ++r)
        detail::expect_same_call(statuses[0], statuses[r], r);
}

}  // namespace ulysses::inline ULYSSES_ABI
