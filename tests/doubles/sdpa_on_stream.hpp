#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "cuda_runtime.hpp"
#include "sdpa.hpp"

#include <ulysses/adapters/cuda.hpp>

#include <cstddef>
#include <cstring>
#include <span>
#include <vector>

/// A double of plans that runs them when their stream gets there.
class sdpa_double_on_stream {
   public:
    using space_type = ulysses::cuda_space;
    template <class T>
    static constexpr bool takes = sdpa_double::takes<T>;
    static constexpr std::int64_t row_bytes = sdpa_double::row_bytes;

    template <class Key>
    std::size_t workspace_bytes(Key const& key) {
        return plans_.workspace_bytes(key);
    }
    template <class Key>
    void run(ulysses::cuda_space::queue on, Key const& key, ulysses::sdpa_operands const& operands,
             void* workspace) {
        doubles::enqueue(on.stream, [=, this] { plans_.run({}, key, operands, workspace); });
    }
    void write(ulysses::cuda_space::queue on, void* to, std::span<std::byte const> bytes) {
        doubles::enqueue(on.stream, [to, own = std::vector(bytes.begin(), bytes.end())] {
            std::memcpy(to, own.data(), own.size());
        });
    }

    std::size_t plans() const { return plans_.plans(); }

   private:
    sdpa_double plans_;
};
