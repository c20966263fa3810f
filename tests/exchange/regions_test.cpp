// SPDX-License-Identifier: Apache-2.0

#include <ulysses/exchange/regions.hpp>
#include <ulysses/plan/sequence.hpp>

#include <doctest/doctest.h>

#include <array>
#include <vector>

namespace uly = ulysses;
using std::int64_t;

namespace {

uly::plan plan_of(uly::shape const& layer, int64_t tokens, int ranks, int rank) {
    uly::plan moves;
    moves.rebuild(uly::checked(layer), uly::sequence::split(ranks, 2, tokens), ranks, rank, 1);
    return moves;
}

template <class... Regions>
void check_apart(std::size_t arena_bytes, int64_t query_rows, int64_t key_rows,
                 std::vector<std::pair<uly::region, bool>> const& regions) {
    std::size_t end = 0;
    for (auto const& [place, of_queries] : regions) {
        CHECK(place.offset >= end);
        CHECK(place.offset % 64 == 0);
        CHECK(place.pitch % 64 == 0);
        CHECK(place.pitch >= place.row_bytes);
        CHECK(place.pitch < place.row_bytes + 64);
        end = place.offset +
              static_cast<std::size_t>(place.pitch * (of_queries ? query_rows : key_rows));
    }
    CHECK(arena_bytes == end);
}

}  // namespace

TEST_CASE("regions: the operands of an arena lie apart, rows on lines of their own") {
    for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing}) {
        auto const moves = plan_of({.heads = 6,
                                    .kv_heads = 3,
                                    .head_dim = 17,
                                    .value_dim = 5,
                                    .mask = uly::mask::causal,
                                    .keep = keep},
                                   37, 4, 1);
        auto const queries = moves.query_region_rows(), keys = moves.key_region_rows();
        auto const f = uly::forward_regions::of<float>(moves);
        check_apart(f.inbox_bytes, queries, keys, {{f.q, true}, {f.k, false}, {f.v, false}});
        check_apart(f.outbox_bytes, queries, keys, {{f.o, true}});
        CHECK(f.q.row_bytes == 17 * 4);
        CHECK(f.o.row_bytes == 5 * 4);

        auto const b = uly::backward_regions::of<uly::bf16>(moves);
        std::vector<std::pair<uly::region, bool>> in,
            out{{b.dq, true}, {b.dk, false}, {b.dv, false}};
        in.reserve(5);  // g++ takes growing for writing past the end
        in.push_back({b.dout, true});
        if (keep != uly::keep::exchanged) {
            in.push_back({b.q, true});
            in.push_back({b.k, false});
            in.push_back({b.v, false});
        }
        if (keep == uly::keep::local) in.push_back({b.o, true});
        if (keep == uly::keep::nothing) out.push_back({b.o, true});
        check_apart(b.inbox_bytes, queries, keys, in);
        check_apart(b.outbox_bytes, queries, keys, out);
        // Parts that are summed over ranks are of the accumulator type.
        CHECK(b.dq.row_bytes == 17 * 2);
        CHECK(b.dk.row_bytes == 17 * 4);
        CHECK(b.dv.row_bytes == 5 * 4);
    }
}

TEST_CASE("regions: an arena of 2^62 bytes or more is refused") {
    uly::arena_layout arena;
    static_cast<void>(arena.add<float>(int64_t{1} << 40, 16));
    CHECK_THROWS_WITH_AS(static_cast<void>(arena.add<float>(int64_t{1} << 56, 17)),
                         "ulysses: exchange: an arena must stay below 2^62 bytes: "
                         "72057594037927936 rows of 128 bytes",
                         uly::invalid_shape);
    CHECK(arena.bytes() == std::size_t{64} << 40);
}

TEST_CASE("regions: the items of a rank share no row of its regions and stay inside") {
    for (int ranks : {1, 2, 3, 5, 8})
        for (int rank = 0; rank < ranks; ++rank) {
            CAPTURE(ranks);
            CAPTURE(rank);
            auto const moves =
                plan_of({.heads = 12, .kv_heads = 4, .head_dim = 3, .mask = uly::mask::causal}, 19,
                        ranks, rank);
            uly::region const place{64, 64, 12};
            auto const rows = static_cast<std::size_t>(moves.query_region_rows());
            std::vector<float> memory((rows + 1) * 16);
            std::vector<int> uses(rows);
            uly::head_operand<float> const operand(reinterpret_cast<std::byte*>(memory.data()),
                                                   place, 3);
            for (auto const& item : moves.items()) {
                auto const view = operand.queries(moves, item);
                REQUIRE(view.extents == uly::extents4{2, item.work.rows(), item.work.heads(), 3});
                for (int64_t b = 0; b < 2; ++b)
                    for (int64_t s = 0; s < view.tokens(); ++s)
                        for (int64_t h = 0; h < view.heads(); ++h) {
                            auto const offset = view.row(b, s, h) - memory.data() - 16;
                            REQUIRE(offset % 16 == 0);
                            REQUIRE(offset / 16 < moves.own_query_rows());
                            ++uses[static_cast<std::size_t>(offset / 16)];
                        }
            }
            for (int64_t row = 0; row < moves.own_query_rows(); ++row)
                CHECK(uses[static_cast<std::size_t>(row)] == 1);
        }
}

TEST_CASE("regions: items of a head-local tensor are views into it") {
    auto const moves = plan_of({.heads = 6, .kv_heads = 3, .head_dim = 2}, 5, 3, 1);
    REQUIRE(moves.items().size() == 1);
    std::array<double, 2 * 5 * 2 * 2> q{};
    std::array<double, 2 * 5 * 1 * 2> k{};
    uly::head_operand<double> const queries(uly::head_view<double>(q.data(), {2, 5, 2, 2})),
        keys(uly::head_view<double>(k.data(), {2, 5, 1, 2}));
    CHECK(queries.queries(moves, moves.items()[0]).data == q.data());
    CHECK(queries.queries(moves, moves.items()[0]).extents == uly::extents4{2, 5, 2, 2});
    CHECK(keys.keys(moves, moves.items()[0]).data == k.data());
    CHECK(keys.keys(moves, moves.items()[0]).extents == uly::extents4{2, 5, 1, 2});
}
