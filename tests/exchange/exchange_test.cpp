// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/serial.hpp>
#include <ulysses/comm/threads.hpp>
#include <ulysses/core/tensor.hpp>
#include <ulysses/exchange/exchange.hpp>
#include <ulysses/space/host.hpp>
#include <ulysses/stage/to_heads.hpp>

#include "../pipeline/orders.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>
#include <thread>

namespace uly = ulysses;
using namespace pipeline_test;

namespace {

using communicator = uly::threads::communicator;
using moves_type = uly::exchange<communicator, uly::no_observer>;

constexpr auto pattern = std::byte{0xab};

/// A value that tells where it came from, exact in float.
float code(int64_t b, int64_t token, int64_t head, int64_t d) {
    return static_cast<float>(((b * 64 + token) * 13 + head) * 32 + d);
}

/// One rank's operands of a plan, in token-major memory with a gap after every row.
struct rank_operands {
    uly::extents4 query, key;
    std::vector<float> q, k;

    static constexpr int64_t gap = 3;

    rank_operands(uly::plan const& moves, float value)
        : query{moves.batch(), moves.own_queries(), moves.layer().heads, moves.layer().head_dim},
          key{moves.batch(), moves.own_keys(), moves.layer().kv_heads, moves.layer().head_dim},
          q(size(query), value),
          k(size(key), value) {}

    static std::size_t size(uly::extents4 const& e) {
        return static_cast<std::size_t>(e[0] * e[1] * (e[2] * e[3] + gap));
    }
    static uly::token_view<float> view(std::vector<float>& x, uly::extents4 const& e) {
        auto const token = e[2] * e[3] + gap;
        return {x.data(), e, {e[1] * token, token, e[3], 1}};
    }
    uly::token_view<float> queries() { return view(q, query); }
    uly::token_view<float> keys() { return view(k, key); }

    void fill(uly::sequence const& step, int rank) {
        auto const fill_one = [&](uly::token_view<float> x, uly::token_orders const& order) {
            for (int64_t b = 0; b < x.batch(); ++b)
                for (int64_t s = 0; s < x.tokens(); ++s)
                    for (int64_t h = 0; h < x.heads(); ++h)
                        for (int64_t d = 0; d < x.dim(); ++d)
                            x(b, s, h, d) = code(b, order.position(rank, s), h, d);
        };
        fill_one(queries(), step.queries());
        fill_one(keys(), step.keys());
    }
};

/// Calls `use(row bytes, b, token, head)` for each row that the rank's items hold.
template <class Use>
void for_own_rows(uly::plan const& moves, std::byte* window, uly::region const& q,
                  uly::region const& k, Use const& use) {
    uly::head_operand<float> const queries(window, q, moves.layer().head_dim),
        keys(window, k, moves.layer().head_dim);
    auto const each = [&](uly::head_view<float> const& view, int64_t token, int64_t head,
                          bool key) {
        for (int64_t b = 0; b < view.batch(); ++b)
            for (int64_t s = 0; s < view.tokens(); ++s)
                for (int64_t h = 0; h < view.heads(); ++h)
                    use(view.row(b, s, h), b, token + s, head + h, key);
    };
    for (auto const& item : moves.items()) {
        each(queries.queries(moves, item), item.work.row_begin, item.work.head_begin, false);
        each(keys.keys(moves, item), item.work.key_begin, item.work.kv_begin, true);
    }
}

struct layout {
    uly::arena_layout arena;
    uly::region q, k;

    explicit layout(uly::plan const& moves)
        : q(arena.add<float>(moves.query_region_rows(), moves.layer().head_dim)),
          k(arena.add<float>(moves.key_region_rows(), moves.layer().head_dim)) {}
    std::size_t bytes() const { return arena.bytes(); }
};

/// First fault that a rank saw, for the main thread to report.
struct fault {
    std::atomic<int> count{0};
    void unless(bool right) {
        if (!right) ++count;
    }
};

uly::shape random_layer(std::mt19937_64& random) {
    auto const kv_heads = 1 + below(random, 4);
    return uly::checked({.heads = kv_heads * (1 + below(random, 3)),
                         .kv_heads = kv_heads,
                         .head_dim = 1 + below(random, 20),
                         .mask = below(random, 2) == 0 ? uly::mask::full : uly::mask::causal});
}

/// put, then what lies in every window; then get and sum, back where it came from.
void round_trip(uly::shape const& layer, uly::sequence const& step, fault& wrong,
                std::vector<int> const& hosts = {}) {
    auto const ranks = step.ranks();
    auto const body = [&](communicator c) {
        auto const me = c.rank();
        uly::plan moves;
        moves.rebuild(layer, step, ranks, me, 1);
        layout const places(moves);
        // Guard lines before and after the regions.
        std::size_t const guard = 128;
        auto const window = c.make_window(places.bytes() + 2 * guard);
        auto* const own = c.address(window, me);
        std::memset(own, static_cast<int>(pattern), places.bytes() + 2 * guard);
        auto q = places.q, k = places.k;
        q.offset += guard;
        k.offset += guard;
        c.fence({});

        rank_operands local(moves, 0.0f);
        local.fill(step, me);
        moves_type moving(c);
        uly::no_observer none;
        moving.begin(none);
        moving.put(moves.query_moves(), window, q, uly::token_view<float const>(local.queries()));
        moving.put(moves.key_moves(), window, k, uly::token_view<float const>(local.keys()));
        moving.send({});
        moving.publish({});
        moving.receive({});

        std::vector<bool> written(places.bytes() + 2 * guard);
        for_own_rows(moves, own, q, k, [&](float* row, auto b, auto token, auto head, bool) {
            for (int64_t d = 0; d < layer.head_dim; ++d)
                wrong.unless(row[d] == code(b, token, head, d));
            auto const first = static_cast<std::size_t>(reinterpret_cast<std::byte*>(row) - own);
            for (std::size_t i = 0; i < static_cast<std::size_t>(layer.head_dim) * 4; ++i)
                written[first + i] = true;
        });
        for (std::size_t i = 0; i < written.size(); ++i)
            wrong.unless(written[i] || own[i] == pattern);

        rank_operands back(moves, std::nanf(""));
        moving.get(moves.query_moves(), window, q, back.queries());
        moving.sum(moves.key_returns(), window, k, back.keys());
        moving.send({});
        moving.publish({});
        moving.receive({});
        moving.add<float, float>({});
        c.fence({});

        // Integers below 2^24: sums over the ranks that share a key are exact, so that dividing by
        // their number gives the value back.
        auto const keys = back.keys();
        for (int64_t b = 0; b < keys.batch(); ++b)
            for (int64_t s = 0; s < keys.tokens(); ++s)
                for (int64_t h = 0; h < keys.heads(); ++h) {
                    auto const token = step.keys().position(me, s);
                    float users = 0;
                    for (int r = 0; r < ranks; ++r) {
                        bool uses = false;
                        for (auto const& item : moves.items(r))
                            uses = uses || (item.kv_begin <= h && h < item.kv_end &&
                                            item.key_begin <= token && token < item.key_end);
                        users += uses ? 1.0f : 0.0f;
                    }
                    for (int64_t d = 0; d < keys.dim(); ++d)
                        wrong.unless(keys(b, s, h, d) == users * code(b, token, h, d));
                }
        auto const queries = back.queries(), sent = local.queries();
        for (int64_t b = 0; b < queries.batch(); ++b)
            for (int64_t s = 0; s < queries.tokens(); ++s)
                wrong.unless(
                    std::memcmp(queries.row(b, s, 0), sent.row(b, s, 0),
                                static_cast<std::size_t>(layer.heads * layer.head_dim) * 4) == 0);
        // Gaps between the rows of a local operand belong to the caller.
        for (auto const* x : {&back.q, &back.k}) {
            auto const& e = x == &back.q ? back.query : back.key;
            auto const token = e[2] * e[3] + rank_operands::gap;
            for (std::size_t i = 0; i < x->size(); ++i)
                if (static_cast<int64_t>(i) % token >= e[2] * e[3])
                    wrong.unless(std::isnan((*x)[i]));
        }
    };
    uly::threads::options settings;
    settings.hosts = hosts;
    uly::threads::run(ranks, body, settings);
}

/// No rank reaches another; some do.
std::vector<int> hosts_apart(int ranks) {
    std::vector<int> hosts;
    for (int r = 0; r < ranks; ++r) hosts.push_back(r);
    return hosts;
}
std::vector<int> random_hosts(std::mt19937_64& random, int ranks) {
    std::vector<int> hosts;
    for (int r = 0; r < ranks; ++r) hosts.push_back(static_cast<int>(below(random, 3)));
    return hosts;
}

}  // namespace

TEST_CASE("exchange: gather(scatter(x)) = x bit for bit, nothing outside the regions is written "
          "(case 1)") {
    constexpr std::uint64_t first_seed = 1, count = 60;
    MESSAGE("seeds " << first_seed << " .. " << first_seed + count - 1);
    for (auto seed = first_seed; seed < first_seed + count; ++seed)
        for (int ranks = 1; ranks <= 8; ++ranks) {
            CAPTURE(seed);
            CAPTURE(ranks);
            std::mt19937_64 random{seed};
            auto const layer = random_layer(random);
            auto const tokens = 1 + below(random, 40), batch = 1 + below(random, 3);
            auto const queries = random_orders(random, tokens, ranks);
            auto const cross = layer.mask == uly::mask::full && below(random, 2) == 0;
            auto const step = uly::sequence::of(
                batch, queries,
                cross ? random_orders(random, 1 + below(random, 40), ranks) : orders{});
            fault wrong;
            for (auto const& hosts :
                 {std::vector<int>{}, hosts_apart(ranks), random_hosts(random, ranks)})
                round_trip(layer, step, wrong, hosts);
            CHECK(wrong.count == 0);
        }
}

TEST_CASE("exchange: a group of one rank exchanges with itself") {
    uly::serial const one;
    auto const step = uly::sequence::of(1, orders{{{3, 2}, {0, 3}}});
    uly::plan moves;
    moves.rebuild(uly::checked({.heads = 2, .head_dim = 1}), step, 1, 0, 1);
    CHECK(!moves.holds_all_in_order());
    layout const places(moves);
    auto const window = one.make_window(places.bytes());
    std::array<float, 10> q{30, 31, 40, 41, 0, 1, 10, 11, 20, 21}, back{};
    uly::exchange<uly::serial, uly::no_observer> moving(one);
    uly::no_observer none;
    moving.begin(none);
    moving.put(moves.query_moves(), window, places.q,
               uly::token_view<float const>(q.data(), {1, 5, 2, 1}));
    moving.send({});
    moving.publish({});
    uly::head_operand<float> const whole(one.address(window, 0), places.q, 1);
    auto const view = whole.queries(moves, moves.items()[0]);
    for (int64_t s = 0; s < 5; ++s)
        for (int64_t h = 0; h < 2; ++h) CHECK(view(0, s, h, 0) == static_cast<float>(10 * s + h));
    moving.get(moves.query_moves(), window, places.q,
               uly::token_view<float>(back.data(), {1, 5, 2, 1}));
    moving.receive({});
    CHECK(back == q);
}

TEST_CASE("exchange: golden vectors, two ranks, two tokens each (case 1, case 2)") {
    // x = 1000 b + 10 token + head; rank 1 gets heads 2 and 3 of every token.
    for (int64_t batch : {1, 2}) {
        std::vector<float> seen;
        auto const step = uly::sequence::split(2, batch, 4);
        uly::threads::run(2, [&](communicator c) {
            uly::plan moves;
            moves.rebuild(uly::checked({.heads = 4, .head_dim = 1}), step, 2, c.rank(), 1);
            layout const places(moves);
            auto const window = c.make_window(places.bytes());
            std::vector<float> x;
            for (int64_t b = 0; b < batch; ++b)
                for (int64_t s = 0; s < 2; ++s)
                    for (int64_t h = 0; h < 4; ++h)
                        x.push_back(static_cast<float>(1000 * b + 10 * (2 * c.rank() + s) + h));
            moves_type moving(c);
            uly::no_observer none;
            moving.begin(none);
            moving.put(moves.query_moves(), window, places.q,
                       uly::token_view<float const>(x.data(), {batch, 2, 4, 1}));
            moving.send({});
            moving.publish({});
            if (c.rank() != 1) return;
            auto const view = uly::head_operand<float>(c.address(window, 1), places.q, 1)
                                  .queries(moves, moves.items()[0]);
            REQUIRE(view.extents == uly::extents4{batch, 4, 2, 1});
            for (int64_t b = 0; b < batch; ++b)
                for (int64_t s = 0; s < 4; ++s)
                    for (int64_t h = 0; h < 2; ++h) seen.push_back(view(b, s, h, 0));
        });
        std::vector<float> const golden{2,    3,    12,   13,   22,   23,   32,   33,
                                        1002, 1003, 1012, 1013, 1022, 1023, 1032, 1033};
        CHECK(seen == std::vector(golden.begin(), golden.begin() + batch * 8));
    }
}

namespace {

/// [S, B, H, D], as Megatron-style engines lay tokens.
struct sequence_first {
    float* memory;
    uly::extents4 sizes;
};

}  // namespace

template <>
struct ulysses::tensor_traits<sequence_first> {
    static constexpr axes order = axes::sbhd;
    static float* data(sequence_first const& x) { return x.memory; }
    static extents4 extents(sequence_first const& x) { return x.sizes; }
};

TEST_CASE(
    "exchange: sequence-first operands come back as the transpose of batch-first ones (case 3)") {
    auto const step = uly::sequence::split(2, 2, 4);
    int wrong = 0;
    uly::threads::run(2, [&](communicator c) {
        uly::plan moves;
        moves.rebuild(uly::checked({.heads = 4, .head_dim = 1}), step, 2, c.rank(), 1);
        layout const places(moves);
        auto const window = c.make_window(places.bytes());
        // Head-local [B = 2, S = 4, heads of this rank, 1], written where an attention functor
        // would.
        auto const own = uly::head_operand<float>(c.address(window, c.rank()), places.q, 1)
                             .queries(moves, moves.items()[0]);
        for (int64_t b = 0; b < 2; ++b)
            for (int64_t s = 0; s < 4; ++s)
                for (int64_t h = 0; h < 2; ++h)
                    own(b, s, h, 0) = static_cast<float>(1000 * b + 10 * s + h + 2 * c.rank());
        moves_type moving(c);
        uly::no_observer none;
        moving.begin(none);
        moving.publish({});
        std::array<float, 16> batch_first{}, token_first{};
        moving.get(moves.query_moves(), window, places.q,
                   uly::token_view<float>(batch_first.data(), {2, 2, 4, 1}));
        moving.get(moves.query_moves(), window, places.q,
                   uly::view_of_heads<uly::sequence_local>(
                       sequence_first{token_first.data(), {2, 2, 4, 1}}, "o"));
        moving.receive({});
        c.fence({});
        if (c.rank() == 0)
            for (std::size_t b = 0; b < 2; ++b)
                for (std::size_t s = 0; s < 2; ++s)
                    for (std::size_t h = 0; h < 4; ++h) {
                        auto const value = static_cast<float>(1000 * b + 10 * s + h);
                        wrong += batch_first[(b * 2 + s) * 4 + h] != value;
                        wrong += token_first[(s * 2 + b) * 4 + h] != value;
                    }
    });
    CHECK(wrong == 0);
}

TEST_CASE("exchange: parts of a shared key-value head are summed in rank order") {
    // Floats whose sum depends on the order: the result must be that of adding rank by rank.
    auto const part = [](int rank, int64_t head, int64_t key) {
        std::mt19937_64 random{static_cast<std::uint64_t>(rank * 1000 + head * 100 + key)};
        return std::ldexp(static_cast<float>(below(random, 1 << 20)),
                          static_cast<int>(below(random, 20)));
    };
    for (int ranks : {3, 4, 8}) {
        fault wrong;
        auto const layer =
            uly::checked({.heads = 4, .kv_heads = 2, .head_dim = 1, .mask = uly::mask::causal});
        auto const step = uly::sequence::of(1, zigzag(21, ranks));
        uly::threads::run(ranks, [&](communicator c) {
            uly::plan moves;
            moves.rebuild(layer, step, ranks, c.rank(), 1);
            layout const places(moves);
            auto const window = c.make_window(places.bytes());
            for_own_rows(moves, c.address(window, c.rank()), places.q, places.k,
                         [&](float* row, auto, auto token, auto head, bool key) {
                             if (key) *row = part(c.rank(), head, token);
                         });
            moves_type moving(c);
            uly::no_observer none;
            moving.begin(none);
            moving.publish({});
            rank_operands back(moves, std::nanf(""));
            moving.sum(moves.key_returns(), window, places.k, back.keys());
            moving.receive({});
            moving.add<float, float>({});
            c.fence({});
            auto const keys = back.keys();
            for (int64_t s = 0; s < keys.tokens(); ++s)
                for (int64_t h = 0; h < 2; ++h) {
                    auto const token = step.keys().position(c.rank(), s);
                    float sum = 0;
                    bool any = false;
                    for (int r = 0; r < ranks; ++r) {
                        bool uses = false;
                        for (auto const& item : moves.items(r))
                            uses = uses ||
                                   (item.kv_begin <= h && h < item.kv_end && token < item.key_end);
                        if (uses) sum = any ? sum + part(r, h, token) : part(r, h, token);
                        any = any || uses;
                    }
                    wrong.unless(keys(0, s, h, 0) == sum);
                }
        });
        CHECK(wrong.count == 0);
    }
}

TEST_CASE("exchange: no poison survives 100 rounds with random delays (case 29)") {
    // Every rank poisons its own windows whenever the protocol says that they are its own, and
    // sleeps at random: a block that came late, or was read early, shows as NaN or as another
    // round's value.
    constexpr std::uint64_t seed = 29;
    MESSAGE("seed " << seed);
    for (int ranks : {2, 4}) {
        fault wrong;
        uly::threads::run(ranks, [&](communicator c) {
            auto const me = c.rank();
            std::mt19937_64 same{seed};  // alike on every rank: shapes and orders
            std::mt19937_64 own{seed + 1 + static_cast<std::uint64_t>(me)};
            auto const pause = [&] {
                if (below(own, 3) == 0)
                    std::this_thread::sleep_for(std::chrono::microseconds(below(own, 300)));
            };
            auto const inbox = c.make_window(1 << 16), outbox = c.make_window(1 << 16);
            auto* const in = c.address(inbox, me);
            auto* const out = c.address(outbox, me);
            auto const poison = [&](std::byte* memory) { std::memset(memory, 0xff, 1 << 16); };
            poison(in);
            c.fence({});
            moves_type moving(c);
            uly::no_observer none;
            uly::plan moves;
            for (int round = 0; round < 100; ++round) {
                auto const layer = random_layer(same);
                auto const tokens = 1 + below(same, 12);
                auto const step = uly::sequence::of(1, random_orders(same, tokens, ranks));
                moves.rebuild(layer, step, ranks, me, 1);
                layout const places(moves);
                wrong.unless(places.bytes() <= 1 << 16);
                rank_operands local(moves, 0.0f), back(moves, std::nanf(""));
                local.fill(step, me);
                for (auto& x : local.q) x += static_cast<float>(round);
                moving.begin(none);
                pause();
                moving.put(moves.query_moves(), inbox, places.q,
                           uly::token_view<float const>(local.queries()));
                moving.send({});
                pause();
                moving.publish({});
                pause();
                poison(out);
                for_own_rows(moves, in, places.q, places.k,
                             [&](float* row, auto, auto, auto, bool key) {
                                 if (!key)
                                     std::memcpy(out + (reinterpret_cast<std::byte*>(row) - in),
                                                 row, static_cast<std::size_t>(layer.head_dim) * 4);
                             });
                pause();
                poison(in);
                moving.publish({});
                pause();
                moving.get(moves.query_moves(), outbox, places.q, back.queries());
                moving.receive({});
                pause();
                auto const got = back.queries(), sent = local.queries();
                for (int64_t s = 0; s < got.tokens(); ++s)
                    for (int64_t h = 0; h < got.heads(); ++h)
                        for (int64_t d = 0; d < got.dim(); ++d)
                            wrong.unless(got(0, s, h, d) == sent(0, s, h, d));
            }
        });
        CHECK(wrong.count == 0);
    }
}

TEST_CASE("exchange: what an abandoned call has listed is forgotten") {
    uly::serial const one;
    auto const step = uly::sequence::split(1, 1, 2);
    uly::plan moves;
    moves.rebuild(uly::checked({.heads = 1, .head_dim = 1}), step, 1, 0, 1);
    layout const places(moves);
    auto const window = one.make_window(places.bytes());
    float freed[2] = {5, 6}, back[2] = {1, 2};
    uly::exchange<uly::serial, uly::no_observer> moving(one);
    uly::no_observer none;
    moving.begin(none);
    moving.get(moves.query_moves(), window, places.q, uly::token_view<float>(freed, {1, 2, 1, 1}));
    moving.begin(none);  // the call before threw ahead of its move
    moving.put(moves.query_moves(), window, places.q,
               uly::token_view<float const>(back, {1, 2, 1, 1}));
    moving.send({});
    CHECK(freed[0] == 5);
    CHECK(freed[1] == 6);
}
