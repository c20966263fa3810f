#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/tensor.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

/// The model's own tensor, as an engine would have one, and its adoption by the library.
namespace lm {

/// Rows of one rank's tokens, [B, s, width], packed. Owns memory that grows to the largest shape
/// seen. Like a pointer, a const tensor still gives access to its elements.
template <class T>
class tensor {
   public:
    tensor() = default;
    tensor(std::int64_t batch, std::int64_t tokens, std::int64_t width) {
        reshape(batch, tokens, width);
    }

    /// Contents are lost when the memory grows.
    void reshape(std::int64_t batch, std::int64_t tokens, std::int64_t width) {
        batch_ = batch;
        tokens_ = tokens;
        width_ = width;
        if (size() <= capacity_) return;
        capacity_ = size();
        elements_ = std::make_unique<T[]>(static_cast<std::size_t>(capacity_));
    }

    T* data() const { return elements_.get(); }
    T* row(std::int64_t i) const { return data() + i * width_; }
    std::int64_t batch() const { return batch_; }
    std::int64_t tokens() const { return tokens_; }
    std::int64_t width() const { return width_; }
    std::int64_t rows() const { return batch_ * tokens_; }
    std::int64_t size() const { return rows() * width_; }
    std::size_t bytes() const { return static_cast<std::size_t>(capacity_) * sizeof(T); }

   private:
    std::unique_ptr<T[]> elements_;
    std::int64_t batch_ = 0, tokens_ = 0, width_ = 0, capacity_ = 0;
};

}  // namespace lm

// [snippet]
template <class T>
struct ulysses::tensor_traits<lm::tensor<T>> {
    static T* data(lm::tensor<T> const& x) { return x.data(); }
    static std::array<std::int64_t, 3> extents(lm::tensor<T> const& x) {
        return {x.batch(), x.tokens(), x.width()};
    }
};
// [/snippet]
