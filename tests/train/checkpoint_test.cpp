// SPDX-License-Identifier: Apache-2.0

#include "failure.hpp"
#include "tiny_model.hpp"

#include <ulysses/comm/serial.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace train_test;

namespace {

/// y = x + 1 / (i + 2) of each number of layer i, but not linear: what backward needs is x.
struct plain_layers {
    std::vector<std::string> calls{};
    std::vector<double> kept{};  ///< of each place: the first number of its x

    static double at(int64_t i) { return 1 / static_cast<double>(i + 2); }
    void forward(int64_t i, uly::row_view<double const> x, uly::row_view<double> y) {
        calls.push_back(uly::concat("f", i));
        for (int64_t j = 0; j < x.rows * x.width; ++j)
            y.data[j] = x.data[j] + at(i) * x.data[j] * x.data[j];
    }
    void forward_keeping(int64_t i, int64_t place, uly::row_view<double const> x,
                         uly::row_view<double> y) {
        forward(i, x, y);
        calls.back() = uly::concat("k", i, "@", place);
        kept.resize(std::max(kept.size(), static_cast<std::size_t>(place) + 1));
        kept[static_cast<std::size_t>(place)] = x.data[0];
    }
    void backward(int64_t i, int64_t place, uly::row_view<double const> x,
                  uly::row_view<double> d) {
        calls.push_back(uly::concat("b", i));
        CHECK(kept[static_cast<std::size_t>(place)] == x.data[0]);
        for (int64_t j = 0; j < x.rows * x.width; ++j) d.data[j] *= 1 + 2 * at(i) * x.data[j];
    }
};

/// What copies did, and a device's memory that is gone once it is freed.
struct traffic {
    int64_t out = 0, back = 0, most_in_flight = 0;
    std::atomic<int64_t> in_flight{0};
};
/// Copies by threads, late, as a device's would be; `wait` is the queue's.
struct late_copier {
    using space_type = uly::host_space;
    struct store_type : uly::host_space {};
    struct copy {
        std::jthread worker;
    };
    using ticket_type = std::shared_ptr<copy>;

    traffic* seen;
    std::shared_ptr<std::set<std::byte const*>> stored =
        std::make_shared<std::set<std::byte const*>>();

    ticket_type start(uly::host_space::queue, std::byte* to, std::byte const* from,
                      std::size_t bytes) {
        auto const size = static_cast<int64_t>(bytes);
        if (stored->count(from) == 0) {
            stored->insert(to);
            seen->out += size;
        } else {
            seen->back += size;
        }
        seen->most_in_flight = std::max(seen->most_in_flight, ++seen->in_flight);
        auto ticket = std::make_shared<copy>();
        ticket->worker = std::jthread([to, from, bytes, own = seen] {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            std::memcpy(to, from, bytes);
            --own->in_flight;
        });
        return ticket;
    }
    void wait(uly::host_space::queue, ticket_type const& ticket) const { ticket->worker.join(); }
};

std::vector<double> numbers(int64_t count) {
    std::mt19937_64 random{3};
    std::uniform_real_distribution<double> uniform(-1, 1);
    std::vector<double> all(static_cast<std::size_t>(count));
    for (auto& each : all) each = uniform(random);
    return all;
}

/// y, then the gradient of the input, of `layers` plain layers.
template <class Checkpoint>
std::pair<std::vector<double>, std::vector<double>> run_plain(Checkpoint& saved,
                                                              plain_layers& layers, int64_t rows) {
    auto const x = numbers(rows * 3);
    std::vector<double> y(x.size()), d(x.size(), 1.0);
    std::ranges::copy(x, saved.input(rows, 3).data);
    saved.forward(layers, {y.data(), rows, 3});
    saved.backward(layers, {d.data(), rows, 3});
    return {y, d};
}

}  // namespace

TEST_CASE("checkpoint: which layers run when, and where they keep") {
    using names = std::vector<std::string>;
    auto const calls_of = [](int64_t count, uly::checkpoint_options const& options) {
        uly::checkpoint<double> saved(uly::serial{}, count, options);
        plain_layers layers;
        run_plain(saved, layers, 2);
        return layers.calls;
    };
    CHECK(calls_of(3, {.every = 3}) == names{"k0@0", "k1@1", "k2@2", "b2", "b1", "b0"});
    CHECK(calls_of(3, {}) == names{"f0", "f1", "k2@0", "b2", "k1@0", "b1", "k0@0", "b0"});
    CHECK(calls_of(5, {.every = 2, .resident = 2}) == names{"f0", "f1", "f2", "f3", "k4@0", "b4",
                                                            "k2@0", "k3@1", "b3", "b2", "k0@0",
                                                            "k1@1", "b1", "b0"});
    CHECK(calls_of(1, {}) == names{"k0@0", "b0"});
}

TEST_CASE(
    "checkpoint: inputs elsewhere, by copies that are late: the same bits, in bounded memory") {
    for (int64_t const count : {1, 2, 3, 7, 8})
        for (int64_t every = 1; every <= count; ++every)
            for (int64_t const resident : {2, 3, 5}) {
                CAPTURE(count);
                CAPTURE(every);
                CAPTURE(resident);
                constexpr int64_t rows = 5, bytes = rows * 3 * sizeof(double), pitch = 128;
                static_assert(bytes <= pitch);
                uly::checkpoint<double> all_kept(uly::serial{}, count, {.every = count});
                plain_layers one, other;
                auto const expected = run_plain(all_kept, one, rows);
                traffic seen;
                uly::checkpoint<double, late_copier> saved(
                    uly::serial{}, count, {.every = every, .resident = resident}, {&seen});
                auto const segments = (count + every - 1) / every;
                auto const moved = std::max<int64_t>(0, segments - resident);
                for (int64_t i = 1; i <= 2; ++i) {
                    CHECK(run_plain(saved, other, rows) == expected);
                    CHECK(seen.back == i * moved * bytes);
                }
                CHECK(seen.in_flight == 0);
                CHECK(seen.most_in_flight <= resident);
                auto const between = segments == 1 ? every - 1 : every;
                CHECK(static_cast<int64_t>(saved.bytes()) ==
                      (std::min(resident, segments) + between) * pitch);
                CHECK(static_cast<int64_t>(saved.stored_bytes()) == moved * pitch);
            }
}

TEST_CASE("checkpoint: a pipeline's layers, by each keep policy, have the gradients of none") {
    constexpr int64_t depth = 5;
    auto const samples = text_samples(12);
    for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing}) {
        // Of each rank, its loss and its part of the gradients.
        auto const results_of = [&](uly::checkpoint_options const& options, double dropout = 0) {
            std::vector<std::vector<double>> all(3);
            pipeline_test::run_ranks(3, [&](ranks_type world) {
                auto run = uly::prepare(
                    {.parallel = {.sp = 3},
                     .step = {.micro_batch = 2, .gradient_accumulation = 6, .tokens = longest}},
                    world, samples, text_fields);
                tiny_model model(world, depth, keep, options, dropout);
                auto const sums =
                    run.accumulate([&](auto const& batch) { return model.learn(batch); });
                auto& mine = all[static_cast<std::size_t>(world.rank())];
                mine.assign(model.gradients().begin(), model.gradients().end());
                mine.push_back(sums->loss);
                auto const segments = (depth + options.every - 1) / options.every;
                auto const last = depth - (segments - 1) * options.every;
                CHECK(model.forwards == 6 * (depth - last));
                CHECK(model.keeping_forwards == 6 * depth);
            });
            return all;
        };
        auto const expected = results_of({.every = depth});
        CHECK(results_of({.every = 1}) == expected);
        CHECK(results_of({.every = 1, .resident = 2}) == expected);
        CHECK(results_of({.every = 2, .resident = 2}) == expected);
        auto const dropped = results_of({.every = depth}, 0.5);
        CHECK(dropped != expected);
        CHECK(results_of({.every = 2, .resident = 2}, 0.5) == dropped);
    }
}

TEST_CASE("checkpoint: a forward whose backward does not come, and layers that throw") {
    traffic seen;
    plain_layers layers;
    uly::checkpoint<double, late_copier> saved(uly::serial{}, 6, {.resident = 2}, {&seen});
    auto const expected = run_plain(saved, layers, 4);
    std::vector<double> y(12);
    saved.input(4, 3);
    saved.forward(layers, {y.data(), 4, 3});
    CHECK(run_plain(saved, layers, 4) == expected);
    struct failing_layers : plain_layers {
        void forward(int64_t i, uly::row_view<double const> x, uly::row_view<double> to) {
            if (i == 3) throw std::runtime_error("out of luck");
            plain_layers::forward(i, x, to);
        }
    } failing;
    saved.input(400, 3);  // grows
    y.resize(1200);
    CHECK_THROWS_AS(saved.forward(failing, {y.data(), 400, 3}), std::runtime_error);
    CHECK_THROWS_AS(saved.backward(layers, {y.data(), 400, 3}), uly::invalid_call);
    CHECK(run_plain(saved, layers, 4) == expected);
    saved.input(400, 3);
    saved.forward(layers, {y.data(), 400, 3});  // copies may be on their way when it ends
}

TEST_CASE("checkpoint: what ends waits for every copy, though a wait throws") {
    struct broken_copier : uly::host_copier {
        int64_t* waits;
        void wait(uly::host_space::queue, ticket_type) const {
            ++*waits;
            throw std::runtime_error("device lost");
        }
    };
    int64_t waits = 0;
    {
        uly::checkpoint<double, broken_copier> saved(uly::serial{}, 6, {.resident = 4},
                                                     {{}, &waits});
        plain_layers layers;
        std::vector<double> y(12);
        saved.input(4, 3);
        CHECK_THROWS_AS(saved.forward(layers, {y.data(), 4, 3}), std::runtime_error);
        CHECK(waits == 1);
    }
    CHECK(waits == 2);
    waits = 0;
    {
        uly::checkpoint<double, broken_copier> saved(uly::serial{}, 5, {.resident = 3},
                                                     {{}, &waits});
        struct failing_layers : plain_layers {
            void forward(int64_t i, uly::row_view<double const> x, uly::row_view<double> to) {
                if (i == 1) throw std::runtime_error("out of luck");
                plain_layers::forward(i, x, to);
            }
        } layers;
        std::vector<double> y(12);
        saved.input(4, 3);
        CHECK_THROWS_AS(saved.forward(layers, {y.data(), 4, 3}), std::runtime_error);
        CHECK(waits == 0);
    }
    CHECK(waits == 2);
}

TEST_CASE("checkpoint: calls out of order, and what cannot be, on every rank alike") {
    uly::checkpoint<double> saved(uly::serial{}, 2);
    plain_layers layers;
    std::vector<double> y(6);
    uly::row_view<double> const rows{y.data(), 2, 3};
    auto const text = [](auto const& body) { return rule_of(failure_of(body).text); };
    CHECK(text([&] { saved.forward(layers, rows); }) ==
          "ulysses: checkpoint: forward needs an input, which it takes once: there is none");
    saved.input(2, 3);
    CHECK(text([&] { saved.backward(layers, rows); }) ==
          "ulysses: checkpoint: backward needs a forward before it: there is an input");
    CHECK(text([&] {
              saved.forward(layers, {y.data(), 1, 3});
          }) == "ulysses: checkpoint: operands must have one row a token: [1, 3], expected [2, 3]");
    saved.forward(layers, rows);
    CHECK(text([&] { saved.forward(layers, rows); }) ==
          "ulysses: checkpoint: forward needs an input, which it takes once: forward has run");
    CHECK(text([&] { saved.input(-1, 3); }) ==
          "ulysses: checkpoint: an input has 0 or more rows of 1 or more numbers: -1 rows of 3");
    saved.input(0, 3);  // a rank without tokens
    saved.forward(layers, {nullptr, 0, 3});
    saved.backward(layers, {nullptr, 0, 3});

    auto const refused = [](int64_t count, auto const& options_of) {
        return failure_on_all(2,
                              [&](ranks_type ranks) {
                                  uly::checkpoint<double>(ranks, count, options_of(ranks.rank()));
                              })
            .text;
    };
    using options = uly::checkpoint_options;
    CHECK(refused(4, [](int rank) { return options{.every = 1 + rank}; }) ==
          "ulysses: checkpoint: every must be equal on every rank: rank 0 has 1, rank 1 has 2");
    CHECK(refused(4, [](int rank) { return options{.every = 5 * rank + 1}; }) ==
          "ulysses: checkpoint: there is at least 1 layer, and a segment has at least 1 of them: 6 "
          "of 4");
    CHECK(refused(0, [](int) { return options{}; }) ==
          "ulysses: checkpoint: there is at least 1 layer, and a segment has at least 1 of them: 1 "
          "of 0");
    CHECK(refused(4, [](int) { return options{.resident = 1}; }) ==
          "ulysses: checkpoint: at least 2 inputs are resident, or 0 for all: 1");
}
