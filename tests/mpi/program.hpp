#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/mpi.hpp>

#include <chrono>
#include <cstdio>
#include <exception>
#include <string_view>
#include <thread>

/// A test program over processes: every rank checks, rank 0 reports, and a rank that finds something
/// wrong ends the job. What it prints is counted as that of tests/tally.py.
namespace mpi_test {

/// Who reaches whom, as ranks declare it.
enum class reach { all, none, two_hosts };
inline constexpr reach reaches[] = {reach::all, reach::none, reach::two_hosts};

constexpr std::string_view name(reach way) {
    constexpr std::string_view names[] = {"all reaching", "none reaching", "two hosts"};
    return names[static_cast<int>(way)];
}

/// The host that this process declares.
inline int host_of(reach way) {
    int rank = 0, size = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (way == reach::all) return 0;
    return way == reach::none ? rank : 2 * rank / size;
}

class program {
   public:
    explicit program(int rank) : rank_(rank) {}

    template <class Body>
    void check(std::string_view way, std::string_view what, Body const& body) {
        try {
            body();
        } catch (std::exception const& e) {
            std::fprintf(stderr, "rank %d: %.*s, %.*s: %s\n", rank_, static_cast<int>(what.size()),
                         what.data(), static_cast<int>(way.size()), way.data(), e.what());
            // The launcher drops what it has not read when the job is aborted.
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
        ++passed_;
        if (rank_ == 0)
            std::printf("ok      %.*s, %.*s\n", static_cast<int>(what.size()), what.data(),
                        static_cast<int>(way.size()), way.data());
    }

    void skip(std::string_view why) {
        ++skipped_;
        if (rank_ == 0) std::printf("skipped: %.*s\n", static_cast<int>(why.size()), why.data());
    }

    /// Prints the counts; the exit status they deserve.
    int close() const {
        if (rank_ == 0) std::printf("%d passed, 0 failed, %d skipped\n", passed_, skipped_);
        return passed_ > 0 ? 0 : skipped_ > 0 ? 77 : 1;
    }

   private:
    int rank_, passed_ = 0, skipped_ = 0;
};

template <class Body>
int run(int argc, char** argv, Body const& body) {
    ulysses::mpi::session session{argc, argv};
    program test(session.world().rank());
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    body(test, session.world());
    return test.close();
}

}  // namespace mpi_test
