// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a communicator must have a const noexcept member `int rank()`.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using ranks = archetypes::reaching_communicator;
#else
struct ranks : archetypes::reaching_communicator {
    int rank() const { return 0; }
};
#endif

int main() {
    ulysses::pipeline layer{ranks{}, ulysses::sequence_local{}, archetypes::attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}, archetypes::projection{}};
}
