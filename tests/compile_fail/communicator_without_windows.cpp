// SPDX-License-Identifier: Apache-2.0
// expect: must have a collective member `window_type make_window(std::size_t bytes)`.
// expect: must have a collective member `window_type shared_window(arena, std::size_t bytes)`.
// expect: must have a member `std::byte* address(window_type const&, int rank)`.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using ranks = archetypes::reaching_communicator;
#else
struct ranks : archetypes::reaching_communicator {
    window_type make_window(std::size_t) const = delete;
    window_type shared_window(ulysses::arena, std::size_t) const = delete;
    std::byte* address(window_type const&, int) const = delete;
};
#endif

static_assert(ulysses::reaches_memory<ranks> || ulysses::explain_reach<ranks>());
