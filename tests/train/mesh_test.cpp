// SPDX-License-Identifier: Apache-2.0

#include "failure.hpp"

#include <ulysses/comm/serial.hpp>
#include <ulysses/train/mesh.hpp>

#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

using namespace train_test;

namespace {

/// World ranks of a group, in its order.
std::vector<std::int64_t> members(ranks_type const& group, int world_rank) {
    std::int64_t const mine = world_rank;
    std::vector<std::int64_t> all(static_cast<std::size_t>(group.size()));
    group.all_gather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)));
    CHECK(all[static_cast<std::size_t>(group.rank())] == mine);
    return all;
}

using list = std::vector<std::int64_t>;

}  // namespace

// What a configuration is can be a compile-time value.
namespace {
constexpr uly::parallel_config eight{.sp = 2, .dp_replicate = 2, .dp_shard = 2};
static_assert(valid(eight) && eight.ranks() == 8 && eight.data_ranks() == 4);
static_assert(!valid(uly::parallel_config{.sp = 0}));
static_assert(!valid(uly::parallel_config{.sp = 1 << 30, .dp_replicate = 1 << 30, .dp_shard = 8}));
}  // namespace

TEST_CASE("mesh: sp ranks are contiguous and fastest, then shards, then replicas") {
    pipeline_test::run_ranks(8, [](ranks_type world) {
        uly::mesh const ranks{world, eight};
        auto const r = world.rank();
        auto const pair = r / 2 * 2, half = r / 4 * 4;
        CHECK(members(ranks.world(), r) == list{0, 1, 2, 3, 4, 5, 6, 7});
        CHECK(members(ranks.sp(), r) == list{pair, pair + 1});
        CHECK(members(ranks.dp(), r) == (r % 2 == 0 ? list{0, 2, 4, 6} : list{1, 3, 5, 7}));
        CHECK(members(ranks.states(), r) == list{half, half + 1, half + 2, half + 3});
        CHECK(members(ranks.dp_replicate(), r) == list{r % 4, r % 4 + 4});
        CHECK(ranks.data_rank() == r / 2);
        CHECK(ranks.config() == eight);
    });
}

TEST_CASE("mesh: of one rank") {
    uly::mesh const ranks{uly::serial{}, {}};
    CHECK(ranks.sp().size() == 1);
    CHECK(ranks.states().size() == 1);
    CHECK(ranks.data_rank() == 0);
}

TEST_CASE("mesh: errors name all numbers, on all ranks") {
    auto const of = [](uly::parallel_config const& config) {
        return failure_on_all(3, [&](ranks_type world) { uly::mesh{world, config}; });
    };
    auto wrong = of({.sp = 2, .dp_replicate = 1, .dp_shard = 2});
    CHECK(wrong.code == uly::errc::invalid_config);
    CHECK(wrong.text ==
          "ulysses: mesh: sp * dp_replicate * dp_shard must be the number of ranks: sp 2, "
          "dp_replicate 1, dp_shard 2: 4 ranks, the group has 3");
    wrong = of({.sp = 3, .dp_replicate = 0, .dp_shard = -1});
    CHECK(wrong.code == uly::errc::invalid_config);
    CHECK(wrong.text ==
          "ulysses: mesh: sizes lie in 1 .. 2^31 - 1: sp 3, dp_replicate 0, dp_shard -1");
    wrong = failure_on_all(3, [](ranks_type world) {
        uly::mesh{world, world.rank() == 2 ? uly::parallel_config{.dp_shard = 3}
                                           : uly::parallel_config{.sp = 3}};
    });
    CHECK(wrong.code == uly::errc::disagreement);
    CHECK(wrong.text ==
          "ulysses: mesh: every rank must be divided alike: rank 0 has sp 3, dp_replicate 1, "
          "dp_shard 1, rank 2 has sp 1, dp_replicate 1, dp_shard 3");
}

TEST_CASE("config: from text") {
    using uly::config_from_text;
    CHECK(config_from_text<uly::parallel_config>("") == uly::parallel_config{});
    auto const all = config_from_text<uly::training_config>(
        "# a run of 8 ranks\nsp=4,dp_shard=2 # no replicas\n\tmicro_batch=3\r\ntokens=131072",
        {.step = {.gradient_accumulation = 7}});
    CHECK(all.parallel == uly::parallel_config{.sp = 4, .dp_shard = 2});
    CHECK(all.step ==
          uly::step_config{.micro_batch = 3, .gradient_accumulation = 7, .tokens = 131072});

    auto const wrong = [](std::string_view text) {
        auto const thrown = failure_of([&] { config_from_text<uly::parallel_config>(text); });
        CHECK(thrown.code == uly::errc::invalid_config);
        CHECK(thrown.text.find("mesh_test.cpp") != std::string::npos);
        return rule_of(thrown.text);
    };
    CHECK(wrong("sp=4 dp=2") ==
          "ulysses: config: a key must be known: 'dp', known are sp, dp_replicate, dp_shard");
    CHECK(wrong("sp 4") == "ulysses: config: settings are written key=value: 'sp'");
    CHECK(wrong("sp=4 sp=2") == "ulysses: config: a key is given once: 'sp' again");
    for (auto const* const value : {"", "four", "4x", "4.0", "99999999999999999999", "+4"})
        CHECK(wrong(uly::concat("sp=", value)) ==
              uly::concat("ulysses: config: a value must be a whole number: sp is '", value, "'"));
}

TEST_CASE("config: from the environment") {
    ::setenv("ULYSSES_DP_SHARD", "4", 1);
    ::setenv("ULYSSES_SP", "", 1);  // as if it were not set
    CHECK(uly::config_from_environment(uly::parallel_config{.sp = 2, .dp_shard = 3}) ==
          uly::parallel_config{.sp = 2, .dp_shard = 4});
    ::setenv("ULYSSES_SP", "two", 1);
    auto const wrong = failure_of([] { uly::config_from_environment<uly::parallel_config>(); });
    CHECK(wrong.code == uly::errc::invalid_config);
    CHECK(rule_of(wrong.text) ==
          "ulysses: config: a value must be a whole number: ULYSSES_SP is 'two'");
    ::unsetenv("ULYSSES_SP");
    ::unsetenv("ULYSSES_DP_SHARD");
}

TEST_CASE("accounting: samples, tokens, steps") {
    uly::accounting const run{{.sp = 4, .dp_replicate = 2, .dp_shard = 3},
                              {.micro_batch = 2, .gradient_accumulation = 5, .tokens = 1001}};
    CHECK(run.effective_batch() == 2 * 5 * 6);
    CHECK(run.tokens_per_step() == 60 * 1001);
    CHECK(run.tokens_per_rank() == 2 * 251);
    CHECK(run.describe() ==
          "24 ranks: sp 4, dp_replicate 2, dp_shard 3\nmicro_batch 2, gradient_accumulation 5, "
          "tokens 1001\neffective batch 60 samples, 60060 tokens a step, at most 502 tokens a rank "
          "and micro-batch\n");
}

TEST_CASE("accounting: micro-batches of an epoch, counted one by one") {
    for (std::int64_t const sp : {1, 2, 3})
        for (std::int64_t const dp : {1, 2, 4})
            for (std::int64_t const block : {1, 3})
                for (std::int64_t samples = 0; samples <= 40; ++samples) {
                    uly::accounting const run{{.sp = sp, .dp_shard = dp},
                                              {.micro_batch = block, .gradient_accumulation = 2}};
                    std::int64_t full = 0, any = 0, rotation_full = 0;
                    for (std::int64_t first = 0; first < samples; first += dp * block) {
                        // One micro-batch of every group; sp of them are a rotation.
                        ++any;
                        if (first + dp * block <= samples) ++full;
                    }
                    rotation_full = full / sp * sp;
                    CAPTURE(sp);
                    CAPTURE(dp);
                    CAPTURE(block);
                    CAPTURE(samples);
                    CHECK(run.micro_batches_per_epoch(samples, uly::at_end::drop) == rotation_full);
                    CHECK(run.micro_batches_per_epoch(samples, uly::at_end::pad) == any);
                    CHECK(run.steps_per_epoch(samples, uly::at_end::pad) == (any + 1) / 2);
                }
}

TEST_CASE("accounting: equal tokens between data and sequence parallelism") {
    uly::accounting const data{{.dp_shard = 8}, {.gradient_accumulation = 3, .tokens = 100}};
    auto const both = data.with_equal_tokens({.sp = 4, .dp_shard = 2});
    CHECK(both.step().gradient_accumulation == 3 * 4);  // times P
    CHECK(both.tokens_per_step() == data.tokens_per_step());
    CHECK(both.with_equal_tokens({.dp_shard = 8}).step() == data.step());
    auto const wrong =
        failure_of([&] { static_cast<void>(data.with_equal_tokens({.sp = 1, .dp_shard = 9})); });
    CHECK(wrong.code == uly::errc::invalid_config);
    CHECK(
        rule_of(wrong.text) ==
        "ulysses: accounting: equal tokens need as many micro-batches on every data rank: "
        "micro_batch 1, gradient_accumulation 3, tokens 100 with sp 1, dp_replicate 1, dp_shard 8 "
        "are 24 micro-batches a step; sp 1, dp_replicate 1, dp_shard 9 has 9 data ranks");
    auto const huge = failure_of([] {
        uly::accounting{{.dp_shard = 1 << 30},
                        {.gradient_accumulation = 1 << 30, .tokens = 1 << 30}};
    });
    CHECK(huge.code == uly::errc::invalid_config);
    CHECK(rule_of(huge.text) ==
          "ulysses: accounting: sizes lie in 1 .. 2^31 - 1, their product below 2^62: micro_batch "
          "1, gradient_accumulation 1073741824, tokens 1073741824, sp 1, dp_replicate 1, dp_shard "
          "1073741824");
}
