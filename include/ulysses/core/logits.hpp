#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/index_range.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/real.hpp>
#include <ulysses/core/tensor_view.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <ranges>
#include <span>

/// What happens to a layer's scores between Q K^T and the product with V.
///
/// Of query row i of head h and key j, at positions p and j of sample b:
///
///     s  = scale q . k
///     s  = softcap tanh(s / softcap)                                 softcap
///     s += bias[b, h, i, j]                                          bias
///     s -= slope[h] |p - j|                                          ALiBi
///     P  = exp(s) / (exp(sink[h]) + sum over the keys it sees of exp(s))    sinks
///     P  = keyed_random(b, h, i, j) < rate ? 0 : P / (1 - rate)      dropout
///
/// *Source*: softcap as in Gemma 2 (2024); ALiBi: Press et al. (2022); sinks as in gpt-oss (2025).
namespace ulysses::inline ULYSSES_ABI {

/// What a layer asks for; the values come with each call.
struct logit_rule {
    real softcap{};  ///< 0: none
    bool alibi = false, bias = false, sinks = false;
    friend constexpr bool operator==(logit_rule const&, logit_rule const&) = default;
};

namespace detail {

/// Calls `use(pointer)` with elements of the type that `type` names.
template <class Use>
void with_elements(void const* data, dtype type, Use const& use) {
    switch (type) {
        case dtype::f64: return use(static_cast<double const*>(data));
        case dtype::f32: return use(static_cast<float const*>(data));
        case dtype::f16: return use(static_cast<half const*>(data));
        case dtype::bf16: return use(static_cast<bf16 const*>(data));
        case dtype::none: return;
    }
}

}  // namespace detail

/// One number for each query head, of an element type known at run time. A view.
class head_values {
   public:
    head_values() = default;
    template <std::ranges::contiguous_range Values>
        requires element<std::ranges::range_value_t<Values>> head_values(Values const& values)
            : data_(std::ranges::data(values)),
              type_(dtype_of<std::ranges::range_value_t<Values>>),
              size_(static_cast<std::int64_t>(std::ranges::size(values))) {}

        bool empty() const { return size_ == 0; }
        std::int64_t size() const { return size_; }
        dtype type() const { return type_; }
        void const* data() const { return data_; }
        double operator[](std::int64_t head) const {
            double value = 0;
            detail::with_elements(data_, type_,
                                  [&](auto const* all) { value = static_cast<double>(all[head]); });
            return value;
        }
        /// Those of heads [first, first + count).
        head_values part(std::int64_t first, std::int64_t count) const {
            auto result = *this;
            if (empty()) return result;
            detail::with_elements(data_, type_,
                                  [&](auto const* all) { result.data_ = all + first; });
            result.size_ = count;
            return result;
        }

       private:
        void const* data_ = nullptr;
        dtype type_ = dtype::none;
        std::int64_t size_ = 0;
};

/// Places of a bias's elements: extents [B or 1, Hq or 1, Sq or 1, Sk or 1] of the whole sequence,
/// whatever this rank computes; an extent of 1 stands for all indices.
struct bias_layout {
    extents4 extents{};
    extents4 strides{};

    bias_layout() = default;
    bias_layout(extents4 const& shape, extents4 const& steps) : extents(shape), strides(steps) {
        for (std::size_t axis = 0; axis < 4; ++axis)
            if (extents[axis] == 1) strides[axis] = 0;
    }
    std::int64_t at(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
        return b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3];
    }
    friend bool operator==(bias_layout const&, bias_layout const&) = default;
};

/// A bias that is added to the scores, of an element type known at run time. A view of the whole
/// [B, Hq, Sq, Sk], the same on every rank; each reads what it computes with.
class logit_bias {
   public:
    logit_bias() = default;
    template <element T>
    logit_bias(T const* data, extents4 const& extents, extents4 const& strides)
        : data_(data), type_(dtype_of<T>), layout_(extents, strides) {}
    /// Packed, the last axis contiguous.
    template <element T>
    logit_bias(T const* data, extents4 const& extents)
        : logit_bias(data, extents, packed_strides(extents)) {}

    bool empty() const { return type_ == dtype::none; }
    void const* data() const { return data_; }
    dtype type() const { return type_; }
    bias_layout const& layout() const { return layout_; }

    /// to[j] = bias of key j, for the keys of a row.
    template <class A>
    void read(std::int64_t b, std::int64_t h, std::int64_t i, index_range keys, A* to) const {
        detail::with_elements(data_, type_, [&](auto const* all) {
            auto const* const row = all + layout_.at(b, h, i, 0);
            for (auto j = keys.begin; j < keys.end; ++j)
                to[j - keys.begin] = static_cast<A>(row[j * layout_.strides[3]]);
        });
    }
    /// Head 0 of the result is head `first` of this.
    logit_bias from_head(std::int64_t first) const {
        auto result = *this;
        detail::with_elements(data_, type_, [&](auto const* all) {
            result.data_ = all + first * layout_.strides[1];
        });
        return result;
    }

   private:
    void const* data_ = nullptr;
    dtype type_ = dtype::none;
    bias_layout layout_;
};

/// The gradient of a bias, with extents of its own choice: what an extent of 1 stands for is summed. It
/// is added to, by each rank for what it computes; the sum over ranks is the gradient.
template <class A>
class bias_gradient {
   public:
    bias_gradient() = default;
    bias_gradient(A* data, extents4 const& extents, extents4 const& strides)
        : data_(data), layout_(extents, strides) {}
    bias_gradient(A* data, extents4 const& extents)
        : bias_gradient(data, extents, packed_strides(extents)) {}

    bool empty() const { return data_ == nullptr; }
    A* data() const { return data_; }
    bias_layout const& layout() const { return layout_; }

    /// Adds ds[j] of the keys of a row.
    template <class B>
    void add(std::int64_t b, std::int64_t h, std::int64_t i, index_range keys, B const* ds) const {
        auto* const row = data_ + layout_.at(b, h, i, 0);
        for (auto j = keys.begin; j < keys.end; ++j)
            row[j * layout_.strides[3]] += static_cast<A>(ds[j - keys.begin]);
    }
    bias_gradient from_head(std::int64_t first) const {
        auto result = *this;
        if (!empty()) result.data_ += first * layout_.strides[1];
        return result;
    }

   private:
    A* data_ = nullptr;
    bias_layout layout_;
};

/// What dropout's random numbers are a function of, beside the global sample, head, query and key.
struct dropout_key {
    std::uint64_t seed = 0;
    std::uint64_t step = 0;   ///< the training step, so that each drops others
    std::uint64_t layer = 0;  ///< likewise
    std::uint64_t first_sample =
        0;  ///< global index of the call's sample 0, where batches are shared out
    friend bool operator==(dropout_key const&, dropout_key const&) = default;
};

/// What a call brings for what its layer asks for; the same on every rank. Views.
struct logit_inputs {
    head_values slopes{};  ///< ALiBi: one a query head
    head_values sinks{};   ///< one a query head
    logit_bias bias{};
    std::optional<dropout_key> dropout{};  ///< none: nothing is dropped, as in evaluation
};

/// Where a backward call adds the gradients of what is learned; empty: not wanted. Each rank adds what
/// its rows give: the gradient is the sum over ranks.
template <class A>
struct logit_gradients {
    std::span<A> sinks{};  ///< one a query head
    bias_gradient<A> bias{};
};

}  // namespace ulysses::inline ULYSSES_ABI
