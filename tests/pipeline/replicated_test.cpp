// SPDX-License-Identifier: Apache-2.0

#include "../plan/replicated.hpp"
#include "six_steps.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cstring>

using namespace pipeline_test;
using namespace replicated_cases;
namespace uly = ulysses;

/// Tokens that every rank holds: their output is the same on every rank, and their gradients, which
/// every rank brings and gets a part of, are right when they are summed over the ranks.
namespace {

constexpr auto causal = uly::mask::causal;

/// a + b, where all bits zero mean that there is nothing to add, so that -0 stays what it is.
template <class T>
T sum_of(T a, T b) {
    constexpr T none{};
    if (std::memcmp(&b, &none, sizeof(T)) == 0) return a;
    if (std::memcmp(&a, &none, sizeof(T)) == 0) return b;
    using wide = uly::accumulator_t<T>;
    return static_cast<T>(static_cast<wide>(a) + static_cast<wide>(b));
}

/// Adds a rank's tokens to `whole`, in the order of calls.
template <class T>
void add_back(uly::token_orders const& order, int rank, tensor<T> const& part, tensor<T>& whole) {
    auto const& e = part.sizes;
    for (int64_t b = 0; b < e[0]; ++b)
        for (int64_t s = 0; s < e[1]; ++s)
            for (int64_t h = 0; h < e[2]; ++h)
                for (int64_t d = 0; d < e[3]; ++d) {
                    auto& to = whole(b, order.position(rank, s), h, d);
                    to = sum_of(to, part(b, s, h, d));
                }
}

/// As `put_back`; false when another rank has put other bits there.
template <class T>
bool put_alike(uly::token_orders const& order, int rank, tensor<T> const& part, tensor<T>& whole,
               std::vector<bool>& there) {
    there.resize(whole.memory.size());
    auto const& e = part.sizes;
    auto alike = true;
    for (int64_t b = 0; b < e[0]; ++b)
        for (int64_t s = 0; s < e[1]; ++s)
            for (int64_t h = 0; h < e[2]; ++h)
                for (int64_t d = 0; d < e[3]; ++d) {
                    auto& to = whole(b, order.position(rank, s), h, d);
                    auto const place = static_cast<std::size_t>(&to - whole.memory.data());
                    auto const& value = part(b, s, h, d);
                    if (there[place]) alike = alike && std::memcmp(&to, &value, sizeof(T)) == 0;
                    to = value;
                    there[place] = true;
                }
    return alike;
}

/// Every rank's part of a gradient [B, S, H, D]: its own tokens of `whole`, and of replicated ones
/// parts drawn at random, whose sum in rank order, rounded once, `whole` then has.
template <class T>
std::vector<tensor<T>> parts_of(std::mt19937_64& random, uly::token_orders const& orders,
                                tensor<T>& whole) {
    using wide = uly::accumulator_t<T>;
    std::vector<tensor<T>> parts;
    for (int r = 0; r < orders.ranks(); ++r) parts.push_back(own_part(orders, r, whole));
    tensor<wide> sums(whole.sizes, wide(0));
    for (int r = 0; r < orders.ranks(); ++r)
        for (int64_t token = 0; auto const& run : orders.runs(r)) {
            for (int64_t i = 0; i < run.count && run.replicated; ++i)
                for (int64_t b = 0; b < whole.sizes[0]; ++b)
                    for (int64_t h = 0; h < whole.sizes[2]; ++h)
                        for (int64_t d = 0; d < whole.sizes[3]; ++d) {
                            auto& part = parts[static_cast<std::size_t>(r)](b, token + i, h, d);
                            auto& sum = sums(b, run.at(i), h, d);
                            part = T(static_cast<float>(below(random, 2001) - 1000) / 1000.0f);
                            sum = r == 0 ? static_cast<wide>(part) : sum + static_cast<wide>(part);
                            whole(b, run.at(i), h, d) = static_cast<T>(sum);
                        }
            token += run.count;
        }
    return parts;
}

/// Forward and backward, with every rank's own part of dO.
template <class T>
results<T> compute_replicated(problem<T> const& p, uly::sequence const& step,
                              std::vector<tensor<T>> const& dout, reach way) {
    results<T> whole(p);
    auto const ranks = step.ranks();
    std::vector<local_problem<T>> locals;
    for (int r = 0; r < ranks; ++r) {
        locals.emplace_back(p, step, r);
        locals.back().dout = dout[static_cast<std::size_t>(r)];
    }
    uly::threads::options settings;
    settings.hosts = hosts_of(way, ranks);
    uly::threads::run(
        ranks,
        [&](uly::threads::communicator c) {
            auto& local = locals[static_cast<std::size_t>(c.rank())];
            uly::pipeline layer{c, uly::sequence_local{}, builtin_attention{}, p.layer};
            auto saved = layer.make_context();
            layer.attend(step, saved, local.q, local.k, local.v, local.o);
            if (p.layer.keep != uly::keep::nothing)
                collect_log_sum_exp<T>(saved, layer.planned(step), whole.lse);
            attend_backward(layer, step, saved, local);
        },
        settings);
    for (auto* each : {&whole.dq, &whole.dk, &whole.dv})
        std::fill(each->memory.begin(), each->memory.end(), T{});
    std::vector<bool> there;
    for (int r = 0; r < ranks; ++r) {
        auto const& local = locals[static_cast<std::size_t>(r)];
        CHECK(put_alike(step.queries(), r, local.o, whole.o, there));
        add_back(step.queries(), r, local.dq, whole.dq);
        add_back(step.keys(), r, local.dk, whole.dk);
        add_back(step.keys(), r, local.dv, whole.dv);
    }
    return whole;
}

/// The results of one rank, however the ranks reach each other.
template <class T>
void check_replicated(problem<T> p, orders const& queries, orders const& keys = {}) {
    INFO(p.text());
    auto const step = p.step(queries, keys);
    std::mt19937_64 random{11};
    auto const dout = parts_of(random, step.queries(), p.dout);
    auto const many = compute_replicated(p, step, dout, reach_under_test());
    for (auto const way : {reach::none, reach::some})
        if (reach_under_test() == reach::all)
            CHECK(same_bits(compute_replicated(p, step, dout, way), many));
    auto kept = p;
    kept.layer.keep = uly::keep::exchanged;
    auto const one = compute_alone<builtin_attention>(kept);
    CHECK(same_bits(many.o, one.o));
    if (p.layer.keep != uly::keep::nothing) CHECK(same_bits(many.lse, one.lse));
    CHECK(same_bits(many.dq, one.dq));
    auto const exact = compute_alone<uly::reference_attention>(converted<double>(kept));
    // Every rank rounds its part of a replicated key's gradient to the element type.
    auto const ranks = static_cast<int>(queries.size());
    auto const bound = bounds_of(p, ranks);
    auto const parts = sizeof(T) < 4 ? ranks : 1;
    CHECK(largest_difference(many.dk, exact.dk) <= parts * bound.dk);
    CHECK(largest_difference(many.dv, exact.dv) <= parts * bound.dv);
}

orders random_replicated(std::mt19937_64& random, int64_t tokens, int ranks) {
    auto const segments = random_segments(random, tokens);
    auto const rest = tokens - tokens_of(segments);
    return with_replicated(random, tokens, segments,
                           rest == 0 ? orders(static_cast<std::size_t>(ranks))
                                     : random_orders(random, rest, ranks));
}

}  // namespace

TEST_CASE("case 17: text of 5 tokens on every rank beside an image of 16 on four") {
    for (auto const mask : {uly::mask::full, causal})
        for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing}) {
            uly::shape const layer{
                .heads = 4, .kv_heads = 2, .head_dim = 8, .mask = mask, .keep = keep};
            check_replicated(make_problem<float>(17, layer, 2, 21), replicated_front(5, 21, 4));
        }
}

TEST_CASE("case 17: by a number of tokens, attended once over 21 keys") {
    constexpr int64_t text = 5, image = 16, all = text + image;
    constexpr uly::shape shape{.heads = 4, .head_dim = 8};
    auto const p = make_problem<float>(17, shape, 1, all);
    auto const one = compute_alone<builtin_attention>(p);
    std::array<tensor<float>, 4> outputs;
    std::array<int64_t, 4> rows{};
    run_ranks(4, [&](uly::threads::communicator group) {
        auto const me = static_cast<std::size_t>(group.rank());
        uly::pipeline layer{group, uly::sequence_local{}, builtin_attention{}, p.layer};
        // [snippet]
        auto const own = image / group.size();
        auto const step =
            uly::sequence::agree(group, {.batch = 1, .tokens = text + own, .replicated = text});
        // [/snippet]
        CHECK(step.keys().total() == all);
        local_problem<float> local(p, step, group.rank());
        layer.attend(step, local.q, local.k, local.v, local.o);
        rows[me] = layer.planned(step).own_query_rows();
        for (auto const& item : layer.planned(step).items()) CHECK(item.work.keys() == all);
        CHECK(layer.describe(step).find("on every rank: 5 of the queries, 5 of the keys") !=
              std::string::npos);
        outputs[me] = local.o;
        CHECK(same_bits(local.o, own_part(step.queries(), group.rank(), one.o)));
    });
    CHECK(rows[0] + rows[1] + rows[2] + rows[3] == 4 * all);
    for (auto const& each : outputs)
        CHECK(std::memcmp(each.data(), outputs[0].data(),
                          static_cast<std::size_t>(text) * 4 * 8 * sizeof(float)) == 0);
}

TEST_CASE("case 18: 16 queries on four ranks over 5 keys that every rank holds") {
    for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing}) {
        uly::shape const layer{
            .heads = 4, .kv_heads = 2, .head_dim = 8, .value_dim = 3, .keep = keep};
        check_replicated(make_problem<float>(18, layer, 2, 16, 5), equal_shares(16, 4),
                         replicated_front(5, 5, 4));
    }
    run_ranks(4, [](uly::threads::communicator group) {
        auto const step =
            uly::sequence::agree(group, {.tokens = 4, .keys = 5, .replicated_keys = 5});
        uly::plan moves;
        moves.rebuild(uly::checked({.heads = 4, .head_dim = 8}), step, 4, group.rank(), 1);
        CHECK(step.keys().total() == 5);
        for (int peer = 0; peer < 4; ++peer)
            CHECK(moves.rows(peer).keys_to == (peer == group.rank() ? 5 : 0));
    });
}

TEST_CASE("replicated: elements of 16 bits, whose parts of dO are summed in float") {
    check_replicated(
        make_problem<uly::bf16>(19, {.heads = 3, .head_dim = 8, .mask = causal}, 2, 21),
        replicated_front(5, 21, 4));
}

TEST_CASE("replicated: random layers, tokens and keep policies have the bits of one rank") {
    constexpr std::uint64_t first_seed = 1, shapes = 60;
    MESSAGE("seeds " << first_seed << " .. " << first_seed + shapes - 1);
    for (auto seed = first_seed; seed < first_seed + shapes; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        auto const kv_heads = 1 + below(random, 4);
        uly::shape layer{.heads = kv_heads * (1 + below(random, 3)),
                         .kv_heads = kv_heads,
                         .head_dim = 1 + below(random, 12),
                         .value_dim = 1 + below(random, 12),
                         .mask = below(random, 2) == 0 ? uly::mask::full : causal,
                         .assignment = below(random, 6) == 0 ? uly::assignment::whole_heads
                                                             : uly::assignment::balanced};
        auto const tokens = 1 + below(random, 40);
        auto const cross = layer.mask == uly::mask::full && below(random, 2) == 0;
        auto const keys = cross ? 1 + below(random, 40) : tokens;
        auto p = make_problem<float>(seed, layer, 1 + below(random, 2), tokens, keys);
        constexpr uly::keep policies[] = {uly::keep::exchanged, uly::keep::local,
                                          uly::keep::nothing};
        p.layer.keep = policies[seed % 3];
        // Every group of 1 to 8 ranks in turn.
        for (auto const ranks : {1 + static_cast<int>(seed % 8), 2, 5}) {
            CAPTURE(ranks);
            auto const sharded_queries = cross && below(random, 3) == 0;
            auto const queries = sharded_queries ? random_orders(random, tokens, ranks)
                                                 : random_replicated(random, tokens, ranks);
            auto const key_order =
                p.keys == p.tokens ? orders{} : random_replicated(random, keys, ranks);
            check_replicated(p, queries, key_order);
        }
    }
}

TEST_CASE("replicated: six steps: y alike on every rank, gradients summed over the ranks") {
    for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing}) {
        CAPTURE(static_cast<int>(keep));
        six_problem<double> p(
            20, {.heads = 3, .kv_heads = 1, .head_dim = 4, .mask = causal, .keep = keep}, 2, 21, 5);
        std::mt19937_64 random{20};
        constexpr int ranks = 4;
        auto const step = uly::sequence::of(p.batch, replicated_front(5, p.tokens, ranks));
        auto const dy = parts_of(random, step.queries(), p.dy);
        auto const one = six_steps(p, equal_shares(p.tokens, 1));
        struct rank_part {
            tensor<double> x, y, dx;
            std::vector<double> gradients;
        };
        std::vector<rank_part> parts(ranks);
        for (int r = 0; r < ranks; ++r) {
            auto& mine = parts[static_cast<std::size_t>(r)];
            mine.x = own_part(step.queries(), r, p.x);
            mine.y = mine.dx = tensor<double>(mine.x.sizes);
            mine.gradients.assign(p.parameters.size(), 0.0);
        }
        run_ranks(ranks, [&](uly::threads::communicator c) {
            auto const me = static_cast<std::size_t>(c.rank());
            auto& mine = parts[me];
            uly::pipeline layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer,
                                uly::dense{uly::builtin_gemm{}, uly::no_epilogue{}}};
            auto saved = layer.make_context();
            auto const weights = p.places().weights(p.parameters.data());
            layer.forward(step, saved, token_operand(mine.x), weights, token_operand(mine.y));
            layer.backward(step, saved, token_operand(mine.x), weights, token_operand(dy[me]),
                           token_operand(mine.dx), p.places().gradients(mine.gradients.data()));
        });
        tensor<double> y(p.x.sizes), dx(p.x.sizes, 0.0);
        std::vector<double> gradients(p.parameters.size(), 0.0);
        std::vector<bool> there;
        for (int r = 0; r < ranks; ++r) {
            auto const& mine = parts[static_cast<std::size_t>(r)];
            CHECK(put_alike(step.queries(), r, mine.y, y, there));
            add_back(step.queries(), r, mine.dx, dx);
            for (std::size_t i = 0; i < gradients.size(); ++i) gradients[i] += mine.gradients[i];
        }
        CHECK(same_bits(y, one.y));
        CHECK(largest_difference(dx, one.dx) <= 1e-13);
        double off = 0, largest = 0;
        for (std::size_t i = 0; i < gradients.size(); ++i) {
            off = std::max(off, std::fabs(gradients[i] - one.gradients[i]));
            largest = std::max(largest, std::fabs(one.gradients[i]));
        }
        CHECK(off <= 1e-12);
        CHECK(largest > 0.1);
    }
}
