#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/collectives.hpp>
#include <ulysses/comm/threads.hpp>
#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

/// Ranks as processes that fork makes, for what cuda_peers asks of its host: what they tell each other
/// goes through memory that they share. No more than a benchmark and tests need.
namespace ulysses_bench {

class process_ranks {
   public:
    using space_type = ulysses::host_space;
    static constexpr int most{8};

    /// What the processes share, zeros at first.
    struct memory {
        struct slot {
            ulysses::detail::collective_offer offer;
            std::array<std::byte, 65536> part;
        };
        std::atomic<int> arrived, generation, gone;  // gone: 1 + a rank that has left
        char text[512];                              // what it left with
        slot slots[most];
    };

    process_ranks() = default;
    process_ranks(int rank, int ranks, memory* shared) : rank_(rank), size_(ranks), all_(shared) {}

    int rank() const noexcept { return rank_; }
    int size() const noexcept { return size_; }
    std::uint64_t begin_call() const { return ++*calls_; }

    void fence(ulysses::fence_status const& status) const {
        std::vector<ulysses::fence_status> statuses(static_cast<std::size_t>(size_));
        meet({.call = ulysses::detail::collective::fence, .status = status}, [&] {
            for (int r = 0; r < size_; ++r)
                statuses[static_cast<std::size_t>(r)] = slot(r).offer.status;
        });
        ulysses::throw_verdict(statuses);
    }
    void all_gather(std::span<std::byte const> mine, std::span<std::byte> all,
                    ulysses::fence_status const& status = {}) const {
        exchange({.call = ulysses::detail::collective::all_gather, .status = status}, mine,
                 [&](int r, std::size_t first, std::span<std::byte const> part) {
                     std::memcpy(all.data() + static_cast<std::size_t>(r) * mine.size() + first,
                                 part.data(), part.size());
                 });
    }
    void broadcast(std::span<std::byte> data, int root) const {
        ulysses::fence_status status;
        ulysses::detail::check_root(status, root, size_);
        exchange(
            {.call = ulysses::detail::collective::broadcast, .argument = root, .status = status},
            data, [&](int r, std::size_t first, std::span<std::byte const> part) {
                if (r == root) std::memcpy(data.data() + first, part.data(), part.size());
            });
    }
    void leave(std::string_view text) const {
        text.copy(all_->text, sizeof all_->text - 1);
        all_->gone = 1 + rank_;
    }

   private:
    memory::slot& slot(int rank) const { return all_->slots[rank]; }

    /// Shows the offer, runs `read` when all have shown theirs, and waits until all have read.
    template <class Read>
    void meet(ulysses::detail::collective_offer offer, Read const& read) const {
        offer.calls = *calls_;
        slot(rank_).offer = offer;
        barrier();
        auto const shown = [&](int r) { return slot(r).offer; };
        for (int r = 0; r < size_; ++r) *calls_ = std::max(*calls_, shown(r).calls);
        std::exception_ptr differs;
        try {
            ulysses::detail::expect_same_collective(size_, shown);
            if (offer.call != ulysses::detail::collective::fence) {
                ulysses::detail::throw_offered(size_, shown);
                ulysses::detail::expect_alike(size_, shown);
            }
        } catch (...) {
            differs = std::current_exception();
        }
        if (!differs) read();
        barrier();
        if (differs) std::rethrow_exception(differs);
    }

    template <class Take>
    void exchange(ulysses::detail::collective_offer offer, std::span<std::byte const> mine,
                  Take const& take) const {
        offer.bytes = mine.size();
        auto const most_bytes = slot(rank_).part.size();
        std::size_t first = 0;
        do {
            auto const part = mine.subspan(first, std::min(most_bytes, mine.size() - first));
            std::copy(part.begin(), part.end(), slot(rank_).part.begin());
            meet(offer, [&] {
                for (int r = 0; r < size_; ++r)
                    if (!part.empty()) take(r, first, std::span(slot(r).part).first(part.size()));
            });
            first += part.size();
        } while (first < mine.size());
    }

    void barrier() const {
        auto const until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
        auto const generation = all_->generation.load();
        expect_all();
        if (++all_->arrived == size_) {
            all_->arrived = 0;
            ++all_->generation;
            return;
        }
        while (all_->generation == generation) {
            expect_all();
            if (std::chrono::steady_clock::now() > until)
                ulysses::throw_error(ulysses::errc::timed_out,
                                     "ulysses: fence: a process is silent");
            std::this_thread::yield();
        }
    }
    void expect_all() const {
        if (auto const gone = all_->gone.load())
            ulysses::throw_error(ulysses::errc::peer_failed,
                                 ulysses::detail::left_text(gone - 1, all_->text), gone - 1);
    }

    int rank_ = 0, size_ = 1;
    memory* all_ = nullptr;
    std::shared_ptr<std::uint64_t> calls_ = std::make_shared<std::uint64_t>(0);
};

/// Runs `body(ranks)` in so many processes; returns what the first of them that failed said, nothing if
/// all ended well. This process has not used CUDA, and has no other threads nor children.
template <class Body>
std::string run_processes(int ranks, Body const& body) {
    auto* const shared = mmap(nullptr, sizeof(process_ranks::memory), PROT_READ | PROT_WRITE,
                              MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) return "no memory to share";
    auto* const all = new (shared) process_ranks::memory{};
    std::vector<pid_t> children;
    for (int r = 0; r < ranks; ++r) {
        auto const child = fork();
        if (child != 0) {
            children.push_back(child);
            continue;
        }
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        process_ranks const own(r, ranks, all);
        int status = 0;
        try {
            body(own);
        } catch (std::exception const& e) {
            status = 1;
            int none = 0;
            if (all->gone.compare_exchange_strong(none, 1 + r))
                std::string_view(e.what()).copy(all->text, sizeof all->text - 1);
        }
        _exit(status);
    }
    std::string failed;
    auto const take = [&](std::size_t r, int status) {
        int none = 0;
        if (status == 0) return;
        all->gone.compare_exchange_strong(none, 1 + static_cast<int>(r));
        if (failed.empty())
            failed =
                ulysses::concat("rank ", all->gone - 1, ": ", all->text, " (status ", status, ")");
    };
    // As they end, so that the others hear of one that was killed.
    for (std::size_t r = 0; r < children.size(); ++r)
        if (children[r] < 0) take(r, -1);
    for (int status = 0, child = 0; (child = wait(&status)) > 0;)
        take(static_cast<std::size_t>(std::ranges::find(children, child) - children.begin()),
             status);
    munmap(shared, sizeof(process_ranks::memory));
    return failed;
}

/// Threads or processes.
class host_ranks {
    template <class Body>
    decltype(auto) of(Body const& body) const {
        return std::visit(body, ranks_);
    }

   public:
    using space_type = ulysses::host_space;

    host_ranks() = default;
    host_ranks(ulysses::threads::communicator ranks) : ranks_(std::move(ranks)) {}
    host_ranks(process_ranks ranks) : ranks_(std::move(ranks)) {}

    int rank() const noexcept {
        return of([](auto const& ranks) { return ranks.rank(); });
    }
    int size() const noexcept {
        return of([](auto const& ranks) { return ranks.size(); });
    }
    std::uint64_t begin_call() const {
        return of([](auto const& ranks) { return ranks.begin_call(); });
    }
    void fence(ulysses::fence_status const& status) const {
        of([&](auto const& ranks) { ranks.fence(status); });
    }
    void all_gather(std::span<std::byte const> mine, std::span<std::byte> all,
                    ulysses::fence_status const& status = {}) const {
        of([&](auto const& ranks) { ranks.all_gather(mine, all, status); });
    }
    void broadcast(std::span<std::byte> data, int root) const {
        of([&](auto const& ranks) { ranks.broadcast(data, root); });
    }
    void leave(std::string_view text) const {
        of([&](auto const& ranks) { ranks.leave(text); });
    }

   private:
    std::variant<ulysses::threads::communicator, process_ranks> ranks_;
};

}  // namespace ulysses_bench
