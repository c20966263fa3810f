#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/tensor_view.hpp>

#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

/// How a foreign tensor becomes a view, in three tiers: a `tensor_traits` specialisation, else the
/// tensor's own members, else the interface of std::mdspan.
namespace ulysses::inline ULYSSES_ABI {

struct host_space;

/// The order in which a tensor's extents name the axes. Tensors of rank 3 leave out the batch,
/// which is then 1; tensors [B, S, C] of whole tokens leave out the head.
enum class axes : std::uint8_t { bshd, sbhd, bhsd };

/// Adopts a foreign tensor type. A specialisation has
///
///     template <> struct ulysses::tensor_traits<my::tensor> {
///         static float* data(my::tensor const& t) { return t.ptr; }
///         static std::array<std::int64_t, 4> extents(my::tensor const& t) { return t.sizes; }
///         // The rest is optional.
///         static std::array<std::int64_t, 4> strides(my::tensor const& t) { return t.steps; }
///         static constexpr axes order = axes::sbhd;
///         using space_type = host_space;
///     };
///
/// `data` returns a pointer to the element type. Extents are a list of integers, one for each of 2 to
/// 4 axes, with `size()` and `[]`: an array, a span, a vector. Strides are in elements and a list with
/// `[]` of at least as many; without them the tensor is packed row-major. A specialisation that has
/// one of these names and something else by it, or a name close to one, is refused.
template <class X>
struct tensor_traits {};

template <class T, class Layout>
struct tensor_traits<tensor_view<T, Layout>> {
    static T* data(tensor_view<T, Layout> const& view) { return view.data; }
    static extents4 extents(tensor_view<T, Layout> const& view) { return view.extents; }
    static extents4 strides(tensor_view<T, Layout> const& view) { return view.strides; }
};

namespace detail {

template <class P>
concept points = std::is_pointer_v<std::remove_cvref_t<P>> &&
    std::is_object_v<std::remove_pointer_t<std::remove_cvref_t<P>>>;
template <class List>
concept indexed = requires(List const& list) {
    { list[0] } -> std::convertible_to<std::int64_t>;
};
template <class List>
concept counted = indexed<List> && requires(List const& list) {
    { list.size() } -> std::convertible_to<std::size_t>;
};

/// Its names are ambiguous in a class that derives from it and has them too, whatever they stand for
/// there.
struct every_name {
    int data, extents, strides, order, space_type;
    int stride, strides_, axis_order, layout, space;  // near ones
};
template <class X>
struct probed_traits : tensor_traits<X>, every_name {};
template <class X>
concept probeable = !std::is_final_v<tensor_traits<X>>;

template <class X>
concept traits_name_strides = probeable<X> && !requires {
    &probed_traits<X>::strides;
};
template <class X>
concept traits_name_order = probeable<X> && !requires {
    &probed_traits<X>::order;
};
template <class X>
concept traits_name_space_type = probeable<X> && !requires {
    &probed_traits<X>::space_type;
};
/// A specialisation that means to say where a tensor lies.
template <class X>
concept traits_name_access = traits_name_strides<X> ||(probeable<X> && !requires {
    &probed_traits<X>::data;
    &probed_traits<X>::extents;
});
/// One with a name that is taken for another and would never be looked at.
template <class X>
concept traits_misname = probeable<X> && !requires {
    &probed_traits<X>::stride;
    &probed_traits<X>::strides_;
    &probed_traits<X>::axis_order;
    &probed_traits<X>::layout;
    &probed_traits<X>::space;
};

template <class X>
concept data_by_traits = requires(X const& x) {
    { tensor_traits<X>::data(x) } -> points;
};
template <class X>
concept extents_by_traits = requires(X const& x) {
    { tensor_traits<X>::extents(x) } -> counted;
};
template <class X>
concept strides_by_traits = requires(X const& x) {
    { tensor_traits<X>::strides(x) } -> indexed;
};
template <class X>
concept order_by_traits = requires {
    typename std::integral_constant<axes, tensor_traits<X>::order>;
};

template <class X>
concept names_data = requires(X const& x) {
    x.data();
};
template <class X>
concept names_extents = requires(X const& x) {
    x.extents();
};
template <class X>
concept names_strides = requires(X const& x) {
    x.strides();
}
|| requires(X const& x) { x.strides; };
template <class X>
concept names_stride = requires(X const& x) {
    x.stride();
}
|| requires(X const& x) { x.stride(0); }
|| requires(X const& x) { x.stride; };
template <class X>
concept strides_by_members = requires(X const& x) {
    { x.strides() } -> indexed;
};
template <class X>
concept order_by_members = requires {
    typename std::integral_constant<axes, X::order>;
};

template <class X>
concept tensor_by_traits = data_by_traits<X> && extents_by_traits<X>;
template <class X>
concept tensor_by_members = !traits_name_access<X> && requires(X const& x) {
    { x.data() } -> points;
    { x.extents() } -> counted;
};
/// False for an mdspan whose accessor gives other values than those in memory, a scaled one say.
template <class X>
concept gives_elements = !requires {
    typename X::reference;
}
|| std::is_lvalue_reference_v<typename X::reference>;
template <class X>
concept tensor_by_mdspan = !traits_name_access<X> && gives_elements<X> && requires(X const& x) {
    { x.data_handle() } -> points;
    { x.rank() } -> std::convertible_to<std::size_t>;
    { x.extent(0) } -> std::convertible_to<std::int64_t>;
    { x.stride(0) } -> std::convertible_to<std::int64_t>;
};

/// What may be left out is there in a form that is understood, or is not there.
template <class X>
concept strides_fit = (tensor_by_traits<X> && (strides_by_traits<X> || !traits_name_strides<X>)) ||
                      (tensor_by_members<X> &&
                       (strides_by_members<X> || !(names_strides<X> || names_stride<X>))) ||
                      (!tensor_by_traits<X> && !tensor_by_members<X>);
template <class X>
concept order_fits = order_by_traits<X> ||
    (!traits_name_order<X> &&
     (tensor_by_traits<X> || order_by_members<X> || !requires { X::order; }));
template <class X>
concept space_fits = !traits_name_space_type<X> || requires {
    typename tensor_traits<X>::space_type;
};

/// A tensor before its axes have been given their roles.
template <class T>
struct raw_tensor {
    T* data = nullptr;
    std::size_t rank = 0;
    std::array<std::int64_t, 4> extents{};
    std::array<std::int64_t, 4> strides{};
    axes order = axes::bshd;
};

template <class X>
constexpr axes order_of() {
    if constexpr (order_by_traits<X>)
        return tensor_traits<X>::order;
    else if constexpr (order_by_members<X>)
        return X::order;
    else
        return axes::bshd;
}

template <class T, class Extents>
raw_tensor<T> with_extents(T* data, Extents const& extents) {
    raw_tensor<T> raw;
    raw.data = data;
    raw.rank = extents.size();
    for (std::size_t i = 0; i < raw.rank && i < 4; ++i)
        raw.extents[i] = static_cast<std::int64_t>(extents[i]);
    std::int64_t step = 1;
    for (std::size_t i = raw.rank; i-- > 0;)
        if (i < 4) {
            raw.strides[i] = step;
            step = wrapping_product(step, raw.extents[i]);
        }
    return raw;
}

template <class Raw, class Strides>
void set_strides(Raw& raw, Strides const& strides) {
    if constexpr (requires { strides.size(); })
        if (static_cast<std::size_t>(strides.size()) < raw.rank)
            raise(errc::invalid_tensor, {}, "tensor", "a tensor has a stride for each of its axes",
                  strides.size(), " strides, ", raw.rank, " axes");
    for (std::size_t i = 0; i < raw.rank && i < 4; ++i)
        raw.strides[i] = static_cast<std::int64_t>(strides[i]);
}

/// Gives axes of one element, whose strides frameworks leave arbitrary, those of a packed tensor.
template <class View>
void settle_strides(View& view) {
    auto const packed = packed_strides(view.extents);
    for (std::size_t axis = 0; axis < 4; ++axis)
        if (view.extents[axis] <= 1 && view.strides[axis] != 0) view.strides[axis] = packed[axis];
}

template <class X>
auto raw(X const& x) {
    if constexpr (tensor_by_traits<X>) {
        auto result = with_extents(tensor_traits<X>::data(x), tensor_traits<X>::extents(x));
        if constexpr (strides_by_traits<X>) set_strides(result, tensor_traits<X>::strides(x));
        result.order = order_of<X>();
        return result;
    } else if constexpr (tensor_by_members<X>) {
        auto result = with_extents(x.data(), x.extents());
        if constexpr (strides_by_members<X>) set_strides(result, x.strides());
        result.order = order_of<X>();
        return result;
    } else {
        using element_type = std::remove_reference_t<decltype(*x.data_handle())>;
        raw_tensor<element_type> result;
        result.data = x.data_handle();
        result.rank = static_cast<std::size_t>(x.rank());
        result.order = order_of<X>();
        for (std::size_t i = 0; i < result.rank && i < 4; ++i) {
            result.extents[i] = static_cast<std::int64_t>(x.extent(i));
            result.strides[i] = static_cast<std::int64_t>(x.stride(i));
        }
        return result;
    }
}

}  // namespace detail

/// A type that can be an operand: by traits, by members, or as an mdspan; its elements are double,
/// float, half or bf16 (`dtype_of`).
template <class X>
concept tensor_like = (detail::tensor_by_traits<X> || detail::tensor_by_members<X> ||
                       detail::tensor_by_mdspan<X>)&&!detail::traits_misname<X> &&
                      detail::strides_fit<X> && detail::order_fits<X> && detail::space_fits<X> &&
                      requires(X const& x) {
    requires element<std::remove_reference_t<decltype(*detail::raw(x).data)>>;
};

/// Element type of an operand, const where the operand is.
template <tensor_like X>
using element_of_t = std::remove_pointer_t<decltype(detail::raw(std::declval<X const&>()).data)>;

namespace detail {

template <class X>
constexpr auto space_of() {
    if constexpr (requires { typename tensor_traits<X>::space_type; })
        return std::type_identity<typename tensor_traits<X>::space_type>{};
    else if constexpr (requires { typename X::space_type; })
        return std::type_identity<typename X::space_type>{};
    else
        return std::type_identity<host_space>{};
}

}  // namespace detail

/// Where an operand's elements live; the host unless its type says otherwise.
template <class X>
using space_of_t = typename decltype(detail::space_of<X>())::type;

/// False for a view of another layout policy than `Layout`; foreign tensors name none.
template <class X, class Layout>
inline constexpr bool has_layout_or_none = true;
template <class T, class Own, class Layout>
inline constexpr bool has_layout_or_none<tensor_view<T, Own>, Layout> = std::same_as<Own, Layout>;

/// The view of a per-head operand [B, S, H, D], or [S, H, D] with a batch of one, in the axis order
/// of its type. `name` is what an error calls it. *Throws* `invalid_tensor` when it has another
/// number of axes.
template <layout_policy Layout, tensor_like X>
tensor_view<element_of_t<X>, Layout> view_of_heads(X const& x, std::string_view name,
                                                   where at = where::here()) {
    auto const raw = detail::raw(x);
    if (raw.rank != 3 && raw.rank != 4)
        raise(errc::invalid_tensor, at, name, "a per-head operand has 3 or 4 axes, [B, S, H, D]",
              raw.rank, " axes");
    // Position of batch, token, head and dim among the four; rank 3 has no batch axis.
    constexpr std::size_t places[3][4] = {{0, 1, 2, 3}, {1, 0, 2, 3}, {0, 2, 1, 3}};
    constexpr std::size_t places_without_batch[3][4] = {{4, 0, 1, 2}, {4, 0, 1, 2}, {4, 1, 0, 2}};
    auto const* place =
        (raw.rank == 4 ? places : places_without_batch)[static_cast<std::size_t>(raw.order)];
    tensor_view<element_of_t<X>, Layout> view;
    view.data = raw.data;
    for (std::size_t axis = 0; axis < 4; ++axis) {
        view.extents[axis] = place[axis] == 4 ? 1 : raw.extents[place[axis]];
        view.strides[axis] = place[axis] == 4 ? 0 : raw.strides[place[axis]];
    }
    detail::settle_strides(view);
    return view;
}

/// The view of an operand of whole tokens [B, S, C], or [S, C] with a batch of one, as [B, S, 1,
/// C]. *Throws* `invalid_tensor` when it has another number of axes.
template <layout_policy Layout, tensor_like X>
tensor_view<element_of_t<X>, Layout> view_of_tokens(X const& x, std::string_view name,
                                                    where at = where::here()) {
    auto const raw = detail::raw(x);
    // Our own views always have four axes; a head axis of one is then the absent one.
    auto const head = raw.order == axes::bhsd ? std::size_t{1} : std::size_t{2};
    auto const has_head_axis = raw.rank == 4 && raw.extents[head] == 1;
    if (raw.rank != 2 && raw.rank != 3 && !has_head_axis)
        raise(errc::invalid_tensor, at, name,
              "an operand of whole tokens has 2 or 3 axes, [B, S, C]", raw.rank, " axes");
    tensor_view<element_of_t<X>, Layout> view;
    view.data = raw.data;
    auto const dim = raw.rank - 1;
    auto const token_first = raw.rank == 2 || raw.order == axes::sbhd;
    auto const token_after_head = has_head_axis && head == 1;
    auto const token = token_first        ? std::size_t{0}
                       : token_after_head ? std::size_t{2}
                                          : std::size_t{1};
    auto const batch = token_first ? std::size_t{1} : std::size_t{0};
    view.extents = {raw.rank == 2 ? 1 : raw.extents[batch], raw.extents[token], 1,
                    raw.extents[dim]};
    view.strides = {raw.rank == 2 ? 0 : raw.strides[batch], raw.strides[token], 0,
                    raw.strides[dim]};
    detail::settle_strides(view);
    return view;
}

}  // namespace ulysses::inline ULYSSES_ABI
