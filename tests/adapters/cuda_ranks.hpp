#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "../../bench/gpu/processes.hpp"

#include <ulysses/adapters/cuda_peers.hpp>
#include <ulysses/comm/threads.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

/// Rank threads with a stream each, on the devices of the double in turn.
namespace cuda_test {

template <class Host>
using ranks_over = ulysses::cuda_peers::communicator<Host>;
using ranks_type = ranks_over<ulysses::threads::communicator>;

/// One of the devices that ranks take in turn.
inline void set_device(int rank) {
    int devices = 1;
    cudaGetDeviceCount(&devices);
    cudaSetDevice(rank % devices);
}

/// Streams are made in the order of ranks, each on its rank's device, and outlive the ranks.
class streams {
   public:
    explicit streams(int count, int first = 0) : all_(static_cast<std::size_t>(count)) {
        int before = 0;
        cudaGetDevice(&before);
        for (auto& each : all_) {
            set_device(first++);
            cudaStreamCreateWithFlags(&each, cudaStreamNonBlocking);
        }
        cudaSetDevice(before);
    }
    streams(streams const&) = delete;
    streams& operator=(streams const&) = delete;
    ~streams() {
        for (auto* const each : all_) cudaStreamDestroy(each);
    }
    cudaStream_t operator[](int rank) const { return all_[static_cast<std::size_t>(rank)]; }

   private:
    std::vector<cudaStream_t> all_;
};

template <class Host = ulysses::threads::communicator, class Body>
void run(int ranks, Body const& body, ulysses::cuda_peers::options const& given = {},
         ulysses::threads::options const& hosts = {}) {
    streams const on(ranks);
    ulysses::threads::run(
        ranks,
        [&](ulysses::threads::communicator host) {
            set_device(host.rank());
            body(ranks_over<Host>(Host(host), on[host.rank()], given));
        },
        hosts);
}

/// Ranks as processes. Returns what the first that failed said.
template <class Host, class Body>
std::string run_processes(int ranks, Body const& body,
                          ulysses::cuda_peers::options const& given = {}) {
    return ulysses_bench::run_processes(ranks, [&](ulysses_bench::process_ranks const& host) {
        set_device(host.rank());
        streams const on(1, host.rank());
        body(ranks_over<Host>(Host(host), on[0], given));
    });
}

}  // namespace cuda_test
