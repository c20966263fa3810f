// SPDX-License-Identifier: Apache-2.0
// usage: trace_program FILE RANKS EVENTS
// Runs two layers, the six steps forward and backward, on RANKS ranks, each with a recorder of EVENTS
// events, and writes their trace. Prints what the plans say of it, as JSON, for trace_test.py.

#include <ulysses/ulysses.hpp>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <fstream>
#include <string>
#include <vector>

namespace uly = ulysses;

namespace {

constexpr uly::shape shape{.heads = 5, .kv_heads = 1, .head_dim = 4, .mask = uly::mask::causal};
constexpr std::int64_t batch = 2, tokens = 37, width = 12;
// Names that a file must escape.
constexpr char const* names[] = {"layer \"0\"\\\n\t\x01",
                                 "layer 1 \xc3\xa9 \xff\xe2\x82 \xed\xa0\x80"};

std::int64_t sum_of(std::vector<std::size_t> const& each) {
    std::int64_t sum = 0;
    for (auto const bytes : each) sum += static_cast<std::int64_t>(bytes);
    return sum;
}

/// Bytes that leave `rank` in what was run: both layers, forward and backward.
std::size_t planned(uly::sequence const& step, int ranks, int rank) {
    uly::plan moves;
    moves.rebuild(uly::checked(shape), step, ranks, rank, 1);
    return 2 * (uly::forward_traffic(moves, sizeof(float)).sent +
                uly::backward_traffic(moves, sizeof(float), sizeof(float)).sent);
}

void run_rank(uly::threads::communicator ranks, uly::trace_recorder& recorder) {
    auto const step = uly::sequence::split(ranks.size(), batch, tokens);
    auto const own = step.queries().count(ranks.rank());
    auto const filled = [](std::int64_t count) {
        return std::vector<float>(static_cast<std::size_t>(count), 0.1f);
    };
    auto all = filled(batch * tokens * width), x = filled(batch * own * width), y = x, dx = x;
    auto q = filled(width * shape.heads * shape.head_dim), dq = q, o = q, d_o = q;
    auto k = filled(width * shape.head_dim), v = k, dk = k, dv = k;
    auto const rows = shape.heads * shape.head_dim;
    uly::dense_weights<float> const weights{.q = {q.data(), rows},
                                            .k = {k.data(), shape.head_dim},
                                            .v = {v.data(), shape.head_dim},
                                            .o = {o.data(), width}};
    uly::dense_gradients<float> const gradients{.q = {dq.data(), rows},
                                                .k = {dk.data(), shape.head_dim},
                                                .v = {dv.data(), shape.head_dim},
                                                .o = {d_o.data(), width}};
    auto const local = [&](std::vector<float>& of) {
        return uly::token_view<float>(of.data(), {batch, own, 1, width});
    };
    uly::pipeline layer{ranks, uly::sequence_local{},           uly::reference_attention{},
                        shape, uly::dense{uly::builtin_gemm{}}, uly::trace_observer{}};
    std::vector<uly::trace_observer> layers;
    for (auto const* name : names) layers.push_back(recorder.observe(name));

    auto step_1 = recorder.observe("input");
    step_1.begin(uly::step_id::shard);
    uly::shard(step, ranks.rank(),
               uly::tensor_view<float, uly::replicated>(all.data(), {batch, tokens, 1, width}),
               local(x));
    step_1.end(uly::step_id::shard);
    for (auto& each : layers) {  // layers of one shape may share a pipeline
        layer.observer() = each;
        auto saved = layer.make_context();
        layer.forward(step, saved, local(x), weights, local(y));
        layer.backward(step, saved, local(x), weights, local(y), local(dx), gradients);
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return 2;
    auto const ranks = std::atoi(argv[2]);
    auto const events = static_cast<std::size_t>(std::atoi(argv[3]));
    std::deque<uly::trace_recorder> recorders;
    for (int r = 0; r < ranks; ++r) recorders.emplace_back(r, ranks, uly::trace_options{events});
    uly::threads::run(ranks, [&](uly::threads::communicator c) {
        run_rank(c, recorders[static_cast<std::size_t>(c.rank())]);
    });
    std::ofstream file(argv[1], std::ios::binary);
    uly::write_trace(file, recorders);
    auto const step = uly::sequence::split(ranks, batch, tokens);
    std::vector<std::size_t> leaving;
    for (int r = 0; r < ranks; ++r) leaving.push_back(planned(step, ranks, r));
    std::printf("{\"ranks\": %d, \"leaving\": [", ranks);
    for (std::size_t r = 0; r < leaving.size(); ++r)
        std::printf("%s%zu", r > 0 ? ", " : "", leaving[r]);
    std::printf("], \"total\": %lld}\n", static_cast<long long>(sum_of(leaving)));
    return file.good() ? 0 : 1;
}
