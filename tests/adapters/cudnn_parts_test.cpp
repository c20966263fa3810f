// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/sdpa_key.hpp>
#include <ulysses/adapters/cudnn/sdpa_lists.hpp>
#include <ulysses/adapters/cudnn/sdpa_parts.hpp>

#include "../visibility.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

namespace uly = ulysses;

namespace {

std::int64_t below(std::mt19937_64& random, std::int64_t limit) {
    return static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(limit));
}

struct drawn {
    std::int64_t batch = 1;
    uly::visibility rule{};
    std::vector<uly::sample_keys> samples{};
    std::vector<std::int64_t> documents{};

    explicit drawn(std::mt19937_64& random) {
        batch = 1 + below(random, 3);
        rule.mask = below(random, 2) == 0 ? uly::mask::causal : uly::mask::full;
        rule.queries = rule.keys = 1 + below(random, 40);
        if (below(random, 2) == 0) rule.keys = 1 + below(random, 40);
        if (below(random, 2) == 0) rule.window.left = below(random, 45);
        if (below(random, 3) == 0) rule.window.right = below(random, 45);
        if (below(random, 3) == 0) return;
        for (std::int64_t b = 0; b < batch; ++b) {
            uly::sample_keys own{0, rule.keys, rule.keys - rule.queries, 0, 0};
            if (below(random, 2) == 0) own.begin = below(random, rule.keys + 1);
            own.end = own.begin + below(random, rule.keys - own.begin + 1);
            if (below(random, 3) == 0) own.position = below(random, 80) - 40;
            own.first_document = static_cast<std::int64_t>(documents.size());
            if (below(random, 2) == 0)
                for (std::int64_t first = 0; first < rule.keys;
                     first += 1 + below(random, rule.keys)) {
                    documents.push_back(first);
                    ++own.documents;
                }
            samples.push_back(own);
        }
        rule.samples = samples;
        rule.documents = documents;
    }
};

/// That a band says of a part's rows, key by key, what the rule says of them.
void check_band(drawn const& d, uly::sdpa_part const& part, uly::sdpa_band const& band) {
    REQUIRE(band.left != 0);  // cuDNN takes a left bound of 1 and more
    REQUIRE(band.right >= -1);
    auto const rows = part.rows.size(), keys = part.keys.size();
    for (auto b = part.sample; b < part.sample + part.samples; ++b)
        for (std::int64_t i = 0; i < rows; ++i)
            for (std::int64_t j = 0; j < d.rule.keys; ++j) {
                auto const local = j - part.keys.begin;
                auto const within = local >= 0 && local < keys;
                REQUIRE((within && band.sees(i, local, rows, keys)) ==
                        sees(d.rule, b, part.rows.begin + i, j));
            }
}

}  // namespace

TEST_CASE("cudnn: parts hold each row once, and bands say what it sees, key by key") {
    std::mt19937_64 random{1};
    int together = 0, apart = 0, from_last = 0, unseen = 0, merged = 0;
    for (int trial = 0; trial < 1500; ++trial) {
        CAPTURE(trial);
        drawn const d(random);
        auto const begin = below(random, d.rule.queries);
        uly::index_range const rows{begin, begin + 1 + below(random, d.rule.queries - begin)};
        std::vector<uly::sdpa_part> parts;
        uly::append_parts(d.rule, d.batch, rows, parts);
        std::vector<int> held(static_cast<std::size_t>(d.batch * d.rule.queries));
        std::vector<uly::sdpa_part> seen;
        for (auto const& part : parts) {
            for (auto b = part.sample; b < part.sample + part.samples; ++b)
                for (auto i = part.rows.begin; i < part.rows.end; ++i)
                    ++held[static_cast<std::size_t>(b * d.rule.queries + i)];
            merged += part.samples > 1 && !d.rule.uniform();
            if (part.keys.size() == 0) {
                ++unseen;
                for (auto b = part.sample; b < part.sample + part.samples; ++b)
                    for (auto i = part.rows.begin; i < part.rows.end; ++i)
                        for (std::int64_t j = 0; j < d.rule.keys; ++j)
                            REQUIRE_FALSE(sees(d.rule, b, i, j));
                continue;
            }
            seen.push_back(part);
            for (auto const from_first : {false, true}) {
                auto const band = uly::band_of({&part, 1}, uly::sdpa_reach::of(d.rule), from_first);
                REQUIRE(band.has_value());
                REQUIRE_FALSE((from_first && band->from_last));
                check_band(d, part, *band);
            }
        }
        for (std::int64_t b = 0; b < d.batch; ++b)
            for (std::int64_t i = 0; i < d.rule.queries; ++i)
                REQUIRE(held[static_cast<std::size_t>(b * d.rule.queries + i)] ==
                        (rows.begin <= i && i < rows.end ? 1 : 0));
        if (seen.size() < 2) continue;
        auto const band = uly::band_of(seen, uly::sdpa_reach::of(d.rule), false);
        ++(band ? together : apart);
        if (!band) continue;
        from_last += band->from_last;
        for (auto const& part : seen) check_band(d, part, *band);
    }
    CHECK(together > 200);
    CHECK(apart > 50);
    CHECK(from_last > 5);
    CHECK(unseen > 200);
    CHECK(merged > 5);
}

TEST_CASE("cudnn: lists say where the entries of a batch begin and how long they are") {
    std::vector<uly::sdpa_part> const parts{{0, 2, {10, 13}, {4, 9}, 0},
                                            {3, 1, {11, 12}, {6, 8}, 0}};
    uly::detail::varied_batch const batch(parts, 10, 4);
    CHECK(batch.batch == 4);
    CHECK(batch.rows == 64);
    CHECK(batch.keys == 64);
    uly::detail::host_lists lists;
    using entry = uly::detail::varied_batch::entry;
    auto const counts = lists.put_counts(batch, &entry::keys);
    auto const firsts = lists.put_firsts(batch, {1000, 10, 1, 1}, &entry::row, &entry::rows);
    auto const read = [&](std::size_t begin, auto... expected) {
        using number = std::common_type_t<decltype(expected)...>;
        number const all[] = {expected...};
        return std::memcmp(lists.bytes().data() + begin, all, sizeof(all)) == 0;
    };
    CHECK(counts % 64 == 0);
    CHECK(firsts % 64 == 0);
    CHECK(read(counts, 5, 5, 2, 0));
    // Entries that are not there begin where the last ends.
    CHECK(read(firsts, std::int64_t{0}, std::int64_t{1000}, std::int64_t{3010}, std::int64_t{3020},
               std::int64_t{3020}));
    for (std::int64_t length = 1; length < 5000; ++length) {
        auto const rounded = uly::detail::rounded_length(length);
        REQUIRE(rounded >= length);
        REQUIRE(rounded < length + std::max<std::int64_t>(64, length / 8 + 1));
    }
}

TEST_CASE("cudnn: keys that differ in one thing are other keys, and hash apart") {
    uly::sdpa_key const base{.rows = 128, .keys = 128};
    uly::sdpa_key_hash const hash;
    auto const differs = [&](auto const& change) {
        auto other = base;
        change(other);
        CHECK_FALSE(other == base);
        CHECK(hash(other) != hash(base));
    };
    differs([](auto& k) { k.backward = true; });
    differs([](auto& k) { k.deterministic = true; });
    differs([](auto& k) { k.sinks = true; });
    differs([](auto& k) { k.type = uly::dtype::f16; });
    differs([](auto& k) { k.rows = 64; });
    differs([](auto& k) { k.scale = 0.5; });
    differs([](auto& k) { k.dropout = 0.5; });
    differs([](auto& k) { k.band.left = 3; });
    differs([](auto& k) { k.band.from_last = true; });
    differs([](auto& k) { k.dq[2] = 7; });
    differs([](auto& k) { k.varied = true; });
    differs([](auto& k) { k.row_places = 5; });
    differs([](auto& k) { k.softcap = 30; });
    differs([](auto& k) { k.slopes = true; });
    differs([](auto& k) { k.diagonal = 3; });
    differs([](auto& k) { k.dv[0] = 7; });
    differs([](auto& k) { k.dbias_extents[0] = 2; });
    differs([](auto& k) { k.bias_type = uly::dtype::f32; });
    differs([](auto& k) { k.bias_strides[1] = 7; });
    CHECK(hash(base) == hash(uly::sdpa_key{base}));
}
