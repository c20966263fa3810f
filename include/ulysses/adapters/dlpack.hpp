#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/tensor.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

/// Tensors handed over by DLPack, as operands.
///
///     layer.attend(step, uly::dlpack::view<float const>(*q), ..., uly::dlpack::view<float>(*o));
///
/// No dlpack.h is included. Its structs are plain data of a fixed layout, so any type with their
/// members will do: the real header in whichever version, or the copy of it that an engine carries
/// already, perhaps in a namespace of its own. What an engine includes is then never in conflict
/// with what this header would have included.
///
/// *Source*: https://dmlc.github.io/dlpack/latest/c_api.html
namespace ulysses::inline ULYSSES_ABI::dlpack {

/// A `DLTensor`, by its members.
template <class X>
concept tensor = requires(X const& x) {
    { x.data } -> std::convertible_to<void*>;
    {static_cast<std::int64_t>(x.device.device_type)};
    { x.ndim } -> std::convertible_to<std::int64_t>;
    { x.dtype.code } -> std::convertible_to<std::int64_t>;
    { x.dtype.bits } -> std::convertible_to<std::int64_t>;
    { x.dtype.lanes } -> std::convertible_to<std::int64_t>;
    { x.shape } -> std::convertible_to<std::int64_t const*>;
    { x.strides } -> std::convertible_to<std::int64_t const*>;
    { x.byte_offset } -> std::convertible_to<std::uint64_t>;
};

/// A `DLManagedTensor`, or a `DLManagedTensorVersioned`, which also has `version` and `flags`.
template <class X>
concept managed_tensor = requires(X const& x) {
    requires tensor<std::remove_cvref_t<decltype(x.dl_tensor)>>;
};

/// What `view` returns: an operand by its members. It does not own, and does not refer to the
/// struct that it was made of.
template <element T, axes Order>
class operand {
   public:
    static constexpr axes order = Order;

    operand(T* first, std::span<std::int64_t const> sizes, std::span<std::int64_t const> steps)
        : data_(first), rank_(sizes.size()) {
        std::copy(sizes.begin(), sizes.end(), sizes_.begin());
        std::copy(steps.begin(), steps.end(), steps_.begin());
    }

    T* data() const { return data_; }
    std::span<std::int64_t const> extents() const { return {sizes_.data(), rank_}; }
    std::span<std::int64_t const> strides() const { return {steps_.data(), rank_}; }

   private:
    T* data_;
    std::size_t rank_;
    std::array<std::int64_t, 4> sizes_{}, steps_{};
};

namespace detail {

/// Codes of DLDataTypeCode and DLDeviceType, and the flag of a read-only tensor.
inline constexpr std::int64_t float_code = 2, bfloat_code = 4;
inline constexpr std::int64_t cpu = 1, cuda_host = 3, rocm_host = 11;
inline constexpr std::uint64_t read_only = 1;
inline constexpr std::int64_t version_major = 1;

template <class T, class X>
void check_type_and_device(X const& x, where at) {
    constexpr auto wanted = dtype_of<std::remove_const_t<T>>;
    constexpr auto code = wanted == dtype::bf16 ? bfloat_code : float_code;
    constexpr auto bits = static_cast<std::int64_t>(sizeof(T) * 8);
    if (x.dtype.code != code || x.dtype.bits != bits || x.dtype.lanes != 1)
        raise(errc::invalid_tensor, at, "dlpack::view", "dtype must be that of the element",
              "code ", x.dtype.code, ", bits ", x.dtype.bits, ", lanes ", x.dtype.lanes, "; ",
              name(wanted), " has code ", code, ", bits ", bits, ", lanes 1");
    auto const device = static_cast<std::int64_t>(x.device.device_type);
    if (device != cpu && device != cuda_host && device != rocm_host)
        raise(errc::invalid_tensor, at, "dlpack::view", "the device must be host memory",
              "device type ", device, ", host memory is ", cpu, ", ", cuda_host, " and ",
              rocm_host);
}

}  // namespace detail

/// The view of a DLTensor as elements T, which a program knows when it is compiled and a DLTensor
/// when it runs; const for a tensor that is only read. `Order` names its axes. Strides left out
/// (null) mean packed row-major; `byte_offset` is applied.
///
/// *Throws* `invalid_tensor` with the values of both sides when the dtype is not T's, the device is
/// not host memory, the number of axes is not 2 to 4, or the memory is null or not aligned to T.
/// Everything else is checked by the call that the operand is passed to.
template <element T, axes Order = axes::bshd, tensor X>
operand<T, Order> view(X const& x, where at = where::here()) {
    detail::check_type_and_device<T>(x, at);
    if (x.ndim < 2 || x.ndim > 4)
        raise(errc::invalid_tensor, at, "dlpack::view", "an operand has 2 to 4 axes", x.ndim,
              " axes");
    if (x.shape == nullptr)
        raise(errc::invalid_tensor, at, "dlpack::view", "shape must not be null", x.ndim, " axes");
    auto const rank = static_cast<std::size_t>(x.ndim);
    std::span<std::int64_t const> const sizes(x.shape, rank);
    auto empty = false;
    for (std::size_t axis = 0; axis < rank; ++axis) {
        if (sizes[axis] < 0)
            raise(errc::invalid_tensor, at, "dlpack::view", "extents must not be negative",
                  "extent ", sizes[axis], " of axis ", axis);
        empty = empty || sizes[axis] == 0;
    }
    std::array<std::int64_t, 4> steps{};
    std::int64_t packed = 1;
    for (auto axis = rank; axis-- > 0;
         packed = ulysses::detail::wrapping_product(packed, sizes[axis]))
        steps[axis] = x.strides != nullptr ? x.strides[axis] : packed;
    if (empty) return {nullptr, sizes, {steps.data(), rank}};

    if (x.data == nullptr)
        raise(errc::invalid_tensor, at, "dlpack::view", "data must not be null", packed,
              " elements, byte offset ", x.byte_offset);
    auto const address = reinterpret_cast<std::uintptr_t>(x.data) + x.byte_offset;
    if (address < x.byte_offset)
        raise(errc::invalid_tensor, at, "dlpack::view", "data + byte_offset must be an address",
              "byte offset ", x.byte_offset);
    if (address % alignof(T) != 0)
        raise(errc::invalid_tensor, at, "dlpack::view",
              "data + byte_offset must be aligned to the element", "byte offset ", x.byte_offset,
              ", ", address % alignof(T), " bytes past a multiple of ", alignof(T));
    auto* const first = static_cast<std::byte*>(x.data) + x.byte_offset;
    return {reinterpret_cast<T*>(first), sizes, {steps.data(), rank}};
}

/// The view of a managed tensor's DLTensor. Its deleter stays with the caller, to be called when no
/// call uses the operand any more.
///
/// *Throws* `invalid_tensor` as above; also for another major version of DLPack, and for a
/// read-only tensor whose elements would not be const.
template <element T, axes Order = axes::bshd, managed_tensor X>
operand<T, Order> view(X const& x, where at = where::here()) {
    if constexpr (requires { x.version.major; })
        if (x.version.major != detail::version_major)
            raise(errc::invalid_tensor, at, "dlpack::view",
                  "the major version of DLPack must be known", x.version.major, ", known is ",
                  detail::version_major);
    if constexpr (requires { x.flags; } && !std::is_const_v<T>)
        if ((x.flags & detail::read_only) != 0)
            raise(errc::invalid_tensor, at, "dlpack::view",
                  "a read-only tensor is viewed as const elements", "flags ", x.flags);
    return view<T, Order>(x.dl_tensor, at);
}

}  // namespace ulysses::inline ULYSSES_ABI::dlpack
