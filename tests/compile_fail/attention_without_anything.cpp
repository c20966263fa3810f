// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: an attention functor must name the memory it reads as its member type `space_type`.
// expect: ulysses: an attention functor must declare what it can do as `static constexpr attention_features features`.
// expect: ulysses: an attention functor must say on which rows heads may be cut in a member `std::int64_t row_multiple()`.
// expect: ulysses: an attention functor must say what memory it needs in a member template `std::size_t workspace_bytes<T>(attention_extents const&)`.
// expect: ulysses: an attention functor must have a const member `forward(attention_call, q, k, v, o, lse)` over head_local views of the operands' element type; where its space has queues it is given a `queued<attention_call, space_type>`.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#if defined(ULYSSES_CONTROL)
using attention = archetypes::attention;
#else
struct attention {};
#endif

int main() {
    ulysses::pipeline layer{archetypes::reaching_communicator{}, ulysses::sequence_local{},
                            attention{}, ulysses::shape{.heads = 1, .head_dim = 1},
                            archetypes::projection{}};
}
