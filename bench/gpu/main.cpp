// SPDX-License-Identifier: Apache-2.0

#include "../table.hpp"
#include "layers.hpp"
#include "sections.hpp"

#include <ulysses/attention/reference.hpp>

#include <cstdio>
#include <cstring>
#include <exception>
#include <span>

/// usage: ulysses_bench_gpu [--quick] [--json FILE]
///
/// What pipelines of ranks that share one GPU compute and take. Ends with 3 where there is none, with 1
/// when something is wrong. --quick: small, to see that it runs.
namespace ulysses_bench {

namespace {

namespace uly = ulysses;
using uly::copy_way;
using uly::cuda_peers::fence_way;
using uly::detail::expect_cuda;

/// o, dq, dk, dv of all tokens, in memory that processes share.
struct whole_results {
    explicit whole_results(sizes const& of) {
        for (std::size_t i = 0; i < 4; ++i) {
            auto const count = static_cast<std::size_t>(of.tokens * of.row(i));
            auto* const memory = mmap(nullptr, count * sizeof(float), PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED) throw std::bad_alloc();
            parts[i] = {static_cast<float*>(memory), count};
            clear(i);
        }
    }
    whole_results(whole_results const&) = delete;
    whole_results& operator=(whole_results const&) = delete;
    ~whole_results() {
        for (auto const part : parts) munmap(part.data(), part.size_bytes());
    }
    void clear(std::size_t i) const {
        std::fill(parts[i].begin(), parts[i].end(), std::numeric_limits<float>::quiet_NaN());
    }
    std::array<std::span<float>, 4> parts;
};
constexpr std::string_view names[] = {"o", "dq", "dk", "dv"};

/// Forward and backward on the host, in double.
void compute_on_host(sizes const& of, whole_results const& to) {
    std::array<std::vector<float>, 4> in;
    for (std::size_t i = 0; i < 4; ++i)
        for (std::int64_t j = 0; j < of.tokens * of.row(i); ++j) in[i].push_back(value_of(i, j));
    auto const view = [&](std::size_t i, float* data) {
        return uly::head_view<float>(data, {1, of.tokens, of.row(i) / of.dim, of.dim});
    };
    auto const constant = [](uly::head_view<float> const& x) {
        return uly::head_view<float const>(x.data, x.extents, x.strides);
    };
    std::vector<float> lse(static_cast<std::size_t>(of.tokens * of.heads));
    uly::head_view<float> const rows(lse.data(), {1, of.tokens, of.heads, 1});
    uly::attention_call call;
    call.visible.mask = uly::mask::causal;
    call.visible.queries = call.visible.keys = of.tokens;
    call.scale = uly::softmax_scale(uly::checked(of.shape()));
    uly::attention_extents const extents{1,           of.tokens, of.heads, of.tokens,
                                         of.kv_heads, of.dim,    of.dim};
    std::vector<double> workspace(
        uly::reference_attention::workspace_bytes<float>(extents) / sizeof(double) + 8);
    call.workspace = std::as_writable_bytes(std::span(workspace));
    auto const q = view(0, in[0].data()), k = view(1, in[1].data()), v = view(2, in[2].data()),
               dout = view(3, in[3].data()), o = view(0, to.parts[0].data());
    uly::reference_attention const reference;
    reference.forward<float>(call, constant(q), constant(k), constant(v), o, rows);
    for (auto const i : {2, 3})
        std::fill(to.parts[static_cast<std::size_t>(i)].begin(),
                  to.parts[static_cast<std::size_t>(i)].end(), 0.0f);
    uly::attention_backward_views<float> views;
    views.q = constant(q), views.k = constant(k), views.v = constant(v);
    views.o = constant(o), views.dout = constant(dout), views.lse = constant(rows);
    views.dq = view(0, to.parts[1].data());
    views.dk = view(1, to.parts[2].data());
    views.dv = view(2, to.parts[3].data());
    reference.backward<float>(call, views);
}

struct place {
    std::string_view name;
    bool processes;
    fence_way fence;
};
constexpr place places[] = {{"threads, events", false, fence_way::events},
                            {"threads, flags", false, fence_way::flags},
                            {"processes", true, fence_way::flags}};

/// The layer over `ranks`, into `to`.
void compute(place const& at, int ranks, copy_way way, sizes const& of, whole_results const& to) {
    for (std::size_t i = 0; i < 4; ++i) to.clear(i);
    auto const body = [&](ranks_type const& each) {
        rank_of_layer layer(each, of, true);
        layer.train();
        layer.train();  // in windows that are there already
        for (std::size_t i = 0; i < 4; ++i) layer.get(i, to.parts[i]);
        each.host().fence({});
    };
    uly::cuda_peers::options const given{.fence = at.fence, .way = way};
    if (at.processes)
        on_processes(ranks, given, body);
    else
        on_threads(ranks, given, body);
}

/// Of one rank against the host, then of several against one.
void check_results(std::vector<result>& rows, sizes const& of, bool processes,
                   whole_results const& exact, whole_results const& one,
                   whole_results const& several) {
    if (processes) {
        compute(places[2], 1, copy_way::kernel, of, one);
        for (std::size_t i = 0; i < 4; ++i) {
            double largest = 0, magnitude = 0;
            for (std::size_t j = 0; j < one.parts[i].size(); ++j) {
                auto const x = static_cast<double>(exact.parts[i][j]);
                auto const off = std::fabs(static_cast<double>(one.parts[i][j]) - x);
                largest = off <= largest ? largest : off;
                magnitude = std::max(magnitude, std::fabs(x));
            }
            // Sums of as many float terms as there are tokens, at worst.
            auto const allowed = static_cast<double>(of.tokens + 8) * 0x1p-23 * magnitude;
            rows.push_back({uly::concat("1 rank, ", names[i], ": largest difference"),
                            largest * 1e6, "1e-6", "fp64 on the host: what is allowed",
                            largest / allowed, "<= 1"});
        }
    }
    for (auto const& at : places) {
        if (at.processes != processes) continue;
        for (int const ranks : {2, 4, 8})
            for (auto const way : {copy_way::kernel, copy_way::engine}) {
                compute(at, ranks, way, of, several);
                double differ = 0;
                for (std::size_t i = 0; i < 4; ++i)
                    for (std::size_t j = 0; j < one.parts[i].size(); ++j)
                        differ +=
                            std::memcmp(&one.parts[i][j], &several.parts[i][j], sizeof(float)) != 0;
                rows.push_back(
                    {uly::concat(ranks, " ranks, ", at.name, ", ",
                                 way == copy_way::kernel ? "kernel" : "engine", ": other elements"),
                     differ, "", "the bits of 1 rank, o, dq, dk, dv", differ, "<= 0"});
            }
    }
}

/// Median milliseconds of what `body` gives the stream.
template <class Body>
double milliseconds(stream_owner const& stream, bool quick, Body const& body) {
    std::vector<double> all;
    for (int round = quick ? -1 : -3; round < (quick ? 3 : 20); ++round) {
        stream.wait();
        event_pair const events;
        events.begin(stream);
        body();
        auto const taken = events.end(stream);
        if (round >= 0) all.push_back(taken);
    }
    return median(all);
}

/// Step 3 of one of four ranks, q, k and v, against a copy of as many bytes from device to device.
void measure_copies(std::vector<result>& rows, bool quick) {
    constexpr std::int64_t ranks = 4, heads = 32, row = 256;  // 128 elements of 2 bytes
    std::int64_t const tokens = quick ? 16 : 8192, bytes = tokens * heads * row;
    stream_owner const stream;
    device_array<std::byte> const from(stream.get(), 3 * bytes), to(stream.get(), 3 * bytes);
    std::vector<uly::block_copy> blocks;
    for (std::int64_t operand = 0; operand < 3; ++operand)
        for (int peer = 0; peer < ranks; ++peer) {
            auto const own = heads / ranks;
            uly::block_copy block;
            block.from = from.data() + operand * bytes + peer * own * row;
            block.to = to.data() + operand * bytes + peer * own * tokens * row;
            block.extents = {1, tokens, own};
            block.from_strides = {0, heads * row, row};
            block.to_strides = {0, row, tokens * row};
            block.row_bytes = row;
            block.peer = peer;
            blocks.push_back(block);
        }
    auto const plain = milliseconds(stream, quick, [&] {
        expect_cuda(cudaMemcpyAsync(to.data(), from.data(), static_cast<std::size_t>(3 * bytes),
                                    cudaMemcpyDefault, stream.get()),
                    "cudaMemcpyAsync");
    });
    auto const what = uly::concat("q, k, v of ", tokens, " tokens, 32 heads of 128 16-bit");
    for (auto const way : {copy_way::kernel, copy_way::engine}) {
        uly::cuda_work work({.way = way, .ranks = ranks});
        auto const taken = milliseconds(stream, quick, [&] {
            uly::cuda_space::copy({.stream = stream.get(), .work = &work}, blocks, 0);
        });
        rows.push_back({uly::concat(way == copy_way::kernel ? "kernel: " : "engine: ", what),
                        taken * 1000, "us", "device-to-device copy of as many bytes", taken / plain,
                        way == copy_way::kernel && !quick ? "<= 1.05" : ""});
    }
}

/// Host time of a call, and device time of one in a graph, with attention that does nothing.
void measure_calls(std::vector<result>& rows, bool quick) {
    sizes const of{.tokens = 64, .heads = 8, .kv_heads = 8, .dim = 8};
    int const calls = quick ? 2 : 200;
    double alone = 0;
    for (int const ranks : {1, 2, 4, 8}) {
        std::vector<double> all(static_cast<std::size_t>(ranks));
        on_threads(ranks, {}, [&](ranks_type const& each) {
            rank_of_layer layer(each, of, false);
            layer.attend();
            layer.wait();
            each.host().fence({});
            auto const start = std::chrono::steady_clock::now();
            for (int i = 0; i < calls; ++i) layer.attend();
            std::chrono::duration<double> const taken = std::chrono::steady_clock::now() - start;
            all[static_cast<std::size_t>(each.rank())] = taken.count() / calls;
            layer.wait();
        });
        auto const most = *std::ranges::max_element(all);
        if (ranks == 1) alone = most;
        rows.push_back({uly::concat("host time of attend, ", ranks, " ranks"), most * 1e6, "us",
                        "1 rank", most / alone});
    }
    constexpr int ranks = 4;
    std::array<double, ranks> eager{}, replayed{};
    on_threads(ranks, {.fence = fence_way::flags}, [&](ranks_type const& each) {
        rank_of_layer layer(each, of, false);
        auto const me = static_cast<std::size_t>(each.rank());
        auto const time = [&](auto const& body) {
            layer.wait();
            each.host().fence({});
            auto const start = std::chrono::steady_clock::now();
            for (int i = 0; i < calls; ++i) body();
            layer.wait();
            std::chrono::duration<double> const taken = std::chrono::steady_clock::now() - start;
            return taken.count() / calls;
        };
        layer.attend();
        eager[me] = time([&] { layer.attend(); });
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t made = nullptr;
        expect_cuda(cudaStreamBeginCapture(layer.stream(), cudaStreamCaptureModeThreadLocal),
                    "cudaStreamBeginCapture");
        layer.attend();
        expect_cuda(cudaStreamEndCapture(layer.stream(), &graph), "cudaStreamEndCapture");
        expect_cuda(cudaGraphInstantiate(&made, graph, 0), "cudaGraphInstantiate");
        replayed[me] =
            time([&] { expect_cuda(cudaGraphLaunch(made, layer.stream()), "cudaGraphLaunch"); });
        each.host().fence({});
        cudaGraphExecDestroy(made);
        cudaGraphDestroy(graph);
    });
    auto const of_calls = *std::ranges::max_element(eager),
               of_graph = *std::ranges::max_element(replayed);
    rows.push_back({"attend by a graph, 4 ranks", of_graph * 1e6, "us", "attend by its call",
                    of_graph / of_calls});
}

std::string device_name() {
    cudaDeviceProp properties{};
    int runtime = 0;
    expect_cuda(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
    expect_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    return uly::concat(properties.name, ", sm_", properties.major, properties.minor, ", CUDA ",
                       runtime / 1000, ".", runtime % 1000 / 10);
}

int run(bool quick, char const* json) {
    // In a process of its own: those that fork makes of one that has used CUDA cannot.
    auto const none = run_processes(1, [](process_ranks const&) {
        int count = 0;
        auto const found = cudaGetDeviceCount(&count);
        if (found != cudaSuccess || count == 0)
            uly::throw_error(uly::errc::transport,
                             uly::concat("there is no GPU here: ", cudaGetErrorName(found), ", ",
                                         count, " devices"));
    });
    if (!none.empty()) {
        std::fprintf(stderr, "ulysses_bench_gpu: %s\n", none.c_str());
        return 3;
    }
    sizes const of = quick ? sizes{.tokens = 24, .heads = 8, .kv_heads = 8, .dim = 4} : sizes{};
    whole_results const exact(of), one(of), several(of);
    std::vector<result> rows;
    compute_on_host(of, exact);
    section(rows, "processes", [&] { check_results(rows, of, true, exact, one, several); });
    section(rows, "threads", [&] { check_results(rows, of, false, exact, one, several); });
    section(rows, "copies", [&] { measure_copies(rows, quick); });
    section(rows, "calls", [&] { measure_calls(rows, quick); });
    section(rows, "cuDNN", [&] { measure_cudnn(rows, quick); });
    section(rows, "6 steps", [&] { measure_six_steps(rows, quick); });
    std::printf("%s\n", device_name().c_str());
    print(rows);
    if (json != nullptr && !write_json(json, rows)) {
        std::fprintf(stderr, "ulysses_bench_gpu: cannot write %s\n", json);
        return 1;
    }
    auto const wrong = std::ranges::any_of(
        rows, [](result const& row) { return row.target != "<= 1.05" && !met(row); });
    return wrong ? 1 : 0;
}

}  // namespace

}  // namespace ulysses_bench

int main(int argc, char** argv) {
    bool quick = false;
    char const* json = nullptr;
    for (int i = 1; i < argc; ++i) {
        std::string_view const option = argv[i];
        if (option == "--quick") {
            quick = true;
        } else if (option == "--json" && i + 1 < argc) {
            json = argv[++i];
        } else {
            std::fprintf(stderr, "usage: ulysses_bench_gpu [--quick] [--json FILE]\n");
            return 2;
        }
    }
    try {
        return ulysses_bench::run(quick, json);
    } catch (std::exception const& e) {
        std::fprintf(stderr, "ulysses_bench_gpu: %s\n", e.what());
        return 1;
    }
}
