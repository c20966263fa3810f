// SPDX-License-Identifier: Apache-2.0

#include <ulysses/observer/counting.hpp>

#include "six_steps.hpp"

#include <doctest/doctest.h>

#include <array>
#include <numeric>

using namespace pipeline_test;
namespace uly = ulysses;

namespace {

/// A communicator that counts what the library asks of it: no collective is hidden from it.
class counting_ranks {
   public:
    using space_type = uly::host_space;
    using window_type = uly::threads::communicator::window_type;
    using ticket_type = uly::threads::communicator::ticket_type;
    struct counters {
        int fences = 0, windows = 0, calls = 0;
        int groups = 0, largest_group = 0;  ///< of messages
    };

    counting_ranks(uly::threads::communicator ranks, counters* counted)
        : ranks_(ranks), counted_(counted) {}
    int rank() const noexcept { return ranks_.rank(); }
    int size() const noexcept { return ranks_.size(); }
    std::uint64_t begin_call() const {
        ++counted_->calls;
        return ranks_.begin_call();
    }
    void fence(uly::fence_status const& status) const {
        ++counted_->fences;
        ranks_.fence(status);
    }
    window_type make_window(std::size_t bytes) const {
        ++counted_->windows;
        return ranks_.make_window(bytes);
    }
    // The group's windows grow inside: asking for them when they are large enough is not
    // collective.
    window_type shared_window(uly::arena which, std::size_t bytes) const {
        return ranks_.shared_window(which, bytes);
    }
    std::size_t shared_window_bytes(uly::arena which) const {
        return ranks_.shared_window_bytes(which);
    }
    std::byte* address(window_type const& window, int rank) const {
        return ranks_.address(window, rank);
    }
    ticket_type start(std::span<uly::outgoing const> out, std::span<uly::incoming const> in) const {
        ++counted_->groups;
        counted_->largest_group = std::max(
            {counted_->largest_group, static_cast<int>(out.size()), static_cast<int>(in.size())});
        return ranks_.start(out, in);
    }
    void wait(ticket_type ticket) const { ranks_.wait(ticket); }

   private:
    uly::threads::communicator ranks_;
    counters* counted_;
};
static_assert(uly::reaches_memory<counting_ranks> && uly::sends_messages<counting_ranks>);

/// Bytes by (from, to), fences, and the order of steps; copies share one record.
struct recorder {
    struct record {
        std::vector<std::size_t> moved;
        int fences = 0;
        std::vector<uly::step_id> begun, ended;
    };
    record* seen;
    int ranks;
    void begin(uly::step_id step) const noexcept { seen->begun.push_back(step); }
    void end(uly::step_id step) const noexcept { seen->ended.push_back(step); }
    void moved(int from, int to, std::size_t bytes) const noexcept {
        seen->moved.resize(static_cast<std::size_t>(ranks * ranks));
        seen->moved[static_cast<std::size_t>(from * ranks + to)] += bytes;
    }
    void fence() const noexcept { ++seen->fences; }
};

/// What each rank sent and received, from the records of all.
std::vector<uly::traffic> traffic_of(std::vector<recorder::record> const& records) {
    auto const ranks = records.size();
    std::vector<uly::traffic> result(ranks);
    for (auto const& record : records)
        for (std::size_t from = 0; from < ranks && !record.moved.empty(); ++from)
            for (std::size_t to = 0; to < ranks; ++to)
                if (from != to) {
                    result[from].sent += record.moved[from * ranks + to];
                    result[to].received += record.moved[from * ranks + to];
                }
    return result;
}

using step = uly::step_id;

template <class T>
void check_counts(uly::shape const& layer, orders const& order) {
    auto const ranks = static_cast<int>(order.size());
    auto const size = static_cast<std::size_t>(ranks);
    auto const sequence = uly::sequence::of(2, order);
    auto const p = make_problem<T>(1, layer, 2, sequence.queries().total());
    std::vector<recorder::record> forward(size), backward(size);
    std::vector<uly::traffic> planned_forward(size), planned_backward(size);
    std::vector<counting_ranks::counters> counted(size), before(size);
    run_ranks(ranks, [&](uly::threads::communicator c) {
        auto const me = static_cast<std::size_t>(c.rank());
        recorder::record record;
        uly::pipeline pipeline{counting_ranks{c, &counted[me]},
                               uly::sequence_local{},
                               builtin_attention{},
                               p.layer,
                               uly::no_projection{},
                               recorder{&record, ranks}};
        auto saved = pipeline.make_context();
        local_problem<T> local(p, sequence, c.rank());
        for (int call = 0; call < 3; ++call) {  // windows are made in the first
            before[me] = counted[me];
            record = {};
            pipeline.attend(sequence, saved, local.q, local.k, local.v, local.o);
            forward[me] = record;
            record = {};
            attend_backward(pipeline, sequence, saved, local);
            backward[me] = record;
        }
        auto const& moves = pipeline.planned(sequence);
        constexpr auto accumulator = sizeof(uly::accumulator_t<T>);
        planned_forward[me] = uly::forward_traffic(moves, sizeof(T));
        planned_backward[me] = uly::backward_traffic(moves, sizeof(T), accumulator, false);
    });
    CHECK(traffic_of(forward) == planned_forward);
    CHECK(traffic_of(backward) == planned_backward);
    auto const fences = ranks > 1 ? 2 : 0;
    for (std::size_t r = 0; r < size; ++r) {
        CHECK(forward[r].fences == fences);
        CHECK(backward[r].fences == fences);
        // And none that the observer does not see, nor any other collective.
        CHECK(counted[r].fences - before[r].fences == 2 * fences);
        CHECK(counted[r].windows == before[r].windows);
        CHECK(counted[r].calls - before[r].calls == fences);
        // One group of messages an exchange at most, in it one message a peer that is not reached.
        auto const hosts = hosts_of(reach_under_test(), ranks);
        auto const reached =
            hosts.empty() ? ranks
                          : static_cast<int>(std::count(hosts.begin(), hosts.end(), hosts[r]));
        CHECK(counted[r].groups - before[r].groups <= (ranks == reached ? 0 : 4));
        CHECK(counted[r].largest_group <= ranks - reached);
        using steps = std::vector<step>;
        CHECK(forward[r].begun == (ranks > 1 ? steps{step::to_heads, step::attend, step::to_tokens}
                                             : steps{step::attend}));
        CHECK(backward[r].begun == (ranks > 1 ? steps{step::to_tokens, step::attend, step::to_heads}
                                              : steps{step::attend}));
        CHECK(forward[r].ended == forward[r].begun);
        CHECK(backward[r].ended == backward[r].begun);
    }
}

}  // namespace

TEST_CASE("counting: two exchanges forward, two backward, and the plan's bytes") {
    for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing})
        for (int ranks : {1, 2, 3, 4, 8}) {
            CAPTURE(static_cast<int>(keep));
            CAPTURE(ranks);
            uly::shape const layer{.heads = 6,
                                   .kv_heads = 2,
                                   .head_dim = 4,
                                   .value_dim = 3,
                                   .mask = uly::mask::causal,
                                   .keep = keep};
            check_counts<float>(layer, zigzag(19, ranks));
            // dk and dv travel in the accumulator type.
            check_counts<uly::bf16>(layer, equal_shares(19, ranks));
        }
}

TEST_CASE("counting: of tokens that every rank holds the output alone moves, with its gradient") {
    for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing})
        for (int ranks : {2, 4, 5}) {
            CAPTURE(static_cast<int>(keep));
            CAPTURE(ranks);
            uly::shape const layer{
                .heads = 6, .kv_heads = 2, .head_dim = 4, .value_dim = 3, .keep = keep};
            auto const all = replicated_front(19, 19, ranks);
            check_counts<float>(layer, replicated_front(5, 19, ranks));
            check_counts<float>(layer, all);
            auto const step = uly::sequence::of(2, all);
            std::size_t forward = 0, backward = 0;
            for (int r = 0; r < ranks; ++r) {
                uly::plan moves;
                moves.rebuild(uly::checked(layer), step, ranks, r, 1);
                forward += uly::forward_traffic(moves, 1).sent;
                backward += uly::backward_traffic(moves, 1, 1, false).sent;
            }
            // o of each row from the rank that computes it to the others, and dO back.
            auto const moved = static_cast<std::size_t>((ranks - 1) * 6 * 2 * 19 * 3);
            CHECK(forward == moved);
            CHECK(backward == moved);
        }
}

TEST_CASE("counting: a layer's bytes are the closed form (case 9)") {
    // Hq 32, Hkv 8, P 8: (P - 1) / P * S / P * (2 Hq + 2 Hkv) * D * b for every rank.
    uly::shape const layer{.heads = 32, .kv_heads = 8, .head_dim = 4};
    constexpr int ranks = 8;
    constexpr int64_t tokens = 64;
    auto const p = make_problem<float>(9, layer, 1, tokens);
    std::vector<recorder::record> records(ranks);
    auto const sequence = uly::sequence::split(ranks, 1, tokens);
    std::vector<std::size_t> own(ranks);
    run_ranks(ranks, [&](uly::threads::communicator c) {
        auto const me = static_cast<std::size_t>(c.rank());
        local_problem<float> local(p, sequence, c.rank());
        uly::pipeline pipeline{c,       uly::sequence_local{}, builtin_attention{},
                               p.layer, uly::no_projection{},  recorder{&records[me], ranks}};
        pipeline.attend(sequence, local.q, local.k, local.v, local.o);
        for (int r = 0; r < ranks; ++r)
            if (r != c.rank()) {
                own[me] += records[me].moved[me * ranks + static_cast<std::size_t>(r)];
                own[me] += records[me].moved[static_cast<std::size_t>(r) * ranks + me];
            }
    });
    constexpr std::size_t expected =
        (ranks - 1) * (tokens / ranks) / ranks * (2 * 32 + 2 * 8) * 4 * 4;
    for (std::size_t r = 0; r < ranks; ++r) {
        CHECK(traffic_of(records)[r] == uly::traffic{expected, expected});
        CHECK(own[r] == expected);
    }
    CHECK(uly::closed_form_elements(p.layer, 1, tokens, ranks) * 4 ==
          static_cast<int64_t>(ranks * expected));
    // Over all ranks (P - 1) / P * S * (D + Dv) * (Hq + Hkv + P - gcd(Hkv, P)): of keys always, of
    // queries where no head is cut (how many of a cut head's rows are at home depends on the token
    // order).
    for (auto const& numbers : {std::array<int64_t, 3>{8, 2, 4},
                                {16, 2, 8},
                                {6, 3, 2},
                                {6, 2, 4},
                                {12, 12, 8},
                                {3, 1, 8}}) {
        auto const heads = numbers[0], kv_heads = numbers[1], size = numbers[2];
        CAPTURE(heads);
        std::size_t sent = 0;
        int64_t keys = 0;
        for (int r = 0; r < size; ++r) {
            uly::plan moves;
            moves.rebuild(
                uly::checked({.heads = heads, .kv_heads = kv_heads, .head_dim = 5, .value_dim = 3}),
                uly::sequence::split(static_cast<int>(size), 3, 48), static_cast<int>(size), r, 1);
            sent += uly::forward_traffic(moves, 1).sent;
            for (int peer = 0; peer < size; ++peer)
                keys += peer != r ? moves.rows(peer).keys_to : 0;
        }
        auto const copies = kv_heads + size - std::gcd(kv_heads, size);
        CHECK(keys == (size - 1) * 48 / size * 3 * copies);
        if (heads % size == 0)
            CHECK(sent ==
                  static_cast<std::size_t>((size - 1) * 48 / size * 3 * 8 * (heads + copies)));
    }
}

TEST_CASE("counting: six steps, by the library's own observer") {
    for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing})
        for (int ranks : {1, 3}) {
            CAPTURE(static_cast<int>(keep));
            CAPTURE(ranks);
            six_problem<float> const p(
                1,
                {.heads = 6, .kv_heads = 2, .head_dim = 4, .mask = uly::mask::causal, .keep = keep},
                2, 10, 5);
            auto const sequence = uly::sequence::split(ranks, 2, 10);
            std::vector<uly::counting_observer> seen(static_cast<std::size_t>(ranks));
            std::vector<uly::counting_observer> seen_backward(static_cast<std::size_t>(ranks));
            std::size_t sent_forward = 0, sent_backward = 0;
            run_ranks(ranks, [&](uly::threads::communicator c) {
                auto const me = static_cast<std::size_t>(c.rank());
                uly::pipeline layer{
                    c,       uly::sequence_local{},           builtin_attention{},
                    p.layer, uly::dense{uly::builtin_gemm{}}, uly::counting_observer{c.rank()}};
                auto saved = layer.make_context();
                auto const x = own_part(sequence.queries(), c.rank(), p.x);
                tensor<float> y(x.sizes), dx(x.sizes);
                auto gradients = p.parameters;
                auto const weights = p.places().weights(p.parameters.data());
                layer.forward(sequence, saved, token_operand(x), weights, token_operand(y));
                seen[me] = layer.observer();
                layer.observer().reset();
                layer.backward(sequence, saved, token_operand(x), weights, token_operand(y),
                               token_operand(dx), p.places().gradients(gradients.data()));
                seen_backward[me] = layer.observer();
                c.fence({});
                for (int r = 0; r < ranks && c.rank() == 0; ++r) {
                    uly::plan moves;
                    moves.rebuild(p.layer, sequence, ranks, r, 1);
                    sent_forward += uly::forward_traffic(moves, 4).sent;
                    sent_backward += uly::backward_traffic(moves, 4, 4).sent;
                }
            });
            std::size_t forward = 0, backward = 0;
            for (std::size_t r = 0; r < seen.size(); ++r) {
                CHECK(seen[r].rank == static_cast<int>(r));
                forward += seen[r].bytes_sent + seen[r].bytes_received;
                backward += seen_backward[r].bytes_sent + seen_backward[r].bytes_received;
                CHECK(seen[r].fences == (ranks > 1 ? 2 : 0));
                CHECK(seen_backward[r].fences == (ranks > 1 ? 2 : 0));
                CHECK((seen[r].bytes_kept > 0) == (ranks > 1));
                std::size_t const exchanges = ranks > 1 ? 1 : 0;
                std::size_t const expected[] = {0, 1, exchanges, 1, exchanges, 1};
                for (std::size_t i = 0; i < 6; ++i) {
                    CHECK(seen[r].steps[i] == expected[i]);
                    CHECK(seen_backward[r].steps[i] == expected[i]);
                }
            }
            CHECK(forward == sent_forward);
            CHECK(backward == sent_backward);
            CHECK((forward > 0) == (ranks > 1));
        }
}

TEST_CASE(
    "counting: 100 calls that alternate splits are right and cost no extra collective (case 10)") {
    auto const p =
        make_problem<float>(10, {.heads = 3, .head_dim = 4, .mask = uly::mask::causal}, 1, 8);
    auto const right = compute_alone<builtin_attention>(p);
    std::vector<counting_ranks::counters> counted(2), before(2);
    std::vector<int> wrong(2);
    run_ranks(2, [&](uly::threads::communicator c) {
        auto const me = static_cast<std::size_t>(c.rank());
        uly::pipeline layer{counting_ranks{c, &counted[me]}, uly::sequence_local{},
                            builtin_attention{}, p.layer};
        uly::sequence const steps[] = {uly::sequence::of(1, contiguous({5, 3})),
                                       uly::sequence::of(1, contiguous({3, 5}))};
        for (int call = -1; call < 100; ++call) {
            if (call == 0) before[me] = counted[me];
            auto const& now = steps[call & 1];
            local_problem<float> local(p, now, c.rank());
            layer.attend(now, local.q, local.k, local.v, local.o);
            wrong[me] += same_bits(local.o, own_part(now.queries(), c.rank(), right.o)) ? 0 : 1;
        }
    });
    CHECK(wrong == std::vector<int>{0, 0});
    for (std::size_t r = 0; r < 2; ++r) {
        CHECK(counted[r].fences - before[r].fences == 200);
        CHECK(counted[r].windows == before[r].windows);
    }
}
