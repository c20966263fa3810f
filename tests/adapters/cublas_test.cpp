// SPDX-License-Identifier: Apache-2.0

#include "../doubles/cublas.hpp"
#include "../doubles/cuda_runtime.hpp"
#include "../gemm/product.hpp"

#include <ulysses/adapters/cublas.hpp>
#include <ulysses/space/host.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

/// The functor over doubles of cuBLAS and of the CUDA runtime, whose device memory is the host's.
namespace {

namespace uly = ulysses;
using namespace product_test;
using uly::cuda_space;

struct stream_owner {
    cudaStream_t stream = nullptr;
    stream_owner() { REQUIRE(cudaStreamCreateWithFlags(&stream, 0) == cudaSuccess); }
    stream_owner(stream_owner const&) = delete;
    stream_owner& operator=(stream_owner const&) = delete;
    ~stream_owner() { cudaStreamDestroy(stream); }
    cuda_space::queue queue() const { return {.stream = stream}; }
    void wait() const { REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess); }
};

template <class T>
uly::queued<uly::gemm_call<T>, cuda_space> on(stream_owner const& stream,
                                              uly::gemm_call<T> const& call) {
    return {call, stream.queue()};
}

/// A product of so many rows, columns and terms, of batches that lie one behind the other.
struct small_call {
    std::vector<float> a, b, c;
    uly::gemm_call<float> call;

    explicit small_call(std::int64_t size = 2, std::int64_t batch = 1)
        : a(at(size * size * batch), 1), b(a), c(a.size(), 3) {
        auto const one = size * size;
        call = {.m = size,
                .n = size,
                .k = size,
                .a = {.data = a.data(), .stride = size, .batch_stride = one},
                .b = {.data = b.data(), .stride = size, .batch_stride = one},
                .c = c.data(),
                .c_stride = size,
                .batch = batch,
                .c_batch_stride = one};
    }
};

template <class Error>
std::string refusal(uly::cublas const& gemm, stream_owner const& stream,
                    uly::gemm_call<float> const& call) {
    try {
        gemm(on(stream, call));
    } catch (Error const& e) {
        return e.what();
    }
    return "not refused";
}

}  // namespace

TEST_CASE_TEMPLATE("cublas: equals the formula for any shape, stride, batch and transposition", T,
                   double, float, uly::half, uly::bf16) {
    stream_owner const stream;
    uly::cublas const gemm;
    int64_t const sizes[] = {1, 2, 7, 8, 31, 33, 65};
    for (std::uint64_t seed = 1; seed <= 80; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        auto const k = seed % 10 == 0 ? 0 : sizes[random() % 7];
        auto const p = random_product<T>(random, sizes[random() % 7], sizes[random() % 7], k);
        INFO(p.text());
        CHECK(error_over_bound(p, [&](uly::gemm_call<T> const& call) {
                  gemm(on(stream, call));
                  stream.wait();
              }) <= 1.0);
    }
}

TEST_CASE("cublas: heads of one matrix in turn are a batch") {
    stream_owner const stream;
    uly::cublas const gemm;
    constexpr std::int64_t heads = 3, dim = 2, rows = 4;
    std::vector<double> a(rows * heads * dim), b(heads * dim * dim), c(a.size(), -1);
    for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<double>(i % 7);
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = static_cast<double>(i % 5) - 2;
    gemm(on(stream, uly::gemm_call<double>{
                        .m = rows,
                        .n = dim,
                        .k = dim,
                        .a = {.data = a.data(), .stride = heads * dim, .batch_stride = dim},
                        .b = {.data = b.data(), .stride = dim, .batch_stride = dim * dim},
                        .c = c.data(),
                        .c_stride = heads * dim,
                        .batch = heads,
                        .c_batch_stride = dim}));
    stream.wait();
    for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t h = 0; h < heads; ++h)
            for (std::int64_t j = 0; j < dim; ++j) {
                double sum = 0;
                for (std::int64_t q = 0; q < dim; ++q)
                    sum += a[at((r * heads + h) * dim + q)] * b[at((h * dim + q) * dim + j)];
                CHECK(c[at((r * heads + h) * dim + j)] == sum);
            }
}

TEST_CASE("cublas: accumulation is of 32 bits, TF32 only where it is asked for") {
    auto const mode_of = [](uly::cublas_options const& given) {
        stream_owner const stream;
        small_call one;
        uly::cublas const gemm(given);
        gemm(on(stream, one.call));
        stream.wait();
        return static_cast<int>(doubles::cublas_math_mode());
    };
    CHECK(mode_of({}) == CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION);
    CHECK(mode_of({.tf32 = true}) ==
          (CUBLAS_TF32_TENSOR_OP_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
}

TEST_CASE("cublas: a handle and a workspace for each stream, in the order of its work") {
    auto const bytes = doubles::allocated_bytes();
    auto const handles = doubles::cublas_handles();
    {
        stream_owner const first, second;
        uly::cublas const gemm({.workspace_bytes = 4096});
        auto const copy = gemm;
        constexpr std::int64_t size = 48;
        std::vector<small_call> calls;
        for (int i = 0; i < 4; ++i) calls.emplace_back(size);
        for (int i = 0; i < 20; ++i) {
            gemm(on(first, calls[0].call));
            copy(on(second, calls[1].call));
            gemm(on(first, calls[2].call));
            copy(on(second, calls[3].call));
        }
        CHECK(doubles::cublas_handles() == handles + 2);
        CHECK(doubles::allocated_bytes() == bytes + 2 * (4096 + 256));
        first.wait();
        second.wait();
        for (auto const& each : calls) CHECK(each.c == std::vector<float>(each.c.size(), size));
        // The product of a product: nothing but the stream orders them.
        small_call one(size), next(size);
        next.call.a.data = one.c.data();
        gemm(on(first, one.call));
        gemm(on(first, next.call));
        first.wait();
        CHECK(next.c == std::vector<float>(next.c.size(), size * size));
    }
    CHECK(doubles::cublas_handles() == handles);
}

TEST_CASE("cublas: products are captured after a first call, and memory does not grow in a graph") {
    stream_owner const stream;
    uly::cublas const gemm;
    small_call one;
    REQUIRE(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    auto const text = refusal<uly::invalid_call>(gemm, stream, one.call);
    CHECK(text.find("memory must not grow while a stream is captured") != std::string::npos);
    cudaGraph_t graph = nullptr;
    REQUIRE(cudaStreamEndCapture(stream.stream, &graph) == cudaSuccess);
    cudaGraphDestroy(graph);

    gemm(on(stream, one.call));
    stream.wait();
    CHECK(one.c[0] == 2);
    one.call.beta = 1;
    REQUIRE(cudaStreamBeginCapture(stream.stream, cudaStreamCaptureModeGlobal) == cudaSuccess);
    gemm(on(stream, one.call));
    REQUIRE(cudaStreamEndCapture(stream.stream, &graph) == cudaSuccess);
    cudaGraphExec_t program = nullptr;
    REQUIRE(cudaGraphInstantiate(&program, graph, 0) == cudaSuccess);
    for (int i = 0; i < 3; ++i) cudaGraphLaunch(program, stream.stream);
    stream.wait();
    CHECK(one.c[0] == 8);
    cudaGraphExecDestroy(program);
    cudaGraphDestroy(graph);
}

TEST_CASE("cublas: what it cannot multiply is refused, with cuBLAS's own words where it says so") {
    stream_owner const stream;
    uly::cublas const gemm;
    auto const products = doubles::cublas_products();
    small_call one;
    one.call.a.stride = 1;
    CHECK(refusal<uly::invalid_tensor>(gemm, stream, one.call) ==
          "ulysses: cublas: rows must not overlap: a stride 1, columns 2");
    one.call.a.stride = 2, one.call.b.stride = 1;
    CHECK(refusal<uly::invalid_tensor>(gemm, stream, one.call) ==
          "ulysses: cublas: rows must not overlap: b stride 1, columns 2");
    one.call.b.stride = 2, one.call.c_stride = 0;
    CHECK(refusal<uly::invalid_tensor>(gemm, stream, one.call) ==
          "ulysses: cublas: rows must not overlap: c stride 0, columns 2");
    small_call two(2, 2);
    for (std::int64_t const apart : {0, 1, 2, 3, -3}) {
        two.call.c_batch_stride = apart;
        CHECK(refusal<uly::invalid_tensor>(gemm, stream, two.call) ==
              uly::concat("ulysses: cublas: products of a batch must not overlap: batch stride ",
                          apart, ", 2 rows of 2 at stride 2"));
    }
    CHECK(doubles::cublas_products() == products);

    gemm(on(stream, uly::gemm_call<float>{}));  // nothing to multiply
    CHECK(doubles::cublas_products() == products);
    small_call good;
    doubles::fail_cublas(CUBLAS_STATUS_NOT_INITIALIZED);
    CHECK(refusal<uly::transport_error>(gemm, stream, good.call) ==
          "ulysses: cublas: a call of cuBLAS must succeed: cublasCreate: "
          "CUBLAS_STATUS_NOT_INITIALIZED (1), the double's words");
    gemm(on(stream, good.call));
    doubles::fail_cublas(CUBLAS_STATUS_EXECUTION_FAILED);
    CHECK(refusal<uly::transport_error>(gemm, stream, good.call) ==
          "ulysses: cublas: a call of cuBLAS must succeed: cublasGemmStridedBatchedEx: "
          "CUBLAS_STATUS_EXECUTION_FAILED (13), the double's words");
    doubles::fail_cublas(CUBLAS_STATUS_ALLOC_FAILED);
    CHECK(refusal<uly::out_of_memory>(gemm, stream, good.call) ==
          "ulysses: cublas: memory must be available: cublasGemmStridedBatchedEx: the double's "
          "words");
    stream.wait();
    doubles::fail_allocation(0);
    uly::cublas const fresh;
    CHECK(refusal<uly::out_of_memory>(fresh, stream, good.call)
              .find("cuda_space::allocate: memory must be available") != std::string::npos);
    doubles::fail_allocation(-1);
    fresh(on(stream, good.call));
    stream.wait();
    CHECK(good.c[0] == 2);
}

TEST_CASE("cublas: sizes and strides past 2^31 arrive whole") {
    stream_owner const stream;
    uly::cublas const gemm;
    small_call one;
    gemm(on(stream, one.call));
    stream.wait();
    constexpr auto far = std::int64_t{1} << 33;
    doubles::fail_cublas(CUBLAS_STATUS_NOT_SUPPORTED);  // looked at, not multiplied
    one.call.m = far + 1, one.call.n = far + 2, one.call.k = far + 3;
    one.call.a.stride = far + 5, one.call.b.stride = far + 6, one.call.c_stride = far + 7;
    CHECK(
        refusal<uly::transport_error>(gemm, stream, one.call).find("a status of the double (15)") !=
        std::string::npos);
    auto const seen = doubles::last_cublas_sizes();
    CHECK(seen.m == far + 2);  // column by column it is the transpose
    CHECK(seen.n == far + 1);
    CHECK(seen.k == far + 3);
    CHECK(seen.lda == far + 6);
    CHECK(seen.ldb == far + 5);
    CHECK(seen.ldc == far + 7);
}
