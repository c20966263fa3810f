// SPDX-License-Identifier: Apache-2.0

#include <ulysses/space/host.hpp>
#include <ulysses/stage/attend.hpp>

#include "../pipeline/orders.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <vector>

namespace uly = ulysses;
using namespace pipeline_test;

namespace {

struct seen_call {
    uly::attention_call call;
    uly::extents4 q, k, v, o, lse;
    bool backward = false;
};

/// Records its calls; adds one to every element that it must write or add to.
struct recording_attention {
    using space_type = uly::host_space;
    static constexpr uly::attention_features features{
        .causal = true, .full = true, .grouped = true, .value_dim = true, .row_range = true};

    std::vector<seen_call>* seen;
    int64_t multiple = 1;

    int64_t row_multiple() const { return multiple; }
    template <uly::element T>
    static std::size_t workspace_bytes(uly::attention_extents const& e) {
        return static_cast<std::size_t>(e.batch + 2 * e.rows + 3 * e.heads + 5 * e.keys +
                                        7 * e.kv_heads + 11 * e.head_dim + 13 * e.value_dim);
    }

    static void add_one(auto const& view) {
        for (int64_t b = 0; b < view.batch(); ++b)
            for (int64_t s = 0; s < view.tokens(); ++s)
                for (int64_t h = 0; h < view.heads(); ++h)
                    for (int64_t d = 0; d < view.dim(); ++d) view(b, s, h, d) += 1;
    }

    void forward(uly::attention_call const& call, uly::head_view<float const> q,
                 uly::head_view<float const> k, uly::head_view<float const> v,
                 uly::head_view<float> o, uly::head_view<float> lse) const {
        seen->push_back({call, q.extents, k.extents, v.extents, o.extents, lse.extents});
        add_one(o);
        add_one(lse);
    }
    void backward(uly::attention_call const& call,
                  uly::attention_backward_views<float> const& views) const {
        seen->push_back({call, views.q.extents, views.k.extents, views.v.extents, views.o.extents,
                         views.lse.extents, true});
        CHECK(views.dq.extents == views.q.extents);
        CHECK(views.dk.extents == views.k.extents);
        CHECK(views.dv.extents == views.v.extents);
        CHECK(views.dout.extents == views.o.extents);
        add_one(views.dq);
        add_one(views.dk);
        add_one(views.dv);
    }
};
static_assert(uly::differentiable_attention_for<recording_attention, float>);

/// Head-local memory for a plan's own regions, zero at first.
struct own_memory {
    std::vector<float> q, k, v, o, lse, dq, dk, dv;
    uly::attend_operands<float> operands;

    explicit own_memory(uly::plan const& moves) {
        auto const& layer = moves.layer();
        auto const give = [](auto& operand, std::vector<float>& memory, int64_t rows, int64_t dim) {
            memory.assign(static_cast<std::size_t>(rows * dim), 0.0f);
            uly::region const place{0, dim * 4, dim * 4};
            operand = {reinterpret_cast<std::byte*>(memory.data()), place, dim};
        };
        auto const queries = moves.own_query_rows(), keys = moves.key_region_rows();
        give(operands.q, q, queries, layer.head_dim);
        give(operands.k, k, keys, layer.head_dim);
        give(operands.v, v, keys, layer.value_dim);
        give(operands.o, o, queries, layer.value_dim);
        give(operands.lse, lse, queries, 1);
        operands.dout = {
            reinterpret_cast<std::byte*>(o.data()), {0, layer.value_dim * 4, 0}, layer.value_dim};
        give(operands.dq, dq, queries, layer.head_dim);
        give(operands.dk, dk, keys, layer.head_dim);
        give(operands.dv, dv, keys, layer.value_dim);
    }
};

}  // namespace

TEST_CASE("attend: the functor is called once for each work item and told where it lies") {
    // Hq 6, Hkv 3, P 2: rank 1 computes heads 3 and 4-6, in two items, as one head ratio demands.
    uly::plan moves;
    auto const layer = uly::checked({.heads = 6,
                                     .kv_heads = 3,
                                     .head_dim = 4,
                                     .value_dim = 2,
                                     .mask = uly::mask::causal,
                                     .scale = 0.25});
    moves.rebuild(layer, uly::sequence::split(2, 2, 9), 2, 1, 1);
    std::vector<seen_call> seen;
    own_memory memory(moves);
    recording_attention const attention{&seen};
    auto const bytes = uly::attend_workspace_bytes<float>(attention, moves);
    std::vector<std::byte> workspace(bytes);
    uly::attend(attention, moves, memory.operands, workspace);
    REQUIRE(seen.size() == 2);
    struct expected {
        int64_t query_head, kv_head, heads, kv_heads;
    };
    expected const golden[] = {{3, 1, 1, 1}, {4, 2, 2, 1}};
    for (std::size_t i = 0; i < 2; ++i) {
        auto const& [call, q, k, v, o, lse, backward] = seen[i];
        CHECK(call.query_head == golden[i].query_head);
        CHECK(call.kv_head == golden[i].kv_head);
        CHECK(call.query_begin == 0);
        CHECK(call.key_begin == 0);
        CHECK(call.visible.queries == 9);
        CHECK(call.visible.keys == 9);
        CHECK(call.visible.mask == uly::mask::causal);
        CHECK(call.scale == 0.25);
        CHECK(call.workspace.size() >= bytes);
        CHECK(q == uly::extents4{2, 9, golden[i].heads, 4});
        CHECK(k == uly::extents4{2, 9, golden[i].kv_heads, 4});
        CHECK(v == uly::extents4{2, 9, golden[i].kv_heads, 2});
        CHECK(o == uly::extents4{2, 9, golden[i].heads, 2});
        CHECK(lse == uly::extents4{2, 9, golden[i].heads, 1});
        CHECK(!backward);
    }
    uly::attend_backward(attention, moves, memory.operands, workspace);
    REQUIRE(seen.size() == 4);
    CHECK(seen[2].backward);
    CHECK(seen[2].call.query_head == 3);
    CHECK(seen[3].call.query_head == 4);
}

TEST_CASE("attend: a cut head's rows are global, its keys reach as far as they see") {
    // One causal head of 8 rows weighs 36; the cut is the first row with 18 before it: row 6 (21).
    for (int rank : {0, 1}) {
        uly::plan moves;
        auto const layer = uly::checked({.heads = 1, .head_dim = 4, .mask = uly::mask::causal});
        moves.rebuild(layer, uly::sequence::split(2, 1, 8), 2, rank, 1);
        std::vector<seen_call> seen;
        own_memory memory(moves);
        uly::attend(recording_attention{&seen}, moves, memory.operands, {});
        REQUIRE(seen.size() == 1);
        CHECK(seen[0].call.query_begin == (rank == 0 ? 0 : 6));
        CHECK(seen[0].q[1] == (rank == 0 ? 6 : 2));
        CHECK(seen[0].k[1] == (rank == 0 ? 6 : 8));
        CHECK(seen[0].call.visible.queries == 8);
        CHECK(seen[0].call.scale == 0.5);  // 1 / sqrt(head_dim)
    }
}

TEST_CASE("attend: cuts keep the functor's row multiple") {
    for (int rank = 0; rank < 3; ++rank) {
        uly::plan moves;
        std::vector<seen_call> seen;
        recording_attention const attention{&seen, 16};
        moves.rebuild(uly::checked({.heads = 2, .head_dim = 1}), uly::sequence::split(3, 1, 100), 3,
                      rank, attention.row_multiple());
        own_memory memory(moves);
        uly::attend(attention, moves, memory.operands, {});
        REQUIRE(!seen.empty());
        for (auto const& each : seen) {
            CHECK(each.call.query_begin % 16 == 0);
            auto const end = each.call.query_begin + each.q[1];
            CHECK((end % 16 == 0 || end == 100));
        }
    }
}

TEST_CASE("attend: over all items every row is written once, gradients of shared keys meet in one "
          "place") {
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        auto const kv_heads = 1 + below(random, 4), group = 1 + below(random, 4);
        auto const ranks = static_cast<int>(1 + below(random, 8));
        auto const layer =
            uly::checked({.heads = kv_heads * group,
                          .kv_heads = kv_heads,
                          .head_dim = 1,
                          .mask = below(random, 2) == 0 ? uly::mask::full : uly::mask::causal});
        auto const step = uly::sequence::split(ranks, 1 + below(random, 2), 1 + below(random, 20));
        int64_t rows = 0;
        for (int rank = 0; rank < ranks; ++rank) {
            uly::plan moves;
            moves.rebuild(layer, step, ranks, rank, 1);
            std::vector<seen_call> seen;
            own_memory memory(moves);
            recording_attention const attention{&seen};
            uly::attend(attention, moves, memory.operands, {});
            for (auto const* written : {&memory.o, &memory.lse})
                for (auto const x : *written) CHECK(x == 1.0f);
            uly::attend_backward(attention, moves, memory.operands, {});
            for (auto const x : memory.dq) CHECK(x == 1.0f);
            rows += static_cast<int64_t>(memory.lse.size());
            // Items of one head add to the same rows: as many in total as the items see.
            double added = 0, items = 0;
            for (auto const x : memory.dk) added += static_cast<double>(x);
            for (auto const& each : seen)
                if (each.backward)
                    items += static_cast<double>(each.k[0] * each.k[1] * each.k[2] * each.k[3]);
            CHECK(added == items);
        }
        CHECK(rows == layer.heads * step.batch() * step.queries().total());
    }
}

TEST_CASE("attend: workspace is what the largest item needs") {
    uly::plan moves;
    auto const layer = uly::checked({.heads = 6, .kv_heads = 3, .head_dim = 4, .value_dim = 2});
    moves.rebuild(layer, uly::sequence::split(2, 1, 9), 2, 1, 1);
    std::vector<seen_call> none;
    // Items 3 | 1 and 4-6 | 2: the second has two query heads.
    CHECK(uly::attend_workspace_bytes<float>(recording_attention{&none}, moves) ==
          1 + 2 * 9 + 3 * 2 + 5 * 9 + 7 * 1 + 11 * 4 + 13 * 2);
    // A rank without rows needs none.
    moves.rebuild(uly::checked({.heads = 1, .head_dim = 4}), uly::sequence::split(3, 1, 1), 3, 2,
                  1);
    CHECK(moves.items().empty());
    CHECK(uly::attend_workspace_bytes<float>(recording_attention{&none}, moves) == 0);
}
