#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cuda_blocks.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

/// Lists of copies and sums, and bytes, as launches. `Launcher::run(stream, tiles, body)` runs body(tile, thread)
/// for every thread of `tiles` thread blocks: a kernel, or in tests a loop.
namespace ulysses::inline ULYSSES_ABI::detail {

/// The x extent of a grid.
inline constexpr std::int64_t most_tiles = 0x7fffffff;

template <class Launcher, class List, class Items, class Take>
cudaError_t run_lists(cudaStream_t stream, Items& items, Take const& take) {
    while (!items.empty()) {
        List list;
        auto const tiles = take(list, items);
        if (tiles > most_tiles) return cudaErrorInvalidConfiguration;
        if (tiles == 0) continue;
        if (auto const result = Launcher::run(stream, tiles, list); result != cudaSuccess)
            return result;
    }
    return cudaSuccess;
}

template <class Launcher>
cudaError_t copies_by(cudaStream_t stream, std::span<block_copy const> blocks) {
    auto const take = [](auto& list, auto& left) { return take_copies(list, left); };
    if (blocks.size() <= few_copies::capacity)
        return run_lists<Launcher, few_copies>(stream, blocks, take);
    return run_lists<Launcher, many_copies>(stream, blocks, take);
}

/// body(tile, thread) for each of `body.threads()` threads.
template <class Launcher, class Body>
cudaError_t threads_by(cudaStream_t stream, Body const& body) {
    auto const tiles = (body.threads() + block_threads - 1) / block_threads;
    if (tiles > most_tiles) return cudaErrorInvalidConfiguration;
    return tiles == 0 ? cudaSuccess : Launcher::run(stream, tiles, body);
}

template <class Launcher, class List>
cudaError_t bytes_of(cudaStream_t stream, std::byte* to, std::span<std::byte const> bytes) {
    while (!bytes.empty()) {
        List list;
        auto const count = std::min(bytes.size(), static_cast<std::size_t>(List::capacity));
        list.to = to;
        list.count = static_cast<std::int64_t>(count);
        std::memcpy(list.bytes, bytes.data(), count);
        if (auto const result = threads_by<Launcher>(stream, list); result != cudaSuccess)
            return result;
        to += count;
        bytes = bytes.subspan(count);
    }
    return cudaSuccess;
}
template <class Launcher>
cudaError_t bytes_by(cudaStream_t stream, void* to, std::span<std::byte const> bytes) {
    auto* const first = static_cast<std::byte*>(to);
    if (bytes.size() <= static_cast<std::size_t>(few_bytes::capacity))
        return bytes_of<Launcher, few_bytes>(stream, first, bytes);
    return bytes_of<Launcher, many_bytes>(stream, first, bytes);
}

template <class Launcher, class To, class From>
cudaError_t sums_of(cudaStream_t stream, std::span<block_sum const> sums) {
    auto const take = [](auto& list, auto& left) { return take_sums(list, left); };
    std::size_t sources = 0;
    for (auto const& sum : sums) sources += sum.from.size();
    using few = few_sums<To, From>;
    if (sums.size() <= few::capacity && sources <= few::source_capacity)
        return run_lists<Launcher, few>(stream, sums, take);
    return run_lists<Launcher, many_sums<To, From>>(stream, sums, take);
}

/// To the source's own type, or from or to the accumulator of 16-bit elements.
template <class Launcher>
cudaError_t sums_by(cudaStream_t stream, dtype to, dtype from, std::span<block_sum const> sums) {
    if (to == dtype::f64) return sums_of<Launcher, double, double>(stream, sums);
    if (to == dtype::f32)
        return from == to           ? sums_of<Launcher, float, float>(stream, sums)
               : from == dtype::f16 ? sums_of<Launcher, float, half>(stream, sums)
                                    : sums_of<Launcher, float, bf16>(stream, sums);
    if (to == dtype::f16)
        return from == to ? sums_of<Launcher, half, half>(stream, sums)
                          : sums_of<Launcher, half, float>(stream, sums);
    return from == to ? sums_of<Launcher, bf16, bf16>(stream, sums)
                      : sums_of<Launcher, bf16, float>(stream, sums);
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
