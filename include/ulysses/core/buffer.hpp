#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/space.hpp>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// Memory of a space that grows to the largest size asked for and is freed with its owner. Contents
/// are lost when it grows; in a steady state it allocates nothing. What a recorded queue was given, which
/// is run again, is freed with its owner only.
template <class Space>
class buffer {
   public:
    using queue_type = typename Space::queue;

    buffer() = default;
    buffer(buffer&& other) noexcept { swap(other); }
    buffer& operator=(buffer&& other) noexcept {
        swap(other);
        return *this;
    }
    ~buffer() {
        release();
        for (auto const& [queue, memory, bytes] : recorded_)
            Space::deallocate(queue, memory, bytes);
    }

    /// At least `bytes` bytes, aligned to 64, allocated and later freed on `queue`. Holds what it held
    /// when a recorded queue's memory cannot grow.
    std::span<std::byte> reserve(std::size_t bytes, queue_type queue = {}) {
        if constexpr (requires { Space::records(queue); })
            is_recorded_ = is_recorded_ || Space::records(queue);
        if (bytes > held_.bytes) {
            if (is_recorded_)
                recorded_.reserve(recorded_.size() + 1);
            else
                release();
            auto* const memory = static_cast<std::byte*>(Space::allocate(queue, bytes));
            if (held_.memory != nullptr) recorded_.push_back(held_);
            held_ = {queue, memory, bytes};
            is_recorded_ = false;
        }
        return {held_.memory, held_.bytes};
    }

    std::byte* data() const { return held_.memory; }
    std::size_t bytes() const { return held_.bytes; }

   private:
    struct piece {
        [[no_unique_address]] queue_type queue{};
        std::byte* memory = nullptr;
        std::size_t bytes = 0;
    };

    void release() {
        if (held_.memory != nullptr) Space::deallocate(held_.queue, held_.memory, held_.bytes);
        held_ = {};
    }
    void swap(buffer& other) noexcept {
        std::swap(held_, other.held_);
        std::swap(recorded_, other.recorded_);
        std::swap(is_recorded_, other.is_recorded_);
    }

    piece held_;
    std::vector<piece> recorded_;
    bool is_recorded_ = false;
};

}  // namespace ulysses::inline ULYSSES_ABI
