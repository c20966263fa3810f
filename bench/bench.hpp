#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <string>
#include <type_traits>
#include <vector>

/// Measuring two things against each other on a machine that is busy with others: rounds that run
/// each once in turn, and the median of each.
namespace ulysses_bench {

/// One line of the table.
struct result {
    std::string name;      ///< what was measured, with its sizes
    double value = 0;      ///< how much of it, in `unit`
    std::string unit;      ///< GFLOP/s, GB/s, us, ...
    std::string against;   ///< what it is compared with, measured in the same rounds
    double ratio = 0;      ///< value over that of `against`; 0: compared with nothing
    std::string target{};  ///< the ratio aimed at, with its direction: ">= 0.75"; empty: none
    bool measured = true;  ///< else `against` says why not
};

struct bench_options {
    bool quick = false;  ///< smaller sizes and fewer rounds: does it run, not how fast
    int rounds = 9;      ///< medians are over this many
};

inline double median(std::vector<double> values) {
    auto const middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

/// Seconds that `body` takes; what it returns when it measures itself.
template <class Body>
double seconds_of(Body& body) {
    if constexpr (std::is_same_v<decltype(body()), double>) {
        return body();
    } else {
        auto const start = std::chrono::steady_clock::now();
        body();
        std::chrono::duration<double> const taken = std::chrono::steady_clock::now() - start;
        return taken.count();
    }
}

/// Median seconds of each body. All run once unmeasured, then in turn, `options.rounds` times.
template <class... Bodies>
std::array<double, sizeof...(Bodies)> interleaved(bench_options const& options,
                                                  Bodies&&... bodies) {
    std::array<std::vector<double>, sizeof...(Bodies)> seconds;
    auto const rounds = options.quick ? 3 : options.rounds;
    for (int round = -1; round < rounds; ++round) {
        std::size_t which = 0;
        auto const run = [&](auto& body) {
            auto const taken = seconds_of(body);
            if (round >= 0) seconds[which].push_back(taken);
            ++which;
        };
        (run(bodies), ...);
    }
    std::array<double, sizeof...(Bodies)> medians{};
    std::transform(seconds.begin(), seconds.end(), medians.begin(), median);
    return medians;
}

}  // namespace ulysses_bench
