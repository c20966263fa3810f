#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <cstdint>
#include <fstream>
#include <string>

/// Bytes that programs can still be given; 0 where the system does not tell.
inline std::int64_t available_bytes() {
    std::ifstream file("/proc/meminfo");
    for (std::string name; file >> name;)
        if (name == "MemAvailable:") {
            std::int64_t kibibytes = 0;
            file >> kibibytes;
            return kibibytes * 1024;
        }
    return 0;
}
