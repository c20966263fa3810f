#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

/// What communicators that meet by themselves have in common: what a rank brings to a collective call,
/// what all ranks alike conclude from it, and the texts of what goes wrong.
///
/// `shown(rank)` is the `collective_offer` that the rank has brought.
namespace ulysses::inline ULYSSES_ABI::detail {

/// The collective calls, as ranks tell each other which one they are in.
enum class collective : std::uint8_t {
    fence,
    make_window,
    all_reduce,
    all_gather,
    broadcast,
    split,
    close
};

constexpr std::string_view name(collective call) {
    constexpr std::string_view names[] = {"fence",     "make_window", "all_reduce", "all_gather",
                                          "broadcast", "split",       "close"};
    return names[static_cast<std::size_t>(call)];
}

/// What a rank brings to a collective call. Trivially copyable.
struct collective_offer {
    collective call = collective::fence;
    int argument = 0;         ///< root, color, or `reduction_argument`
    int key = 0;              ///< of a split
    std::uint64_t calls = 0;  ///< pipeline calls that the rank has begun
    std::uint64_t bytes = 0;  ///< of what it passes
    fence_status status;
};

template <class Shown>
void expect_same_collective(int ranks, Shown const& shown) {
    for (int r = 1; r < ranks; ++r)
        if (shown(r).call != shown(0).call)
            throw_error(errc::disagreement,
                        concat("ulysses: fence: ranks must make the same calls in the same order, "
                               "with the same shapes: rank 0 is in ",
                               name(shown(0).call), ", rank ", r, " in ", name(shown(r).call)),
                        r);
}

/// Throws what the lowest failing rank offered.
template <class Shown>
void throw_offered(int ranks, Shown const& shown) {
    for (int r = 0; r < ranks; ++r)
        if (auto const& theirs = shown(r).status; theirs.code != errc::none)
            throw_error(theirs.code, concat(theirs.text, " (rank ", r, ")"), r);
}

/// Which operation on which type of number an `all_reduce` means: equal sizes are not enough.
template <class T>
constexpr int reduction_argument(reduction op) {
    constexpr auto kind =
        static_cast<int>(sizeof(T)) * 4 + std::is_floating_point_v<T> * 2 + std::is_signed_v<T>;
    return kind * 4 + static_cast<int>(op);
}
inline std::string reduction_text(int argument) {
    constexpr std::string_view operations[] = {"sum", "min", "max"};
    return concat(operations[argument % 4], " of ", argument / 4 / 4, "-byte ",
                  argument / 8 % 2 != 0   ? "floating-point numbers"
                  : argument / 4 % 2 != 0 ? "signed integers"
                                          : "unsigned integers");
}

template <class T>
T combined(reduction op, T a, T b) {
    switch (op) {
        case reduction::sum: return static_cast<T>(a + b);
        case reduction::min: return b < a ? b : a;
        case reduction::max: return a < b ? b : a;
    }
    return a;
}

/// Ranks pass as many bytes, and the same operation or root.
template <class Shown>
void expect_alike(int ranks, Shown const& shown) {
    auto const& first = shown(0);
    auto const differ = [&](std::string_view rule, auto const& of_first, int r, auto const& other) {
        throw_error(errc::disagreement,
                    concat("ulysses: ", name(first.call), ": ", rule, ": rank 0 passes ", of_first,
                           ", rank ", r, " ", other),
                    r);
    };
    for (int r = 1; r < ranks; ++r) {
        auto const& theirs = shown(r);
        if (theirs.bytes != first.bytes)
            differ("every rank must pass as many bytes", first.bytes, r, theirs.bytes);
        if (theirs.argument == first.argument) continue;
        if (first.call == collective::all_reduce)
            differ("every rank must pass the same operation and type",
                   reduction_text(first.argument), r, reduction_text(theirs.argument));
        differ("every rank must pass the same root", first.argument, r, theirs.argument);
    }
}

/// The ranks that a split brings together, in their new order.
class split_members {
   public:
    /// *Throws* what an allocation throws, so that `list` throws nothing.
    void reserve(int ranks) { members_.reserve(static_cast<std::size_t>(ranks)); }

    template <class Shown>
    void list(int ranks, int color, Shown const& shown) {
        for (int r = 0; r < ranks; ++r)
            if (shown(r).argument == color) members_.emplace_back(shown(r).key, r);
        std::sort(members_.begin(), members_.end());
    }

    int size() const { return static_cast<int>(members_.size()); }
    /// The rank in the old group of the one that has `rank` in the new.
    int old_rank(int rank) const { return members_[static_cast<std::size_t>(rank)].second; }
    int new_rank(int old_rank) const {
        auto const at = std::ranges::find(members_, old_rank, &std::pair<int, int>::second);
        return static_cast<int>(at - members_.begin());
    }

   private:
    std::vector<std::pair<int, int>> members_;  // key, old rank
};

// What a rank passes to a call.

inline void check_parts(fence_status& status, std::size_t part, std::size_t all, int ranks) {
    if (status.code == errc::none && all != part * static_cast<std::size_t>(ranks))
        status.fail(errc::invalid_call,
                    concat("ulysses: all_gather: all must hold one part for each rank: ", all,
                           " bytes for ", ranks, " parts of ", part));
}
inline void check_root(fence_status& status, int root, int ranks) {
    if (root < 0 || root >= ranks)
        status.fail(errc::invalid_call, concat("ulysses: broadcast: root must be a rank: root ",
                                               root, " of ", ranks, " ranks"));
}
inline void expect_peer(int peer, int ranks) {
    if (peer < 0 || peer >= ranks)
        raise(errc::invalid_call, {}, "start", "a message is for a rank and from one", "peer ",
              peer, " of ", ranks, " ranks");
}
template <class Ticket>
void expect_open(bool is_open, Ticket const& ticket) {
    if (!is_open)
        raise(errc::invalid_call, {}, "wait", "a ticket is waited for once, in its group",
              "ticket ", ticket.index, ", use ", ticket.use);
}

// Why a group fails.

inline std::string left_text(int rank, std::string_view text) {
    return concat("ulysses: fence: a rank left the group: rank ", rank, ": ", text);
}
/// `silent`: each with a space before.
inline std::string silent_text(int rank, std::chrono::milliseconds waited,
                               std::string_view silent) {
    return concat("ulysses: fence: every rank must arrive within the deadline: rank ", rank,
                  " waited ", waited.count(), " ms, silent ranks:", silent);
}
inline std::string unanswered_text(int rank, std::chrono::milliseconds waited, int peer) {
    return concat("ulysses: wait: every rank must answer within the deadline: rank ", rank,
                  " waited ", waited.count(), " ms for rank ", peer);
}
/// `sent`: how much, in words.
inline std::string sizes_text(int from, std::string_view sent, int to, std::size_t expected) {
    return concat("ulysses: start: both ends of a message must name its size: rank ", from,
                  " sends ", sent, ", rank ", to, " expects ", expected);
}

/// When a deadline that begins now is over.
inline std::chrono::steady_clock::time_point end_of(std::chrono::milliseconds deadline) {
    using std::chrono::milliseconds;
    return std::chrono::steady_clock::now() +
           std::clamp<milliseconds>(deadline, milliseconds(0), std::chrono::hours(24 * 365));
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
