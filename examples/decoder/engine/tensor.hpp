#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "arena.hpp"

#include <cstddef>
#include <cstdint>
#include <utility>

namespace engine {

/// Rows of floats, packed, in an arena.
class Tensor {
   public:
    Tensor(Arena& arena, std::int64_t rows, std::int64_t columns)
        : arena_(&arena), rows_(rows), columns_(columns) {
        first_ = static_cast<float*>(arena.take(bytes()));
    }
    Tensor(Tensor&& other) noexcept
        : arena_(other.arena_),
          first_(std::exchange(other.first_, nullptr)),
          rows_(other.rows_),
          columns_(other.columns_) {}
    Tensor& operator=(Tensor&& other) noexcept {
        std::swap(arena_, other.arena_);
        std::swap(first_, other.first_);
        std::swap(rows_, other.rows_);
        std::swap(columns_, other.columns_);
        return *this;
    }
    ~Tensor() {
        if (first_ != nullptr) arena_->give_back(first_, bytes());
    }

    std::int64_t rows() const { return rows_; }
    std::int64_t columns() const { return columns_; }
    float* row(std::int64_t i) { return first_ + i * columns_; }
    float const* row(std::int64_t i) const { return first_ + i * columns_; }

   private:
    std::size_t bytes() const { return static_cast<std::size_t>(rows_ * columns_) * sizeof(float); }

    Arena* arena_;
    float* first_ = nullptr;
    std::int64_t rows_, columns_;
};

/// Some columns of a tensor, read as heads side by side.
struct Heads {
    float* first;
    std::int64_t rows, heads, dim;
    std::int64_t stride;  // floats from one row to the next

    float* at(std::int64_t row, std::int64_t head) const {
        return first + row * stride + head * dim;
    }
};

}  // namespace engine
