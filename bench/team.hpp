#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/threads.hpp>

#include <chrono>
#include <thread>
#include <vector>

namespace ulysses_bench {

/// Rank threads that run one body at a time, timed from fence to fence.
class team {
   public:
    explicit team(int ranks, ulysses::threads::options const& given = {}) : group_(ranks, given) {}

    /// Seconds in which every rank ran `body(handle)`; starting threads is not counted.
    template <class Body>
    double seconds(Body const& body) const {
        double taken = 0;
        auto const work = [&](int rank) {
            auto const handle = group_.handle(rank);
            handle.fence({});
            auto const start = std::chrono::steady_clock::now();
            body(handle);
            handle.fence({});
            std::chrono::duration<double> const mine = std::chrono::steady_clock::now() - start;
            if (rank == 0) taken = mine.count();
        };
        std::vector<std::jthread> others;
        for (int r = 1; r < group_.size(); ++r) others.emplace_back(work, r);
        work(0);
        return taken;
    }

    ulysses::threads::communicator handle(int rank) const { return group_.handle(rank); }
    int size() const { return group_.size(); }

   private:
    ulysses::threads::group group_;
};

}  // namespace ulysses_bench
