// SPDX-License-Identifier: Apache-2.0

#include "bench.hpp"
#include "exchange.hpp"
#include "table.hpp"

#include <ulysses/adapters/mpi.hpp>
#include <ulysses/observer/counting.hpp>
#include <ulysses/pipeline.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

/// usage: mpiexec -n P ulysses_bench_mpi [--quick] [--json FILE]
///
/// Steps 3 and 5 over processes of one host, through a pipeline whose attention does nothing: ranks
/// that reach each other's memory against memcpy of as many bytes, and against the usual way, to
/// pack for each peer, call MPI_Alltoall and unpack; then ranks that send messages against the usual
/// way over MPI_Alltoallv, and against that call alone, over bytes that lie packed already.
/// Fails when a pipeline moves other bytes than its plan lists.
namespace ulysses_bench {

namespace {

/// Of each operand on each rank, in KiB.
constexpr int64_t sizes[] = {4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10};

#ifdef OPEN_MPI
constexpr char mpi_name[] = "Open MPI";
#else
constexpr char mpi_name[] = "MPICH";
#endif

rank_memory memory_of(int ranks, int64_t kibibytes) {
    int64_t const heads = 32, dim = kibibytes < 16 ? 32 : 128;
    return {.ranks = ranks,
            .tokens = (kibibytes << 10) / (heads * dim * static_cast<int64_t>(sizeof(float))),
            .heads = heads,
            .dim = dim};
}

std::string size_text(int64_t kibibytes) {
    return kibibytes < 1 << 10 ? std::to_string(kibibytes) + " KiB"
                               : std::to_string(kibibytes >> 10) + " MiB";
}

/// Whether this host has room for so much, here on every rank alike.
bool is_available(ulysses::mpi::communicator const& world, std::size_t bytes) {
    std::size_t kibibytes = std::numeric_limits<std::size_t>::max() >> 10;
    std::ifstream file("/proc/meminfo");
    for (std::string name; file >> name; file.ignore(256, '\n'))
        if (name == "MemAvailable:") file >> kibibytes;
    world.broadcast(std::as_writable_bytes(std::span(&kibibytes, 1)), 0);
    return bytes <= kibibytes << 10;
}

/// Seconds of one of `calls` calls of `body`, from fence to fence: MPICH's barrier spins, and with more
/// ranks than cores would tell of that alone.
template <class Body>
auto timed(ulysses::mpi::communicator const& world, int calls, Body body) {
    return [=] {
        world.fence({});
        auto const begin = MPI_Wtime();
        for (int i = 0; i < calls; ++i) body();
        world.fence({});
        return (MPI_Wtime() - begin) / calls;
    };
}

/// A pipeline of the exchange alone, which counts what it moves.
class exchanging {
   public:
    exchanging(ulysses::mpi::communicator const& ranks, rank_memory& mine)
        : ranks_(ranks),
          mine_(mine),
          step_(ulysses::sequence::split(ranks.size(), 1, mine.tokens * ranks.size())),
          layer_(ranks, ulysses::sequence_local{}, no_attention{},
                 ulysses::shape{.heads = mine.heads, .head_dim = mine.dim},
                 ulysses::no_projection{}, ulysses::counting_observer(ranks.rank())) {}

    void operator()() {
        layer_.attend(step_, mine_.view(mine_.q), mine_.view(mine_.k), mine_.view(mine_.v),
                      mine_.view(mine_.o));
        ++calls_;
    }

    /// *Throws* when all ranks together have moved other bytes than planned.
    void check_bytes() {
        auto const& seen = layer_.observer();
        auto const planned = ulysses::forward_traffic(layer_.planned(step_), sizeof(float));
        std::int64_t bytes[] = {static_cast<std::int64_t>(seen.bytes_sent + seen.bytes_received),
                                static_cast<std::int64_t>(planned.sent) * calls_};
        ranks_.all_reduce(std::span<std::int64_t>(bytes), ulysses::reduction::sum);
        if (bytes[0] != bytes[1])
            throw std::runtime_error(ulysses::concat("moved other bytes than planned: ", bytes[0],
                                                     " counted, ", bytes[1], " planned"));
    }

   private:
    ulysses::mpi::communicator ranks_;
    rank_memory& mine_;
    ulysses::sequence step_;
    ulysses::pipeline<ulysses::mpi::communicator, ulysses::sequence_local, no_attention,
                      ulysses::no_projection, ulysses::counting_observer>
        layer_;
    std::int64_t calls_ = 0;
};

/// As many packed bytes as one exchange's three operands, by MPI_Alltoallv, then those of one.
class packed_operands {
   public:
    explicit packed_operands(rank_memory const& mine)
        : part_(static_cast<int>(mine.part() * sizeof(float))),
          sent_(3 * mine.bytes()),
          received_(sent_) {}

    void operator()() {
        exchange(3);
        exchange(1);
    }

   private:
    void exchange(int operands) {
        int ranks = 0;
        MPI_Comm_size(MPI_COMM_WORLD, &ranks);
        std::vector<int> const counts(static_cast<std::size_t>(ranks), operands * part_);
        std::vector<int> places(counts.size());
        for (std::size_t r = 1; r < places.size(); ++r) places[r] = places[r - 1] + counts[r - 1];
        MPI_Alltoallv(sent_.data(), counts.data(), places.data(), MPI_BYTE, received_.data(),
                      counts.data(), places.data(), MPI_BYTE, MPI_COMM_WORLD);
    }

    int part_;
    std::vector<std::byte> sent_, received_;
};

void all_to_all(rank_memory& mine) {
    auto const part = static_cast<int>(mine.part());
    MPI_Alltoall(mine.sent.data(), part, MPI_FLOAT, mine.received.data(), part, MPI_FLOAT,
                 MPI_COMM_WORLD);
}

void all_to_all_v(rank_memory& mine) {
    auto const part = static_cast<int>(mine.part());
    std::vector<int> const counts(static_cast<std::size_t>(mine.ranks), part);
    std::vector<int> places(counts.size());
    for (std::size_t r = 0; r < places.size(); ++r) places[r] = static_cast<int>(r) * part;
    MPI_Alltoallv(mine.sent.data(), counts.data(), places.data(), MPI_FLOAT, mine.received.data(),
                  counts.data(), places.data(), MPI_FLOAT, MPI_COMM_WORLD);
}

class bench {
   public:
    bench(ulysses::mpi::communicator const& world, bench_options const& options)
        : world_(world), options_(options) {}

    void measure(int64_t kibibytes) {
        auto mine = memory_of(world_.size(), kibibytes);
        auto options = options_;
        options.rounds = kibibytes > 64 << 10 ? 7 : 31;
        auto const calls = static_cast<int>(std::clamp<int64_t>((16 << 10) / kibibytes, 1, 64));
        auto const name =
            ulysses::concat(mpi_name, ", ", world_.size(), " ranks, ", size_text(kibibytes));
        auto const bytes = static_cast<double>(mine.bytes()) * 4 * world_.size();
        // As in the bench of threads: smaller ones stay in a cache, and 4 ranks may want for cores.
        auto const aims = world_.size() == 2 && kibibytes >= 16 << 10;
        auto const add = [&](char const* how, double seconds, char const* against, double other,
                             char const* target) {
            rows_.push_back({name + how, bytes / seconds * 1e-9, "GB/s", against, other / seconds,
                             aims ? target : ""});
        };
        {
            ulysses::mpi::group const owner(MPI_COMM_WORLD);
            exchanging layer(owner.handle(), mine);
            auto const seconds = interleaved(
                options, timed(world_, calls, [&] { layer(); }),
                timed(world_, calls, [&] { copy_operands(mine, [&] { world_.fence({}); }); }),
                timed(world_, calls,
                      [&] { pack_exchange_unpack(mine, [&] { all_to_all(mine); }); }));
            layer.check_bytes();
            add("", seconds[0], "memcpy of the same bytes", seconds[1], ">= 0.9");
            add("", seconds[0], "pack, MPI_Alltoall, unpack", seconds[2], ">= 2.5");
        }
        {
            ulysses::mpi::group const owner(MPI_COMM_WORLD, {.host = world_.rank()});
            exchanging layer(owner.handle(), mine);
            packed_operands packed(mine);
            auto const seconds =
                interleaved(options, timed(world_, calls, [&] { layer(); }),
                            timed(world_, calls,
                                  [&] { pack_exchange_unpack(mine, [&] { all_to_all_v(mine); }); }),
                            timed(world_, calls, [&] { packed(); }));
            layer.check_bytes();
            add(", by messages", seconds[0], "pack, MPI_Alltoallv, unpack", seconds[1], ">= 1.0");
            add(", by messages", seconds[0], "MPI_Alltoallv of packed bytes", seconds[2], "");
        }
    }

    std::vector<result> const& rows() const { return rows_; }

   private:
    ulysses::mpi::communicator world_;
    bench_options options_;
    std::vector<result> rows_;
};

int run(int argc, char** argv) {
    ulysses::mpi::session const session{argc, argv};
    auto const world = session.world();
    bench_options options;
    char const* json = nullptr;
    for (int i = 1; i < argc; ++i) {
        if (std::strcmp(argv[i], "--quick") == 0) {
            options.quick = true;
        } else if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
            json = argv[++i];
        } else {
            std::fprintf(stderr, "ulysses_bench_mpi: unknown option or missing value: %s\n",
                         argv[i]);
            return 2;
        }
    }
    bench all(world, options);
    for (auto const kibibytes : sizes) {
        if (options.quick && kibibytes > 16 << 10) continue;
        // Operands, and either windows and messages, or packed copies.
        auto const needed = static_cast<std::size_t>(kibibytes << 10) * 18;
        if (is_available(world, needed * static_cast<std::size_t>(world.size())))
            all.measure(kibibytes);
        else if (world.rank() == 0)
            std::printf("%s an operand and rank: skipped, there is too little memory\n",
                        size_text(kibibytes).c_str());
    }
    if (world.rank() != 0) return 0;
    print(all.rows());
    if (json == nullptr || write_json(json, all.rows())) return 0;
    std::fprintf(stderr, "ulysses_bench_mpi: cannot write %s\n", json);
    return 2;
}

}  // namespace

}  // namespace ulysses_bench

int main(int argc, char** argv) {
    try {
        return ulysses_bench::run(argc, argv);
    } catch (std::exception const& e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
