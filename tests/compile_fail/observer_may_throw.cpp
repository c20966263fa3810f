// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: an observer must have a noexcept member `begin(step_id)`.
// expect: ulysses: an observer must have a noexcept member `fence()`.
// expect: ulysses: an observer of whole calls must have both noexcept members `begin(pass_kind)` and `end(pass_kind)`; one that has neither is not told.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using observer = archetypes::call_observer;
#else
struct observer : archetypes::observer {
    using archetypes::observer::end;
    void begin(ulysses::step_id);
    void fence();
    void begin(ulysses::pass_kind) noexcept;
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
