// SPDX-License-Identifier: Apache-2.0

#include "../conformance/communicator.hpp"
#include "program.hpp"

#include <ulysses/adapters/cuda_peers.hpp>
#include <ulysses/adapters/mpi.hpp>

#include <cuda_runtime_api.h>

/// usage: mpiexec -n P cuda_test
///
/// Ranks of cuda_peers are processes that MPI has started: their windows are opened through handles that
/// MPI carries. Over the double of the CUDA runtime.
namespace uly = ulysses;

int main(int argc, char** argv) {
    return mpi_test::run(argc, argv, [&](mpi_test::program& test, uly::mpi::communicator world) {
        test.check("by handles", "cuda_peers over processes of MPI", [&] {
            conformance::check_communicator(
                [&](int, auto const& body) {
                    cudaStream_t stream = nullptr;
                    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
                    // Of groups that are split off, which fail alone.
                    body(uly::cuda_peers::communicator(world.split(0, world.rank()), stream));
                    cudaStreamDestroy(stream);
                },
                {world.size()});
        });
    });
}
