#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/gather.hpp>
#include <ulysses/core/guarded.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// Numbers of a configuration that must be equal on every rank, and what each is called. `status` is
/// what this rank brings instead, as its configuration cannot be. *Blocking*: one small collective.
/// *Throws* the same on every rank: `disagreement` with the first that differs, or a rank's status.
template <class Comm, std::size_t Count>
void agree_on(Comm const& ranks, std::string_view operation,
              std::array<std::string_view, Count> const& names,
              std::array<std::int64_t, Count> const& mine, fence_status status, where at) {
    static_assert(gathers<Comm> || explain_gathers<Comm>());
    std::vector<std::array<std::int64_t, Count>> all;
    guarded(status, [&] { all.resize(static_cast<std::size_t>(ranks.size())); });
    all_gather_or_fail(ranks, std::as_bytes(std::span(&mine, 1)),
                       std::as_writable_bytes(std::span(all)), status);
    for (std::size_t r = 1; r < all.size(); ++r)
        for (std::size_t i = 0; i < Count; ++i)
            if (all[r][i] != all[0][i])
                raise(errc::disagreement, at, operation,
                      concat(names[i], " must be equal on every rank"), "rank 0 has ", all[0][i],
                      ", rank ", r, " has ", all[r][i]);
}

/// Runs `body`, a part of what `world` does together that not all of its ranks take part in: what it
/// throws releases the others, but for an error that `known(error)` says they know of.
template <class Comm, class Known, class Body>
void leaving_unless(Comm const& world, Known const& known, Body&& body) {
#if ULYSSES_EXCEPTIONS
    if constexpr (can_leave<Comm>) {
        try {
            leaving_on_failure(world, body);
        } catch (error const& e) {
            if (!known(e)) world.leave(e.what());
            throw;
        }
        return;
    }
#endif
    static_cast<void>(known);
    leaving_on_failure(world, body);
}

}  // namespace ulysses::inline ULYSSES_ABI
