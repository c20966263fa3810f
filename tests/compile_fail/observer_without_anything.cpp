// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: an observer must be copyable: a pipeline holds it by value; let it point to what it fills.
// expect: ulysses: an observer must have a noexcept member `begin(step_id)`.
// expect: ulysses: an observer must have a noexcept member `end(step_id)`.
// expect: ulysses: an observer must have a noexcept member `moved(int from, int to, std::size_t bytes)`.
// expect: ulysses: an observer must have a noexcept member `fence()`.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using observer = archetypes::observer;
#else
struct observer {
    observer() = default;
    observer(observer&&) = default;
    observer& operator=(observer&&) = default;
};
#endif

int main() {
    ulysses::pipeline layer{ulysses::serial{},
                            ulysses::sequence_local{},
                            ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1},
                            ulysses::no_projection{},
                            observer{}};
}
