#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/tensor.hpp>

#include <tuple>
#include <type_traits>

/// What the types of a call's operands must be, in sentences, when it is compiled.
namespace ulysses::inline ULYSSES_ABI {

/// The one element type of the operands `X` of a pipeline in `Space`, as a `std::type_identity`.
template <class Space, class Layout, class Attention, class... X>
consteval auto operand_type_of() {
    static_assert((... && (tensor_like<X> || explain_tensor<X>())));
    if constexpr ((... && tensor_like<X>)) {
        using first = std::tuple_element_t<0, std::tuple<std::remove_cv_t<element_of_t<X>>...>>;
        static_assert((... && std::is_same_v<first, std::remove_cv_t<element_of_t<X>>>),
                      "ulysses: the operands of one call must have one element type.");
        static_assert((... && same_space<Space, space_of_t<X>>()));
        static_assert(
            (... && has_layout_or_none<X, Layout>),
            "ulysses: a view that names a layout policy must name the pipeline's own: give a "
            "sequence_local pipeline token_views, a head_local one head_views.");
        static_assert(attention_for<Attention, first> || explain_attention<Attention, first>());
        return std::type_identity<first>{};
    } else {
        return std::type_identity<float>{};  // what is wrong has been said
    }
}

template <class X>
consteval bool of_const_elements() {
    if constexpr (tensor_like<X>)
        return std::is_const_v<element_of_t<X>>;
    else
        return false;
}

template <class Layout>
consteval bool projects() {
    static_assert(std::is_same_v<Layout, sequence_local>,
                  "ulysses: a projection accepts sequence_local views only; head_local pipelines "
                  "have `attend`.");
    return true;
}

template <class... X>
consteval bool mutable_outputs() {
    static_assert((... && !of_const_elements<X>()),
                  "ulysses: the elements of an output (o, y, dq, dk, dv, dx) must not be const.");
    return true;
}

}  // namespace ulysses::inline ULYSSES_ABI
