#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/block.hpp>
#include <ulysses/core/buffer.hpp>
#include <ulysses/core/communicator.hpp>

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

/// Memory for the messages of a call between ranks that do not reach each other: one message a peer
/// and direction, in it the rows of every operand that moves, one operand behind the other.
namespace ulysses::inline ULYSSES_ABI {

/// A place in one peer's message.
struct message_place {
    int peer = 0;
    std::size_t offset = 0;
};

/// The messages of one direction. While copies are listed only their sizes are known; `reserve` then
/// gives them memory.
template <class Space>
class message_buffer {
   public:
    using queue_type = typename Space::queue;

    explicit message_buffer(int ranks) : bytes_(static_cast<std::size_t>(ranks)) {}

    /// No message for any peer.
    void clear() {
        std::fill(bytes_.begin(), bytes_.end(), std::size_t{0});
        total_ = 0;
    }

    /// Where the next operand's rows begin.
    message_place next(int peer) const { return {peer, bytes_[static_cast<std::size_t>(peer)]}; }

    /// Ends an operand's rows, of so many bytes.
    void extend(int peer, std::size_t bytes) {
        bytes_[static_cast<std::size_t>(peer)] += bytes;
        total_ += bytes;
    }

    /// *Throws* `out_of_memory`.
    void reserve(queue_type queue) {
        constexpr std::size_t line_bytes = 64;
        offsets_.clear();
        std::size_t used = 0;
        for (auto const bytes : bytes_) {
            offsets_.push_back(used);
            used += (bytes + line_bytes - 1) / line_bytes * line_bytes;
        }
        if (used > 0) memory_.reserve(used, queue);
    }

    bool empty() const { return total_ == 0; }
    std::size_t held_bytes() const { return memory_.bytes(); }

    std::byte* at(message_place const& place) const {
        return memory_.data() + offsets_[static_cast<std::size_t>(place.peer)] + place.offset;
    }

    /// Calls `use(peer, bytes)` for every message that is not empty.
    template <class Use>
    void for_each(Use const& use) const {
        for (std::size_t peer = 0; peer < bytes_.size(); ++peer)
            if (bytes_[peer] > 0)
                use(static_cast<int>(peer),
                    std::span<std::byte>(memory_.data() + offsets_[peer], bytes_[peer]));
    }

   private:
    std::vector<std::size_t> bytes_, offsets_;
    std::size_t total_ = 0;
    buffer<Space> memory_;
};

}  // namespace ulysses::inline ULYSSES_ABI
