// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a space must have a static member `void* allocate(queue, std::size_t bytes)`.
// expect: ulysses: a space must have a static member `deallocate(queue, void* memory, std::size_t bytes)`.
// expect: ulysses: a space must have a static member `copy(queue, std::span<block_copy const>, std::size_t group_bytes)`.
// expect: ulysses: a space must have a static member template `add<To, From>(queue, std::span<block_sum const>)`.
// expect: ulysses: a space must name what orders its work as the copyable member type `queue`.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using space = archetypes::space;
using other = archetypes::space;
#else
struct space {
    struct queue {};
};
struct other {};
#endif

template <class Space>
struct ranks : archetypes::reaching_communicator {
    using space_type = Space;
};
template <class Space>
struct attention : archetypes::attention {
    using space_type = Space;
};
template <class Space>
struct projection : archetypes::projection {
    using space_type = Space;
};

template <class Space>
using layer = ulysses::pipeline<ranks<Space>, ulysses::sequence_local, attention<Space>, projection<Space>>;

static_assert(sizeof(layer<space>) > 0);
static_assert(ulysses::space<other> || ulysses::explain_space<other>());
