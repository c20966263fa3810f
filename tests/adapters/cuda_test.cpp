// SPDX-License-Identifier: Apache-2.0

#include "../doubles/cuda_runtime.hpp"
#include "../sanitizers.hpp"
#include "../space/scenes.hpp"

#include <ulysses/adapters/cuda.hpp>
#include <ulysses/core/buffer.hpp>
#include <ulysses/space/host.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

/// The CUDA space over a double of the CUDA runtime: device memory is the host's, so that tests look
/// at it once a stream has been waited for.
namespace {

namespace uly = ulysses;
using uly::block_copy;
using uly::block_sum;
using uly::cuda_space;

struct stream_owner {
    cudaStream_t stream = nullptr;
    stream_owner() { REQUIRE(cudaStreamCreateWithFlags(&stream, 0) == cudaSuccess); }
    stream_owner(stream_owner const&) = delete;
    stream_owner& operator=(stream_owner const&) = delete;
    ~stream_owner() { cudaStreamDestroy(stream); }
    void wait() const { REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess); }
};

void check_copies(cuda_space::queue on, stream_owner const& stream) {
    for (unsigned seed = 1; seed <= (TEST_UNDER_SANITIZER ? 12 : 60); ++seed) {
        CAPTURE(seed);
        std::mt19937 random{seed};
        auto const drawn = space_test::drawn_scene(random);
        auto blocks = drawn.blocks;
        // Of this rank, of peers, and of no rank.
        for (auto& block : blocks) block.peer = static_cast<int>(space_test::drawn(random, -1, 3));
        auto target = drawn.target, expected = drawn.target;
        auto const into = [&](std::vector<std::byte>& memory) {
            for (std::size_t i = 0; i < blocks.size(); ++i)
                blocks[i].to = memory.data() + (drawn.blocks[i].to - drawn.target.data());
        };
        into(expected);
        space_test::copy_naively(blocks);
        into(target);
        cuda_space::copy(on, blocks, 0);
        stream.wait();
        CHECK(target == expected);
    }
}

}  // namespace

TEST_CASE("cuda_space copies by the kernel") {
    stream_owner const stream;
    check_copies({.stream = stream.stream}, stream);
}

TEST_CASE("cuda_space copies peers' blocks by the copy engine") {
    stream_owner const stream;
    for (int const rank : {0, 1, 2}) {
        uly::cuda_work work(
            {.way = uly::copy_way::engine, .in_flight = 1 + rank, .rank = rank, .ranks = 3});
        check_copies({.stream = stream.stream, .work = &work}, stream);
        stream.wait();
    }
}

TEST_CASE("the copy engine begins with the next rank, and has none of a rank's own blocks") {
    stream_owner const stream;
    std::vector<std::byte> const from(8);
    std::vector<std::byte> to(8 * 8);
    std::vector<block_copy> blocks;
    for (int i = 0; i < 8; ++i) {
        block_copy block;
        block.to = to.data() + 8 * i;
        block.from = from.data();
        block.extents = {1, 1, 1};
        block.row_bytes = 8;
        block.peer = i % 4;
        blocks.push_back(block);
    }
    uly::cuda_work work({.way = uly::copy_way::engine, .in_flight = 2, .rank = 2, .ranks = 4});
    doubles::copies();
    doubles::waits();
    cuda_space::copy({.stream = stream.stream, .work = &work}, blocks, 0);
    stream.wait();
    std::vector<void const*> expected;
    for (int const i : {3, 7, 0, 4, 1, 5}) expected.push_back(to.data() + 8 * i);
    CHECK(doubles::copies() == expected);
    CHECK(doubles::waits().size() == 4);  // two lanes for the stream, the stream for both
    // Where nothing goes to a peer, no lane is used.
    cuda_space::copy({.stream = stream.stream, .work = &work}, std::span(blocks).subspan(2, 1), 0);
    CHECK(doubles::waits().empty());
    stream.wait();
}

namespace {

struct calls_of_engine {
    std::int64_t row_bytes, rows, planes, calls;
    friend bool operator==(calls_of_engine const&, calls_of_engine const&) = default;
};

calls_of_engine calls_of(std::array<std::int64_t, 3> extents, std::array<std::int64_t, 3> to,
                         std::array<std::int64_t, 3> from, std::int64_t row_bytes) {
    block_copy block;
    block.extents = extents;
    block.to_strides = to;
    block.from_strides = from;
    block.row_bytes = row_bytes;
    auto const layout = uly::detail::engine_layout_of(block);
    auto const& rest = layout.rest;
    return {layout.row_bytes, layout.rows.extent, layout.planes.extent,
            rest[0].extent * rest[1].extent * rest[2].extent};
}

}  // namespace

TEST_CASE("the copy engine takes merged axes, rows and planes by one call") {
    // [batch, token, head]: all back to back is one row.
    CHECK(calls_of({2, 5, 3}, {240, 48, 16}, {240, 48, 16}, 16) == calls_of_engine{480, 1, 1, 1});
    // Tokens of a packed tensor, a part of its heads: rows of one call, batches joined to them.
    CHECK(calls_of({2, 5, 3}, {240, 48, 16}, {960, 192, 16}, 16) == calls_of_engine{48, 10, 1, 1});
    // Token-major to head-major, one head: rows, and samples as planes.
    CHECK(calls_of({2, 5, 1}, {960, 64, 0}, {480, 48, 0}, 16) == calls_of_engine{16, 5, 2, 1});
    // Samples that are no whole number of pitches apart take a call each.
    CHECK(calls_of({2, 5, 1}, {1000, 64, 0}, {480, 48, 0}, 16) == calls_of_engine{16, 5, 1, 2});
    // Heads that lie inside a token's row on one side take a call each.
    CHECK(calls_of({1, 50, 3}, {0, 64, 3200}, {0, 48, 16}, 16) == calls_of_engine{16, 50, 1, 3});
    // A row read again and again, and pitches beyond CUDA's.
    CHECK(calls_of({1, 5, 1}, {0, 64, 0}, {0, 0, 0}, 16) == calls_of_engine{16, 1, 1, 5});
    CHECK(calls_of({3, 1, 1}, {std::int64_t{1} << 31, 0, 0}, {64, 0, 0}, 16) ==
          calls_of_engine{16, 1, 1, 3});
}

TEST_CASE("cuda_space copies more blocks than a launch holds, and rows read again and again") {
    constexpr std::size_t rows = 700, bytes = 24;
    stream_owner const stream;
    uly::cuda_work engine({.way = uly::copy_way::engine, .ranks = 2});
    for (auto* const work : {static_cast<uly::cuda_work*>(nullptr), &engine}) {
        std::vector<std::byte> const from(bytes, std::byte{7});
        std::vector<std::byte> to(rows * 3 * bytes);
        std::vector<block_copy> blocks;
        for (std::size_t i = 0; i < rows; ++i) {
            block_copy block;
            block.to = to.data() + i * 3 * bytes;
            block.from = from.data();
            block.extents = {1, 3, 1};
            block.to_strides = {0, bytes, 0};
            block.row_bytes = bytes;
            block.peer = 1;
            blocks.push_back(block);
        }
        cuda_space::copy({.stream = stream.stream, .work = work}, blocks, 0);
        stream.wait();
        CHECK(to == std::vector<std::byte>(to.size(), std::byte{7}));
    }
}

namespace {

template <class To, class From>
void check_sums(std::size_t most_sources) {
    stream_owner const stream;
    for (unsigned seed = 1; seed <= (TEST_UNDER_SANITIZER ? 4 : 20); ++seed) {
        CAPTURE(seed);
        std::mt19937 random{seed};
        std::vector<From> values(200000);
        for (auto& value : values)
            value = From(std::uniform_real_distribution<uly::accumulator_t<From>>{-3, 3}(random));
        std::vector<std::vector<uly::sum_source>> sources;
        std::vector<block_sum> sums;
        std::vector<To> to(100000, To(std::numeric_limits<float>::quiet_NaN()));
        std::int64_t used = 0;
        for (auto count = space_test::drawn(random, 0, 90); count > 0; --count) {
            block_sum sum;
            sum.extents = {space_test::drawn(random, 0, 2), space_test::drawn(random, 1, 5),
                           space_test::drawn(random, 1, 3)};
            sum.elements = space_test::drawn(random, 1, 33);
            auto const strides_of = [&](std::int64_t size) {
                auto const row = sum.elements + space_test::drawn(random, 0, 3);
                return std::array{row * sum.extents[1] * sum.extents[2] * size,
                                  row * sum.extents[2] * size, row * size};
            };
            sum.to = reinterpret_cast<std::byte*>(to.data() + used);
            sum.to_strides = strides_of(sizeof(To));
            used += sum.to_strides[0] * std::max<std::int64_t>(sum.extents[0], 1) /
                    static_cast<std::int64_t>(sizeof(To));
            auto& list = sources.emplace_back();
            auto const most = static_cast<std::int64_t>(most_sources);
            for (auto left = space_test::drawn(random, 0, most); left > 0; --left)
                list.push_back({reinterpret_cast<std::byte const*>(
                                    values.data() + space_test::drawn(random, 0, 190000)),
                                strides_of(sizeof(From))});
            sums.push_back(sum);
        }
        REQUIRE(used <= static_cast<std::int64_t>(to.size()));
        auto expected = to;
        for (std::size_t i = 0; i < sums.size(); ++i) sums[i].from = sources[i];
        cuda_space::add<To, From>({.stream = stream.stream}, sums);
        for (auto& sum : sums)
            sum.to = reinterpret_cast<std::byte*>(expected.data()) +
                     (sum.to - reinterpret_cast<std::byte*>(to.data()));
        uly::host_space::add<To, From>({}, sums);
        stream.wait();
        CHECK(std::memcmp(to.data(), expected.data(), to.size() * sizeof(To)) == 0);
    }
}

}  // namespace

TEST_CASE("cuda_space adds with the bits of the host") {
    check_sums<double, double>(4);
    check_sums<float, float>(4);
    check_sums<uly::half, uly::half>(3);
    check_sums<uly::half, float>(3);
    check_sums<uly::bf16, uly::bf16>(40);
    check_sums<uly::bf16, float>(3);
    check_sums<float, uly::half>(3);
    check_sums<float, uly::bf16>(3);
}

namespace {

template <class Body>
std::string text_of_error(uly::errc code, Body const& body) {
    try {
        body();
    } catch (uly::error const& e) {
        CHECK(e.code() == code);
        return e.what();
    }
    return "nothing was thrown";
}

bool contains(std::string const& text, std::string const& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("cuda_space refuses sums of more sources than a launch holds") {
    stream_owner const stream;
    std::vector<uly::sum_source> const sources(769);
    block_sum sum;
    sum.from = sources;
    auto const text = text_of_error(uly::errc::unsupported, [&] {
        cuda_space::add<float, float>({.stream = stream.stream}, {&sum, 1});
    });
    CHECK(contains(text, "ulysses: cuda_space::add: a sum must have no more sources than a launch "
                         "holds: 769 sources, at most 768"));
}

TEST_CASE("cuda_space writes bytes of the host, which are its own from then on, without waiting") {
    stream_owner const stream;
    for (std::size_t const bytes : {0, 1, 5, 1023, 4000, 4001, 32000, 70003}) {
        CAPTURE(bytes);
        std::vector<std::byte> from(bytes, std::byte{1}), to(bytes + 1);
        if (bytes > 0) from.back() = std::byte{2};
        auto const expected = from;
        auto const waited = doubles::synchronisations();
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t made = nullptr;
        REQUIRE(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal) ==
                cudaSuccess);
        cuda_space::write({.stream = stream.stream}, to.data(), from);
        REQUIRE(cudaStreamEndCapture(stream.stream, &graph) == cudaSuccess);
        from.assign(bytes, std::byte{3});
        REQUIRE(cudaGraphInstantiate(&made, graph, 0) == cudaSuccess);
        REQUIRE(cudaGraphLaunch(made, stream.stream) == cudaSuccess);
        CHECK(doubles::synchronisations() == waited);
        stream.wait();
        CHECK(std::equal(expected.begin(), expected.end(), to.begin()));
        CHECK(to.back() == std::byte{0});
        cudaGraphExecDestroy(made);
        cudaGraphDestroy(graph);
    }
}

TEST_CASE("cuda_space allocates in the order of the stream, or from an engine's own memory") {
    stream_owner const stream;
    cuda_space::queue const plain{.stream = stream.stream};
    auto const before = doubles::allocated_bytes();
    auto* const memory = cuda_space::allocate(plain, 1000);
    CHECK(reinterpret_cast<std::uintptr_t>(memory) % 64 == 0);
    CHECK(doubles::allocated_bytes() == before + 1000);
    cuda_space::deallocate(plain, memory, 1000);
    stream.wait();
    CHECK(doubles::allocated_bytes() == before);

    doubles::fail_allocation(0);
    CHECK(contains(
        text_of_error(uly::errc::out_of_memory, [&] { cuda_space::allocate(plain, 12345); }),
        "ulysses: cuda_space::allocate: memory must be available: 12345 bytes"));

    struct engine {
        alignas(64) std::byte bytes[128];
        std::size_t taken = 0;
        cudaStream_t stream = nullptr;
    } arena;
    uly::cuda_memory const own{&arena,
                               [](void* context, std::size_t bytes, cudaStream_t on) -> void* {
                                   auto& from = *static_cast<engine*>(context);
                                   if (bytes > sizeof from.bytes) return nullptr;
                                   from.taken = bytes;
                                   from.stream = on;
                                   return from.bytes;
                               },
                               [](void* context, void*, std::size_t bytes, cudaStream_t) noexcept {
                                   static_cast<engine*>(context)->taken -= bytes;
                               }};
    cuda_space::queue const from_engine{.stream = stream.stream, .from = &own};
    auto* const taken = cuda_space::allocate(from_engine, 100);
    CHECK(taken == arena.bytes);
    CHECK(arena.taken == 100);
    CHECK(arena.stream == stream.stream);
    cuda_space::deallocate(from_engine, taken, 100);
    CHECK(arena.taken == 0);
    CHECK(contains(
        text_of_error(uly::errc::out_of_memory, [&] { cuda_space::allocate(from_engine, 129); }),
        "memory must be available: 129 bytes"));
}

TEST_CASE("memory that a captured call was given is there until its owner ends") {
    stream_owner const stream;
    cuda_space::queue const on{.stream = stream.stream};
    auto const before = doubles::allocated_bytes();
    auto const captured = [&](auto const& body) {
        cudaGraph_t graph = nullptr;
        REQUIRE(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal) ==
                cudaSuccess);
        body();
        REQUIRE(cudaStreamEndCapture(stream.stream, &graph) == cudaSuccess);
        cudaGraphDestroy(graph);
        CHECK(cudaGetLastError() == cudaSuccess);
    };
    {
        uly::buffer<cuda_space> memory;
        memory.reserve(100, on);
        memory.reserve(200, on);
        stream.wait();
        CHECK(doubles::allocated_bytes() == before + 200);  // no graph names the first
        auto* const first = memory.data();
        captured([&] { CHECK(memory.reserve(150, on).data() == first); });
        captured([&] {
            text_of_error(uly::errc::invalid_call, [&] { memory.reserve(300, on); });
            CHECK(memory.data() == first);
        });
        memory.reserve(300, on);
        memory.reserve(400, on);
        stream.wait();
        CHECK(doubles::allocated_bytes() == before + 200 + 400);
        auto moved = std::move(memory);
        CHECK(moved.bytes() == 400);
    }
    stream.wait();
    CHECK(doubles::allocated_bytes() == before);
}

TEST_CASE("cuda_space knows memory that its device does not reach") {
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    stream_owner const stream;
    auto* const memory =
        static_cast<std::byte*>(cuda_space::allocate({.stream = stream.stream}, 1000));
    void* pinned = nullptr;
    REQUIRE(cudaHostAlloc(&pinned, 64, cudaHostAllocMapped) == cudaSuccess);
    cuda_space::expect_memory("kit", "x", memory, memory + 999);
    cuda_space::expect_memory("kit", "x", pinned, pinned);
    std::vector<std::byte> const host(8);
    auto const text_of = [](void const* first, void const* last) {
        return text_of_error(uly::errc::invalid_tensor,
                             [&] { cuda_space::expect_memory("kit", "x", first, last); });
    };
    CHECK(contains(
        text_of(host.data(), host.data()),
        "ulysses: kit: x: an operand must be memory of the rank's device: the host's, which "
        "CUDA does not know, the rank is on device 0"));
    CHECK(contains(text_of(memory, memory + 1000), "the host's, which CUDA does not know"));
    REQUIRE(cudaSetDevice(1) == cudaSuccess);
    CHECK(contains(text_of(memory, memory), "memory of device 0, the rank is on device 1"));
    REQUIRE(cudaSetDevice(0) == cudaSuccess);
    cudaFreeHost(pinned);
    cuda_space::deallocate({.stream = stream.stream}, memory, 1000);
    stream.wait();
}

TEST_CASE("cuda_space tells CUDA's own error") {
    CHECK(
        contains(text_of_error(uly::errc::transport,
                               [] { uly::detail::expect_cuda(cudaErrorInvalidValue, "cudaOf"); }),
                 "ulysses: cuda: a call of CUDA must succeed: cudaOf: cudaErrorInvalidValue (1)"));
    CHECK(contains(
        text_of_error(uly::errc::invalid_call,
                      [] { uly::cuda_work({.in_flight = 2, .rank = 3, .ranks = 3}); }),
        "ulysses: cuda_work: in_flight must be positive and rank one of ranks: in_flight 2, rank "
        "3 of 3"));
}

TEST_CASE("copies and sums never make the host wait, and can be captured and launched again") {
    stream_owner const stream;
    uly::cuda_work engine({.way = uly::copy_way::engine, .in_flight = 2, .ranks = 2});
    std::vector<float> from(64), to(64), doubled(64);
    std::array<block_copy, 2> blocks;
    for (std::size_t i = 0; i < 2; ++i) {
        blocks[i].to = reinterpret_cast<std::byte*>(to.data() + 32 * i);
        blocks[i].from = reinterpret_cast<std::byte const*>(from.data() + 32 * i);
        blocks[i].extents = {1, 1, 1};
        blocks[i].row_bytes = 128;
        blocks[i].peer = static_cast<int>(i);
    }
    std::array<uly::sum_source, 2> sources;
    sources.fill({reinterpret_cast<std::byte const*>(to.data()), {}});
    block_sum sum;
    sum.to = reinterpret_cast<std::byte*>(doubled.data());
    sum.from = sources;
    sum.extents = {1, 1, 1};
    sum.elements = 64;

    auto const waited = doubles::synchronisations();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t made = nullptr;
    REQUIRE(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    cuda_space::copy({.stream = stream.stream, .work = &engine}, blocks, 0);
    cuda_space::add<float, float>({.stream = stream.stream, .work = &engine}, {&sum, 1});
    REQUIRE(cudaStreamEndCapture(stream.stream, &graph) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&made, graph, 0) == cudaSuccess);
    CHECK(doubles::synchronisations() == waited);
    REQUIRE(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeThreadLocal) == cudaSuccess);
    CHECK(contains(
        text_of_error(uly::errc::invalid_call,
                      [&] { cuda_space::allocate({.stream = stream.stream}, 64); }),
        "ulysses: cuda_space::allocate: memory must not grow while a stream is captured: make the "
        "call once before: 64 bytes"));
    cudaGraph_t empty = nullptr;
    REQUIRE(cudaStreamEndCapture(stream.stream, &empty) == cudaSuccess);
    cudaGraphDestroy(empty);
    for (int round = 1; round <= 3; ++round) {
        for (std::size_t i = 0; i < 64; ++i) from[i] = static_cast<float>(round * 100) + float(i);
        REQUIRE(cudaGraphLaunch(made, stream.stream) == cudaSuccess);
        stream.wait();
        for (std::size_t i = 0; i < 64; ++i)
            CHECK(doubled[i] == 2 * (static_cast<float>(round * 100) + static_cast<float>(i)));
    }
    cudaGraphExecDestroy(made);
    cudaGraphDestroy(graph);
}
