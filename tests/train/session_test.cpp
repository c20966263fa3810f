// SPDX-License-Identifier: Apache-2.0

#include "../faulty.hpp"
#include "failure.hpp"
#include "tiny_model.hpp"

#include <ulysses/comm/serial.hpp>
#include <ulysses/train/prefetch.hpp>

#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using namespace train_test;

namespace {

/// Of the ranks' first, and the same on all.
curve curve_on(uly::parallel_config const& parallel, int64_t epochs,
               uly::evaluation evaluates = uly::evaluation::sharded, bool balance = false) {
    std::vector<curve> all(static_cast<std::size_t>(parallel.ranks()));
    pipeline_test::run_ranks(static_cast<int>(parallel.ranks()), [&](ranks_type world) {
        all[static_cast<std::size_t>(world.rank())] =
            curve_of(world, parallel, epochs, evaluates, balance);
    });
    for (auto const& each : all) {
        CHECK(each.losses == all[0].losses);
        CHECK(each.norms == all[0].norms);
        CHECK(each.held_out == all[0].held_out);
    }
    return all[0];
}

void check_equal(curve const& a, curve const& b) {
    REQUIRE(a.losses.size() == b.losses.size());
    for (std::size_t i = 0; i < a.losses.size(); ++i) {
        CHECK(std::abs(a.losses[i] - b.losses[i]) <= 1e-9);
        CHECK(std::abs(a.norms[i] - b.norms[i]) <= 1e-9);
    }
    CHECK(a.tokens == b.tokens);
    CHECK(std::abs(a.held_out - b.held_out) <= 1e-9);
    CHECK(a.held_out_tokens == b.held_out_tokens);
}

/// Tokens of a sample that are predicted: those behind the first, but for masked ones.
int64_t predicted(std::vector<text_sample> const& samples) {
    int64_t count = 0;
    for (auto const& each : samples)
        for (std::size_t t = 1; t < each.labels.size(); ++t)
            count += each.labels[t] != uly::ignored_label;
    return count;
}

}  // namespace

TEST_CASE("session: losses are the same however the ranks are divided, at equal tokens") {
    auto const alone = curve_on({}, 2);
    // Two epochs of 59 samples, 8 an update.
    REQUIRE(alone.losses.size() == 16);
    CHECK(alone.losses.back() < 0.8 * alone.losses.front());
    CHECK(std::accumulate(alone.tokens.begin(), alone.tokens.end(), int64_t{0}) ==
          2 * predicted(text_samples(59)));
    CHECK(alone.held_out_tokens == predicted(text_samples(13, 1000)));
    CHECK(*std::ranges::max_element(alone.norms) > 2);  // clipped
    CHECK(*std::ranges::min_element(alone.norms) < 2);  // and not
    for (uly::parallel_config const parallel : {uly::parallel_config{.sp = 2},
                                                {.sp = 4},
                                                {.sp = 2, .dp_shard = 2},
                                                {.dp_replicate = 2, .dp_shard = 2},
                                                {.sp = 4, .dp_replicate = 2}}) {
        CAPTURE(parallel.sp);
        CAPTURE(parallel.data_ranks());
        check_equal(curve_on(parallel, 2), alone);
    }
}

TEST_CASE("session: nor does it matter which tokens a rank is given, or how it evaluates") {
    auto const alone = curve_on({}, 1);
    for (auto const evaluates : {uly::evaluation::sharded, uly::evaluation::bypass})
        for (bool const balance : {false, true}) {
            CAPTURE(balance);
            check_equal(curve_on({.sp = 3, .dp_shard = 2}, 1, evaluates, balance),
                        curve_on({.dp_replicate = 2}, 1, evaluates, balance));
            check_equal(curve_on({.sp = 4}, 1, evaluates, balance), alone);
        }
}

TEST_CASE("session: gradients are those of the mean loss, by central differences") {
    pipeline_test::run_ranks(4, [](ranks_type world) {
        auto const samples = text_samples(8);
        auto run = uly::prepare(
            {.parallel = {.sp = 2, .dp_shard = 2},
             .step = {.micro_batch = 2, .gradient_accumulation = 2, .tokens = longest}},
            world, samples, text_fields);
        tiny_model model(run.ranks().sp(), 2, uly::keep::nothing, {.every = 1});
        auto const update =
            run.step(model.gradients(), [&](auto const& batch) { return model.learn(batch); });
        REQUIRE(update);
        CHECK(update->clip.factor == 1);
        auto const loss = [&] {
            return run.evaluate(samples, [&](auto const& batch) { return model.loss_of(batch); })
                .mean_loss();
        };
        CHECK(std::abs(loss() - update->sums.mean_loss()) < 1e-14);
        std::vector<double> const gradients(model.gradients().begin(), model.gradients().end());
        for (std::size_t i = 3; i < gradients.size(); i += 61) {
            auto& w = model.weights()[i];
            auto const kept = w;
            w = kept + 1e-5;
            auto const above = loss();
            w = kept - 1e-5;
            auto const below = loss();
            w = kept;
            CHECK(std::abs((above - below) / 2e-5 - gradients[i]) < 1e-8);
        }
    });
}

TEST_CASE(
    "session: case 26, saved between two updates and restored, a run goes on as it would have") {
    auto const samples = text_samples(40);
    uly::session_config const config{
        .parallel = {.sp = 2},
        .step = {.micro_batch = 2, .gradient_accumulation = 3, .tokens = longest}};
    pipeline_test::run_ranks(2, [&](ranks_type world) {
        auto const ids_of = [](auto& run) {
            std::vector<std::vector<int64_t>> seen;
            while (run.accumulate([&](auto const& batch) {
                seen.push_back(batch.ids());
                return uly::token_sums{};
            })) {}
            return seen;
        };
        auto run = uly::prepare(config, world, samples, text_fields);
        for (int i = 0; i < 3; ++i)  // 9 micro-batches: in the middle of a rotation
            run.accumulate([](auto const&) { return uly::token_sums{}; });
        auto const state = run.state();
        CHECK(state.position == 1);
        auto const expected = ids_of(run);
        CHECK(expected.size() == 11);
        auto again = uly::prepare(config, world, samples, text_fields);
        again.restore(state);
        CHECK(ids_of(again) == expected);
        // An evaluation in between changes nothing.
        again.restore(state);
        again.evaluate(text_samples(3, 900), [](auto const&) { return uly::token_sums{}; });
        CHECK(ids_of(again) == expected);
    });
}

TEST_CASE("session: a source of each rank's own samples; the last update is of fewer") {
    pipeline_test::run_ranks(2, [](ranks_type world) {
        auto const own = text_samples(3, 100 * world.rank());
        auto run = uly::prepare(
            {.parallel = {.dp_shard = 2}, .step = {.gradient_accumulation = 2, .tokens = longest}},
            world, uly::prefetched{uly::range_source{own}}, text_fields);
        std::vector<int64_t> counts;
        while (auto const sums = run.accumulate([](auto const& batch) {
            return uly::token_sums{.loss = 1, .tokens = static_cast<int64_t>(batch.ids().size())};
        }))
            counts.push_back(sums->tokens);
        auto const tokens = [](int64_t i) { return 1 + i * 7 % longest; };
        CHECK(counts == std::vector{tokens(0) + tokens(1) + tokens(100) + tokens(101),
                                    tokens(2) + tokens(102)});
        CHECK(run.numbers().steps_per_epoch(6, uly::at_end::drop) == 2);
    });
}

TEST_CASE("session: a gradient that is not finite is left, and told on every rank") {
    pipeline_test::run_ranks(3, [](ranks_type world) {
        auto const samples = text_samples(6);
        auto run = uly::prepare({.parallel = {.sp = 3}, .step = {.tokens = longest}}, world,
                                samples, text_fields);
        std::vector<float> gradients(4, 17.0f);  // is set to zero
        auto const next = [&](float value) {
            return run.step(std::span(gradients), [&](auto const&) {
                gradients[1] += world.rank() == 2 ? value : 0;
                return uly::token_sums{.loss = 1, .tokens = 1};
            });
        };
        CHECK(next(6)->clip.finite);
        CHECK(gradients == std::vector<float>{0, 2, 0, 0});  // of three tokens
        CHECK(!next(std::numeric_limits<float>::infinity())->clip.finite);
    });
}

TEST_CASE("session: what cannot be is the same error on every rank") {
    auto const samples = text_samples(8);
    auto const refused = [&](auto const& config_of) {
        return failure_on_all(2, [&](ranks_type world) {
            uly::prepare(config_of(world.rank()), world, samples, text_fields);
        });
    };
    uly::session_config const fits{.parallel = {.sp = 2}, .step = {.tokens = longest}};
    auto const with = [&](auto const& change) {
        return refused([&](int rank) {
            auto config = fits;
            change(config, rank);
            return config;
        });
    };
    auto const others =
        with([](auto& config, int rank) { config.step.gradient_accumulation = 4 + rank; });
    CHECK(others.code == uly::errc::disagreement);
    CHECK(with([](auto& config, int rank) { config.step.micro_batch = rank; }).text ==
          "ulysses: session: micro_batch must be equal on every rank: rank 0 has 0, rank 1 has 1");
    CHECK(others.text ==
          "ulysses: session: gradient_accumulation must be equal on every rank: rank 0 has 4, rank "
          "1 has 5");
    auto const none = with([](auto& config, int) { config.step.gradient_accumulation = 0; });
    CHECK(none.code == uly::errc::invalid_config);
    CHECK(none.text ==
          "ulysses: accounting: sizes lie in 1 .. 2^31 - 1, their product below 2^62: micro_batch "
          "1, gradient_accumulation 0, tokens 13, sp 2, dp_replicate 1, dp_shard 1");
    CHECK(with([](auto& config, int rank) { config.largest_norm = 1 + rank; }).text ==
          "ulysses: gradient_clip: every rank must have the same largest norm: rank 0 has "
          "1.000000, rank 1 has 2.000000");
    CHECK(with([](auto& config, int rank) { config.evaluates = uly::evaluation(rank); }).text ==
          "ulysses: session: evaluation must be equal on every rank: rank 0 has 0, rank 1 has 1");
    CHECK(with([](auto& config, int) { config.parallel.sp = 3; }).code ==
          uly::errc::invalid_config);
    CHECK(failure_on_all(2,
                         [&](ranks_type world) {
                             auto config = fits;
                             config.step.tokens = 10;
                             auto run = uly::prepare(config, world, samples, text_fields);
                             while (run.accumulate([](auto const&) { return uly::token_sums{}; })) {
                             }
                         })
              .text == "ulysses: batch: a sample must not have more tokens than max_length: 11 "
                       "tokens, max_length 10");
}

TEST_CASE(
    "session: what a body throws on one rank releases the others; what all throw does not end it") {
    auto const samples = text_samples(8);
    uly::session_config const config{.parallel = {.sp = 2}, .step = {.tokens = longest}};
    std::vector<failure> seen(2);
    auto const run_with = [&](auto const& body) {
        try {
            pipeline_test::run_ranks(2, [&](ranks_type world) {
                auto run = uly::prepare(config, world, samples, text_fields);
                auto& mine = seen[static_cast<std::size_t>(world.rank())];
                mine = failure_of([&] {
                    run.accumulate(
                        [&](auto const& batch) { return body(world.rank(), batch, run); });
                });
            });
        } catch (std::exception const&) {  // of the rank that threw no error of the library
        }
    };
    run_with([](int rank, auto const&, auto const& run) {
        if (rank == 1) throw std::runtime_error("out of luck");
        run.ranks().sp().fence({});  // as a pipeline's call would
        return uly::token_sums{};
    });
    CHECK(seen[0].code == uly::errc::peer_failed);
    CHECK(seen[0].text.find("out of luck") != std::string::npos);
    run_with([](int rank, auto const&, auto const& run) {
        if (rank == 0) uly::raise(uly::errc::invalid_tensor, {}, "mine", "a rule", 3);
        run.ranks().sp().fence({});
        return uly::token_sums{};
    });
    CHECK(seen[0].code == uly::errc::invalid_tensor);
    CHECK(seen[1].code == uly::errc::peer_failed);
    // The ranks of one sequence know of it, those of another do not.
    seen.assign(4, {});
    try {
        pipeline_test::run_ranks(4, [&](ranks_type world) {
            auto both = config;
            both.parallel.dp_shard = 2;
            auto run = uly::prepare(both, world, samples, text_fields);
            seen[static_cast<std::size_t>(world.rank())] = failure_of([&] {
                run.accumulate([&](auto const&) {
                    uly::fence_status status;
                    if (world.rank() == 1) status.fail(uly::errc::invalid_tensor, "of an operand");
                    run.ranks().sp().fence(status);
                    return uly::token_sums{};
                });
            });
        });
    } catch (std::exception const&) {}
    for (std::size_t r = 0; r < 4; ++r)
        CHECK(seen[r].code == (r < 2 ? uly::errc::invalid_tensor : uly::errc::peer_failed));
    pipeline_test::run_ranks(2, [&](ranks_type world) {
        auto run = uly::prepare(config, world, samples, text_fields);
        auto const thrown = failure_of([&] {
            run.accumulate([&](auto const&) {
                uly::fence_status status;
                if (world.rank() == 1) status.fail(uly::errc::invalid_tensor, "of an operand");
                run.ranks().sp().fence(status);
                return uly::token_sums{};
            });
        });
        CHECK(thrown.code == uly::errc::invalid_tensor);
        CHECK(run.accumulate([](auto const&) { return uly::token_sums{}; }).has_value());
    });
}

TEST_CASE("session: an error of the ranks of one sequence among several releases the others") {
    auto const samples = text_samples(8);
    for (bool const evaluated : {false, true}) {
        std::vector<failure> seen(4);
        pipeline_test::run_ranks(4, [&](ranks_type world) {
            // In evaluation a sequence is one rank's, though training shares it among all.
            uly::session_config config{.parallel = {.sp = 2, .dp_shard = 2},
                                       .step = {.tokens = longest}};
            if (evaluated)
                config = {.parallel = {.sp = 4},
                          .step = {.tokens = longest},
                          .evaluates = uly::evaluation::bypass};
            auto run = uly::prepare(config, world, samples, text_fields);
            auto const body = [&](auto const&) {
                uly::fence_status status;
                if (world.rank() == 1) status.fail(uly::errc::invalid_tensor, "of an operand");
                (evaluated ? run.evaluation_ranks() : run.ranks().sp()).fence(status);
                return uly::token_sums{};
            };
            seen[static_cast<std::size_t>(world.rank())] = failure_of([&] {
                if (evaluated)
                    run.evaluate(samples, body);
                else
                    run.accumulate(body);
            });
        });
        for (std::size_t r = 0; r < seen.size(); ++r) {
            CAPTURE(r);
            bool const shares = r == 1 || (r == 0 && !evaluated);
            CHECK(seen[r].code == (shares ? uly::errc::invalid_tensor : uly::errc::peer_failed));
            CHECK(seen[r].text.find("of an operand") != std::string::npos);
        }
    }
}

TEST_CASE("session: an update is not begun, saved or restored within another; evaluated it is") {
    auto const samples = text_samples(8);
    uly::session_config const config{.parallel = {.sp = 2}, .step = {.tokens = longest}};
    pipeline_test::run_ranks(2, [&](ranks_type world) {
        auto run = uly::prepare(config, world, samples, text_fields);
        auto const none = [](auto const&) { return uly::token_sums{}; };
        std::vector<double> gradients(3);
        auto const state = run.state();
        auto const within = [&](auto const& call) {
            CHECK(run.accumulate([&](auto const& batch) {
                         auto const ids = batch.ids();
                         auto const failed = failure_of(call);
                         CHECK(failed.code == uly::errc::invalid_call);
                         CHECK(rule_of(failed.text) ==
                               "ulysses: session: an update ends before the next, and before the "
                               "run is saved or restored: called within the body of one");
                         CHECK(batch.ids() == ids);
                         return uly::token_sums{};
                     })
                      .has_value());
        };
        within([&] { run.accumulate(none); });
        within([&] {
            gradients[0] = 17;
            run.step(std::span(gradients), none);
        });
        CHECK(gradients[0] == 17);
        within([&] { run.restart(); });
        within([&] { run.state(); });
        within([&] { run.restore(state); });
        run.accumulate([&](auto const& batch) {
            auto const ids = batch.ids();
            run.evaluate(samples, none);
            CHECK(batch.ids() == ids);
            return uly::token_sums{};
        });
        CHECK(failure_of([&] {
                  run.accumulate([&](auto const&) {
                      uly::fence_status status;
                      status.fail(uly::errc::invalid_tensor, "of an operand");
                      run.ranks().sp().fence(status);
                      return uly::token_sums{};
                  });
              }).code == uly::errc::invalid_tensor);
        run.restore(state);  // a body that threw has ended
        CHECK(run.accumulate(none).has_value());
    });
}

TEST_CASE("session: configured by text, over a group of one; a range with equal samples") {
    auto const config = uly::config_from_text<uly::session_config>(
        "micro_batch=2, gradient_accumulation=3, tokens=5");
    auto same = text_samples(1, 3);  // 9 tokens
    same.resize(7, same[0]);
    CHECK(failure_of([&] {
              auto run = uly::prepare(config, uly::serial{}, same, text_fields);
              run.accumulate([](auto const&) { return uly::token_sums{}; });
          }).code == uly::errc::invalid_config);
    auto shorter = config;
    shorter.batches = {.too_long = uly::overlong::truncate, .end = uly::at_end::pad};
    auto run = uly::prepare(shorter, uly::serial{}, same, text_fields);
    std::vector<int64_t> sizes;
    auto const count = [&](auto const& batch) {
        sizes.push_back(static_cast<int64_t>(batch.ids().size()));
        return uly::token_sums{};
    };
    CHECK(run.accumulate(count));
    CHECK(run.accumulate(count));
    CHECK(!run.accumulate(count));
    CHECK(sizes == std::vector<int64_t>{10, 10, 10, 5});
    run.evaluate(same, count);
    CHECK(sizes.size() == 8);
    CHECK(run.numbers().effective_batch() == 6);
    // The samples of two ranks are equal, and are dealt out all the same.
    pipeline_test::run_ranks(2, [&](ranks_type world) {
        auto two = shorter;
        two.parallel.dp_shard = 2;
        auto run_of_two = uly::prepare(two, world, same, text_fields);
        CHECK(run_of_two.accumulate([](auto const&) { return uly::token_sums{}; }).has_value());
        CHECK(failure_of([&] {
                  auto refused = uly::prepare(two, world, uly::range_source{same}, text_fields);
                  refused.accumulate([](auto const&) { return uly::token_sums{}; });
              }).code == uly::errc::disagreement);
    });
}

TEST_CASE("session: whatever call of a communicator fails on a rank, all ranks end, with an error, "
          "at once") {
    auto const samples = text_samples(16);
    using faulty_ranks = faults::faulty<ranks_type>;
    constexpr auto deadline = std::chrono::seconds(100);
    // Threads that tell nobody of what their rank throws. Returns how many points the rank has passed.
    auto const ends = [&](faults::fault const& given, std::vector<failure>& seen) {
        seen.assign(4, {});
        std::size_t points = 0;
        uly::threads::group const owner(4, {.deadline = deadline});
        std::vector<std::jthread> threads;
        for (int r = 0; r < 4; ++r)
            threads.emplace_back([&, r] {
                auto const events = std::make_shared<faults::script>(r, given);
                auto& mine = seen[static_cast<std::size_t>(r)];
                try {
                    mine = failure_of([&] {
                        faulty_ranks const world(owner.handle(r), events);
                        auto run =
                            uly::prepare({.parallel = {.sp = 2, .dp_shard = 2},
                                          .step = {.gradient_accumulation = 2, .tokens = longest}},
                                         world, samples, text_fields);
                        std::vector<double> gradients(3);
                        auto const body = [](auto const&) { return uly::token_sums{}; };
                        while (run.step(std::span(gradients), body)) {}
                        run.evaluate(samples, body);
                    });
                } catch (std::exception const& e) {
                    mine = {uly::errc::none, e.what()};
                }
                if (r == 1) points = events->points().size();
            });
        threads.clear();
        return points;
    };
    std::vector<failure> seen;
    auto const points = ends({}, seen);
    for (auto const& each : seen) CHECK(each.text == "nothing was thrown");
    CHECK(points > 50);
    for (auto const what : {faults::kind::throws, faults::kind::fails, faults::kind::bad_alloc})
        for (std::size_t i = 0; i < points; ++i) {
            CAPTURE(faults::name(what));
            CAPTURE(i);
            auto const begin = faults::clock::now();
            ends({.what = what, .rank = 1, .point = i}, seen);
            CHECK(faults::clock::now() - begin < deadline / 2);
            for (auto const& each : seen) CHECK(each.text != "nothing was thrown");
        }
}
