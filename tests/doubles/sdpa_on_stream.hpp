#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "cuda_runtime.hpp"
#include "sdpa.hpp"

#include <ulysses/adapters/cuda.hpp>

#include <cstddef>
#include <span>
#include <string_view>

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
        ulysses::cuda_space::write(on, to, bytes);
    }

    static void expect_memory(std::string_view name, void const* first, void const* last) {
        ulysses::cuda_space::expect_memory("cudnn", name, first, last, {});
    }

    std::size_t plans() const { return plans_.plans(); }

   private:
    sdpa_double plans_;
};
