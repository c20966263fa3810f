#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cuda_peers.hpp>
#include <ulysses/comm/threads.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>
#include <vector>

/// Rank threads with a stream each, on the devices of the double in turn.
namespace cuda_test {

using ranks_type = ulysses::cuda_peers::communicator<ulysses::threads::communicator>;

/// Streams are made in the order of ranks, and outlive the ranks.
class streams {
   public:
    explicit streams(int count) : all_(static_cast<std::size_t>(count)) {
        for (auto& each : all_) cudaStreamCreateWithFlags(&each, cudaStreamNonBlocking);
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

template <class Body>
void run(int ranks, Body const& body, ulysses::cuda_peers::options const& given = {},
         ulysses::threads::options const& hosts = {}) {
    streams const on(ranks);
    ulysses::threads::run(
        ranks,
        [&](ulysses::threads::communicator host) {
            int devices = 1;
            cudaGetDeviceCount(&devices);
            cudaSetDevice(host.rank() % devices);
            body(ranks_type(host, on[host.rank()], given));
        },
        hosts);
}

}  // namespace cuda_test
