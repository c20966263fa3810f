#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/mpi/communicator.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

/// Ranks as processes, on one host or several, over MPI.
///
///     int main(int argc, char** argv) {
///         ulysses::mpi::session session{argc, argv};
///         ulysses::pipeline layer{session.world(), ulysses::sequence_local{}, attention, shape};
///
/// Ranks of one host read and write each other's memory, which MPI shares between them; others send
/// messages. One group may do both.
namespace ulysses::inline ULYSSES_ABI::mpi {

namespace detail {

/// *Throws* `transport_error` where MPI gives less than what a handle needs.
inline void expect_level(int level, std::string_view operation) {
    if (level < MPI_THREAD_FUNNELED)
        raise(errc::transport, {}, operation, "MPI must give at least MPI_THREAD_FUNNELED",
              "level ", level);
}

/// *Throws* `invalid_call` for what no group can be made of. MPI itself would end the job.
inline void expect_ranks(MPI_Comm comm) {
    constexpr std::string_view operation = "mpi::group";
    if (!is_running())
        raise(errc::invalid_call, {}, operation,
              "MPI must have been initialised, and not be finalised yet", "it does not run");
    if (comm == MPI_COMM_NULL)
        raise(errc::invalid_call, {}, operation, "a group is of the ranks of one communicator",
              "MPI_COMM_NULL");
    int joins_two = 0;
    check(MPI_Comm_test_inter(comm, &joins_two), operation);
    if (joins_two != 0)
        raise(errc::invalid_call, {}, operation, "a group is of the ranks of one communicator",
              "an intercommunicator");
    int level = MPI_THREAD_SINGLE;
    check(MPI_Query_thread(&level), operation);
    expect_level(level, operation);
}

/// The state of a group of all ranks of `comm`, which it takes over. Hosts are what MPI finds, and what
/// the ranks themselves tell apart. Collective.
inline std::shared_ptr<group_state> make_group(MPI_Comm comm, options const& given,
                                               std::shared_ptr<watchdog> dog) {
    constexpr std::string_view operation = "mpi::group";
    int rank = 0, size = 0, neighbours = 0;
    check(MPI_Comm_rank(comm, &rank), operation);
    check(MPI_Comm_size(comm, &size), operation);
    MPI_Comm machine = MPI_COMM_NULL;
    check(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, rank, MPI_INFO_NULL, &machine),
          operation);
    check(MPI_Comm_size(machine, &neighbours), operation);
    int mine[] = {rank, given.host};  // the first rank of the machine, and what is told apart
    check(MPI_Bcast(mine, 1, MPI_INT, 0, machine), operation);
    MPI_Comm_free(&machine);
    std::vector<std::array<int, 2>> all(static_cast<std::size_t>(size));
    check(MPI_Allgather(mine, 2, MPI_INT, all.data(), 2, MPI_INT, comm), operation);
    std::vector<int> hosts;
    for (auto const& each : all)
        hosts.push_back(static_cast<int>(std::ranges::find(all, each) - all.begin()));
    // Spinning only pays while every process of the machine has a core to spin on.
    auto const cores = std::thread::hardware_concurrency();
    auto const spins = static_cast<unsigned>(neighbours) <= cores ? 2000u : 0u;
    return std::make_shared<group_state>(comm, std::move(hosts), given, spins, std::move(dog));
}

}  // namespace detail

/// Owner of a group of processes: all those of a communicator of MPI, such as an engine's own.
class group {
   public:
    /// Collective over `comm`, which is duplicated. *Throws* `transport_error`, also where MPI gives less
    /// than MPI_THREAD_FUNNELED; `invalid_call` where MPI does not run, and for a communicator that is
    /// null or joins two groups.
    explicit group(MPI_Comm comm, options const& given = {}) {
        detail::expect_ranks(comm);
        int rank = 0;
        detail::check(MPI_Comm_rank(comm, &rank), "mpi::group");
        auto const dog = std::make_shared<detail::watchdog>();
        dog->during("mpi::group", rank, given.deadline, [&] {
            MPI_Comm own = MPI_COMM_NULL;
            detail::check(MPI_Comm_dup(comm, &own), "mpi::group");
            detail::check(MPI_Comm_set_errhandler(own, MPI_ERRORS_RETURN), "mpi::group");
            lease_ = std::make_shared<detail::lease const>(
                detail::lease{nullptr, detail::make_group(own, given, dog)});
        });
    }
    group(group const&) = delete;
    group& operator=(group const&) = delete;

    /// As `close`; during an exception the rank leaves instead.
    ~group() { static_cast<void>(close()); }

    /// Collective: gives back the group's memory once all ranks have come and no handle or window is left
    /// on any; else, and where the group has failed, what is left stays until the job ends. Returns
    /// why the group has failed, or does so now: a rank that is here during an exception leaves it, and
    /// so does one that is here while others are in another call. Nothing once MPI is finalised.
    fence_status close() {
        fence_status met;
        if (!detail::is_running()) lease_.reset();
        if (!lease_) return met;
        auto& state = *lease_->group;
        if (std::uncaught_exceptions() > exceptions_)
            handle().leave("an exception ended the scope of its group or session");
        bool in_use = false;
        guarded(met, [&] {
            auto& mine = state.next_offer(detail::collective::close);
            mine.argument = lease_.use_count() > 1;
            state.meet();
            for (auto const& each : state.shown()) in_use = in_use || each.argument != 0;
        });
        // The others are told, as this rank does not come to their next call either.
        if (met.code != errc::none)
            handle().leave(met.text);
        else if (!in_use)
            state.watched("close", [&] { state.release(); });
        lease_.reset();
        return met;
    }

    /// *Throws* `invalid_call` once the group is closed.
    communicator handle() const {
        if (!lease_)
            raise(errc::invalid_call, {}, "mpi::group", "a handle must name a group",
                  "this one is closed");
        return communicator(lease_);
    }

   private:
    int exceptions_ = std::uncaught_exceptions();
    std::shared_ptr<detail::lease const> lease_;
};

/// Owner of MPI itself: initialises it, unless the program has, and finalises what it has initialised.
/// Then errors of MPI_COMM_WORLD and MPI_COMM_SELF return; a program that initialises MPI decides that
/// itself, and where they do not, MPICH ends the job when a message is longer than expected.
/// One in a program, for as long as it uses MPI.
class session {
   public:
    /// *Throws* `transport_error`, also where MPI gives less than MPI_THREAD_FUNNELED; `invalid_call`
    /// where MPI has been finalised.
    session(int& argc, char**& argv, options const& given = {}) : session(&argc, &argv, given) {}
    explicit session(options const& given = {}) : session(nullptr, nullptr, given) {}
    session(session const&) = delete;
    session& operator=(session const&) = delete;

    /// Collective, see `group`. Where that has failed, the ranks have the deadline to come here: then one
    /// that is missing is given up, and the job ended by `MPI_Abort`, after the reason went to stderr. It
    /// ends as well where MPI takes longer than the deadline to finalise.
    ~session() {
        auto const failure = world_->close();
        if (!owns_ || !detail::is_running()) return;
        if (failure.code != errc::none && !all_come()) {
            std::fprintf(stderr, "%s\n", failure.text);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        dog_.during("mpi::session", rank_, deadline_, [&] {
            MPI_Comm_free(&end_);
            MPI_Finalize();
        });
    }

    /// The group of all processes.
    communicator world() const { return world_->handle(); }

   private:
    session(int* argc, char*** argv, options const& given) : deadline_(given.deadline) {
        int initialised = 0, finalised = 0, level = MPI_THREAD_SINGLE;
        MPI_Initialized(&initialised);
        MPI_Finalized(&finalised);
        if (finalised != 0)
            raise(errc::invalid_call, {}, "mpi::session", "MPI is initialised once in a program",
                  "it has been finalised");
        owns_ = initialised == 0;
        if (owns_)
            detail::check(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &level), "mpi::session");
        else
            detail::check(MPI_Query_thread(&level), "mpi::session");
        detail::expect_level(level, "mpi::session");
        if (owns_) {
            // MPICH reports errors of a request, such as a message that is too long, to these.
            MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
            MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
            MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
            dog_.during("mpi::session", rank_, deadline_, [&] {
                detail::check(MPI_Comm_dup(MPI_COMM_WORLD, &end_), "mpi::session");
            });
        }
        world_.emplace(MPI_COMM_WORLD, given);
    }

    /// Whether all ranks come to this call within the deadline.
    bool all_come() const {
        MPI_Request request = MPI_REQUEST_NULL;
        int come = 0;
        if (MPI_Ibarrier(end_, &request) != MPI_SUCCESS) return false;
        auto const until = ulysses::detail::end_of(deadline_);
        while (MPI_Test(&request, &come, MPI_STATUS_IGNORE) == MPI_SUCCESS && come == 0 &&
               std::chrono::steady_clock::now() < until)
            std::this_thread::yield();
        return come != 0;
    }

    bool owns_ = false;
    int rank_ = 0;
    MPI_Comm end_ = MPI_COMM_NULL;  ///< for the end of the job alone
    std::chrono::milliseconds deadline_;
    detail::watchdog dog_;
    std::optional<group> world_;
};

}  // namespace ulysses::inline ULYSSES_ABI::mpi
