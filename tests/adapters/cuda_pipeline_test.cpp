// SPDX-License-Identifier: Apache-2.0

#include "cuda_pipeline.hpp"
#include "cuda_ranks.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

/// Pipelines over cuda_peers and the double of the CUDA runtime: what threads on the CPU compute.
namespace {

namespace uly = ulysses;
using namespace pipeline_test;
using uly::cuda_peers::fence_way;

// Threads or processes, so that the compiler meets one pipeline.
using ulysses_bench::host_ranks;
using ranks_type = cuda_test::ranks_over<host_ranks>;

template <class Body>
void run(int ranks, Body const& body, uly::cuda_peers::options const& given = {}) {
    cuda_test::run<host_ranks>(ranks, body, given);
}

/// Memory of an engine's own, which counts what is held and what ever was.
struct counted_memory {
    std::atomic<int> held{0}, taken{0};
};
counted_memory counted;
uly::cuda_memory const own_memory{
    &counted,
    [](void* context, std::size_t bytes, cudaStream_t stream) -> void* {
        auto& count = *static_cast<counted_memory*>(context);
        ++count.held, ++count.taken;
        return uly::cuda_space::allocate({.stream = stream}, bytes);
    },
    [](void* context, void* memory, std::size_t bytes, cudaStream_t stream) noexcept {
        --static_cast<counted_memory*>(context)->held;
        uly::cuda_space::deallocate({.stream = stream}, memory, bytes);
    }};

struct way {
    std::string_view name;
    uly::cuda_peers::options given;
};
way const ways[] = {
    {"kernel, events", {}},
    {"engine, flags", {.fence = fence_way::flags, .way = uly::copy_way::engine}},
    {"engine, events, own memory",
     {.way = uly::copy_way::engine, .in_flight = 2, .memory = &own_memory}},
    {"kernel, flags, as processes", {.as_processes = true}},
};

}  // namespace

TEST_CASE("property: pipelines over cuda_peers have the bits of threads") {
    auto const before = doubles::allocated_bytes();
    constexpr std::uint64_t seeds = TEST_UNDER_SANITIZER ? 24 : 120;
    MESSAGE("seeds 1 .. " << seeds);
    for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
        CAPTURE(seed);
        // Each number of ranks meets each way.
        constexpr int sizes[] = {4, 2, 1, 2, 4};
        auto const ranks = sizes[seed % 5];
        CAPTURE(ranks);
        auto const& how = ways[seed % 4];
        CAPTURE(how.name);
        auto const drawn = draw_problem(seed, ranks);
        INFO(drawn.text());
        auto const expected = results_of_threads(ranks, drawn);
        std::vector<bytes> seen(static_cast<std::size_t>(ranks));
        run(
            ranks,
            [&](ranks_type of) {
                seen[static_cast<std::size_t>(of.rank())] = cuda_test::results_on_device(of, drawn);
            },
            how.given);
        CHECK(seen == expected);
    }
    CHECK(doubles::allocated_bytes() == before);
}

TEST_CASE(
    "property: pipelines of processes that open each other's memory have the bits of threads" *
    doctest::skip(TEST_UNDER_THREAD_SANITIZER)) {
    for (std::uint64_t seed = 201; seed <= 216; ++seed) {
        CAPTURE(seed);
        auto const ranks = seed % 2 == 0 ? 2 : 4;
        auto const drawn = draw_problem(seed, ranks);
        INFO(drawn.text());
        auto const expected = results_of_threads(ranks, drawn);
        uly::cuda_peers::options const given{.way = seed / 2 % 2 == 0 ? uly::copy_way::kernel
                                                                      : uly::copy_way::engine};
        auto const failed = cuda_test::run_processes<host_ranks>(
            ranks,
            [&](ranks_type of) {
                if (cuda_test::results_on_device(of, drawn) !=
                    expected[static_cast<std::size_t>(of.rank())])
                    uly::throw_error(uly::errc::none, "other bits than those of threads");
            },
            given);
        CHECK(failed == "");
    }
}

namespace {

using cuda_test::device_problem;

uly::shape const grouped{
    .heads = 8, .kv_heads = 4, .head_dim = 4, .value_dim = 3, .mask = uly::mask::causal};

/// One rank of a layer that is called again and again, with values of one seed or another.
class repeated_layer {
   public:
    explicit repeated_layer(ranks_type const& ranks)
        : ranks_(ranks),
          step_(problem_of(1).step(equal_shares(tokens, ranks.size()))),
          layer_(ranks, uly::sequence_local{}, {}, grouped),
          saved_(layer_.make_context()),
          host_(problem_of(1), step_, ranks.rank()),
          device_(ranks.queue(), host_) {
        cudaStreamSynchronize(stream());  // the host's values are overwritten
    }

    cudaStream_t stream() const { return ranks_.queue().stream; }
    void meet() const { ranks_.host().fence({}); }

    /// By the stream; operands of a call are not there before it comes to them.
    void set_inputs(std::uint64_t seed) {
        local_problem<double> const values(problem_of(seed), step_, ranks_.rank());
        host_.q = values.q, host_.k = values.k, host_.v = values.v, host_.dout = values.dout;
        device_.q.set(host_.q), device_.k.set(host_.k), device_.v.set(host_.v);
    }
    void set_gradient() { device_.dout.set(host_.dout); }
    void set(std::uint64_t seed) {
        set_inputs(seed);
        set_gradient();
    }
    void forward() { layer_.attend(step_, saved_, device_.q, device_.k, device_.v, device_.o); }
    void backward() {
        layer_.attend_backward(step_, saved_, device_.dout, device_.dq, device_.dk, device_.dv);
    }
    void call() {
        forward();
        backward();
    }
    /// Of a call that failed.
    void discard() { saved_.discard(); }
    /// A call of a longer sequence, for which windows and memory grow.
    void call_longer() {
        auto const p = make_problem<double>(3, grouped, 2, 5 * tokens);
        auto const step = p.step(equal_shares(p.tokens, ranks_.size()));
        local_problem<double> host(p, step, ranks_.rank());
        device_problem<double> local(ranks_.queue(), host);
        auto saved = layer_.make_context();
        layer_.attend(step, saved, local.q, local.k, local.v, local.o);
        layer_.attend_backward(step, saved, local.dout, local.dq, local.dk, local.dv);
        cudaStreamSynchronize(stream());
    }
    /// This rank's results, once the stream is done.
    bytes results() {
        device_.o.get(host_.o);
        return results_after_o();
    }
    /// Each operand is used as soon as a call allows.
    bytes results_of(std::uint64_t seed) {
        set_inputs(seed);
        forward();
        device_.o.get(host_.o);
        set_gradient();
        backward();
        return results_after_o();
    }

   private:
    bytes results_after_o() {
        device_.dq.get(host_.dq), device_.dk.get(host_.dk), device_.dv.get(host_.dv);
        cudaStreamSynchronize(stream());
        pipeline_test::results<double> own(problem_of(1));
        host_.put_back_into(own, step_, ranks_.rank());
        return bytes_of(own);
    }

    static constexpr int64_t tokens = 13;
    static problem<double> problem_of(std::uint64_t seed) {
        return make_problem<double>(seed, grouped, 2, tokens);
    }

    ranks_type ranks_;
    uly::sequence step_;
    uly::pipeline<ranks_type, uly::sequence_local, cuda_test::on_stream<builtin_attention>> layer_;
    uly::context<ranks_type> saved_;
    local_problem<double> host_;
    device_problem<double> device_;
};

/// The error that every rank ends with; empty when they differ.
struct common_error {
    void saw(uly::error const& e) {
        std::lock_guard const lock(mutex);
        ++count;
        if (count == 1) text = e.what(), code = e.code();
        if (text != e.what()) text.clear();
    }
    std::mutex mutex;
    int count = 0;
    std::string text;
    uly::errc code = uly::errc::none;
};

bool contains(std::string const& text, std::string_view part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a steady state neither waits for the device nor allocates, and copies by one launch") {
    for (auto const& how : ways) {
        CAPTURE(how.name);
        auto const& given = how.given;
        auto const by_kernel = given.way == uly::copy_way::kernel;
        auto const by_flags = given.as_processes || given.fence == fence_way::flags;
        run(
            2,
            [&](ranks_type ranks) {
                repeated_layer layer(ranks);
                layer.results_of(1);
                layer.set(2);
                layer.meet();
                auto const waited = doubles::synchronisations();
                auto const allocated = doubles::allocated_bytes();
                auto const launched = doubles::launches();
                layer.meet();
                layer.call();
                layer.meet();
                // Of both ranks: q, k and v together, o, dout, all gradients together; dk and dv are
                // made zero; four fences, by flags in two halves.
                auto const kernels = 2 * (4 + 2 + (by_flags ? 8 : 0));
                if (ranks.rank() == 0) {
                    CHECK(doubles::synchronisations() == waited);
                    CHECK(doubles::allocated_bytes() == allocated);
                    if (by_kernel) CHECK(doubles::launches() - launched == kernels);
                }
                layer.meet();
                layer.results();
            },
            given);
    }
}

// A race that the thread sanitizer reports is the point of it.
TEST_CASE("a stream that does not wait once is seen in the results" *
          doctest::skip(TEST_UNDER_SANITIZER)) {
    struct tested_way {
        int ranks;
        uly::cuda_peers::options given;
    };
    tested_way const tested[] = {
        {2, {.way = uly::copy_way::engine}}, {4, {}}, {2, {.fence = fence_way::flags}}};
    for (auto const& how : tested) {
        CAPTURE(how.ranks);
        std::vector<doubles::wait> waits;
        constexpr int longest = 100;
        std::string missed;
        std::atomic<bool> differs{false};
        run(
            how.ranks,
            [&](ranks_type ranks) {
                auto const first = ranks.rank() == 0;
                repeated_layer layer(ranks);
                auto const expected = layer.results_of(2);
                layer.results_of(1);
                layer.meet();
                if (first) doubles::waits();
                layer.meet();
                CHECK(layer.results_of(2) == expected);
                layer.meet();
                if (first) waits = doubles::waits();
                layer.meet();
                for (auto const& one : waits) {
                    // Later on a machine that is busy with something else.
                    for (auto const slow : {2, 20, longest}) {
                        layer.results_of(1);
                        layer.meet();
                        if (first) {
                            differs = false;
                            doubles::drop_wait(one.stream, one.number);
                            doubles::slow_down(one.source, std::chrono::milliseconds(slow));
                        }
                        layer.meet();
                        if (layer.results_of(2) != expected) differs = true;
                        layer.meet();
                        if (first) {
                            doubles::drop_wait(-1, -1);
                            doubles::slow_down(-1, {});
                            doubles::finish();
                        }
                        bool const seen = differs;
                        layer.meet();
                        if (seen) break;
                        if (first && slow == longest)
                            missed +=
                                uly::concat(one.stream, " ", one.number, " ", one.source, "; ");
                    }
                }
            },
            how.given);
        MESSAGE(waits.size() << " waits");
        CHECK(waits.size() >= 8);
        CHECK(missed == "");
    }
}

TEST_CASE("calls are captured after one that was not, and their graph is launched again") {
    for (auto const way : {uly::copy_way::kernel, uly::copy_way::engine})
        run(2,
            [](ranks_type ranks) {
                repeated_layer layer(ranks);
                auto const one = layer.results_of(1), two = layer.results_of(2);
                CHECK(one != two);
                cudaGraph_t graph = nullptr;
                cudaGraphExec_t made = nullptr;
                auto const stream = layer.stream();
                REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) ==
                        cudaSuccess);
                layer.call();
                REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
                REQUIRE(cudaGraphInstantiate(&made, graph, 0) == cudaSuccess);
                for (int round = 0; round < 2; ++round) {
                    layer.set(1);
                    REQUIRE(cudaGraphLaunch(made, stream) == cudaSuccess);
                    CHECK(layer.results() == one);
                    layer.set(2);
                    REQUIRE(cudaGraphLaunch(made, stream) == cudaSuccess);
                    CHECK(layer.results() == two);
                    // What the graph names is still there.
                    layer.call_longer();
                }
                cudaGraphExecDestroy(made);
                cudaGraphDestroy(graph);
            },
            {.fence = fence_way::flags, .way = way});
}

TEST_CASE("what cannot be captured is an error on every rank, and the group goes on") {
    for (auto const way : {fence_way::flags, fence_way::events}) {
        common_error seen;
        run(2,
            [&](ranks_type ranks) {
                repeated_layer layer(ranks);
                auto const stream = layer.stream();
                if (way == fence_way::events) layer.results_of(1);
                cudaGraph_t graph = nullptr;
                REQUIRE(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal) ==
                        cudaSuccess);
                try {
                    layer.call();
                } catch (uly::error const& e) {
                    seen.saw(e);
                }
                REQUIRE(cudaStreamEndCapture(stream, &graph) == cudaSuccess);
                cudaGraphDestroy(graph);
                auto const one = layer.results_of(1);
                layer.results_of(2);
                CHECK(layer.results_of(1) == one);
            },
            {.fence = way});
        CHECK(seen.count == 2);
        auto const flags = way == fence_way::flags;
        CHECK(seen.code == (flags ? uly::errc::invalid_call : uly::errc::unsupported));
        CHECK(contains(seen.text,
                       flags
                           ? "make_window: windows must not grow while a stream is captured: make "
                             "the call once before: "
                           : "fence: calls are captured with fence_way::flags only: rank 0 orders "
                             "its stream by events"));
    }
}

namespace {

/// What `body` ends with on a rank.
template <class Body>
uly::errc error_of(Body const& body) {
    try {
        body();
    } catch (uly::error const& e) {
        return e.code();
    }
    return uly::errc::none;
}
bool ends_group(uly::errc code) {
    return code == uly::errc::peer_failed || code == uly::errc::transport;
}

}  // namespace

TEST_CASE("a layer whose call of CUDA fails, whichever, goes on with the right results, or its "
          "group ends") {
    for (auto const& how : ways) {
        CAPTURE(how.name);
        bytes expected[2];
        run(2, [&](ranks_type ranks) {
            expected[ranks.rank()] = repeated_layer(ranks).results_of(2);
        });
        auto const before = doubles::allocated_bytes();
        auto failed = true;
        int after = 0;
        for (; failed; after += TEST_UNDER_SANITIZER ? 7 : 1) {
            CAPTURE(after);
            run(
                2,
                [&](ranks_type ranks) {
                    auto const failing = ranks.rank() == after % 2;
                    auto const last_error = [] { return cudaGetLastError() == cudaSuccess; };
                    uly::errc first{}, then{};
                    {
                        repeated_layer layer(ranks);
                        layer.set(1);
                        if (failing) doubles::fail_calls(after / 2);
                        first = error_of([&] { layer.call(); });
                        if (failing) {
                            failed = doubles::calls_have_failed();
                            doubles::fail_calls(-1);
                        }
                        CHECK(last_error());
                        if (!ends_group(first)) {
                            layer.discard();
                            then = error_of([&] {
                                auto const results = layer.results_of(2);
                                CHECK(results == expected[ranks.rank()]);
                            });
                        }
                        // The host's values are read until then.
                        cudaStreamSynchronize(layer.stream());
                    }
                    CHECK(last_error());
                    CHECK((then == uly::errc::none || ends_group(then)));
                    if (first == uly::errc::none && failing) CHECK(then == uly::errc::none);
                },
                how.given);
            doubles::finish();
            CHECK(doubles::allocated_bytes() == before);
        }
        MESSAGE(after << " places");
        CHECK(after > 60);
    }
}

namespace {

/// Memory of the host that says it is a device's.
struct lying_tensor : tensor<double> {
    using space_type = uly::cuda_space;
};

}  // namespace

TEST_CASE("an operand in the host's memory is an error on every rank before anything moves") {
    common_error seen;
    auto const p = make_problem<double>(1, grouped, 2, 13);
    run(2, [&](ranks_type ranks) {
        uly::pipeline layer{ranks, uly::sequence_local{}, cuda_test::on_stream<builtin_attention>{},
                            grouped};
        auto const step = p.step(equal_shares(13, 2));
        local_problem<double> host(p, step, ranks.rank());
        device_problem<double> local(ranks.queue(), host);
        lying_tensor const liar{host.o};
        auto saved = layer.make_context();
        layer.attend(step, saved, local.q, local.k, local.v, local.o);
        layer.attend_backward(step, saved, local.dout, local.dq, local.dk, local.dv);
        cudaStreamSynchronize(ranks.queue().stream);
        ranks.host().fence({});
        auto const launched = doubles::launches();
        ranks.host().fence({});
        try {
            if (ranks.rank() == 1)
                layer.attend(step, local.q, local.k, local.v, liar);
            else
                layer.attend(step, local.q, local.k, local.v, local.o);
        } catch (uly::error const& e) {
            seen.saw(e);
        }
        ranks.host().fence({});
        // Rank 0 has written its part of the inboxes; nobody has read it.
        CHECK(doubles::launches() - launched <= 1);
        ranks.host().fence({});
        layer.attend(step, local.q, local.k, local.v, local.o);
        cudaStreamSynchronize(ranks.queue().stream);
    });
    CHECK(seen.count == 2);
    CHECK(seen.code == uly::errc::invalid_tensor);
    CHECK(contains(seen.text, "ulysses: attend: o: an operand must be memory of the rank's device: "
                              "the host's, which CUDA does not know, the rank is on device 1"));
}
