// SPDX-License-Identifier: Apache-2.0

#include "foreign.hpp"

#include <ulysses/ulysses.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <vector>

using namespace foreign;

// [snippet tensor]
namespace engine {
enum class DType { f32, f64, bf16 };
struct Tensor {
    std::shared_ptr<std::byte> storage;  // shared by its views
    std::int64_t offset = 0;             // in bytes, as strides are
    std::vector<std::int64_t> shape, byte_strides;
    DType dtype = DType::f32;
};
}  // namespace engine
// [/snippet]

// [snippet typed]
namespace engine {
template <class T>
struct Typed {
    Tensor const& tensor;
};
}  // namespace engine

template <class T>
struct ulysses::tensor_traits<engine::Typed<T>> {
    static T* data(engine::Typed<T> const& x) {
        return reinterpret_cast<T*>(x.tensor.storage.get() + x.tensor.offset);
    }
    static std::span<std::int64_t const> extents(engine::Typed<T> const& x) {
        return x.tensor.shape;
    }
    static std::array<std::int64_t, 4> strides(engine::Typed<T> const& x) {
        std::array<std::int64_t, 4> in_elements{};
        for (std::size_t i = 0; i < x.tensor.byte_strides.size() && i < 4; ++i)
            in_elements[i] = x.tensor.byte_strides[i] / static_cast<std::int64_t>(sizeof(T));
        return in_elements;
    }
};
// [/snippet]

// [snippet dispatch]
namespace engine {
/// Calls `use(std::type_identity<T>{})` with the element type that all have.
template <class Use>
void dispatch(std::initializer_list<Tensor const*> all, Use const& use) {
    auto const type = (*all.begin())->dtype;
    for (auto const* each : all)
        if (each->dtype != type) throw std::invalid_argument("tensors of two dtypes");
    switch (type) {
        case DType::f32: return use(std::type_identity<float>{});
        case DType::f64: return use(std::type_identity<double>{});
        case DType::bf16: return use(std::type_identity<ulysses::bf16>{});
    }
}

template <class Layer>
void attend(Layer& layer, ulysses::sequence const& step, Tensor const& q, Tensor const& k,
            Tensor const& v, Tensor const& o) {
    dispatch({&q, &k, &v, &o}, [&]<class T>(std::type_identity<T>) {
        layer.attend(step, Typed<T>{q}, Typed<T>{k}, Typed<T>{v}, Typed<T>{o});
    });
}
}  // namespace engine
// [/snippet]

namespace {

template <class T>
constexpr engine::DType dtype = std::is_same_v<T, float>    ? engine::DType::f32
                                : std::is_same_v<T, double> ? engine::DType::f64
                                                            : engine::DType::bf16;

/// The tensor of a slot of any type; without its batch axis when `First` is 1.
template <std::size_t First, class T>
engine::Tensor tensor_of(slot<T> const& x) {
    using element = std::remove_const_t<T>;
    engine::Tensor made;
    made.dtype = dtype<element>;
    made.offset = 3 * static_cast<std::int64_t>(sizeof(element));
    // Nobody's to delete: the slot owns it.
    auto* const first = reinterpret_cast<std::byte*>(const_cast<element*>(x.first));
    made.storage = {first - made.offset, [](std::byte*) {}};
    for (auto i = First; i < 4; ++i) {
        made.shape.push_back(x.sizes[i]);
        made.byte_strides.push_back(x.steps[i] * static_cast<std::int64_t>(sizeof(element)));
    }
    return made;
}

/// The typed operand of a slot, which keeps its tensor.
template <class T>
struct kept {
    std::shared_ptr<engine::Tensor> tensor;
};

}  // namespace

template <class T>
struct ulysses::tensor_traits<kept<T>> {
    using typed = tensor_traits<engine::Typed<T>>;
    static T* data(kept<T> const& x) { return typed::data({*x.tensor}); }
    static auto extents(kept<T> const& x) { return typed::extents({*x.tensor}); }
    static auto strides(kept<T> const& x) { return typed::strides({*x.tensor}); }
};

namespace {

template <std::size_t First>
struct as_typed {
    template <class T>
    auto operator()(slot<T> const& x) const {
        return kept<T>{std::make_shared<engine::Tensor>(tensor_of<First>(x))};
    }
};

}  // namespace

TEST_CASE("dynamic: byte strides and any number of axes, more strides than axes") {
    for (auto const& lay : {bshd, padded}) {
        check<float>(lay, as_typed<0>{});
        check<double>(lay, as_typed<0>{});
        check<uly::bf16>(lay, as_typed<0>{});
        check<float>(lay, as_typed<1>{}, 1);
    }
}

TEST_CASE("dynamic: the element type is chosen by the tensors' dtype") {
    auto const run = []<class T>(std::type_identity<T>) {
        std::vector<T> values(2 * 3 * 4, T(0.5f)), found(values.size(), T(9.0f));
        slot<T> const source{values.data(), {1, 2, 3, 4}, {24, 12, 4, 1}},
            result{found.data(), {1, 2, 3, 4}, {24, 12, 4, 1}};
        auto const input = tensor_of<0>(source), output = tensor_of<1>(result);
        uly::pipeline layer{uly::serial{},
                            uly::sequence_local{},
                            uly::reference_attention{},
                            {.heads = 3, .head_dim = 4}};
        auto const step = uly::sequence::split(1, 1, 2);
        engine::attend(layer, step, input, input, input, output);
        for (auto const each : found) CHECK(static_cast<float>(each) == 0.5f);
        auto flat = output;
        flat.shape = {6, 4};
        CHECK_THROWS_AS(engine::attend(layer, step, input, input, input, flat),
                        uly::invalid_tensor);
        flat.shape = {1, 1, 2, 3, 4};
        CHECK_THROWS_AS(engine::attend(layer, step, input, input, input, flat),
                        uly::invalid_tensor);
        auto other = output;
        other.dtype = input.dtype == engine::DType::f32 ? engine::DType::f64 : engine::DType::f32;
        CHECK_THROWS_AS(engine::attend(layer, step, input, input, input, other),
                        std::invalid_argument);
    };
    run(std::type_identity<float>{});
    run(std::type_identity<double>{});
    run(std::type_identity<uly::bf16>{});
}
