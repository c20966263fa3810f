// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a projection accepts sequence_local views only: it is local to a rank's tokens; a head_local view holds all tokens of some heads.
// expect: ulysses: to_heads and to_tokens take a rank's own tokens, sequence_local views; a head_local view already holds what they bring together.
// expect: ulysses: attention accepts head_local views only; a sequence_local shard holds a part of the keys: exchange it first (pipeline::attend) or the result would be wrong.
// expect: ulysses: shard and unshard go between the whole sequence, which a view names replicated, and a rank's own tokens, which it names sequence_local.
// never: no matching function

// Each stage, called directly with views of the wrong layout.
#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

namespace uly = ulysses;
using projection = archetypes::differentiable_projection;
using exchange = uly::exchange<uly::serial, uly::no_observer>;

#if defined(ULYSSES_CONTROL)
template <class T>
using tokens_view = uly::token_view<T>;
template <class T>
using heads_view = uly::head_view<T>;
using whole_view = uly::tensor_view<float, uly::replicated>;
#else
template <class T>
using tokens_view = uly::head_view<T>;
template <class T>
using heads_view = uly::token_view<T>;
using whole_view = uly::token_view<float>;
#endif

void use(uly::sequence const& step, uly::plan const& moves, exchange& moving, exchange::window const& window,
         uly::forward_regions const& forward, uly::backward_regions const& backward) {
    projection const steps;
    archetypes::weights const w;
    archetypes::gradients const g;
    tokens_view<float> x;
    tokens_view<float const> cx;
    uly::project_in(steps, step, 0, cx, w, x, x, x);  // refused
    uly::project_in_backward(steps, step, 0, cx, w, x, x, x, x, g);  // refused
    uly::project_out(steps, step, 0, cx, w, x);  // refused
    uly::project_out_backward(steps, step, 0, w, cx, x);  // refused
    uly::project_out_gradients(steps, step, 0, cx, cx, g);  // refused
    uly::to_heads(moving, moves, window, forward, cx, cx, cx);  // refused
    uly::to_heads_backward(moving, moves, window, backward, x, x, x);  // refused
    uly::to_tokens(moving, moves, window, forward.o, x);  // refused
    uly::to_tokens_backward(moving, moves, window, backward, cx);  // refused
    uly::head_operand<float>{heads_view<float>{}};  // refused
    uly::shard(step, 0, whole_view{}, uly::token_view<float>{});  // refused
    uly::unshard(step, 0, uly::token_view<float>{}, whole_view{});  // refused
}
