// SPDX-License-Identifier: Apache-2.0

#include "failure.hpp"

#include <ulysses/train/batch.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using namespace train_test;

namespace {

using std::int64_t;
using list = std::vector<int64_t>;

struct sample {
    list ids{}, labels{}, positions{};
    std::vector<float> weights{};
    std::vector<int> axes{};  // three a token
};
using samples = std::vector<sample>;

sample of(list ids) { return {.ids = ids, .labels = ids}; }
/// `count` samples of 1 + (i * 5) % 9 tokens, the first id of which says which one it is.
samples many(int64_t count, int64_t first = 0) {
    samples all;
    for (auto i = first; i < first + count; ++i) {
        list ids(static_cast<std::size_t>(1 + i * 5 % 9));
        std::iota(ids.begin(), ids.end(), 1000 * (i + 1));
        all.push_back(of(ids));
    }
    return all;
}

auto const usual = std::tuple{uly::ids_field(&sample::ids), uly::labels_field(&sample::labels)};

template <class Fields = decltype(usual)>
auto adapter_of(uly::mesh<ranks_type> const& ranks, samples const& own,
                uly::batch_options const& options = {}, Fields const& fields = usual) {
    return uly::batch_adapter{ranks, uly::range_source{own}, fields, options};
}

/// A state of such a run, at another place.
template <class Adapter>
uly::batch_state state_of(Adapter const& batches, int64_t rotation, int64_t position,
                          int64_t drawn) {
    auto state = batches.state();
    state.rotation = rotation;
    state.position = position;
    state.drawn = drawn;
    return state;
}

/// A micro-batch put together again.
struct whole {
    int source;
    int64_t samples, tokens, valid;
    list ids, labels, positions;
    friend bool operator==(whole const&, whole const&) = default;
};
template <class Batch>
whole put_together(ranks_type const& ranks, Batch const& batch) {
    auto const& order = batch.step.queries();
    auto const own = order.count(ranks.rank());
    whole all{batch.source, batch.step.batch(), order.total(), batch.valid_tokens, {}, {}, {}};
    auto const gathered = [&](list const& mine) {
        REQUIRE(static_cast<int64_t>(mine.size()) == all.samples * own);
        list values(static_cast<std::size_t>(all.samples * all.tokens));
        for (int64_t b = 0; b < all.samples; ++b)
            for (int64_t i = 0; i < own; ++i)
                values[static_cast<std::size_t>(b * all.tokens + order.position(ranks.rank(), i))] =
                    mine[static_cast<std::size_t>(b * own + i)];
        ranks.all_reduce(std::span<int64_t>(values), uly::reduction::sum);
        return values;
    };
    all.ids = gathered(batch.ids());
    all.labels = gathered(batch.labels());
    all.positions = gathered(batch.positions);
    return all;
}
/// All micro-batches of the epoch that are left.
template <class Adapter>
std::vector<whole> all_of(uly::mesh<ranks_type> const& ranks, Adapter& batches) {
    std::vector<whole> all;
    typename Adapter::batch_type batch;
    while (batches.next(batch)) all.push_back(put_together(ranks.sp(), batch));
    return all;
}

uly::mesh<ranks_type> of_sequence(ranks_type const& world) { return {world, {.sp = world.size()}}; }

}  // namespace

TEST_CASE("batch: golden vector, each rank's sample in turn, contiguous shards, labels shifted") {
    pipeline_test::run_ranks(2, [](ranks_type world) {
        bool const first = world.rank() == 0;
        samples const own{first ? of({1, 10, 10, 10, 2, 2}) : of({1, 20, 20, 20, 2, 2})};
        auto batches = adapter_of(of_sequence(world), own);
        decltype(batches)::batch_type batch;
        for (int64_t const id : {10, 20}) {
            REQUIRE(batches.next(batch));
            CHECK(batch.source == id / 10 - 1);
            CHECK(batch.ids() == (first ? list{1, id, id} : list{id, 2, 2}));
            CHECK(batch.positions == (first ? list{0, 1, 2} : list{3, 4, 5}));
            CHECK(batch.labels() == (first ? list{id, id, id} : list{2, 2, -100}));
            CHECK(batch.valid_tokens == 5);
            CHECK(batch.step.queries().total() == 6);
            CHECK(batch.step.ranks() == 2);
        }
        CHECK(!batches.next(batch));
        CHECK(!batches.next(batch));
    });
}

TEST_CASE("batch: golden vector, ids 1 to 8 over two ranks have 7 valid tokens") {
    pipeline_test::run_ranks(2, [](ranks_type world) {
        samples const own{of({1, 2, 3, 4, 5, 6, 7, 8})};
        auto batches = adapter_of(of_sequence(world), own, {.duplicates_allowed = true});
        decltype(batches)::batch_type batch;
        REQUIRE(batches.next(batch));
        CHECK(batch.labels() == (world.rank() == 0 ? list{2, 3, 4, 5} : list{6, 7, 8, -100}));
        CHECK(batch.valid_tokens == 7);
    });
}

TEST_CASE("batch: golden vector, positions mark documents, and labels do not cross them") {
    auto const fields = std::tuple{uly::ids_field(&sample::ids), uly::labels_field(&sample::labels),
                                   uly::positions_field(&sample::positions)};
    pipeline_test::run_ranks(2, [&](ranks_type world) {
        sample packed = of({1, 2, 3, 4, 5, 6, 7, 8});
        packed.positions = {0, 1, 2, 0, 1, 0, 1, 2};
        samples const own{packed};
        auto batches = adapter_of(of_sequence(world), own, {.duplicates_allowed = true}, fields);
        decltype(batches)::batch_type batch;
        REQUIRE(batches.next(batch));
        auto const starts = batch.step.packed().documents();
        list offsets(starts.begin(), starts.end());
        offsets.push_back(batch.step.queries().total());
        CHECK(offsets == list{0, 3, 5, 8});
        bool const first = world.rank() == 0;
        CHECK(batch.positions == (first ? list{0, 1, 2, 0} : list{1, 0, 1, 2}));
        CHECK(batch.get<2>() == batch.positions);
        CHECK(batch.labels() == (first ? list{2, 3, -100, 5} : list{-100, 7, 8, -100}));
        CHECK(batch.valid_tokens == 5);
    });
}

TEST_CASE("batch: any field is sharded alike, positions on three axes too, without padding") {
    auto const fields =
        std::tuple{uly::values_field("axes", &sample::axes, 3), uly::ids_field(&sample::ids),
                   uly::values_field("weights", &sample::weights, 1, 0.5f)};
    for (auto const& [ranks, tokens] : {std::pair{4, 7}, {4, 1}, {3, 9}, {1, 5}})
        pipeline_test::run_ranks(ranks, [&, tokens = tokens](ranks_type world) {
            sample one;
            for (int i = 0; i < tokens; ++i) {
                one.ids.push_back(i);
                one.weights.push_back(static_cast<float>(i) / 4);
                for (int axis = 0; axis < 3; ++axis) one.axes.push_back(10 * i + axis);
            }
            samples const own{one};
            auto batches =
                adapter_of(of_sequence(world), own, {.duplicates_allowed = true}, fields);
            typename decltype(batches)::batch_type batch;
            REQUIRE(batches.next(batch));
            auto const& order = batch.step.queries();
            auto const count = static_cast<std::size_t>(order.count(world.rank()));
            REQUIRE(batch.get<0>().size() == 3 * count);
            REQUIRE(batch.ids().size() == count);
            REQUIRE(batch.get<2>().size() == count);
            CHECK(order.total() == tokens);
            for (std::size_t i = 0; i < count; ++i) {
                auto const t = order.position(world.rank(), static_cast<int64_t>(i));
                CHECK(batch.ids()[i] == t);
                CHECK(batch.positions[i] == t);
                CHECK(batch.get<2>()[i] == static_cast<float>(t) / 4);
                for (std::size_t axis = 0; axis < 3; ++axis)
                    CHECK(batch.get<0>()[3 * i + axis] == 10 * t + static_cast<int64_t>(axis));
            }
        });
}

TEST_CASE("batch: samples of several lengths are padded, to a multiple or to a fixed length") {
    pipeline_test::run_ranks(2, [](ranks_type world) {
        samples own{of({1, 2, 3}), of({4, 5, 6, 7, 8}), of({9})};
        for (auto& each : own) each.ids.front() += 100 * world.rank();
        auto const ranks = of_sequence(world);
        auto const first_of = [&](uly::batch_options options) {
            options.micro_batch = 2;
            options.end = uly::at_end::pad;
            auto batches = adapter_of(ranks, own, options);
            auto const all = all_of(ranks, batches);
            REQUIRE(all.size() == 4);
            CHECK(all[2].samples == 1);  // the rest, a smaller batch
            return all[0];
        };
        auto const longest = first_of({});
        CHECK(longest.samples == 2);
        CHECK(longest.tokens == 5);
        CHECK(longest.ids == list{1, 2, 3, 0, 0, 4, 5, 6, 7, 8});
        CHECK(longest.labels == list{2, 3, -100, -100, -100, 5, 6, 7, 8, -100});
        CHECK(longest.valid == 6);
        auto const multiple = first_of({.pad_to_multiple_of = 4});
        CHECK(multiple.tokens == 8);
        CHECK(multiple.ids == list{1, 2, 3, 0, 0, 0, 0, 0, 4, 5, 6, 7, 8, 0, 0, 0});
        CHECK(multiple.valid == 6);
        auto const fixed = first_of({.max_length = 6, .fixed_length = true});
        CHECK(fixed.tokens == 6);
        auto const cut = first_of({.max_length = 4, .too_long = uly::overlong::truncate});
        CHECK(cut.ids == list{1, 2, 3, 0, 4, 5, 6, 7});
        CHECK(cut.labels == list{2, 3, -100, -100, 5, 6, 7, -100});
        // Padding is no key of anyone.
        auto batches = adapter_of(ranks, own, {.micro_batch = 2});
        decltype(batches)::batch_type batch;
        REQUIRE(batches.next(batch));
        auto const of_samples = batch.step.packed().samples();
        REQUIRE(of_samples.size() == 2);
        CHECK(of_samples[0].end == 3);
        CHECK(of_samples[1].end == 5);
    });
}

TEST_CASE("batch: labels that are shifted already are left") {
    pipeline_test::run_ranks(2, [](ranks_type world) {
        samples const own{{.ids = {1, 2, 3, world.rank()}, .labels = {2, 3, 4, 5}}};
        auto const ranks = of_sequence(world);
        auto batches = adapter_of(ranks, own, {.shift_labels = false});
        CHECK(all_of(ranks, batches)[0].labels == list{2, 3, 4, 5});
    });
}

TEST_CASE("batch: unequal ends, dropped or padded; every group has as many micro-batches") {
    pipeline_test::run_ranks(4, [](ranks_type world) {
        uly::mesh const ranks{world, {.sp = 2, .dp_shard = 2}};
        int64_t const counts[] = {3, 1, 2, 4};
        auto const own = many(counts[world.rank()], 10 * world.rank());
        auto const sources = [&](uly::at_end end) {
            auto batches = adapter_of(ranks, own, {.end = end});
            std::vector<std::pair<int, int64_t>> seen;  // source, first id, 0 of no sample
            for (auto const& each : all_of(ranks, batches)) {
                seen.emplace_back(each.source, each.ids[0]);
                if (each.ids[0] == 0) {
                    CHECK(each.tokens == 1);
                    CHECK(each.valid == 0);
                    CHECK(each.labels == list{-100});
                }
            }
            return seen;
        };
        using seen = std::vector<std::pair<int, int64_t>>;
        bool const first = world.rank() < 2;
        CHECK(sources(uly::at_end::drop) ==
              (first ? seen{{0, 1000}, {1, 11000}} : seen{{0, 21000}, {1, 31000}}));
        CHECK(sources(uly::at_end::pad) ==
              (first ? seen{{0, 1000}, {1, 11000}, {0, 2000}, {1, 0}, {0, 3000}, {1, 0}, {1, 0}}
                     : seen{{0, 21000},
                            {1, 31000},
                            {0, 22000},
                            {1, 32000},
                            {0, 0},
                            {1, 33000},
                            {1, 34000}}));
    });
}

TEST_CASE("batch: case 26, every epoch runs; saved mid-rotation and restored") {
    pipeline_test::run_ranks(3, [](ranks_type world) {
        auto const ranks = of_sequence(world);
        auto const own = many(5, 10 * world.rank());
        uly::batch_options const options{.micro_batch = 2, .end = uly::at_end::pad};
        auto batches = adapter_of(ranks, own, options);
        auto const first = all_of(ranks, batches);
        CHECK(first.size() == 9);
        batches.restart();
        CHECK(batches.state().epoch == 1);
        CHECK(all_of(ranks, batches) == first);

        for (std::size_t done = 0; done <= first.size(); ++done) {
            CAPTURE(done);
            auto whole_run = adapter_of(ranks, own, options);
            decltype(whole_run)::batch_type batch;
            std::vector<whole> seen;
            for (std::size_t i = 0; i < done; ++i) {
                REQUIRE(whole_run.next(batch));
                seen.push_back(put_together(ranks.sp(), batch));
            }
            auto const state = whole_run.state();
            auto resumed = adapter_of(ranks, own, options);
            resumed.restore(state);
            CHECK(resumed.state() == state);
            auto const rest = all_of(ranks, resumed);
            seen.insert(seen.end(), rest.begin(), rest.end());
            CHECK(seen == first);
            resumed.restore(state);  // of one that has run already
            CHECK(all_of(ranks, resumed) == rest);
        }
    });
}

TEST_CASE("batch: a common range in its order, at every division of the ranks") {
    auto const common = many(24);
    for (auto const& config : {uly::parallel_config{},
                               {.sp = 4},
                               {.dp_shard = 4},
                               {.sp = 2, .dp_shard = 2},
                               {.sp = 4, .dp_replicate = 2}})
        for (int64_t const block : {1, 3})
            pipeline_test::run_ranks(static_cast<int>(config.ranks()), [&](ranks_type world) {
                uly::mesh const ranks{world, config};
                uly::batch_adapter batches{ranks,
                                           uly::dealt_source{common, uly::dealing_of(ranks, block)},
                                           usual, uly::batch_options{.micro_batch = block}};
                auto const all = all_of(ranks, batches);
                auto const groups = config.data_ranks();
                CHECK(static_cast<int64_t>(all.size()) == 24 / block / groups);
                for (std::size_t k = 0; k < all.size(); ++k) {
                    auto const first =
                        (static_cast<int64_t>(k) * groups + ranks.data_rank()) * block;
                    CHECK(all[k].ids[0] == 1000 * (first + 1));
                }
            });
}

TEST_CASE("batch: token order balanced by valid tokens") {
    pipeline_test::run_ranks(4, [](ranks_type world) {
        sample prompt;  // 14 tokens of a prompt, 7 of an answer
        for (int i = 0; i < 21; ++i) {
            prompt.ids.push_back(i + 100 * world.rank());
            prompt.labels.push_back(i < 14 ? -100 : i);
        }
        samples const own{prompt};
        auto const ranks = of_sequence(world);
        auto plain = adapter_of(ranks, own),
             balanced = adapter_of(ranks, own, {.balance_valid_tokens = true});
        decltype(plain)::batch_type batch;
        REQUIRE(balanced.next(batch));
        auto const valid = std::ranges::count_if(batch.labels(), [](auto l) { return l != -100; });
        CHECK(batch.valid_tokens == 7);
        CHECK((valid == 1 || valid == 2));
        CHECK(batch.ids().size() >= 4);
        CHECK(batch.ids().size() <= 6);
        auto again = adapter_of(ranks, own, {.balance_valid_tokens = true});
        CHECK(all_of(ranks, again) == all_of(ranks, plain));  // the same sequence
    });
}

TEST_CASE("batch: a rank holds whole samples of S tokens, not of P * S") {
    std::vector<std::size_t> held;
    for (int const ranks : {2, 4, 8})
        pipeline_test::run_ranks(ranks, [&](ranks_type world) {
            samples own(1);
            own[0].ids.assign(4096, world.rank());
            own[0].labels = own[0].ids;
            auto batches = adapter_of(of_sequence(world), own);
            decltype(batches)::batch_type batch;
            while (batches.next(batch)) CHECK(batch.ids().size() * ranks == 4096);
            if (world.rank() == 0) held.push_back(batches.bytes());
        });
    CHECK(held[0] == 2 * 3 * 4096 * sizeof(int64_t));  // its own, and the one being shared
    CHECK(held[1] == held[0]);
    CHECK(held[2] == held[0]);
}

TEST_CASE("batch: errors name the numbers, on all ranks") {
    auto const wrong = [](samples const& of_rank_1, uly::batch_options const& options = {}) {
        return failure_on_all(2, [&](ranks_type world) {
            auto const own = world.rank() == 1 ? of_rank_1 : many(2);
            auto batches = adapter_of(of_sequence(world), own, options);
            decltype(batches)::batch_type batch;
            while (batches.next(batch)) {}
        });
    };
    auto failed = wrong({of({1, 2, 3})}, {.max_length = 2, .end = uly::at_end::pad});
    CHECK(failed.code == uly::errc::invalid_config);
    CHECK(
        failed.text ==
        "ulysses: batch: a sample must not have more tokens than max_length: 3 tokens, max_length "
        "2");
    failed = wrong({of({})});
    CHECK(failed.code == uly::errc::invalid_config);
    CHECK(failed.text == "ulysses: batch: a sample has at least one token: 0");
    failed = wrong({{.ids = {1, 2, 3}, .labels = {1}}});
    CHECK(failed.code == uly::errc::invalid_config);
    CHECK(
        failed.text ==
        "ulysses: batch: a field has its values for each token of a sample: labels has 1, expected "
        "3 tokens of 1");
    failed = wrong(many(2));
    CHECK(failed.code == uly::errc::disagreement);
    CHECK(failed.text ==
          "ulysses: batch: every rank's source must have samples of its own: ranks 0 and 1 both "
          "begin with the same 1 samples; deal them out, or set duplicates_allowed");

    auto const options = [](uly::batch_options const& given) {
        auto const thrown = failure_on_all(2, [&](ranks_type world) {
            samples const none;
            adapter_of(of_sequence(world), none, given);
        });
        CHECK(thrown.code == uly::errc::invalid_config);
        return thrown.text;
    };
    CHECK(
        options({.micro_batch = 0, .pad_to_multiple_of = -3}) ==
        "ulysses: batch: micro_batch and pad_to_multiple_of lie in 1 .. 2^31 - 1, max_length in 0 "
        ".. 2^31 - 1: micro_batch 0, pad_to_multiple_of -3, max_length 0");
    CHECK(options({.fixed_length = true}) ==
          "ulysses: batch: fixed_length needs max_length: max_length 0");
    CHECK(options({.max_length = 10, .pad_to_multiple_of = 4}) ==
          "ulysses: batch: max_length must be a multiple of pad_to_multiple_of: 10 and 4");
    failed = failure_on_all(2, [&](ranks_type world) {
        samples const none;
        adapter_of(
            of_sequence(world), none, {},
            std::tuple{uly::ids_field(&sample::ids), uly::values_field("axes", &sample::ids, -1)});
    });
    CHECK(failed.code == uly::errc::invalid_config);
    CHECK(failed.text == "ulysses: batch: a field has 1 or more values a token: axes: -1");
    failed = failure_on_all(2, [&](ranks_type world) {
        samples const none;
        adapter_of(of_sequence(world), none, {.balance_valid_tokens = true},
                   std::tuple{uly::ids_field(&sample::ids)});
    });
    CHECK(failed.code == uly::errc::invalid_config);
    CHECK(failed.text ==
          "ulysses: batch: balance_valid_tokens needs labels_field: 1 fields without");
    failed = failure_on_all(2, [&](ranks_type world) {
        samples const none;
        adapter_of(of_sequence(world), none, {.max_length = 8 + world.rank()});
    });
    CHECK(failed.code == uly::errc::disagreement);
    CHECK(failed.text ==
          "ulysses: batch: max_length must be equal on every rank: rank 0 has 8, rank 1 has 9");
    failed = failure_on_all(2, [&](ranks_type world) {
        auto const own = many(4, 10 * world.rank());
        auto batches = adapter_of(of_sequence(world), own);
        if (world.rank() == 1) batches.restore(state_of(batches, 1, 1, 1));
        decltype(batches)::batch_type batch;
        batches.next(batch);
    });
    CHECK(failed.code == uly::errc::disagreement);
    CHECK(
        failed.text ==
        "ulysses: batch: every rank must be at the same micro-batch, or restored to it: rank 0 is "
        "in epoch 0, rotation 0, position 0, rank 1 in 0, 1, 1");
}

TEST_CASE("batch: a state of another run, or of none, is refused") {
    pipeline_test::run_ranks(4, [](ranks_type world) {
        auto const own = many(6, 10 * world.rank());
        auto const state_on = [&](uly::parallel_config const& config, int64_t micro_batch) {
            auto batches = adapter_of({world, config}, own,
                                      {.micro_batch = micro_batch, .end = uly::at_end::pad});
            decltype(batches)::batch_type batch;
            for (int i = 0; i < 3; ++i) REQUIRE(batches.next(batch));
            return batches.state();
        };
        auto batches = adapter_of({world, {.sp = 2, .dp_shard = 2}}, own);
        auto const refused = [&](uly::batch_state const& state) {
            auto const failed = failure_of([&] { batches.restore(state); });
            CHECK(failed.code == uly::errc::invalid_call);
            return rule_of(failed.text);
        };
        CHECK(refused(state_on({.sp = 4}, 1)) ==
              "ulysses: batch: a state is restored on as many ranks, divided alike, with the same "
              "micro_batch: saved with 4 ranks, sp 4, micro_batch 1, restored with 4, 2, 1");
        CHECK(refused(state_on({.sp = 2, .dp_replicate = 2}, 2))
                  .ends_with("saved with 4 ranks, sp 2, micro_batch 2, restored with 4, 2, 1"));
        uly::mesh const two{world.split(world.rank() / 2, world.rank()), {.sp = 2}};
        auto const of_two = adapter_of(two, own).state();
        CHECK(refused(of_two).ends_with(
            "saved with 2 ranks, sp 2, micro_batch 1, restored with 4, 2, 1"));
        refused({});
        for (auto const& [rotation, position, drawn] :
             {std::tuple{0, 3, 0}, {0, -1, 0}, {-1, 0, -1}, {1, 0, 2}})
            CHECK(refused(state_of(batches, rotation, position, drawn))
                      .starts_with("ulysses: batch: a state is one that an adapter was in"));
        batches.restore(state_on({.sp = 2, .dp_shard = 2}, 1));
        decltype(batches)::batch_type batch;
        CHECK(batches.next(batch));
        CHECK(batch.source == 1);
    });
}

TEST_CASE("batch: what a source throws leaves the call on all ranks") {
    struct broken {
        using sample_type = sample;
        int rank;
        std::optional<sample> next() {
            if (rank == 1) throw std::runtime_error("disk full");
            return of({1, 2, rank});
        }
    };
    auto const failed = failure_on_all(3, [](ranks_type world) {
        uly::batch_adapter batches{of_sequence(world), broken{world.rank()}, usual};
        decltype(batches)::batch_type batch;
        batches.next(batch);
    });
    CHECK(failed.code == uly::errc::functor_failed);
    CHECK(failed.text.find("disk full") != std::string::npos);
}
