// SPDX-License-Identifier: Apache-2.0

#include "foreign.hpp"

#include <ulysses/adapters/dlpack.hpp>
#include <ulysses/ulysses.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#define HAS_DLPACK 1
#endif

using namespace foreign;

namespace {

/// The structs of DLPack 1.0, as an engine may carry them in a namespace of its own.
namespace carried {
enum device_kind : std::int32_t { cpu = 1, cuda = 2, cuda_host = 3, rocm_host = 11 };
struct DLDevice {
    device_kind device_type;
    std::int32_t device_id;
};
struct DLDataType {
    std::uint8_t code, bits;
    std::uint16_t lanes;
};
struct DLTensor {
    void* data;
    DLDevice device;
    std::int32_t ndim;
    DLDataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};
struct DLManagedTensor {
    DLTensor dl_tensor;
    void* manager_ctx;
    void (*deleter)(DLManagedTensor*);
};
struct DLManagedTensorVersioned {
    struct {
        std::uint32_t major, minor;
    } version;
    void* manager_ctx;
    void (*deleter)(DLManagedTensorVersioned*);
    std::uint64_t flags;
    DLTensor dl_tensor;
};
}  // namespace carried

template <class T>
carried::DLDataType type_of() {
    return {static_cast<std::uint8_t>(std::is_same_v<T, uly::bf16> ? 4 : 2), sizeof(T) * 8, 1};
}

/// A tensor as another library hands it over, with the memory of its shape and strides.
template <class Tensor>
struct handed_over {
    std::vector<std::int64_t> shape, strides;
    Tensor tensor{};

    template <class T>
    handed_over(T* data, std::vector<std::int64_t> sizes, std::vector<std::int64_t> steps)
        : shape(std::move(sizes)), strides(std::move(steps)) {
        tensor.data = const_cast<void*>(static_cast<void const*>(data));
        tensor.device.device_type = static_cast<decltype(tensor.device.device_type)>(1);
        tensor.ndim = static_cast<int>(shape.size());
        auto const type = type_of<std::remove_const_t<T>>();
        tensor.dtype = {type.code, type.bits, type.lanes};
        tensor.shape = shape.data();
        tensor.strides = strides.empty() ? nullptr : strides.data();
    }
};

/// Adopts slots by way of a DLTensor, whose struct is gone when the operand is used.
template <class Tensor, uly::axes Order = uly::axes::bshd>
struct as_dlpack {
    template <class T>
    auto operator()(slot<T> const& x) const {
        constexpr std::array<std::size_t, 4> from[3] = {{0, 1, 2, 3}, {1, 0, 2, 3}, {0, 2, 1, 3}};
        std::vector<std::int64_t> sizes, steps;
        for (auto const axis : from[static_cast<std::size_t>(Order)]) {
            sizes.push_back(x.sizes[axis]);
            steps.push_back(x.steps[axis]);
        }
        handed_over<Tensor> const given(x.first, sizes, steps);
        return uly::dlpack::view<T, Order>(given.tensor);
    }
};

using carried_tensor = handed_over<carried::DLTensor>;

template <class T, class Tensor>
std::string refusal(Tensor const& tensor) {
    return message_of<uly::invalid_tensor>([&] { uly::dlpack::view<T>(tensor); });
}

struct refused {
    std::vector<float> memory = std::vector<float>(48);
    carried_tensor given{memory.data(), {2, 3, 2, 4}, {24, 8, 4, 1}};
    carried::DLTensor& tensor = given.tensor;

    template <class T = float>
    void check(std::string const& text) const {
        auto const message = refusal<T>(tensor);
        CAPTURE(message);
        CHECK(contains(message, "ulysses: dlpack::view: " + text + " ["));
        CHECK(contains(message, "dlpack_test.cpp:"));
    }
};

static_assert(uly::dlpack::tensor<carried::DLTensor>);
static_assert(uly::dlpack::managed_tensor<carried::DLManagedTensor>);
static_assert(uly::dlpack::managed_tensor<carried::DLManagedTensorVersioned>);
static_assert(!uly::dlpack::tensor<carried::DLManagedTensor>);
static_assert(!uly::dlpack::tensor<carried::DLDevice>);

}  // namespace

TEST_CASE("dlpack: operands of every layout and element type") {
    using carried::DLTensor;
    for (auto const& lay : {bshd, sbhd, bhsd, padded}) {
        check<float>(lay, as_dlpack<DLTensor>{});
        check<float>(lay, as_dlpack<DLTensor, uly::axes::sbhd>{});
        check<float>(lay, as_dlpack<DLTensor, uly::axes::bhsd>{});
    }
    check<float>(packed_qkv{}, as_dlpack<DLTensor>{});
    check<double>(padded, as_dlpack<DLTensor>{});
    check<uly::bf16>(bshd, as_dlpack<DLTensor>{});
    check<uly::half>(bshd, as_dlpack<DLTensor>{});
}

TEST_CASE("dlpack: without strides a tensor is packed; byte_offset is applied") {
    check<float>(
        bshd,
        []<class T>(slot<T> const& x) {
            auto const& e = x.sizes;
            handed_over<carried::DLTensor> given(x.first, {e[1], e[2], e[3]}, {});
            given.tensor.data = static_cast<std::byte*>(given.tensor.data) - 1024;
            given.tensor.byte_offset = 1024;
            // [snippet]
            auto const& from_outside = given.tensor;  // a DLTensor
            auto const operand = uly::dlpack::view<T>(from_outside);
            // [/snippet]
            return operand;
        },
        1);
}

TEST_CASE("dlpack: managed tensors, with and without a version") {
    check<float>(padded, []<class T>(slot<T> const& x) {
        handed_over<carried::DLTensor> const given(x.first, {x.sizes.begin(), x.sizes.end()},
                                                   {x.steps.begin(), x.steps.end()});
        carried::DLManagedTensor const managed{given.tensor, nullptr, nullptr};
        return uly::dlpack::view<T>(managed);
    });
    check<float>(padded, []<class T>(slot<T> const& x) {
        handed_over<carried::DLTensor> const given(x.first, {x.sizes.begin(), x.sizes.end()},
                                                   {x.steps.begin(), x.steps.end()});
        auto const read_only = static_cast<std::uint64_t>(std::is_const_v<T>);
        carried::DLManagedTensorVersioned const managed{
            {1, 3}, nullptr, nullptr, read_only, given.tensor};
        return uly::dlpack::view<T>(managed);
    });
}

#if defined(HAS_DLPACK)
TEST_CASE("dlpack: the structs of dlpack.h") {
    static_assert(uly::dlpack::tensor<DLTensor>);
    static_assert(uly::dlpack::managed_tensor<DLManagedTensor>);
    check<float>(padded, as_dlpack<DLTensor>{});
    check<float>(packed_qkv{}, as_dlpack<DLTensor, uly::axes::bhsd>{});
    check<uly::bf16>(bshd, as_dlpack<DLTensor>{});
    check<float>(bshd, []<class T>(slot<T> const& x) {
        handed_over<DLTensor> const given(x.first, {x.sizes.begin(), x.sizes.end()}, {});
        DLManagedTensor managed{};
        managed.dl_tensor = given.tensor;
        return uly::dlpack::view<T>(managed);
    });
    // The numbers that the adapter knows.
    namespace known = uly::dlpack::detail;
    CHECK(known::float_code == kDLFloat);
    CHECK(known::bfloat_code == kDLBfloat);
    CHECK(known::cpu == kDLCPU);
    CHECK(known::cuda_host == kDLCUDAHost);
    CHECK(known::rocm_host == kDLROCMHost);
}
#endif

TEST_CASE("dlpack: another element is refused") {
    refused x;
    CHECK(refusal<float>(x.tensor) == "nothing was thrown");
    x.check<double>(
        "dtype must be that of the element: code 2, bits 32, lanes 1; float64 has code 2, bits 64, "
        "lanes 1");
    x.tensor.dtype = {0, 32, 1};
    x.check("dtype must be that of the element: code 0, bits 32, lanes 1; float32 has code 2, bits "
            "32, lanes 1");
    x.tensor.dtype = {2, 32, 4};
    x.check("dtype must be that of the element: code 2, bits 32, lanes 4; float32 has code 2, bits "
            "32, lanes 1");
    x.tensor.dtype = {2, 16, 1};  // half and bfloat16 are told apart
    CHECK(refusal<uly::half>(x.tensor) == "nothing was thrown");
    x.check<uly::bf16>(
        "dtype must be that of the element: code 2, bits 16, lanes 1; bfloat16 has code 4, bits "
        "16, lanes 1");
    x.tensor.dtype = {4, 16, 1};
    CHECK(refusal<uly::bf16 const>(x.tensor) == "nothing was thrown");
}

TEST_CASE("dlpack: only host memory is accepted") {
    refused x;
    for (auto const device : {carried::cuda_host, carried::rocm_host, carried::cpu}) {
        x.tensor.device.device_type = device;
        CHECK(refusal<float>(x.tensor) == "nothing was thrown");
    }
    x.tensor.device.device_type = carried::cuda;
    x.check("the device must be host memory: device type 2, host memory is 1, 3 and 11");
}

TEST_CASE("dlpack: axes and extents") {
    refused x;
    for (int const axes : {-1, 0, 1, 5}) {
        x.tensor.ndim = axes;
        x.check(uly::concat("an operand has 2 to 4 axes: ", axes, " axes"));
    }
    x.tensor.ndim = 4;
    x.given.shape[2] = -7;
    x.check("extents must not be negative: extent -7 of axis 2");
    x.tensor.shape = nullptr;
    x.check("shape must not be null: 4 axes");
}

TEST_CASE("dlpack: memory") {
    refused x;
    x.tensor.byte_offset = 6;
    x.check("data + byte_offset must be aligned to the element: byte offset 6, 2 bytes past a "
            "multiple of 4");
    x.tensor.data = nullptr;
    x.tensor.byte_offset = 64;
    x.check("data must not be null: 48 elements, byte offset 64");
    // A tensor without elements may lie nowhere; a rank may hold no token.
    x.given.shape[1] = 0;
    auto const empty = uly::dlpack::view<float>(x.tensor);
    CHECK(empty.data() == nullptr);
    CHECK(empty.extents()[1] == 0);
}

TEST_CASE("dlpack: versions and read-only tensors") {
    refused x;
    carried::DLManagedTensorVersioned managed{{1, 0}, nullptr, nullptr, 1, x.tensor};
    auto const writing = refusal<float>(managed);
    CAPTURE(writing);
    CHECK(contains(writing, "a read-only tensor is viewed as const elements: flags 1 ["));
    CHECK(refusal<float const>(managed) == "nothing was thrown");
    managed.flags = 2;
    CHECK(refusal<float>(managed) == "nothing was thrown");
    managed.version.major = 2;
    CHECK(contains(refusal<float>(managed),
                   "the major version of DLPack must be known: 2, known is 1 ["));
}

TEST_CASE("dlpack: negative strides are left to the call, which refuses them") {
    refused x;
    x.given.strides[1] = -8;
    auto const turned = uly::dlpack::view<float>(x.tensor);
    auto const message = message_of<uly::invalid_tensor>([&] {
        uly::check_operand("attend", "q", uly::view_of_heads<uly::sequence_local>(turned, "q"),
                           {2, 3, 2, 4});
    });
    CHECK(contains(message, "strides must not be negative"));
}
