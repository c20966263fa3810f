// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a GEMM must have a const call operator that takes a `gemm_call<T>` of the operands' element type.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

struct gemm : ulysses::builtin_gemm {
#if !defined(ULYSSES_CONTROL)
    void operator()() const;
#endif
};

ulysses::blocked_attention attention{gemm{}};
