// SPDX-License-Identifier: Apache-2.0

#include "exchange.hpp"
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

constexpr int ranks = 2;

using layer =
    ulysses::pipeline<ulysses::threads::communicator, ulysses::sequence_local, no_attention>;

/// Every rank's packed part for this rank, copied here: [P, s, H/P, D].
void copy_parts(std::deque<rank_memory>& all, int me) {
    auto& mine = all[static_cast<std::size_t>(me)];
    auto const part = mine.part();
    for (std::size_t peer = 0; peer < ranks; ++peer)
        std::memcpy(mine.received.data() + peer * part,
                    all[peer].sent.data() + static_cast<std::size_t>(me) * part,
                    part * sizeof(float));
}

}  // namespace

void bench_exchange(std::vector<result>& results, bench_options const& options) {
    // Of each of q, k, v and o on each rank. At 4 MiB everything stays in a large cache: no target.
    for (int64_t mebibytes : {4, 16, 64}) {
        if (options.quick && mebibytes > 16) continue;
        auto const tokens = (mebibytes << 20) / (32 * 128 * static_cast<int64_t>(sizeof(float)));
        std::deque<rank_memory> memory;
        for (int r = 0; r < ranks; ++r) memory.push_back({.ranks = ranks, .tokens = tokens});
        ulysses::threads::options hosts_apart;
        hosts_apart.hosts = {0, 1};
        team const threads(ranks), apart(ranks, hosts_apart);
        std::deque<layer> layers, layers_apart;
        for (int r = 0; r < ranks; ++r)
            for (auto* const each : {&layers, &layers_apart})
                each->emplace_back((each == &layers ? threads : apart).handle(r),
                                   ulysses::sequence_local{}, no_attention{},
                                   ulysses::shape{.heads = 32, .head_dim = 128});
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
                    copy_operands(mine, [&] { handle.fence({}); });
                });
            },
            [&] {
                return threads.seconds([&](auto const& handle) {
                    auto const me = handle.rank();
                    pack_exchange_unpack(memory[static_cast<std::size_t>(me)], [&] {
                        handle.fence({});
                        copy_parts(memory, me);
                        handle.fence({});
                    });
                });
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
