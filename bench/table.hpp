#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "bench.hpp"

#include <cstdio>
#include <string>
#include <vector>

/// The results as a table and as JSON.
namespace ulysses_bench {

inline bool met(result const& row) {
    if (row.target.empty()) return true;
    auto const bound = std::stod(row.target.substr(3));
    return row.target[0] == '>' ? row.ratio >= bound : row.ratio <= bound;
}

inline void print(std::vector<result> const& rows) {
    std::printf("%-40s %12s %-9s %-42s %7s %-8s\n", "what", "value", "unit", "against", "ratio",
                "target");
    for (auto const& row : rows)
        std::printf("%-40s %12.1f %-9s %-42s %7.2f %-8s %s\n", row.name.c_str(), row.value,
                    row.unit.c_str(), row.against.c_str(), row.ratio, row.target.c_str(),
                    met(row) ? "" : "missed");
}

/// The texts above hold no character that JSON escapes.
inline bool write_json(char const* path, std::vector<result> const& rows) {
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

}  // namespace ulysses_bench
