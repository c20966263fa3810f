// SPDX-License-Identifier: Apache-2.0
// ULYSSES_WITHOUT_CUDNN, ULYSSES_WITHOUT_SIX_STEPS: why the program has no such part.

#include "sections.hpp"

namespace ulysses_bench {

#if defined(ULYSSES_WITHOUT_CUDNN)
void measure_cudnn(std::vector<result>& rows, bool) {
    for (auto const* const name : {"cuDNN, its options", "cuDNN, speed", "1048576 tokens"})
        rows.push_back(not_measured(name, ULYSSES_WITHOUT_CUDNN));
}
#endif

#if defined(ULYSSES_WITHOUT_SIX_STEPS)
void measure_six_steps(std::vector<result>& rows, bool) {
    for (auto const* const name :
         {"6 steps, results", "6 steps, time", "6 steps, host time", "6 steps by a graph"})
        rows.push_back(not_measured(name, ULYSSES_WITHOUT_SIX_STEPS));
}
#endif

}  // namespace ulysses_bench
