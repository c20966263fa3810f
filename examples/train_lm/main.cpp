// SPDX-License-Identifier: Apache-2.0

#include "program.hpp"

#include <utility>

/// Ranks that are threads of this process.
using ranks_type = ulysses::threads::communicator;

int main(int argc, char** argv) {
    return lm::exit_status([&] {
        auto const given = lm::parse(argc, argv);
        if (!given) return 0;
        return lm::run<ranks_type>(*given, [](int count, auto const& rank) {
            lm::run_report first;
            ulysses::threads::run(count, [&](ranks_type handle) {
                auto seen = rank(handle);
                if (handle.rank() == 0) first = std::move(seen);
            });
            return first;
        });
    });
}
