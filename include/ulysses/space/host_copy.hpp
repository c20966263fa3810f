#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/block.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#if defined(__unix__) || defined(__APPLE__)
#include <unistd.h>
#endif

// Sanitizers do not see non-temporal stores, so they are given plain ones.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ||                         \
    __has_feature(memory_sanitizer)
#define ULYSSES_SEEN_STORES 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ULYSSES_SEEN_STORES 1
#endif

#if defined(__SSE2__) && !defined(ULYSSES_SEEN_STORES)
#include <immintrin.h>
#define ULYSSES_STREAMS 1
#else
#define ULYSSES_STREAMS 0
#endif

/// How the host executes a list of strided copies.
///
/// An exchange reads a token-major tensor and writes head-major windows of every rank, or the other
/// way round. Either side alone could be walked in order, not both: so all blocks of a call advance
/// together along the token axis, a tile at a time, and each byte of the shared side is touched
/// while its page and its neighbours are at hand. Large exchanges store past the caches.
namespace ulysses::inline ULYSSES_ABI::detail {

/// How rows are stored: through the caches, or past them in whole lines of 64 bytes.
enum class store : std::uint8_t { plain, streamed };

inline constexpr std::size_t line_bytes = 64;
inline constexpr bool has_streamed_stores = ULYSSES_STREAMS != 0;

/// One line to an address that is a multiple of 64.
inline void stream_line(std::byte* to, std::byte const* from) {
#if ULYSSES_STREAMS && defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#elif ULYSSES_STREAMS && defined(__AVX__)
    auto* const target = reinterpret_cast<__m256i*>(to);
    auto const* const source = reinterpret_cast<__m256i const*>(from);
    __m256i const first = _mm256_loadu_si256(source);
    __m256i const second = _mm256_loadu_si256(source + 1);
    _mm256_stream_si256(target, first);
    _mm256_stream_si256(target + 1, second);
#elif ULYSSES_STREAMS
    auto* const target = reinterpret_cast<__m128i*>(to);
    auto const* const source = reinterpret_cast<__m128i const*>(from);
    __m128i const first = _mm_loadu_si128(source);
    __m128i const second = _mm_loadu_si128(source + 1);
    __m128i const third = _mm_loadu_si128(source + 2);
    __m128i const fourth = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, first);
    _mm_stream_si128(target + 1, second);
    _mm_stream_si128(target + 2, third);
    _mm_stream_si128(target + 3, fourth);
#else
    std::memcpy(to, from, line_bytes);
#endif
}

/// Makes streamed stores visible to whoever sees a later store of this thread.
inline void streamed_fence() {
#if ULYSSES_STREAMS
    _mm_sfence();
#endif
}

/// The row's whole lines are streamed; what shares a line with a neighbour is stored plainly. A
/// last line of which the rest is `padding` counts as whole and is filled with zeros.
inline void stream_row(std::byte* to, std::byte const* from, std::size_t bytes,
                       std::size_t padding = 0) {
    auto const offset = reinterpret_cast<std::uintptr_t>(to) % line_bytes;
    if (offset != 0) {
        auto const head = std::min(line_bytes - offset, bytes);
        std::memcpy(to, from, head);
        to += head;
        from += head;
        bytes -= head;
    }
    for (; bytes >= line_bytes; bytes -= line_bytes, to += line_bytes, from += line_bytes)
        stream_line(to, from);
    if (bytes == 0) return;
    if (bytes + padding < line_bytes) {
        std::memcpy(to, from, bytes);
    } else {
        alignas(line_bytes) std::byte line[line_bytes] = {};
        std::memcpy(line, from, bytes);
        stream_line(to, line);
    }
}

template <store Store>
void store_row(std::byte* to, std::byte const* from, std::size_t bytes, std::size_t padding) {
    if constexpr (Store == store::streamed && has_streamed_stores)
        stream_row(to, from, bytes, padding);
    else
        std::memcpy(to, from, bytes);
}

/// Rows to copy along two axes, the inner one being that along which the destination is denser.
struct tile_copy {
    std::byte* to;
    std::byte const* from;
    std::int64_t outer, to_outer, from_outer;
    std::int64_t inner, to_inner, from_inner;
    std::size_t row_bytes, padding;

    bool to_contiguous() const { return to_inner == static_cast<std::int64_t>(row_bytes); }
    bool from_contiguous() const { return from_inner == static_cast<std::int64_t>(row_bytes); }
};

inline constexpr std::size_t stage_bytes = 4096;

/// Gathers short rows into whole lines before they are streamed: a row that ends inside a line
/// would otherwise cost a read of that line from memory.
inline void copy_staged(tile_copy const& tile) {
    alignas(line_bytes) std::byte stage[stage_bytes];
    auto const rows_at_once = static_cast<std::int64_t>(stage_bytes / tile.row_bytes);
    for (std::int64_t i = 0; i < tile.outer; ++i) {
        auto* to = tile.to + i * tile.to_outer;
        auto const* from = tile.from + i * tile.from_outer;
        for (std::int64_t first = 0; first < tile.inner; first += rows_at_once) {
            auto const rows = std::min(rows_at_once, tile.inner - first);
            std::byte* end = stage;
            for (std::int64_t j = 0; j < rows; ++j, end += tile.row_bytes, from += tile.from_inner)
                std::memcpy(end, from, tile.row_bytes);
            auto const bytes = static_cast<std::size_t>(end - stage);
            stream_row(to, stage, bytes);
            to += bytes;
        }
    }
}

template <store Store>
void copy_tile(tile_copy tile) {
    if (tile.to_contiguous()) {
        if (tile.from_contiguous()) {
            tile.row_bytes *= static_cast<std::size_t>(tile.inner);
            tile.inner = 1;
        } else if (Store == store::streamed && has_streamed_stores &&
                   tile.row_bytes % line_bytes != 0 && tile.row_bytes <= stage_bytes / 2) {
            return copy_staged(tile);
        }
    }
    for (std::int64_t i = 0; i < tile.outer; ++i) {
        auto* const to = tile.to + i * tile.to_outer;
        auto const* const from = tile.from + i * tile.from_outer;
        for (std::int64_t j = 0; j < tile.inner; ++j)
            store_row<Store>(to + j * tile.to_inner, from + j * tile.from_inner, tile.row_bytes,
                             tile.padding);
    }
}

/// Tokens [first, first + count) of one sample of `block`.
inline tile_copy tile_of(block_copy const& block, std::int64_t sample, std::int64_t first,
                         std::int64_t count) {
    auto const& [to_batch, to_token, to_head] = block.to_strides;
    auto const& [from_batch, from_token, from_head] = block.from_strides;
    auto* const to = block.to + sample * to_batch + first * to_token;
    auto const* const from = block.from + sample * from_batch + first * from_token;
    auto const heads = block.extents[2];
    auto const bytes = static_cast<std::size_t>(block.row_bytes);
    auto const padding = static_cast<std::size_t>(block.to_padding);
    if (heads == 1 || (count > 1 && to_token < to_head))
        return {to, from, heads, to_head, from_head, count, to_token, from_token, bytes, padding};
    return {to, from, count, to_token, from_token, heads, to_head, from_head, bytes, padding};
}

/// Executes `blocks`: samples outermost, then tiles of `tile_tokens` tokens, then the blocks.
template <store Store>
void copy_blocks(std::span<block_copy const> blocks, std::int64_t tile_tokens) {
    std::int64_t samples = 0;
    std::int64_t tokens = 0;
    for (auto const& block : blocks) {
        if (block.bytes() == 0) continue;
        samples = std::max(samples, block.extents[0]);
        tokens = std::max(tokens, block.extents[1]);
    }
    for (std::int64_t sample = 0; sample < samples; ++sample)
        for (std::int64_t first = 0; first < tokens; first += tile_tokens)
            for (auto const& block : blocks) {
                auto const count = std::min(tile_tokens, block.extents[1] - first);
                if (count <= 0 || sample >= block.extents[0]) continue;
                if (block.extents[2] == 0 || block.row_bytes == 0) continue;
                copy_tile<Store>(tile_of(block, sample, first, count));
            }
    if constexpr (Store == store::streamed) streamed_fence();
}

/// Exchanges of more bytes than this, over all ranks, are streamed.
///
/// *Unit* bytes. A quarter of the last-level cache, of which one process is taken to hold no more
/// than 32 MiB however large the cache that several share. Below it, what was stored through the
/// caches is still there for its reader; above it, a plain store reads each line before it writes.
inline std::size_t streamed_from_bytes() {
    static std::size_t const bytes = [] {
        constexpr long most = 32l << 20;
        long cache = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
        cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
        if (cache <= 0) cache = most;
        return static_cast<std::size_t>(std::min(cache, most)) / 4;
    }();
    return bytes;
}

/// Long enough for runs of rows in a window, short enough for the tokens' own lines and pages.
inline constexpr std::int64_t copy_tile_tokens = 32;

inline void copy_blocks(std::span<block_copy const> blocks, store way) {
    if (way == store::streamed)
        copy_blocks<store::streamed>(blocks, copy_tile_tokens);
    else
        copy_blocks<store::plain>(blocks, copy_tile_tokens);
}

}  // namespace ulysses::inline ULYSSES_ABI::detail

#undef ULYSSES_STREAMS
#undef ULYSSES_SEEN_STORES
