// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a communicator that gathers must have a const collective member `all_gather(std::span<std::byte const> mine, std::span<std::byte> all)`.
// expect: ulysses: a communicator that gathers must have a const collective member `broadcast(std::span<std::byte> data, int root)`.
// expect: ulysses: a communicator that reduces must have a const collective member `all_reduce(std::span<float>, reduction)`.
// expect: ulysses: a communicator that reduces must have a const collective member `all_reduce(std::span<double>, reduction)`.
// expect: ulysses: a communicator that reduces must have a const collective member `all_reduce(std::span<std::int64_t>, reduction)`.
// expect: ulysses: a communicator that splits must have a const collective member `split(int color, int key)` that returns a communicator of its own type.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using ranks = archetypes::gathering_communicator;
using reducing = archetypes::reducing_communicator;
using splitting = archetypes::splitting_communicator;
#else
using ranks = archetypes::communicator;
using reducing = archetypes::communicator;
using splitting = archetypes::communicator;
#endif

auto agree(ranks const& group) { return ulysses::sequence::agree(group, {.tokens = 4}); }

static_assert(ulysses::reduces<reducing> || ulysses::explain_reduces<reducing>());
static_assert(ulysses::splits<splitting> || ulysses::explain_splits<splitting>());
