// SPDX-License-Identifier: Apache-2.0

#include "../train/tiny_model.hpp"
#include "program.hpp"

#include <cmath>
#include <cstddef>

/// usage: mpiexec -n P train_test
///
/// Training over processes has the losses of one process, however the processes are divided.
namespace uly = ulysses;
using namespace train_test;

namespace {

void expect_equal(curve const& a, curve const& b) {
    auto const expect = [](bool right, std::string_view what) {
        if (!right) uly::throw_error(uly::errc::none, std::string(what));
    };
    expect(a.losses.size() == b.losses.size() && a.tokens == b.tokens, "other updates");
    for (std::size_t i = 0; i < a.losses.size(); ++i)
        expect(std::abs(a.losses[i] - b.losses[i]) <= 1e-9,
               uly::concat("update ", i, ": loss ", a.losses[i], ", alone ", b.losses[i]));
    expect(std::abs(a.held_out - b.held_out) <= 1e-9 && a.held_out_tokens == b.held_out_tokens,
           "another loss on held-out samples");
}

}  // namespace

int main(int argc, char** argv) {
    return mpi_test::run(argc, argv, [&](mpi_test::program& test, uly::mpi::communicator world) {
        auto const alone = curve_of(world.split(world.rank(), 0), {}, 1);
        for (auto const way : mpi_test::reaches) {
            uly::mpi::group owner(MPI_COMM_WORLD, {.host = mpi_test::host_of(way)});
            for (int64_t sp = 1; sp <= world.size(); ++sp) {
                // An update has 4 micro-batches.
                if (world.size() % sp != 0 || 4 % (world.size() / sp) != 0) continue;
                uly::parallel_config const parallel{.sp = sp, .dp_shard = world.size() / sp};
                for (auto const evaluates : {uly::evaluation::sharded, uly::evaluation::bypass})
                    test.check(mpi_test::name(way), uly::concat("losses of sp ", sp), [&] {
                        expect_equal(curve_of(owner.handle(), parallel, 1, evaluates), alone);
                    });
            }
        }
    });
}
