// SPDX-License-Identifier: Apache-2.0
// usage: mpiexec -n P 08_mpi
// Ranks as processes: of a session, of an engine's own MPI_Comm, and as if on several hosts.

#include <ulysses/adapters/mpi.hpp>
#include <ulysses/ulysses.hpp>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <random>
#include <vector>

namespace uly = ulysses;
constexpr uly::shape heads5{.heads = 5, .head_dim = 32, .mask = uly::mask::causal};
constexpr std::int64_t sequence_tokens = 300, row_elements = heads5.heads * heads5.head_dim;

/// The rank's own rows of q, k, v and o [S, H, D], of which a real engine would hold no more.
struct rows {
    std::int64_t begin, own;

    explicit rows(int rank, int size)
        : begin(sequence_tokens * rank / size), own(sequence_tokens * (rank + 1) / size - begin) {}
    uly::token_view<float> of(std::vector<float>& x) const {  // [B, s, H, D]
        return {x.data() + begin * row_elements, {1, own, heads5.heads, heads5.head_dim}};
    }
};

/// Attention over the whole sequence, of which each rank brings its rows, over any communicator.
template <class Ranks>
void attend(Ranks const& ranks, std::vector<float>& q, std::vector<float>& k, std::vector<float>& v,
            std::vector<float>& o) {
    // [snippet attend]
    uly::pipeline layer{ranks, uly::sequence_local{}, uly::blocked_attention{uly::builtin_gemm{}},
                        uly::fixed<heads5>};
    rows const mine(ranks.rank(), ranks.size());
    auto const step = uly::sequence::agree(ranks, {.batch = 1, .tokens = mine.own});
    layer.attend(step, mine.of(q), mine.of(k), mine.of(v), mine.of(o));
    // [/snippet]
}

/// True where each group gives the bits of one rank.
bool all_alike(uly::mpi::communicator const& world) {
    auto const size = static_cast<std::size_t>(sequence_tokens * row_elements);
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    std::vector<float> q(size), k(size), v(size), alone(size);
    for (auto* each : {&q, &k, &v})
        for (auto& x : *each) x = normal(generator);
    attend(uly::serial{}, q, k, v, alone);

    bool all_same = true;
    auto const check = [&](char const* what, uly::mpi::communicator const& ranks) {
        std::vector<float> o(size);
        attend(ranks, q, k, v, o);
        rows const mine(ranks.rank(), ranks.size());
        auto const same =
            std::memcmp(mine.of(o).data, mine.of(alone).data,
                        static_cast<std::size_t>(mine.own * row_elements) * sizeof(float)) == 0;
        all_same = all_same && same;
        if (world.rank() == 0 || !same)
            std::printf("rank %d of %d, %s: %s\n", ranks.rank(), ranks.size(), what,
                        same ? "the bits of one rank" : "other bits than on one rank");
    };
    check("a session", world);

    // An engine's communicator: here, the ranks in reverse order.
    MPI_Comm engine_comm = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, 0, world.size() - world.rank(), &engine_comm);
    {
        // [snippet group]
        uly::mpi::group const owner(engine_comm, {.deadline = std::chrono::minutes(2)});
        uly::mpi::communicator const ranks = owner.handle();
        // [/snippet]
        check("an MPI_Comm", ranks);
    }
    MPI_Comm_free(&engine_comm);
    {
        // [snippet hosts]
        int const host = 2 * world.rank() / world.size();  // one half of the ranks, the other
        uly::mpi::group const apart(MPI_COMM_WORLD, {.host = host});
        // [/snippet]
        check("two hosts", apart.handle());
    }
    return all_same;
}

int main(int argc, char** argv) {
    // [snippet session]
    uly::mpi::session session{argc, argv};
    auto const world = session.world();
    // [/snippet]
    // [snippet errors]
    try {
        return all_alike(world) ? 0 : 1;
    } catch (std::exception const& e) {
        std::fprintf(stderr, "rank %d: %s\n", world.rank(), e.what());
        world.leave(e.what());
        return 1;
    }
    // [/snippet]
}
