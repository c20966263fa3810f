#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

namespace engine {

/// Memory of one worker: blocks are cut from chunks and, given back, are kept by size for the next
/// of that size. Knows how much of it is in use. A block may be given back by any thread.
class Arena {
   public:
    explicit Arena(std::size_t chunk_bytes = std::size_t{1} << 18) : chunk_bytes_(chunk_bytes) {}
    Arena(Arena const&) = delete;
    Arena& operator=(Arena const&) = delete;

    /// Aligned to 64 bytes.
    void* take(std::size_t bytes) {
        std::lock_guard lock(mutex_);
        auto const size = rounded(bytes);
        auto& free = free_[size];
        if (free.empty()) free.push_back(cut(size));
        auto* const block = free.back();
        free.pop_back();
        in_use_ += size;
        peak_ = std::max(peak_, in_use_);
        return block;
    }

    void give_back(void* block, std::size_t bytes) noexcept {
        std::lock_guard lock(mutex_);
        auto const size = rounded(bytes);
        in_use_ -= size;
        auto& free = free_.find(size)->second;
        free.push_back(static_cast<std::byte*>(block));
    }

    std::size_t in_use() const { return in_use_; }
    std::size_t peak() const { return peak_; }

   private:
    static constexpr std::align_val_t alignment{64};
    struct Release {
        void operator()(std::byte* chunk) const { ::operator delete(chunk, alignment); }
    };
    using Chunk = std::unique_ptr<std::byte, Release>;

    static std::size_t rounded(std::size_t bytes) {
        return std::max<std::size_t>((bytes + 63) / 64 * 64, 64);
    }

    std::byte* cut(std::size_t size) {
        if (size > left_) {
            left_ = std::max(size, chunk_bytes_);
            chunks_.emplace_back(static_cast<std::byte*>(::operator new(left_, alignment)));
            next_ = chunks_.back().get();
        }
        auto* const block = next_;
        next_ += size;
        left_ -= size;
        return block;
    }

    std::size_t chunk_bytes_, left_ = 0, in_use_ = 0, peak_ = 0;
    std::byte* next_ = nullptr;
    std::vector<Chunk> chunks_;
    std::map<std::size_t, std::vector<std::byte*>> free_;
    std::mutex mutex_;
};

}  // namespace engine
