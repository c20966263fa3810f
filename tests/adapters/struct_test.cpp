// SPDX-License-Identifier: Apache-2.0

#include "foreign.hpp"

#include <ulysses/ulysses.hpp>

#include <doctest/doctest.h>

#include <array>
#include <bit>
#include <cstdint>
#include <vector>

using namespace foreign;

// A plain struct, packed, without a batch axis.
// [snippet packed]
namespace engine {
struct activation {
    float* data;
    int tokens, heads, dim;
};
}  // namespace engine

template <>
struct ulysses::tensor_traits<engine::activation> {
    static float* data(engine::activation const& x) { return x.data; }
    static std::array<int, 3> extents(engine::activation const& x) {
        return {x.tokens, x.heads, x.dim};
    }
};
// [/snippet]

// Strides, the order of the axes and constness, once for all element types.
// [snippet ordered]
namespace engine {
template <class T, ulysses::axes Order>
struct tensor {
    T* first;
    std::vector<long> shape, stride;  // in elements
};
}  // namespace engine

template <class T, ulysses::axes Order>
struct ulysses::tensor_traits<engine::tensor<T, Order>> {
    static T* data(engine::tensor<T, Order> const& x) { return x.first; }
    static auto const& extents(engine::tensor<T, Order> const& x) { return x.shape; }
    static auto const& strides(engine::tensor<T, Order> const& x) { return x.stride; }
    static constexpr axes order = Order;
};
// [/snippet]

// Members data(), extent(i), stride(i) and rank(), as Kokkos::View has them.
// [snippet view]
namespace engine {
template <class T>
struct view {
    T* first;
    std::array<std::size_t, 4> sizes, steps;
    T* data() const { return first; }
    static constexpr std::size_t rank() { return 4; }
    std::size_t extent(std::size_t axis) const { return sizes[axis]; }
    std::size_t stride(std::size_t axis) const { return steps[axis]; }
};
}  // namespace engine

template <class T>
struct ulysses::tensor_traits<engine::view<T>> {
    using four = std::array<std::size_t, 4>;
    static T* data(engine::view<T> const& x) { return x.data(); }
    static four extents(engine::view<T> const& x) {
        return {x.extent(0), x.extent(1), x.extent(2), x.extent(3)};
    }
    static four strides(engine::view<T> const& x) {
        return {x.stride(0), x.stride(1), x.stride(2), x.stride(3)};
    }
};
// [/snippet]

// An element type of the engine's own, of bfloat16's representation.
// [snippet element]
namespace engine {
class bfloat {
   public:
    bfloat() = default;
    explicit bfloat(float value) : bits_(ulysses::bf16(value).bits) {}
    operator float() const { return std::bit_cast<float>(std::uint32_t{bits_} << 16); }

   private:
    std::uint16_t bits_ = 0;
};
}  // namespace engine

template <>
inline constexpr ulysses::dtype ulysses::dtype_of<engine::bfloat> = ulysses::dtype::bf16;
// [/snippet]

namespace {

std::vector<long> permuted(uly::extents4 const& x, std::array<std::size_t, 4> const& from,
                           std::size_t first) {
    std::vector<long> all;
    for (auto i = first; i < 4; ++i) all.push_back(static_cast<long>(x[from[i]]));
    return all;
}

/// Axes in `Order`; without the batch when `first` is 1.
template <uly::axes Order, std::size_t First = 0>
struct as_ordered {
    static constexpr std::array<std::size_t, 4> with_batch[3] = {
        {0, 1, 2, 3}, {1, 0, 2, 3}, {0, 2, 1, 3}};
    static constexpr std::array<std::size_t, 4> without[3] = {
        {0, 1, 2, 3}, {0, 1, 2, 3}, {0, 2, 1, 3}};

    template <class T>
    auto operator()(slot<T> const& x) const {
        auto const& from = (First == 0 ? with_batch : without)[static_cast<std::size_t>(Order)];
        return engine::tensor<T, Order>{x.first, permuted(x.sizes, from, First),
                                        permuted(x.steps, from, First)};
    }
};

}  // namespace

TEST_CASE("struct: packed rows of one sample") {
    // Its elements are never const: constness is decided by the parameter.
    check<float>(
        bshd,
        []<class T>(slot<T> const& x) {
            return engine::activation{const_cast<float*>(x.first), static_cast<int>(x.sizes[1]),
                                      static_cast<int>(x.sizes[2]), static_cast<int>(x.sizes[3])};
        },
        1);
}

TEST_CASE("struct: axes in the order that the traits say") {
    for (auto const& lay : {bshd, sbhd, bhsd, padded}) {
        check<float>(lay, as_ordered<uly::axes::bshd>{});
        check<float>(lay, as_ordered<uly::axes::sbhd>{});
        check<float>(lay, as_ordered<uly::axes::bhsd>{});
    }
}

TEST_CASE("struct: three axes in each order") {
    for (auto const& lay : {bshd, sbhd, bhsd, padded}) {
        check<float>(lay, as_ordered<uly::axes::bshd, 1>{}, 1);
        check<float>(lay, as_ordered<uly::axes::sbhd, 1>{}, 1);
        check<float>(lay, as_ordered<uly::axes::bhsd, 1>{}, 1);
    }
}

TEST_CASE("struct: q, k and v side by side in the rows of one matrix, their gradients alike") {
    check<float>(packed_qkv{}, as_ordered<uly::axes::bshd>{});
    check<double>(packed_qkv{}, as_ordered<uly::axes::bhsd>{});
}

TEST_CASE("struct: a type that is like a Kokkos view") {
    auto const as_kokkos = []<class T>(slot<T> const& x) {
        engine::view<T> view{x.first, {}, {}};
        for (std::size_t axis = 0; axis < 4; ++axis) {
            view.sizes[axis] = static_cast<std::size_t>(x.sizes[axis]);
            view.steps[axis] = static_cast<std::size_t>(x.steps[axis]);
        }
        return view;
    };
    check<float>(bshd, as_kokkos);
    check<float>(bhsd, as_kokkos);
}

TEST_CASE("struct: elements of the engine's own 16-bit type") {
    static_assert(uly::element<engine::bfloat>);
    check<engine::bfloat, uly::bf16>(bshd, as_ordered<uly::axes::bshd>{});
    check<engine::bfloat, uly::bf16>(packed_qkv{}, as_ordered<uly::axes::sbhd>{});
    check<uly::half>(padded, as_ordered<uly::axes::bhsd>{});
}

TEST_CASE("struct: operands of const elements are inputs only") {
    using constant = engine::tensor<float const, uly::axes::bshd>;
    static_assert(uly::tensor_like<constant>);
    static_assert(std::is_same_v<uly::element_of_t<constant>, float const>);
}
