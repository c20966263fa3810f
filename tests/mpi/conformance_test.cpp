// SPDX-License-Identifier: Apache-2.0

#include "../conformance/communicator.hpp"
#include "program.hpp"

#include <ulysses/adapters/mpi.hpp>

#include <chrono>
#include <cstddef>
#include <limits>
#include <memory>
#include <span>
#include <string_view>

/// usage: mpiexec -n P conformance_test
///
/// The group's ranks are the processes: all reaching each other's memory, none, and on two hosts.
namespace uly = ulysses;
using conformance::detail::outcome_of;
using mpi_test::reach;
using mpi_test::reaches;

namespace {

/// Groups of all processes, split off one that goes on when they fail: MPICH takes long to make one.
auto ranks_of(reach way) {
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
    auto const seen = outcome_of([&] {
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

/// What no group can be made of, or has.
void check_misuse() {
    auto const is_refused = [](auto const& body, std::string_view rule) {
        auto const seen = outcome_of(body);
        conformance::expect(seen.code == uly::errc::invalid_call &&
                                conformance::detail::contains(seen.text, rule),
                            rule, seen.text);
    };
    is_refused([] { uly::mpi::group const none(MPI_COMM_NULL); }, "MPI_COMM_NULL");
    is_refused(
        [] {
            uly::mpi::group closed(MPI_COMM_SELF);
            closed.close();
            static_cast<void>(closed.handle());
        },
        "this one is closed");
    int rank = 0, size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (size == 1) return;
    MPI_Comm part = MPI_COMM_NULL, both = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank == 0, rank, &part);
    MPI_Intercomm_create(part, 0, MPI_COMM_WORLD, rank == 0 ? 1 : 0, 0, &both);
    is_refused([&] { uly::mpi::group const none(both); }, "an intercommunicator");
    MPI_Comm_free(&both);
    MPI_Comm_free(&part);
}

/// No memory holds the window that all ask for; that is no matter of MPI's, whose sums would overflow.
void check_large_windows(uly::mpi::communicator const& ranks) {
    for (auto const bytes : {std::numeric_limits<std::size_t>::max(), std::size_t{1} << 62}) {
        auto const seen = outcome_of([&] { ranks.make_window(bytes); });
        conformance::expect(seen.code == uly::errc::out_of_memory && seen.rank == 0,
                            "a window that no memory holds is out_of_memory", seen.text);
    }
    ranks.fence({});
}

/// The last rank ends its group while the others are in another call: they wait for it no more.
void check_early_close() {
    uly::mpi::group owner(MPI_COMM_WORLD, {.deadline = std::chrono::seconds(60)});
    auto const ranks = owner.handle();
    auto const last = ranks.size() - 1;
    if (ranks.rank() == last) {
        auto const failure = owner.close();
        conformance::expect(failure.code == uly::errc::disagreement,
                            "a close that the others do not make is a disagreement", failure.text);
        return;
    }
    auto const first = outcome_of([&] { ranks.fence({}); });
    conformance::expect(first.code == uly::errc::disagreement,
                        "a close that the others do not make is a disagreement", first.text);
    auto const next = outcome_of([&] { ranks.fence({}); });
    conformance::expect(next.code == uly::errc::peer_failed && next.rank == last,
                        "a rank that has closed its group has left it", next.text);
}

/// A rank that comes with an error, to ranks that do not come, still tells it.
void check_unheard() {
    uly::mpi::group const owner(MPI_COMM_WORLD, {.deadline = std::chrono::milliseconds(500)});
    auto const ranks = owner.handle();
    uly::fence_status own;
    own.fail(uly::errc::out_of_memory, "no room");
    if (ranks.rank() == 0) {
        auto const seen = outcome_of([&] { ranks.fence(own); });
        conformance::expect(seen.code == uly::errc::timed_out &&
                                conformance::detail::contains(seen.text, "silent ranks: 1") &&
                                conformance::detail::contains(seen.text, "it had failed: no room"),
                            "a rank that waits in vain tells the error that it came with",
                            seen.text);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

/// Receives that have been cancelled on this rank.
int cancelled = 0;

/// Once a group has failed, nothing is received any more into memory that was given to it.
void check_failed_messages() {
    uly::mpi::group owner(MPI_COMM_WORLD, {.deadline = std::chrono::seconds(60)});
    auto const ranks = owner.handle();
    std::byte memory[2] = {};
    auto const parts = std::span(memory);
    uly::incoming const one[] = {{1, parts.first(1)}}, other[] = {{1, parts.last(1)}};
    if (ranks.rank() == 0) {
        auto const first = ranks.start({}, one), second = ranks.start({}, other);
        MPI_Barrier(MPI_COMM_WORLD);
        cancelled = 0;
        for (auto const& ticket : {first, second}) {
            auto const seen = outcome_of([&] { ranks.wait(ticket); });
            conformance::expect(seen.code == uly::errc::peer_failed && cancelled == 2,
                                "a wait that fails lets go of all messages", seen.text);
        }
        return;
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (ranks.rank() == 1) ranks.leave("on purpose");
}

/// What a rank had under way when it left may have been overwritten since: it has not arrived.
void check_messages_of_one_that_left() {
    uly::mpi::group owner(MPI_COMM_WORLD, {.deadline = std::chrono::seconds(60)});
    auto const ranks = owner.handle();
    static std::vector<std::byte> memory(std::size_t{1} << 22);
    uly::outgoing const out[] = {{1, memory}};
    uly::incoming const in[] = {{0, memory}};
    if (ranks.rank() != 1) {
        MPI_Barrier(MPI_COMM_WORLD);  // rank 1 has started
        if (ranks.rank() == 0) {
            static_cast<void>(ranks.start(out, {}));
            ranks.leave("on purpose");
        }
        MPI_Barrier(MPI_COMM_WORLD);
        return;
    }
    auto const ticket = ranks.start({}, in);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Barrier(MPI_COMM_WORLD);
    auto const seen = outcome_of([&] { ranks.wait(ticket); });
    conformance::expect(seen.code == uly::errc::peer_failed && seen.rank == 0,
                        "a message of a rank that left has not arrived", seen.text);
}

}  // namespace

// On its way to MPI itself.
extern "C" int MPI_Cancel(MPI_Request* request) {
    ++cancelled;
    return PMPI_Cancel(request);
}

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
        test.check(mpi_test::name(reach::all), "what is no group", check_misuse);
        for (auto const way : reaches)
            test.check(mpi_test::name(way), "windows that are too large", [&] {
                ranks_of(way)(world.size(), [](auto const& all) { check_large_windows(all); });
            });
        if (world.size() > 1) {
            test.check(mpi_test::name(reach::all), "an early close", check_early_close);
            test.check(mpi_test::name(reach::all), "messages of a failed group",
                       check_failed_messages);
            test.check(mpi_test::name(reach::all), "messages of one that left",
                       check_messages_of_one_that_left);
            test.check(mpi_test::name(reach::all), "an error that none hears", check_unheard);
        }
        // Whom a rank waits for does not depend on what it reaches.
        if (world.size() == 3)
            test.check(mpi_test::name(reach::all), "silence", [&] {
                constexpr std::chrono::milliseconds deadline{500};
                conformance::check_silence(impatient(deadline), deadline, {3});
            });
    });
}
