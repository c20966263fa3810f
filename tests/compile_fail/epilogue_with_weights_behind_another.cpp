// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: an epilogue that takes weights must be the first of `epilogues`: its backward is given q and k as the projection made them.

#include <ulysses/ulysses.hpp>

namespace uly = ulysses;

#if defined(ULYSSES_CONTROL)
using both = uly::epilogues<uly::qk_norm, uly::rope>;
#else
using both = uly::epilogues<uly::rope, uly::qk_norm>;
#endif

int main() {
    return both::takes_weights ? 0 : 1;
}
