// SPDX-License-Identifier: Apache-2.0
// ULYSSES_WITHOUT_CUDNN, ULYSSES_WITHOUT_SIX_STEPS: why the program has no such part.

#include "../table.hpp"
#include "parts.hpp"

namespace ulysses_bench {

namespace {

[[maybe_unused]] group missing(std::vector<std::string> const& names, char const* why) {
    group parts;
    for (auto const& name : names)
        parts.push_back({name, 10, [=](report const& to) { to.add(not_measured(name, why)); }});
    return parts;
}

}  // namespace

#if defined(ULYSSES_WITHOUT_CUDNN)
group cudnn(bool) { return missing({"cuDNN, its options", "cuDNN, speed"}, ULYSSES_WITHOUT_CUDNN); }
group million(bool) { return missing({"1048576 tokens"}, ULYSSES_WITHOUT_CUDNN); }
#endif

#if defined(ULYSSES_WITHOUT_SIX_STEPS)
group six_steps(bool) {
    return missing({"6 steps, results", "6 steps, time", "6 steps by a graph"},
                   ULYSSES_WITHOUT_SIX_STEPS);
}
#endif

}  // namespace ulysses_bench
