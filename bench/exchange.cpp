// SPDX-License-Identifier: Apache-2.0

#include "bench.hpp"
#include "team.hpp"

#include <ulysses/pipeline.hpp>
#include <ulysses/space/host.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

/// Steps 3 and 5 at two ranks: q, k and v to heads and o back to tokens, through a pipeline whose
/// attention does nothing, against memcpy of as many bytes by the same threads and against the
/// usual way: pack for each peer, copy, unpack; then the same between ranks that send messages.
namespace ulysses_bench {

namespace {

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

constexpr int ranks = 2;
constexpr int64_t heads = 32, dim = 128;

using layer =
    ulysses::pipeline<ulysses::threads::communicator, ulysses::sequence_local, no_attention>;

/// One rank's operands [s, H, D] and the memory of the two ways to compare with.
struct rank_memory {
    int64_t tokens;
    std::size_t count = static_cast<std::size_t>(tokens * heads * dim);
    std::vector<float> q = std::vector<float>(count, 1.0f), k = q, v = q, o = q;
    std::vector<float> sent = q, received = q, head_major = q;

    std::size_t bytes() const { return count * sizeof(float); }
    ulysses::token_view<float> view(std::vector<float>& memory) const {
        return {memory.data(), {1, tokens, heads, dim}};
    }
};

/// Rows of one rank's tokens and heads packed for each peer: [P, s, H/P, D].
void pack(rank_memory& mine, std::vector<float> const& from) {
    auto const columns = heads / ranks * dim;
    for (int peer = 0; peer < ranks; ++peer)
        for (int64_t t = 0; t < mine.tokens; ++t)
            std::memcpy(mine.sent.data() + (peer * mine.tokens + t) * columns,
                        from.data() + t * heads * dim + peer * columns,
                        static_cast<std::size_t>(columns) * sizeof(float));
}

/// Every rank's packed part for this rank, copied here: [P, s, H/P, D].
void copy_parts(std::deque<rank_memory>& all, int me) {
    auto& mine = all[static_cast<std::size_t>(me)];
    auto const part = mine.count / ranks;
    for (std::size_t peer = 0; peer < ranks; ++peer)
        std::memcpy(mine.received.data() + peer * part,
                    all[peer].sent.data() + static_cast<std::size_t>(me) * part,
                    part * sizeof(float));
}

/// [S, H/P, D] as received -> [H/P, S, D].
void unpack_heads(rank_memory& mine) {
    auto const all_tokens = mine.tokens * ranks;
    for (int64_t t = 0; t < all_tokens; ++t)
        for (int64_t h = 0; h < heads / ranks; ++h)
            std::memcpy(mine.head_major.data() + (h * all_tokens + t) * dim,
                        mine.received.data() + (t * heads / ranks + h) * dim, dim * sizeof(float));
}

/// [H/P, S, D] -> packed for each peer [P, s, H/P, D].
void pack_heads(rank_memory& mine) {
    auto const all_tokens = mine.tokens * ranks;
    for (int64_t t = 0; t < all_tokens; ++t)
        for (int64_t h = 0; h < heads / ranks; ++h)
            std::memcpy(mine.sent.data() + (t * heads / ranks + h) * dim,
                        mine.head_major.data() + (h * all_tokens + t) * dim, dim * sizeof(float));
}

/// As received [P, s, H/P, D] -> [s, H, D].
void unpack_tokens(rank_memory& mine) {
    auto const columns = heads / ranks * dim;
    for (int peer = 0; peer < ranks; ++peer)
        for (int64_t t = 0; t < mine.tokens; ++t)
            std::memcpy(mine.o.data() + t * heads * dim + peer * columns,
                        mine.received.data() + (peer * mine.tokens + t) * columns,
                        static_cast<std::size_t>(columns) * sizeof(float));
}

void pack_and_copy(std::deque<rank_memory>& all, ulysses::threads::communicator const& handle) {
    auto const me = handle.rank();
    auto& mine = all[static_cast<std::size_t>(me)];
    for (auto const* operand : {&mine.q, &mine.k, &mine.v}) {
        pack(mine, *operand);
        handle.fence({});
        copy_parts(all, me);
        handle.fence({});
        unpack_heads(mine);
    }
    pack_heads(mine);
    handle.fence({});
    copy_parts(all, me);
    handle.fence({});
    unpack_tokens(mine);
}

}  // namespace

void bench_exchange(std::vector<result>& results, bench_options const& options) {
    // Of each of q, k, v and o on each rank. At 4 MiB everything stays in a large cache: no target.
    for (int64_t mebibytes : {4, 16, 64}) {
        if (options.quick && mebibytes > 16) continue;
        auto const tokens = (mebibytes << 20) / static_cast<int64_t>(heads * dim * sizeof(float));
        std::deque<rank_memory> memory;
        for (int r = 0; r < ranks; ++r) memory.push_back({tokens});
        ulysses::threads::options hosts_apart;
        hosts_apart.hosts = {0, 1};
        team const threads(ranks), apart(ranks, hosts_apart);
        std::deque<layer> layers, layers_apart;
        for (int r = 0; r < ranks; ++r)
            for (auto* const each : {&layers, &layers_apart})
                each->emplace_back((each == &layers ? threads : apart).handle(r),
                                   ulysses::sequence_local{}, no_attention{},
                                   ulysses::shape{.heads = heads, .head_dim = dim});
        auto const step = ulysses::sequence::split(ranks, 1, tokens * ranks);
        auto more = options;
        more.rounds = 31;
        auto const exchanged = [&](team const& ranks_of, std::deque<layer>& each) {
            return ranks_of.seconds([&](auto const& handle) {
                auto const me = static_cast<std::size_t>(handle.rank());
                auto& mine = memory[me];
                each[me].attend(step, mine.view(mine.q), mine.view(mine.k), mine.view(mine.v),
                                mine.view(mine.o));
            });
        };
        auto const seconds = interleaved(
            more, [&] { return exchanged(threads, layers); },
            [&] {
                return threads.seconds([&](auto const& handle) {
                    auto& mine = memory[static_cast<std::size_t>(handle.rank())];
                    std::memcpy(mine.head_major.data(), mine.q.data(), mine.bytes());
                    std::memcpy(mine.received.data(), mine.k.data(), mine.bytes());
                    std::memcpy(mine.sent.data(), mine.v.data(), mine.bytes());
                    handle.fence({});
                    handle.fence({});
                    std::memcpy(mine.o.data(), mine.head_major.data(), mine.bytes());
                });
            },
            [&] {
                return threads.seconds([&](auto const& handle) { pack_and_copy(memory, handle); });
            },
            [&] { return exchanged(apart, layers_apart); });
        auto const name = "exchange " + std::to_string(mebibytes) + " MiB an operand and rank";
        auto const bytes = static_cast<double>(mebibytes << 20) * 4 * ranks;
        auto const add = [&](char const* against, double ratio, char const* target) {
            results.push_back({name, bytes / seconds[0] * 1e-9, "GB/s", against, ratio,
                               mebibytes < 16 ? "" : target});
        };
        add("memcpy of the same bytes", seconds[1] / seconds[0], ">= 1.15");
        add("pack, copy, unpack", seconds[2] / seconds[0], ">= 2.5");
        results.push_back({name + ", by messages", bytes / seconds[3] * 1e-9, "GB/s",
                           "pack, copy, unpack", seconds[2] / seconds[3], ""});
    }
}

}  // namespace ulysses_bench
