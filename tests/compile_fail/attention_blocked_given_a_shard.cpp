// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: attention accepts head_local views only; a sequence_local shard holds a part of the keys: exchange it first (pipeline::attend) or the result would be wrong.

#include <ulysses/ulysses.hpp>

#if defined(ULYSSES_CONTROL)
template <class T>
using view = ulysses::head_view<T>;
#else
template <class T>
using view = ulysses::token_view<T>;
#endif

int main() {
    view<float const> q, k, v;
    view<float> o, lse;
    ulysses::blocked_attention{ulysses::builtin_gemm{}}.forward({}, q, k, v, o, lse);
}
