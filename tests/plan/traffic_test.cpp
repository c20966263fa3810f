// SPDX-License-Identifier: Apache-2.0

#include <ulysses/plan/traffic.hpp>

#include "cases.hpp"

#include <doctest/doctest.h>

#include <vector>

namespace uly = ulysses;
using namespace plan_cases;

namespace {

uly::plan plan_of(uly::shape const& layer, uly::sequence const& step, int rank) {
    uly::plan moves;
    moves.rebuild(uly::checked(layer), step, step.ranks(), rank, 1);
    return moves;
}

}  // namespace

TEST_CASE("traffic: counted by hand on two ranks") {
    // Two heads, one key-value head, D = 3, Dv = 5; rank 0 holds 3 tokens, rank 1 holds 2. Each
    // computes one head and needs the key-value head.
    std::vector<runs> const orders{{{0, 3}}, {{3, 2}}};
    auto const step = uly::sequence::of(1, orders);
    uly::shape layer{.heads = 2, .kv_heads = 1, .head_dim = 3, .value_dim = 5};
    auto const first = plan_of(layer, step, 0), second = plan_of(layer, step, 1);
    // Rank 0 sends q of 3 tokens, k and v of 3, and o of rank 1's 2 tokens.
    CHECK(uly::forward_traffic(first, 4) ==
          uly::traffic{4 * (3 * 3 + 3 * 8 + 2 * 5), 4 * (2 * 3 + 2 * 8 + 3 * 5)});
    CHECK(uly::forward_traffic(second, 4) ==
          uly::traffic{4 * (2 * 3 + 2 * 8 + 3 * 5), 4 * (3 * 3 + 3 * 8 + 2 * 5)});
    // Backward: dO of 3 tokens out, dq of 2 back; dk and dv of 2 in the accumulator's 4 bytes.
    CHECK(uly::backward_traffic(first, 2, 4) ==
          uly::traffic{2 * (3 * 5 + 2 * 3) + 4 * 2 * 8, 2 * (2 * 5 + 3 * 3) + 4 * 3 * 8});
}

TEST_CASE("traffic: what a context did not keep moves again") {
    std::vector<runs> const orders{{{0, 3}}, {{3, 2}}};
    auto const step = uly::sequence::of(1, orders);
    uly::shape layer{.heads = 2, .kv_heads = 1, .head_dim = 3, .value_dim = 5};
    auto const kept = uly::backward_traffic(plan_of(layer, step, 0), 2, 4);
    layer.keep = uly::keep::local;  // q, k, v and o out
    auto const local = uly::backward_traffic(plan_of(layer, step, 0), 2, 4);
    CHECK(local.sent == kept.sent + 2 * (3 * 3 + 3 * 8 + 3 * 5));
    CHECK(local.received == kept.received + 2 * (2 * 3 + 2 * 8 + 2 * 5));
    layer.keep = uly::keep::nothing;  // q, k and v out, o back where the projection wants it
    auto const nothing = uly::backward_traffic(plan_of(layer, step, 0), 2, 4, true);
    CHECK(nothing.sent == kept.sent + 2 * (3 * 3 + 3 * 8 + 2 * 5));
    CHECK(nothing.received == kept.received + 2 * (2 * 3 + 2 * 8 + 3 * 5));
    auto const without_o = uly::backward_traffic(plan_of(layer, step, 0), 2, 4, false);
    CHECK(without_o.sent == nothing.sent - 2 * 2 * 5);
    CHECK(without_o.received == nothing.received - 2 * 3 * 5);
}

TEST_CASE("traffic: one rank moves nothing") {
    auto const moves = plan_of({.heads = 3, .head_dim = 2}, uly::sequence::split(1, 2, 7), 0);
    CHECK(uly::forward_traffic(moves, 8) == uly::traffic{});
    CHECK(uly::backward_traffic(moves, 8, 8) == uly::traffic{});
    CHECK(uly::closed_form_elements(moves.layer(), 2, 7, 1) == 0);
}

TEST_CASE("traffic: the closed form of known groups") {
    auto const form = [](int64_t heads, int64_t kv_heads, int ranks) {
        return uly::closed_form_elements(
            {.heads = heads, .kv_heads = kv_heads, .head_dim = 2, .value_dim = 1}, 3, ranks * 10,
            ranks);
    };
    // (P-1)/P * S * B * (Hq + copies of key-value heads) * (D + Dv)
    CHECK(form(32, 8, 8) == 7 * 10 * 3 * (32 + 8) * 3);
    CHECK(form(32, 8, 16) == 15 * 10 * 3 * (32 + 16) * 3);
    CHECK(form(6, 3, 2) == 1 * 10 * 3 * (6 + 4) * 3);
    CHECK(form(4, 1, 4) == 3 * 10 * 3 * (4 + 4) * 3);
}
