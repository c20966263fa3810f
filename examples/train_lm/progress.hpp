#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace lm {

/// A bar that a run draws on a terminal, and wipes at its end; nothing anywhere else.
class progress {
   public:
    progress(bool wanted, int ranks)
        : shown_(wanted && isatty(STDERR_FILENO) != 0), ranks_(ranks) {}
    progress(progress const&) = delete;
    progress& operator=(progress const&) = delete;
    ~progress() {
        if (shown_) std::fputs("\r\033[K", stderr);
    }

    void show(std::int64_t done, std::int64_t steps, double loss) const {
        if (!shown_) return;
        constexpr std::int64_t width = 40;
        auto const filled = static_cast<std::size_t>(width * done / steps);
        std::fprintf(stderr, "\rP = %d  [%s%s]  step %lld of %lld  loss %.4f ", ranks_,
                     std::string(filled, '#').c_str(), std::string(width - filled, '.').c_str(),
                     static_cast<long long>(done), static_cast<long long>(steps), loss);
    }

   private:
    bool shown_;
    int ranks_;
};

}  // namespace lm
