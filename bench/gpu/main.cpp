// SPDX-License-Identifier: Apache-2.0

#include "parts.hpp"

#include <ulysses/adapters/cuda_call.hpp>
#include <ulysses/core/error.hpp>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace ulysses_bench {

namespace {

namespace uly = ulysses;
using uly::detail::expect_cuda;

constexpr std::string_view names[] = {"threads", "processes", "costs", "cudnn", "steps", "million"};

constexpr char usage[] =
    "usage: ulysses_bench_gpu [--quick] [--only NAME]... [--seconds N] [--json FILE]\n"
    "What pipelines of ranks that share one GPU compute and take. Ends with 3 where there is\n"
    "none, with 1 when a result is wrong or a part fails.\n"
    "  --quick      small, to see that it runs\n"
    "  --only NAME  of threads, processes, costs, cudnn, steps, million; all if not given\n"
    "  --seconds N  begins nothing after so many, and ends what runs; 280 if not given\n"
    "  --json FILE  also write the table as a JSON list, line by line\n";

void describe(report const& to) {
    int count = 0, runtime = 0, driver = 0;
    auto const found = cudaGetDeviceCount(&count);
    if (found != cudaSuccess || count == 0)
        throw std::runtime_error(uly::concat("there is no GPU here: ", cudaGetErrorName(found),
                                             ", ", count, " devices"));
    cudaDeviceProp device{};
    expect_cuda(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
    expect_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    expect_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
    auto const version = [](int of) { return uly::concat(of / 1000, ".", of % 1000 / 10); };
    to.add({"device", static_cast<double>(device.totalGlobalMem) / 0x1p30, "GiB",
            uly::concat(device.name, ", sm_", device.major, device.minor, ", CUDA ",
                        version(runtime), ", driver of ", version(driver))});
}

struct options {
    bool quick = false;
    std::vector<std::string_view> only;
    std::chrono::seconds most{280};
    char const* json = nullptr;
};

int run(options const& given) {
    // Streams that wait for each other's kernels each need a queue of their own.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    table all(given.json, given.most);
    all.run({{"device", 60, describe}});
    if (!all.rows().front().measured) {
        std::fprintf(stderr, "ulysses_bench_gpu: %s\n", all.rows().front().against.c_str());
        return 3;
    }
    auto const checks = results(given.quick);
    group const groups[] = {checks[0],
                            checks[1],
                            costs(given.quick),
                            cudnn(given.quick),
                            six_steps(given.quick),
                            million(given.quick)};
    for (std::size_t i = 0; i < std::size(names); ++i)
        if (given.only.empty() || std::ranges::count(given.only, names[i])) all.run(groups[i]);
    return all.print_summary() ? 0 : 1;
}

}  // namespace

}  // namespace ulysses_bench

int main(int argc, char** argv) {
    ulysses_bench::options given;
    for (int i = 1; i < argc; ++i) {
        std::string_view const option = argv[i];
        auto const has_value = i + 1 < argc;
        if (option == "--quick") {
            given.quick = true;
        } else if (option == "--only" && has_value &&
                   std::ranges::count(ulysses_bench::names, argv[i + 1])) {
            given.only.push_back(argv[++i]);
        } else if (option == "--seconds" && has_value) {
            given.most = std::chrono::seconds(std::atoi(argv[++i]));
        } else if (option == "--json" && has_value) {
            given.json = argv[++i];
        } else {
            std::fputs(ulysses_bench::usage, stderr);
            return 2;
        }
    }
    try {
        return ulysses_bench::run(given);
    } catch (std::exception const& e) {
        std::fprintf(stderr, "ulysses_bench_gpu: %s\n", e.what());
        return 1;
    }
}
