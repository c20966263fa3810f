// SPDX-License-Identifier: Apache-2.0

#include "../pipeline/draws.hpp"
#include "../pipeline/six_steps.hpp"
#include "program.hpp"

/// usage: mpiexec -n P pipeline_test [PROBLEMS]
///
/// A pipeline over processes computes the bits of one over threads: all ranks reaching each other's
/// memory, none, and on two hosts. Every rank draws the same problems.
namespace uly = ulysses;
using namespace pipeline_test;

namespace {

/// Processes that count how often their messages were to be moved.
struct processes : uly::mpi::communicator {
    static inline int moved = 0;

    explicit processes(uly::mpi::communicator const& ranks) : uly::mpi::communicator(ranks) {}
    void progress() const {
        ++moved;
        uly::mpi::communicator::progress();
    }
};
static_assert(uly::progresses<processes>);

void expect(bool right, std::string const& what) {
    if (!right) uly::throw_error(uly::errc::none, what);
}

/// Every rank gets its own of what `from` has for all.
bytes dealt(uly::mpi::communicator const& world, int from, std::vector<bytes> const& of_all,
            std::size_t size) {
    auto const me = static_cast<std::size_t>(world.rank());
    bytes mine(size);
    std::vector<uly::outgoing> out;
    for (int r = 0; r < world.size() && world.rank() == from; ++r)
        if (r != from) out.push_back({r, of_all[static_cast<std::size_t>(r)]});
    uly::incoming const in[] = {{from, mine}};
    world.wait(world.start(out, std::span(in).first(world.rank() == from ? 0 : 1)));
    return world.rank() == from ? of_all[me] : mine;
}

/// Problem `first` + r is computed by the threads of rank r, then all of them by all ranks.
void check_problems(uly::mpi::communicator const& world, std::span<processes const> ways,
                    std::uint64_t first) {
    auto const mine = draw_problem(first + static_cast<std::uint64_t>(world.rank()), world.size());
    auto const of_threads = results_of_threads(world.size(), mine);
    for (int r = 0; r < world.size(); ++r) {
        auto const seed = first + static_cast<std::uint64_t>(r);
        auto const drawn = draw_problem(seed, world.size());
        auto const wanted =
            dealt(world, r, of_threads, bytes_of(results<double>(drawn.whole)).size());
        for (auto const& ranks : ways) {
            auto const moved_before = processes::moved;
            auto const text = uly::concat("seed ", seed, ", ", &ranks - ways.data(), ": ");
            expect(results_of(ranks, drawn) == wanted,
                   text + "not the bits of threads: " + drawn.text());
            expect(processes::moved == moved_before || drawn.whole.layer.overlap,
                   text + "only chunks that overlap have messages to be moved");
        }
    }
}

/// Tokens of a causal layer, a few at a time over a cache, have the bits of all at once.
void check_cache(processes const& ranks) {
    auto const p = make_problem<double>(5,
                                        {.heads = 8,
                                         .kv_heads = 4,
                                         .head_dim = 5,
                                         .value_dim = 3,
                                         .mask = uly::mask::causal,
                                         .assignment = uly::assignment::whole_heads},
                                        2, 11);
    auto const whole = compute_alone<builtin_attention>(p);
    uly::pipeline layer{ranks, uly::sequence_local{}, builtin_attention{}, p.layer};
    auto cache = layer.make_cache<double>(p.batch, p.tokens);
    int64_t begin = 0;
    for (int64_t const count : {6, 1, 3, 1}) {
        auto step = uly::sequence::of(p.batch, equal_shares(count, ranks.size()));
        step.pack({.past = cache.lengths()});
        // Where the call's tokens stand in the whole.
        uly::token_orders places;
        for (auto runs : equal_shares(count, ranks.size())) {
            runs[0].begin += begin;
            places.add_rank(runs);
        }
        auto const mine = [&](tensor<double> const& x) {
            return own_part(places, ranks.rank(), x);
        };
        auto const q = mine(p.q);
        tensor<double> const o({q.sizes[0], q.sizes[1], q.sizes[2], p.layer.value_dim});
        layer.attend(step, cache, q, mine(p.k), mine(p.v), o);
        expect(same_bits(o, mine(whole.o)), uly::concat("cache, from token ", begin));
        begin += count;
    }
}

/// All six steps, with dense projections.
void check_six_steps(processes const& ranks) {
    six_problem<double> p(
        3, {.heads = 6, .kv_heads = 3, .head_dim = 4, .value_dim = 3, .mask = uly::mask::causal}, 2,
        13, 5);
    auto const order = equal_shares(p.tokens, ranks.size());
    auto const wanted = six_steps(p, order);
    auto const step = uly::sequence::of(p.batch, order);
    six_results<double> own(p, ranks.size());
    six_steps_rank(ranks, p, step, uly::reference_attention{}, uly::no_epilogue{}, own, true);
    auto const me = ranks.rank();
    auto const same = [&](auto const& a, auto const& b) {
        return same_bits(own_part(step.queries(), me, a), own_part(step.queries(), me, b));
    };
    expect(same(own.y, wanted.y) && same(own.dx, wanted.dx), "six steps: y and dx");
    auto const at = static_cast<std::size_t>(me);
    expect(own.rank_gradients[at] == wanted.rank_gradients[at], "six steps: gradients");
}

}  // namespace

int main(int argc, char** argv) {
    return mpi_test::run(argc, argv, [&](mpi_test::program& test, uly::mpi::communicator world) {
        auto const problems = static_cast<std::uint64_t>(argc > 1 ? std::atoi(argv[1]) : 24);
        std::vector<std::unique_ptr<uly::mpi::group>> owners;
        std::vector<processes> ways;
        for (auto const way : mpi_test::reaches) {
            owners.push_back(std::make_unique<uly::mpi::group>(
                MPI_COMM_WORLD, uly::mpi::options{.host = mpi_test::host_of(way)}));
            ways.emplace_back(owners.back()->handle());
            test.check(mpi_test::name(way), "cache", [&] { check_cache(ways.back()); });
            test.check(mpi_test::name(way), "six steps", [&] { check_six_steps(ways.back()); });
        }
        auto const together = static_cast<std::uint64_t>(world.size());
        for (std::uint64_t seed = 1; seed <= problems; seed += together)
            test.check(uly::concat("seeds ", seed, " to ", seed + together - 1), "problems",
                       [&] { check_problems(world, ways, seed); });
        test.check("of chunks that overlap", "messages are moved", [&] {
            expect(world.size() == 1 || processes::moved > 0,
                   "no message was moved while a chunk was computed");
        });
        ways.clear();
    });
}
