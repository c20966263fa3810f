// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a communicator must name the memory it moves as its member type `space_type`.
// expect: ulysses: a communicator must have a const noexcept member `int rank()`.
// expect: ulysses: a communicator must have a const noexcept member `int size()`.
// expect: ulysses: a communicator must count calls in a const member `std::uint64_t begin_call()`.
// expect: ulysses: a communicator must have a const collective member `fence(fence_status const&)`.

// Every broken clause has its sentence, not only the first.
#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using ranks = archetypes::reaching_communicator;
#else
struct ranks {};
#endif

int main() {
    ulysses::pipeline layer{ranks{}, ulysses::sequence_local{}, archetypes::attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}, archetypes::projection{}};
}
