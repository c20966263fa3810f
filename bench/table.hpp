#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "bench.hpp"

#include <array>
#include <cmath>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

/// The results as a table and as JSON.
namespace ulysses_bench {

/// A line of what cannot be measured here.
inline result not_measured(std::string name, std::string_view why) {
    auto text = "not measured: " + std::string(why.substr(0, why.find('\n')));
    for (auto& each : text)
        if (each == '"' || each == '\\' || static_cast<unsigned char>(each) < ' ') each = ' ';
    result row{std::move(name), 0, "", std::move(text)};
    row.measured = false;
    return row;
}
/// A line of what failed: its target is missed.
inline result failed(std::string name, std::string_view why) {
    auto row = not_measured(std::move(name), why);
    row.ratio = 1, row.target = "<= 0";
    return row;
}

inline bool met(result const& row) {
    if (row.target.empty()) return true;
    auto const bound = std::stod(row.target.substr(3));
    return row.target[0] == '>' ? row.ratio >= bound : row.ratio <= bound;
}

inline void print_head(std::FILE* to = stdout) {
    std::fprintf(to, "%-46s %12s %-9s %-46s %7s %-8s\n", "what", "value", "unit", "against",
                 "ratio", "target");
}
inline void print(result const& row, std::FILE* to = stdout) {
    if (!row.measured)
        std::fprintf(to, "%-46s %12s %-9s %s%s\n", row.name.c_str(), "-", "", row.against.c_str(),
                     met(row) ? "" : "  missed");
    else
        std::fprintf(to, "%-46s %12.1f %-9s %-46s %7.2f %-8s %s\n", row.name.c_str(), row.value,
                     row.unit.c_str(), row.against.c_str(), row.ratio, row.target.c_str(),
                     met(row) ? "" : "missed");
}
inline void print(std::vector<result> const& rows) {
    print_head();
    for (auto const& row : rows) print(row);
}

/// The texts above hold no character that JSON escapes.
inline bool write_json(char const* path, std::vector<result> const& rows) {
    auto* const file = std::fopen(path, "w");
    if (file == nullptr) return false;
    std::fprintf(file, "[\n");
    for (std::size_t i = 0; i < rows.size(); ++i) {
        auto const number = [&](double value, char const* format) {
            if (!rows[i].measured || !std::isfinite(value)) return std::string("null");
            std::array<char, 64> text{};
            std::snprintf(text.data(), text.size(), format, value);
            return std::string(text.data());
        };
        std::fprintf(file,
                     "  {\"name\": \"%s\", \"value\": %s, \"unit\": \"%s\", \"against\": \"%s\", "
                     "\"ratio\": %s, "
                     "\"target\": \"%s\"}%s\n",
                     rows[i].name.c_str(), number(rows[i].value, "%.6g").c_str(),
                     rows[i].unit.c_str(), rows[i].against.c_str(),
                     number(rows[i].ratio, "%.4f").c_str(), rows[i].target.c_str(),
                     i + 1 < rows.size() ? "," : "");
    }
    std::fprintf(file, "]\n");
    return std::fclose(file) == 0;
}

}  // namespace ulysses_bench
