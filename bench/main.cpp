// SPDX-License-Identifier: Apache-2.0

#include "bench.hpp"
#include "table.hpp"

#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

namespace ulysses_bench {

void bench_exchange(std::vector<result>& results, bench_options const& options);
void bench_attention(std::vector<result>& results, bench_options const& options);
void bench_layer(std::vector<result>& results, bench_options const& options);

namespace {

constexpr char usage[] =
    "usage: ulysses_bench [--quick] [--json FILE]\n"
    "Each figure is a ratio of medians measured in one interleaved run.\n"
    "  --quick      small sizes and few rounds, under a minute: does it run, not how fast\n"
    "  --json FILE  also write the table as a JSON list\n";

int run(int argc, char** argv) {
    bench_options options;
    char const* json = nullptr;
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--quick") == 0) {
            options.quick = true;
        } else if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
            json = argv[++i];
        } else if (std::strcmp(argv[i], "--help") == 0) {
            std::fputs(usage, stdout);
            return 0;
        } else {
            std::fprintf(stderr, "ulysses_bench: unknown option or missing value: %s\n%s", argv[i],
                         usage);
            return 2;
        }
    }
    std::vector<result> rows;
    bench_exchange(rows, options);
    bench_attention(rows, options);
    bench_layer(rows, options);
    print(rows);
    if (json != nullptr && !write_json(json, rows)) {
        std::fprintf(stderr, "ulysses_bench: cannot write %s\n", json);
        return 2;
    }
    return 0;
}

}  // namespace

}  // namespace ulysses_bench

int main(int argc, char** argv) {
    try {
        return ulysses_bench::run(argc, argv);
    } catch (std::exception const& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
