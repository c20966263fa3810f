// SPDX-License-Identifier: Apache-2.0

#include "../conformance/communicator.hpp"
#include "program.hpp"

#include <ulysses/adapters/mpi.hpp>

#include <chrono>
#include <memory>

/// usage: mpiexec -n P conformance_test
///
/// The group's ranks are the processes: all reaching each other's memory, none, and on two hosts.
namespace uly = ulysses;
using mpi_test::reaches;

namespace {

/// Groups of all processes, split off one that goes on when they fail: MPICH takes long to make one.
auto ranks_of(mpi_test::reach way) {
    auto const owner = std::make_shared<uly::mpi::group>(
        MPI_COMM_WORLD, uly::mpi::options{.host = mpi_test::host_of(way)});
    return [=](int, auto const& body) {
        auto const all = owner->handle();
        body(all.split(0, all.rank()));
    };
}

/// Groups that fail after `deadline` without one of the processes.
auto impatient(std::chrono::milliseconds deadline) {
    return [=](int, auto const& body) {
        // One that was silent comes late, and the deadline is also that of making a group.
        MPI_Barrier(MPI_COMM_WORLD);
        uly::mpi::group const owner(MPI_COMM_WORLD, {.deadline = deadline});
        body(owner.handle());
    };
}

/// Rank 0 sends 10 bytes to rank 1, which expects others.
void check_sizes(uly::mpi::communicator const& ranks, std::size_t expected) {
    std::byte memory[20] = {};
    auto const data = std::span(memory);
    auto const seen = conformance::detail::outcome_of([&] {
        if (ranks.rank() == 0) {
            uly::outgoing const out[] = {{1, data.first(10)}};
            ranks.wait(ranks.start(out, {}));
        }
        if (ranks.rank() == 1) {
            uly::incoming const in[] = {{0, data.first(expected)}};
            ranks.wait(ranks.start({}, in));
        }
        ranks.fence({});
    });
    conformance::expect(
        seen.code == uly::errc::disagreement && seen.rank == 1 &&
            conformance::detail::contains(
                seen.text, uly::concat("rank 0 sends ", expected < 10 ? "more" : "10 bytes",
                                       ", rank 1 expects ", expected)),
        "sizes of a message that differ are a disagreement on every rank", seen.text);
}

}  // namespace

int main(int argc, char** argv) {
    return mpi_test::run(argc, argv, [](mpi_test::program& test, uly::mpi::communicator world) {
        for (auto const way : reaches) {
            auto const ranks = ranks_of(way);
            test.check(mpi_test::name(way), "communicator",
                       [&] { conformance::check_communicator(ranks, {world.size()}); });
            for (std::size_t const expected : {5, 15})
                if (world.size() > 1)
                    test.check(mpi_test::name(way), "sizes of messages", [&] {
                        ranks(world.size(), [&](auto const& all) { check_sizes(all, expected); });
                    });
        }
        // Whom a rank waits for does not depend on what it reaches.
        if (world.size() == 3)
            test.check(mpi_test::name(mpi_test::reach::all), "silence", [&] {
                constexpr std::chrono::milliseconds deadline{500};
                conformance::check_silence(impatient(deadline), deadline, {3});
            });
    });
}
