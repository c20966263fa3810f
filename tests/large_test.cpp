// SPDX-License-Identifier: Apache-2.0

#include "available_memory.hpp"

#include <ulysses/comm/threads.hpp>
#include <ulysses/exchange/exchange.hpp>
#include <ulysses/space/host.hpp>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

/// More than 2^31 elements, and messages of more than 2^31 bytes, in one exchange, there and back (case
/// 30): real data, so that a size, offset or count that is cut to 32 bits anywhere shows. Exits with 77
/// where there is too little memory.
namespace uly = ulysses;
using std::int64_t;

namespace {

constexpr int ranks = 2;
constexpr uly::shape layer = uly::detail::completed({.heads = 130, .kv_heads = 2, .head_dim = 128});
constexpr int64_t tokens = (int64_t{1} << 17) + 3;  // all on rank 0
constexpr int64_t elements = tokens * layer.heads * layer.head_dim;
static_assert(elements > int64_t{1} << 31);
static_assert(elements / ranks * 2 > int64_t{1} << 31);  // bytes of the message to rank 1

/// A value that tells where it came from; odd multipliers, so that no power of two repeats it.
std::uint16_t code(int64_t token, int64_t head, int64_t d) {
    auto const word =
        static_cast<std::uint64_t>((token * layer.heads + head) * 0x9e3779b1 + d * 40503);
    return static_cast<std::uint16_t>(word ^ (word >> 16) ^ (word >> 32));
}

std::atomic<int64_t> wrong{0};

/// Rows of the rank's items hold what the tokens held.
void check_region(uly::plan const& moves, std::byte* base, uly::region const& place) {
    uly::head_operand<uly::bf16> const region(base, place, layer.head_dim);
    int64_t seen = 0;
    for (auto const& item : moves.items()) {
        auto const rows = region.queries(moves, item);
        for (int64_t h = 0; h < rows.heads(); ++h)
            for (int64_t s = 0; s < rows.tokens(); ++s) {
                auto const* const row = rows.row(0, s, h);
                int64_t differ = 0;
                for (int64_t d = 0; d < layer.head_dim; ++d)
                    differ +=
                        row[d].bits != code(item.work.row_begin + s, item.work.head_begin + h, d);
                wrong += differ;
                ++seen;
            }
    }
    if (seen != moves.own_query_rows()) wrong += 1;
}

void there_and_back(uly::threads::communicator c) {
    std::vector<uly::token_run> const all{{0, tokens}}, none;
    auto const step = uly::sequence::of(1, std::vector{all, none});
    uly::plan moves;
    moves.rebuild(layer, step, ranks, c.rank(), 1);
    uly::arena_layout arena;
    auto const place = arena.add<uly::bf16>(moves.query_region_rows(), layer.head_dim);
    auto const window = c.make_window(arena.bytes());
    auto const own = moves.own_queries();
    auto const memory = std::make_unique_for_overwrite<uly::bf16[]>(
        static_cast<std::size_t>(own * layer.heads * layer.head_dim));
    uly::token_view<uly::bf16> const local(memory.get(), {1, own, layer.heads, layer.head_dim});
    for (int64_t s = 0; s < own; ++s)
        for (int64_t h = 0; h < layer.heads; ++h)
            for (int64_t d = 0; d < layer.head_dim; ++d) local.row(0, s, h)[d].bits = code(s, h, d);

    uly::exchange<uly::threads::communicator, uly::no_observer> moving(c);
    uly::no_observer unseen;
    moving.begin(unseen);
    moving.put(moves.query_moves(), window, place, local);
    moving.send({});
    moving.publish({});
    moving.receive({});
    check_region(moves, c.address(window, c.rank()), place);

    for (int64_t s = 0; s < own; ++s)
        for (int64_t h = 0; h < layer.heads; ++h)
            for (int64_t d = 0; d < layer.head_dim; ++d) local.row(0, s, h)[d].bits = 0xffff;
    moving.get(moves.query_moves(), window, place, local);
    moving.send({});
    moving.publish({});
    moving.receive({});
    for (int64_t s = 0; s < own; ++s)
        for (int64_t h = 0; h < layer.heads; ++h) {
            int64_t differ = 0;
            for (int64_t d = 0; d < layer.head_dim; ++d)
                differ += local.row(0, s, h)[d].bits != code(s, h, d);
            wrong += differ;
        }
    c.fence({});
}

}  // namespace

int main() {
    // Tokens, regions, and the messages of either direction at both ends, with room to spare.
    constexpr auto needed = elements * 2 * 4 + (int64_t{1} << 30);
    if (available_bytes() < needed) {
        std::printf("skipped: needs %lld GiB of free memory\n",
                    static_cast<long long>(needed >> 30));
        return 77;
    }
    // Half of the elements go from rank to rank as messages, the others into the own region.
    uly::threads::options settings;
    settings.hosts = {0, 1};
    uly::threads::run(ranks, there_and_back, settings);
    std::printf("case 30: %lld elements there and back, %lld wrong\n",
                static_cast<long long>(elements), static_cast<long long>(wrong.load()));
    return wrong == 0 ? 0 : 1;
}
