// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/mpi.hpp>
#include <ulysses/attention/reference.hpp>
#include <ulysses/pipeline.hpp>
#include <ulysses/space/host.hpp>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

/// usage: mpiexec -n P faults_test FAULT PLACE
///
/// What becomes of the job when its last rank is `killed`, `throws` or is `silent` at a place of which
/// the others know nothing: see tests/mpi/faults.py.
namespace uly = ulysses;

namespace {

constexpr std::string_view none = "";
std::string_view fault = none, place = none;
bool is_culprit = false, is_splitting = false;

/// Here the culprit fails, if it is to fail at this place.
void pass(std::string_view here) {
    if (!is_culprit || here != place) return;
    if (fault == "killed") std::raise(SIGKILL);
    if (fault == "throws") throw std::runtime_error("of its own");
    if (fault == "silent") std::this_thread::sleep_for(std::chrono::hours(1));
}

/// Attention that fails at its second work item.
struct failing_attention : uly::reference_attention {
    template <class Call, class... Views>
    void forward(Call const& call, Views const&... views) const {
        pass(call.query_head > 0 ? "attention" : none);
        uly::reference_attention::forward(call, views...);
    }
};

void run(uly::mpi::communicator const& world) {
    world.fence({});
    pass("fence");
    world.fence({});

    world.make_window(100);
    world.fence({});      // gives it back
    is_splitting = true;  // a window's first needs a split too
    world.split(0, world.rank()).fence({});

    // More than is sent before the other end is ready, twice: each rank waits for each other one.
    auto const ranks = world.size();
    // MPI may read and write what is under way until the job ends, also after an exception.
    static std::vector<std::byte> sent(std::size_t{1} << 22);
    static std::vector<std::vector<std::byte>> received(2 * static_cast<std::size_t>(ranks), sent);
    auto const start = [&](std::size_t turn) {
        std::vector<uly::outgoing> out;
        std::vector<uly::incoming> in;
        for (int r = 0; r < ranks; ++r) {
            if (r == world.rank()) continue;
            out.push_back({r, sent});
            in.push_back({r, received[2 * static_cast<std::size_t>(r) + turn]});
        }
        return world.start(out, in);
    };
    auto const first = start(0);
    pass("messages");
    auto const second = start(1);
    world.wait(first);
    world.wait(second);

    // Chunks that overlap: one is computed while others are under way.
    uly::pipeline layer{world, uly::sequence_local{}, failing_attention{},
                        uly::shape{.heads = 8, .head_dim = 4, .chunks = 4, .overlap = true}};
    std::vector<double> memory(3 * 8 * 4, 1.0), o(memory.size());
    uly::token_view<double> const x(memory.data(), {1, 3, 8, 4}), y(o.data(), {1, 3, 8, 4});
    layer.attend(uly::sequence::split(ranks, 1, 3 * ranks), x, x, x, y);
    world.fence({});
}

}  // namespace

// Calls of MPI that block, on their way to MPI itself.
extern "C" {
int MPI_Win_allocate_shared(MPI_Aint size, int unit, MPI_Info info, MPI_Comm comm, void* base,
                            MPI_Win* window) {
    pass("make_window");
    return PMPI_Win_allocate_shared(size, unit, info, comm, base, window);
}
int MPI_Win_free(MPI_Win* window) {
    pass("close");
    return PMPI_Win_free(window);
}
int MPI_Comm_split(MPI_Comm comm, int color, int key, MPI_Comm* part) {
    pass(is_splitting ? "split" : none);
    return PMPI_Comm_split(comm, color, key, part);
}
}

namespace {

/// Whether that cannot be made once MPI is finalised.
template <class Make>
bool is_refused(Make const& make) {
    try {
        make();
    } catch (uly::error const& e) {
        return e.code() == uly::errc::invalid_call;
    }
    return false;
}

}  // namespace

int main(int argc, char** argv) {
    std::string_view const wanted = argc > 1 ? argv[1] : "";
    auto const deadline =
        wanted == "silent" ? std::chrono::milliseconds(1000) : std::chrono::seconds(600);
    // Ends after MPI does.
    std::optional<uly::mpi::group> late;
    try {
        uly::mpi::session session{argc, argv, {.deadline = deadline}};
        auto const world = session.world();
        if (wanted == "nothing") late.emplace(MPI_COMM_WORLD);
        fault = wanted;
        place = argc > 2 ? argv[2] : "";
        is_culprit = world.rank() == world.size() - 1;
        try {
            run(world);
        } catch (uly::error const& e) {
            // Before the session ends: then the first process to end may end the job.
            std::fprintf(stderr, "rank %d: %.*s: %s\n", world.rank(),
                         static_cast<int>(uly::name(e.code()).size()), uly::name(e.code()).data(),
                         e.what());
            throw;
        }
    } catch (std::exception const&) {
        return 3;
    }
    return is_refused([] { uly::mpi::session const again; }) &&
                   is_refused([] { uly::mpi::group const other(MPI_COMM_WORLD); })
               ? 0
               : 4;
}
