#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/block.hpp>
#include <ulysses/exchange/messages.hpp>

#include <cstddef>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// Copies of blocks, listed one after the other and then executed at once. One side of some lies in a
/// message, which has memory only when all is listed.
template <class Space>
class copy_list {
   public:
    using queue_type = typename Space::queue;

    void clear() {
        blocks_.clear();
        packs_.clear();
        unpacks_.clear();
        bytes_ = 0;
    }

    void list(block_copy const& copy) {
        blocks_.push_back(merged(copy));
        bytes_ += static_cast<std::size_t>(copy.bytes());
    }
    /// Likewise, to a place in a message.
    void pack(block_copy const& copy, message_place const& to) { packs_.push_back({copy, to}); }
    /// Likewise, from one.
    void unpack(block_copy const& copy, message_place const& from) {
        unpacks_.push_back({copy, from});
    }

    /// Once messages have memory.
    void locate(message_buffer<Space> const& messages) {
        for (auto& each : packs_) {
            each.copy.to = messages.at(each.place);
            list(each.copy);
        }
        for (auto& each : unpacks_) {
            each.copy.from = messages.at(each.place);
            list(each.copy);
        }
        packs_.clear();
        unpacks_.clear();
    }

    /// Executes all that is listed, beside as many bytes on each of `ranks`, and forgets it.
    void execute(queue_type queue, int ranks) {
        Space::copy(queue, blocks_, bytes_ * static_cast<std::size_t>(ranks));
        clear();
    }

   private:
    struct message_copy {
        block_copy copy;
        message_place place;
    };

    std::vector<block_copy> blocks_;
    std::vector<message_copy> packs_, unpacks_;
    std::size_t bytes_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI
