// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a projection must have a const member `project_in(
// expect: ulysses: a projection must have a const member `project_out(
// expect: ulysses: an attention functor must have a const member `forward(
// expect: ulysses: backward needs an attention functor with a const member `backward(
// expect: ulysses: backward needs a projection with a const member `project_in_backward(
// expect: ulysses: a type becomes an operand by a specialisation of ulysses::tensor_traits

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

namespace uly = ulysses;

#if defined(ULYSSES_CONTROL)
using projection = archetypes::differentiable_projection;
using other_projection = projection;
using attention = archetypes::differentiable_attention;
using other_attention = attention;
using tensor = uly::token_view<float>;
#else
struct projection {
    using space_type = archetypes::space;
};
using other_projection = archetypes::projection;
using attention = archetypes::attention_without_forward;
using other_attention = archetypes::attention;
using tensor = archetypes::no_tensor;
#endif

void use(uly::sequence const& step, uly::plan const& moves, uly::attend_operands<float> const& operands) {
    archetypes::weights const w;
    uly::token_view<float> x;
    uly::token_view<float const> cx;
    uly::project_in(projection{}, step, 0, cx, w, x, x, x);  // refused
    uly::project_out(projection{}, step, 0, cx, w, x);  // refused
    uly::project_in_backward(other_projection{}, step, 0, cx, w, x, x, x, x, archetypes::gradients{});  // refused
    uly::attend(attention{}, moves, operands, {});  // refused
    uly::attend_backward(other_attention{}, moves, operands, {});  // refused
    uly::shard(step, 0, uly::tensor_view<float, uly::replicated>{}, tensor{});  // refused
}
