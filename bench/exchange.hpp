#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/space/host.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

/// What the benches of the exchange have in common: a rank's memory, and the usual way with it, to
/// pack for each peer before ranks exchange and to unpack after.
namespace ulysses_bench {

using std::int64_t;

/// Step 4 left out: what remains of a pass is the exchange.
struct no_attention {
    using space_type = ulysses::host_space;
    static constexpr ulysses::attention_features features{
        .causal = true, .full = true, .grouped = true, .value_dim = true, .row_range = true};
    static constexpr int64_t row_multiple() { return 1; }
    template <class T>
    static constexpr std::size_t workspace_bytes(ulysses::attention_extents const&) {
        return 0;
    }
    template <class T>
    static void forward(ulysses::attention_call const&, ulysses::head_view<T const>,
                        ulysses::head_view<T const>, ulysses::head_view<T const>,
                        ulysses::head_view<T>, ulysses::head_view<T>) {}
};

/// One rank's operands [s, H, D] and the memory of the ways to compare with.
struct rank_memory {
    int ranks;
    int64_t tokens;  // s
    int64_t heads = 32, dim = 128;
    std::size_t count = static_cast<std::size_t>(tokens * heads * dim);
    std::vector<float> q = std::vector<float>(count, 1.0f), k = q, v = q, o = q;
    std::vector<float> sent = q, received = q, head_major = q;

    std::size_t bytes() const { return count * sizeof(float); }
    /// For each peer.
    std::size_t part() const { return count / static_cast<std::size_t>(ranks); }
    /// Elements of a token's heads that are of one rank.
    int64_t columns() const { return heads / ranks * dim; }
    ulysses::token_view<float> view(std::vector<float>& memory) const {
        return {memory.data(), {1, tokens, heads, dim}};
    }
};

/// Rows of one rank's tokens and heads packed for each peer: [P, s, H/P, D].
inline void pack(rank_memory& mine, std::vector<float> const& from) {
    auto const columns = mine.columns();
    for (int peer = 0; peer < mine.ranks; ++peer)
        for (int64_t t = 0; t < mine.tokens; ++t)
            std::memcpy(mine.sent.data() + (peer * mine.tokens + t) * columns,
                        from.data() + t * mine.heads * mine.dim + peer * columns,
                        static_cast<std::size_t>(columns) * sizeof(float));
}

/// [S, H/P, D] as received -> [H/P, S, D].
inline void unpack_heads(rank_memory& mine) {
    auto const all_tokens = mine.tokens * mine.ranks, heads = mine.heads / mine.ranks;
    for (int64_t t = 0; t < all_tokens; ++t)
        for (int64_t h = 0; h < heads; ++h)
            std::memcpy(mine.head_major.data() + (h * all_tokens + t) * mine.dim,
                        mine.received.data() + (t * heads + h) * mine.dim,
                        static_cast<std::size_t>(mine.dim) * sizeof(float));
}

/// [H/P, S, D] -> packed for each peer [P, s, H/P, D].
inline void pack_heads(rank_memory& mine) {
    auto const all_tokens = mine.tokens * mine.ranks, heads = mine.heads / mine.ranks;
    for (int64_t t = 0; t < all_tokens; ++t)
        for (int64_t h = 0; h < heads; ++h)
            std::memcpy(mine.sent.data() + (t * heads + h) * mine.dim,
                        mine.head_major.data() + (h * all_tokens + t) * mine.dim,
                        static_cast<std::size_t>(mine.dim) * sizeof(float));
}

/// As received [P, s, H/P, D] -> [s, H, D].
inline void unpack_tokens(rank_memory& mine) {
    auto const columns = mine.columns();
    for (int peer = 0; peer < mine.ranks; ++peer)
        for (int64_t t = 0; t < mine.tokens; ++t)
            std::memcpy(mine.o.data() + t * mine.heads * mine.dim + peer * columns,
                        mine.received.data() + (peer * mine.tokens + t) * columns,
                        static_cast<std::size_t>(columns) * sizeof(float));
}

/// Steps 3 and 5 the usual way; `exchange()` brings each rank's `sent` part to its peer's `received`.
template <class Exchange>
void pack_exchange_unpack(rank_memory& mine, Exchange const& exchange) {
    for (auto const* operand : {&mine.q, &mine.k, &mine.v}) {
        pack(mine, *operand);
        exchange();
        unpack_heads(mine);
    }
    pack_heads(mine);
    exchange();
    unpack_tokens(mine);
}

/// As many bytes as the exchange, copied in order; `fence()` stands where that has its fences.
template <class Fence>
void copy_operands(rank_memory& mine, Fence const& fence) {
    std::memcpy(mine.head_major.data(), mine.q.data(), mine.bytes());
    std::memcpy(mine.received.data(), mine.k.data(), mine.bytes());
    std::memcpy(mine.sent.data(), mine.v.data(), mine.bytes());
    fence();
    fence();
    std::memcpy(mine.o.data(), mine.head_major.data(), mine.bytes());
}

}  // namespace ulysses_bench
