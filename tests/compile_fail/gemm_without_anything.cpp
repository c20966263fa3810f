// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a GEMM must name the memory it reads as its member type `space_type`.
// expect: ulysses: a GEMM must have a const call operator that takes a `gemm_call<T>` of the operands' element type.
// expect: ulysses: a GEMM must say whether a row's bits depend on the number of rows in the call as `static constexpr bool rows_independent`.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using gemm = ulysses::builtin_gemm;
#else
struct gemm {};
#endif

static_assert(sizeof(ulysses::dense<gemm>) > 0);
