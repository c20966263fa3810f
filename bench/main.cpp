// SPDX-License-Identifier: Apache-2.0

#include "bench.hpp"

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

bool met(result const& row) {
    if (row.target.empty()) return true;
    auto const bound = std::stod(row.target.substr(3));
    return row.target[0] == '>' ? row.ratio >= bound : row.ratio <= bound;
}

void print(std::vector<result> const& rows) {
    std::printf("%-40s %12s %-9s %-42s %7s %-8s\n", "what", "value", "unit", "against", "ratio",
                "target");
    for (auto const& row : rows)
        std::printf("%-40s %12.1f %-9s %-42s %7.2f %-8s %s\n", row.name.c_str(), row.value,
                    row.unit.c_str(), row.against.c_str(), row.ratio, row.target.c_str(),
                    met(row) ? "" : "missed");
}

/// The texts above hold no character that JSON escapes.
bool write_json(char const* path, std::vector<result> const& rows) {
    auto* const file = std::fopen(path, "w");
    if (file == nullptr) return false;
    std::fprintf(file, "[\n");
    for (std::size_t i = 0; i < rows.size(); ++i)
        std::fprintf(file,
                     "  {\"name\": \"%s\", \"value\": %.6g, \"unit\": \"%s\", \"against\": \"%s\", "
                     "\"ratio\": %.4f, "
                     "\"target\": \"%s\"}%s\n",
                     rows[i].name.c_str(), rows[i].value, rows[i].unit.c_str(),
                     rows[i].against.c_str(), rows[i].ratio, rows[i].target.c_str(),
                     i + 1 < rows.size() ? "," : "");
    std::fprintf(file, "]\n");
    return std::fclose(file) == 0;
}

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
