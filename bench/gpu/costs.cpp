// SPDX-License-Identifier: Apache-2.0

#include "layers.hpp"
#include "parts.hpp"

#include <ulysses/adapters/cuda.hpp>
#include <ulysses/core/block.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

/// What a pipeline costs beside attention and products: copies, calls, graphs.
namespace ulysses_bench {

namespace {

namespace uly = ulysses;
using uly::copy_way;
using uly::cuda_peers::fence_way;
using uly::detail::expect_cuda;

/// Median milliseconds of what `body` gives the stream.
template <class Body>
double milliseconds(stream_owner const& stream, bool quick, Body const& body) {
    int const repeats = quick ? 1 : 8, rounds = quick ? 3 : 15;
    std::vector<double> all;
    for (int round = -1; round < rounds; ++round) {
        stream.wait();
        event_pair const events;
        events.begin(stream);
        for (int i = 0; i < repeats; ++i) body();
        auto const taken = events.end(stream) / repeats;
        if (round >= 0) all.push_back(taken);
    }
    return median(all);
}

/// Step 3 of one of four ranks, q, k and v, against a copy of as many bytes from device to device.
void measure_copies(report const& to, bool quick) {
    constexpr std::int64_t ranks = 4, heads = 32, row = 256;  // 128 elements of 2 bytes
    std::int64_t const tokens = quick ? 16 : 8192, bytes = tokens * heads * row;
    stream_owner const stream;
    device_array<std::byte> const source(stream.get(), 3 * bytes), target(stream.get(), 3 * bytes);
    std::vector<uly::block_copy> blocks;
    for (std::int64_t operand = 0; operand < 3; ++operand)
        for (int peer = 0; peer < ranks; ++peer) {
            auto const own = heads / ranks;
            uly::block_copy block;
            block.from = source.data() + operand * bytes + peer * own * row;
            block.to = target.data() + operand * bytes + peer * own * tokens * row;
            block.extents = {1, tokens, own};
            block.from_strides = {0, heads * row, row};
            block.to_strides = {0, row, tokens * row};
            block.row_bytes = row;
            block.peer = peer;
            blocks.push_back(block);
        }
    auto const plain = milliseconds(stream, quick, [&] {
        expect_cuda(cudaMemcpyAsync(target.data(), source.data(), source.bytes(), cudaMemcpyDefault,
                                    stream.get()),
                    "cudaMemcpyAsync");
    });
    auto const what = uly::concat("q, k, v of ", tokens, " tokens, 32 x 128, 16 bits");
    to.add({"device-to-device copy", plain * 1e3, "us", what});
    for (auto const way : {copy_way::kernel, copy_way::engine}) {
        uly::cuda_work work({.way = way, .ranks = ranks});
        auto const taken = milliseconds(stream, quick, [&] {
            uly::cuda_space::copy({.stream = stream.get(), .work = &work}, blocks, 0);
        });
        to.add({uly::concat("blocks of 4 ranks, ", text_of(way)), taken * 1e3, "us",
                "device-to-device copy of as many bytes", taken / plain,
                way == copy_way::kernel && !quick ? "<= 1.05" : ""});
    }
}

constexpr sizes small{.tokens = 64, .heads = 8, .kv_heads = 8, .dim = 8};

/// Host time of calls with attention that does nothing.
void measure_calls(report const& to, bool quick) {
    int const calls = quick ? 2 : 200;
    seconds_of_calls alone, alone_training;
    for (int const ranks : {1, 2, 4, 8}) {
        std::vector<seconds_of_calls> all(static_cast<std::size_t>(ranks)), training(all);
        on_threads(ranks, group_options(fence_way::events), [&](ranks_type const& each) {
            auto const me = static_cast<std::size_t>(each.rank());
            auto const wait = [&] { wait_for(each); };
            rank_of_layer layer(each, small, false);
            layer.attend(), layer.train();
            all[me] = timed(
                calls, [&] { layer.attend(); }, wait);
            training[me] = timed(
                calls, [&] { layer.train(); }, wait);
        });
        auto const add = [&](char const* name, seconds_of_calls const& most,
                             seconds_of_calls& of_one) {
            if (ranks == 1) of_one = most;
            to.add({uly::concat("host time of ", name, ", ", ranks, " ranks"), most.host * 1e6,
                    "us", "1 rank", most.host / of_one.host});
        };
        add("attend", slowest(all), alone);
        add("attend and its backward", slowest(training), alone_training);
    }
}

/// Device time of a call in a graph.
void measure_graph(report const& to, bool quick) {
    constexpr int ranks = 4;
    int const calls = quick ? 2 : 200;
    std::vector<seconds_of_calls> eager(ranks), replayed(ranks);
    on_threads(ranks, group_options(fence_way::flags), [&](ranks_type const& each) {
        auto const me = static_cast<std::size_t>(each.rank());
        auto const wait = [&] { wait_for(each); };
        rank_of_layer layer(each, small, false);
        layer.attend();
        eager[me] = timed(
            calls, [&] { layer.attend(); }, wait);
        graph_of_call const graph(layer.stream(), [&] { layer.attend(); });
        replayed[me].all = seconds_of_launch(graph, calls, wait);
    });
    auto const by_graph = slowest(replayed).all;
    to.add({"attend by a graph, 4 ranks", by_graph * 1e6, "us", "attend by its call",
            by_graph / slowest(eager).all});
}

}  // namespace

group costs(bool quick) {
    return {{"copies", 30, [=](report const& to) { measure_copies(to, quick); }},
            {"host time", 30, [=](report const& to) { measure_calls(to, quick); }},
            {"attend by a graph", 30, [=](report const& to) { measure_graph(to, quick); }}};
}

}  // namespace ulysses_bench
