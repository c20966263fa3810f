// SPDX-License-Identifier: Apache-2.0

#include "draws.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace pipeline_test;

namespace {

/// True for the key-value heads whose query rows all lie on one rank.
template <class T>
std::vector<bool> heads_of_one_rank(problem<T> const& p, orders const& queries,
                                    orders const& keys) {
    ulysses::plan moves;
    moves.rebuild(p.layer, p.step(queries, keys), static_cast<int>(queries.size()), 0,
                  builtin_attention::row_multiple());
    std::vector<int> users(static_cast<std::size_t>(p.layer.kv_heads));
    for (int r = 0; r < moves.ranks(); ++r) {
        std::vector<bool> here(users.size());
        for (auto const& item : moves.items(r))
            for (auto g = item.kv_begin; g < item.kv_end; ++g)
                here[static_cast<std::size_t>(g)] = true;
        for (std::size_t g = 0; g < users.size(); ++g) users[g] += here[g] ? 1 : 0;
    }
    std::vector<bool> result;
    for (auto const count : users) result.push_back(count == 1);
    return result;
}

template <class T>
bool same_bits_of_heads(tensor<T> const& a, tensor<T> const& b, std::vector<bool> const& heads) {
    auto const& e = a.sizes;
    for (int64_t i = 0; i < e[0]; ++i)
        for (int64_t s = 0; s < e[1]; ++s)
            for (int64_t h = 0; h < e[2]; ++h)
                for (int64_t d = 0; d < e[3] && heads[static_cast<std::size_t>(h)]; ++d)
                    if (std::memcmp(&a(i, s, h, d), &b(i, s, h, d), sizeof(T)) != 0) return false;
    return true;
}

template <class T>
void compare_with_one_rank(problem<T> const& p, results<double> const& exact,
                           std::vector<int> const& sizes, std::mt19937_64& random) {
    auto const one = compute_alone<builtin_attention>(p);
    auto const bound = bounds_of(p, 8);
    CHECK(largest_difference(one.o, exact.o) <= bound.o);
    CHECK(largest_difference(one.lse, exact.lse) <= bound.lse);
    CHECK(largest_difference(one.dq, exact.dq) <= bound.dq);
    for (auto const ranks : sizes) {
        CAPTURE(ranks);
        auto const queries = random_orders(random, p.tokens, ranks);
        auto const keys = p.keys != p.tokens ? random_orders(random, p.keys, ranks) : orders{};
        auto const many = compute<builtin_attention>(p, queries, keys);
        // However the bytes were moved.
        for (auto const way : {reach::none, reach::some})
            if (reach_under_test() == reach::all)
                CHECK(same_bits(compute<builtin_attention>(p, queries, keys, {}, way), many));
        CHECK(same_bits(many.o, one.o));
        CHECK(same_bits(many.lse, one.lse));
        CHECK(same_bits(many.dq, one.dq));
        auto const whole = heads_of_one_rank(p, queries, keys);
        CHECK(same_bits_of_heads(many.dk, one.dk, whole));
        CHECK(same_bits_of_heads(many.dv, one.dv, whole));
        CHECK(largest_difference(many.dk, exact.dk) <= bound.dk);
        CHECK(largest_difference(many.dv, exact.dv) <= bound.dv);
    }
}

}  // namespace

TEST_CASE("property: o, lse and dq have the bits of one rank at any number of ranks") {
    // Where all ranks reach each other, the other ways of moving bytes are compared as well.
    constexpr std::uint64_t first_seed = 1;
    std::uint64_t const shapes = TEST_UNDER_SANITIZER || reach_under_test() != reach::all ? 70 : 210;
    MESSAGE("seeds " << first_seed << " .. " << first_seed + shapes - 1);
    for (auto seed = first_seed; seed < first_seed + shapes; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        auto const p = random_problem(seed, random);
        INFO(p.text());
        auto const exact = compute_alone<ulysses::reference_attention>(converted<double>(p));
        // 2, 3, 4 and 8 always; 1 as a group of one thread, 5, 6 and 7 in turn.
        constexpr int others[] = {1, 5, 6, 7};
        std::vector<int> const sizes{2, 3, 4, others[seed % 4], 8};
        if (seed % 2 == 0)
            compare_with_one_rank(p, exact, sizes, random);
        else
            compare_with_one_rank(converted<double>(p), exact, sizes, random);
    }
}

TEST_CASE("property: the reference functor has the bits of one rank as well") {
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        auto const kv_heads = 1 + below(random, 3);
        auto const p = make_problem<double>(seed,
                                            {.heads = kv_heads * (1 + below(random, 3)),
                                             .kv_heads = kv_heads,
                                             .head_dim = 3,
                                             .value_dim = 5,
                                             .mask = ulysses::mask::causal},
                                            2, 1 + below(random, 40));
        auto const one = compute_alone<ulysses::reference_attention>(p);
        for (int ranks : {2, 3, 8}) {
            CAPTURE(ranks);
            auto const many =
                compute<ulysses::reference_attention>(p, random_orders(random, p.tokens, ranks));
            CHECK(same_bits(many.o, one.o));
            CHECK(same_bits(many.lse, one.lse));
            CHECK(same_bits(many.dq, one.dq));
        }
    }
}
