#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/space.hpp>

#include <cstddef>
#include <span>
#include <utility>

namespace ulysses::inline ULYSSES_ABI {

/// Memory of a space that grows to the largest size asked for and is freed with its owner. Contents
/// are lost when it grows; in a steady state it allocates nothing.
template <class Space>
class buffer {
   public:
    using queue_type = typename Space::queue;

    buffer() = default;
    buffer(buffer&& other) noexcept
        : queue_(other.queue_),
          memory_(std::exchange(other.memory_, nullptr)),
          bytes_(std::exchange(other.bytes_, 0)) {}
    buffer& operator=(buffer&& other) noexcept {
        std::swap(queue_, other.queue_);
        std::swap(memory_, other.memory_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~buffer() { release(); }

    /// At least `bytes` bytes, aligned to 64, allocated and later freed on `queue`.
    std::span<std::byte> reserve(std::size_t bytes, queue_type queue = {}) {
        if (bytes > bytes_) {
            release();
            queue_ = queue;
            memory_ = static_cast<std::byte*>(Space::allocate(queue_, bytes));
            bytes_ = bytes;
        }
        return {memory_, bytes_};
    }

    std::byte* data() const { return memory_; }
    std::size_t bytes() const { return bytes_; }

   private:
    void release() {
        if (memory_ != nullptr) Space::deallocate(queue_, memory_, bytes_);
        memory_ = nullptr;
        bytes_ = 0;
    }

    [[no_unique_address]] queue_type queue_{};
    std::byte* memory_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI
