// SPDX-License-Identifier: Apache-2.0

#include "program.hpp"

#include <ulysses/adapters/mpi.hpp>

/// usage: mpiexec -n P train_lm_mpi TEXT_FILE [OPTION]...
///
/// Ranks that are processes, on one host or several: all that mpiexec has started.
using ranks_type = ulysses::mpi::communicator;

namespace {

/// The options, whose files rank 0 alone writes, as it alone prints.
std::optional<lm::options> parse(int argc, char** argv, ranks_type const& world) {
    auto const first = world.rank() == 0;
    if (!first && std::freopen("/dev/null", "w", stdout) == nullptr)
        throw std::runtime_error("cannot open /dev/null");
    auto given = lm::parse(argc, argv, world.size());
    if (given && !first) {
        given->save.clear();
        given->losses.clear();
    }
    return given;
}

}  // namespace

int main(int argc, char** argv) {
    return lm::exit_status([&] {
        ulysses::mpi::session const session{argc, argv};
        auto const world = session.world();
        // What is wrong is said first: once a process has ended so, mpiexec may end the others.
        auto const status = lm::exit_status([&] {
            auto const given = parse(argc, argv, world);
            if (!given) return 0;
            return lm::run<ranks_type>(*given, [&](int, auto const& rank) { return rank(world); });
        });
        if (status != 0) world.leave("its training has failed");
        return status;
    });
}
