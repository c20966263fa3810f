// SPDX-License-Identifier: Apache-2.0

#include "../allocations.hpp"
#include "failure.hpp"

#include <ulysses/comm/serial.hpp>
#include <ulysses/train/checkpoint.hpp>
#include <ulysses/train/session.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <tuple>
#include <vector>

#if !TEST_UNDER_SANITIZER

using namespace train_test;

namespace {

using std::int64_t;

/// Memory that is the engine's, as that of samples is.
struct viewed_sample {
    std::span<int64_t const> ids, positions;
    std::span<float const> axes;
};

std::vector<viewed_sample> viewed_samples(std::span<int64_t const> ids,
                                          std::span<int64_t const> positions,
                                          std::span<float const> axes) {
    std::vector<viewed_sample> all;
    for (std::size_t i = 0; i < 30; ++i) {
        auto const tokens = 1 + i * 7 % 13;
        all.push_back(
            {ids.subspan(i, tokens), positions.first(tokens), axes.subspan(i, 3 * tokens)});
    }
    return all;
}

struct two_layers {
    void forward(int64_t, uly::row_view<float const> x, uly::row_view<float> y) const {
        std::copy_n(x.data, x.rows * x.width, y.data);
    }
    void forward_keeping(int64_t i, int64_t, uly::row_view<float const> x,
                         uly::row_view<float> y) const {
        forward(i, x, y);
    }
    void backward(int64_t, int64_t, uly::row_view<float const>, uly::row_view<float>) const {}
};

}  // namespace

TEST_CASE("training: an epoch allocates nothing once the largest micro-batch has been seen") {
    std::vector<int64_t> ids(64), positions(64);
    std::vector<float> axes(256);
    for (std::size_t i = 0; i < ids.size(); ++i) {
        ids[i] = static_cast<int64_t>(i * i % 17);
        positions[i] = static_cast<int64_t>(i % 5);  // documents of five tokens
    }
    auto const samples = viewed_samples(ids, positions, axes);
    for (bool const balance : {false, true}) {
        std::vector<long> seen(4, -1);
        pipeline_test::run_ranks(4, [&](ranks_type world) {
            auto run =
                uly::prepare({.parallel = {.sp = 2, .dp_shard = 2},
                              .step = {.micro_batch = 2, .gradient_accumulation = 2, .tokens = 13},
                              .batches = {.balance_valid_tokens = balance, .end = uly::at_end::pad},
                              .largest_norm = 1},
                             world, samples,
                             std::tuple{uly::ids_field(&viewed_sample::ids),
                                        uly::labels_field(&viewed_sample::ids),
                                        uly::positions_field(&viewed_sample::positions),
                                        uly::values_field("axes", &viewed_sample::axes, 3)});
            std::array<float, 5> gradients{};
            int64_t updates = 0;
            seen[static_cast<std::size_t>(world.rank())] = steady_allocations(world, [&] {
                run.restart();
                while (run.step(std::span<float>(gradients), [&](auto const& batch) {
                    gradients[0] += static_cast<float>(batch.ids().size());
                    return uly::token_sums{.loss = 1, .tokens = 1};
                }))
                    ++updates;
            });
            CHECK(updates == 10 * 4);
        });
        CHECK(seen == std::vector<long>(4, 0));
    }
}

TEST_CASE("checkpoint: forward and backward allocate nothing once they have run") {
    uly::serial const alone;
    uly::checkpoint<float> saved(alone, 6, {.every = 2, .resident = 2});
    std::vector<float> y(30);
    two_layers layers;
    int64_t rows = 10;
    CHECK(steady_allocations(alone, [&] {
              saved.input(rows, 3);
              saved.forward(layers, {y.data(), rows, 3});
              saved.backward(layers, {y.data(), rows, 3});
              rows = rows == 10 ? 4 : 10;
          }) == 0);
}

#endif
