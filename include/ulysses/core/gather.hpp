#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/guarded.hpp>

#include <cstddef>
#include <span>

namespace ulysses::inline ULYSSES_ABI {

/// `all_gather`, or the error that a rank brings instead. Where the communicator's own cannot carry
/// one, that rank leaves the group, if it can.
template <class Comm>
void all_gather_or_fail(Comm const& ranks, std::span<std::byte const> part,
                        std::span<std::byte> all, fence_status const& status) {
    if constexpr (requires { ranks.all_gather(part, all, status); }) {
        leaving_on_failure(ranks, [&] { ranks.all_gather(part, all, status); });
    } else {
        if (status.code != errc::none) {
            if constexpr (can_leave<Comm>) ranks.leave(status.text);
            throw_error(status.code, status.text, ranks.rank());
        }
        leaving_on_failure(ranks, [&] { ranks.all_gather(part, all); });
    }
}

}  // namespace ulysses::inline ULYSSES_ABI
