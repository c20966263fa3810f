// SPDX-License-Identifier: Apache-2.0

#include "six_steps.hpp"

#include <doctest/doctest.h>

#include <set>

using namespace pipeline_test;
namespace uly = ulysses;

namespace {

using communicator = uly::threads::communicator;

constexpr uly::keep policies[] = {uly::keep::exchanged, uly::keep::local, uly::keep::nothing};

uly::shape chunked(uly::shape layer, int64_t chunks, bool overlap) {
    layer.chunks = chunks;
    layer.overlap = overlap && chunks > 1;
    return layer;
}

/// The key-value heads whose query rows all lie on one rank, chunk by chunk.
std::vector<bool> heads_of_one_rank(problem<float> const& p, uly::sequence const& step) {
    std::vector<int> users(static_cast<std::size_t>(p.layer.kv_heads));
    for (int64_t c = 0; c < p.layer.chunks; ++c) {
        uly::plan moves;
        moves.rebuild(p.layer, step, step.ranks(), 0, builtin_attention::row_multiple(),
                      uly::head_chunk::of(p.layer, c));
        for (int r = 0; r < step.ranks(); ++r) {
            std::set<int64_t> here;
            for (auto const& item : moves.items(r))
                for (auto g = item.kv_begin; g < item.kv_end; ++g) here.insert(g);
            for (auto const g : here) ++users[static_cast<std::size_t>(g)];
        }
    }
    std::vector<bool> result;
    for (auto const count : users) result.push_back(count == 1);
    return result;
}

bool same_bits_of_heads(tensor<float> const& a, tensor<float> const& b,
                        std::vector<bool> const& heads) {
    auto const& e = a.sizes;
    for (int64_t i = 0; i < e[0]; ++i)
        for (int64_t s = 0; s < e[1]; ++s)
            for (int64_t h = 0; h < e[2]; ++h)
                if (heads[static_cast<std::size_t>(h)] &&
                    std::memcmp(&a(i, s, h, 0), &b(i, s, h, 0),
                                static_cast<std::size_t>(e[3]) * sizeof(float)) != 0)
                    return false;
    return true;
}

problem<float> random_problem(std::uint64_t seed, std::mt19937_64& random) {
    auto const kv_heads = 1 + below(random, 7);
    auto const tokens = 1 + below(random, below(random, 6) == 0 ? 300 : 40);
    uly::shape layer{.heads = kv_heads * (1 + below(random, 3)),
                     .kv_heads = kv_heads,
                     .head_dim = 1 + below(random, 20),
                     .value_dim = 1 + below(random, 20),
                     .mask = below(random, 3) == 0 ? uly::mask::full : uly::mask::causal,
                     .assignment = below(random, 6) == 0 ? uly::assignment::whole_heads
                                                         : uly::assignment::balanced,
                     .keep = policies[seed % 3]};
    auto const cross = layer.mask == uly::mask::full && below(random, 2) == 0;
    if (below(random, 3) == 0) layer.window = {below(random, tokens), below(random, 3)};
    auto p = make_problem<float>(seed, layer, 1 + below(random, 2), tokens,
                                 cross ? 1 + below(random, 40) : tokens);
    if (!cross && below(random, 3) == 0) p.documents = {0, tokens / 2 + 1};
    return p;
}

}  // namespace

TEST_CASE("case 11: in chunks, overlapped or not, outputs and gradients have the same bits") {
    constexpr std::uint64_t first_seed = 1, shapes = 48;
    MESSAGE("seeds " << first_seed << " .. " << first_seed + shapes - 1);
    for (auto seed = first_seed; seed < first_seed + shapes; ++seed) {
        CAPTURE(seed);
        std::mt19937_64 random{seed};
        auto p = random_problem(seed, random);
        auto const one = compute_alone<builtin_attention>(p);
        auto const exact = compute_alone<uly::reference_attention>(converted<double>(p));
        auto const bound = bounds_of(p, 8);
        auto const ranks = 1 + static_cast<int>((seed / 3) % 8);
        auto const queries = random_orders(random, p.tokens, ranks);
        auto const keys = p.keys != p.tokens ? random_orders(random, p.keys, ranks) : orders{};
        auto const all = p.layer.kv_heads;
        for (auto const chunks : std::set<int64_t>{1, 1 + below(random, all), all}) {
            p.layer = chunked(p.layer, chunks, false);
            CAPTURE(p.text());
            CAPTURE(chunks);
            CAPTURE(ranks);
            auto const in_turn = compute<builtin_attention>(p, queries, keys);
            CHECK(same_bits(in_turn.o, one.o));
            CHECK(same_bits(in_turn.dq, one.dq));
            if (p.layer.keep != uly::keep::nothing) CHECK(same_bits(in_turn.lse, one.lse));
            auto const whole = heads_of_one_rank(p, p.step(queries, keys));
            CHECK(same_bits_of_heads(in_turn.dk, one.dk, whole));
            CHECK(same_bits_of_heads(in_turn.dv, one.dv, whole));
            CHECK(largest_difference(in_turn.dk, exact.dk) <= bound.dk);
            CHECK(largest_difference(in_turn.dv, exact.dv) <= bound.dv);
            p.layer = chunked(p.layer, chunks, true);
            for (auto const way : {reach::all, reach::none, reach::some})
                CHECK(same_bits(compute<builtin_attention>(p, queries, keys, {}, way), in_turn));
        }
    }
}

TEST_CASE("case 11: the six steps in chunks have the same bits") {
    for (auto const policy : policies)
        for (int ranks : {1, 2, 3}) {
            CAPTURE(static_cast<int>(policy));
            CAPTURE(ranks);
            // One key-value head a rank and chunk at 2 ranks: no sum changes.
            six_problem<double> p(1, {.heads = 8, .kv_heads = 4, .head_dim = 4, .value_dim = 3}, 2,
                                  11, 5);
            p.layer.keep = policy;
            auto const order = zigzag(11, ranks);
            auto const whole = six_steps(p, order);
            for (bool const overlap : {false, true}) {
                p.layer = chunked(p.layer, 2, overlap);
                auto const seen = six_steps(p, order);
                CHECK(same_bits(seen.y, whole.y));
                if (ranks < 3) {
                    CHECK(same_bits(seen.dx, whole.dx));
                    CHECK(seen.gradients == whole.gradients);
                } else {
                    CHECK(largest_difference(seen.dx, whole.dx) < 1e-13);
                }
            }
        }
}

TEST_CASE("chunks: where nothing is exchanged there is one, with the same bits") {
    auto p = make_problem<double>(
        1, {.heads = 6, .kv_heads = 3, .head_dim = 4, .assignment = uly::assignment::whole_heads},
        1, 9);
    auto const right = compute_alone<uly::reference_attention>(p);
    p.layer.chunks = 3;
    CHECK(same_bits(compute_alone<uly::reference_attention>(p), right));
    uly::pipeline alone{uly::serial{}, uly::sequence_local{}, uly::reference_attention{}, p.layer};
    CHECK(alone.chunks(uly::sequence::split(1, 1, 9)) == 1);
    CHECK(alone.chunks(uly::sequence::of(1, orders{{{4, 5}, {0, 4}}})) == 3);
    run_ranks(3, [&](communicator c) {
        uly::pipeline heads{c, uly::head_local{}, uly::reference_attention{}, p.layer};
        CHECK(heads.chunks(uly::sequence::split(3, 1, 9)) == 1);
    });
}

namespace {

/// Throws when it is given a query head, by its global index, on one rank.
struct failing_attention : uly::reference_attention {
    int64_t head = -1;
    bool in_backward = false;

    template <class... Views>
    void forward(uly::attention_call const& call, uly::head_view<double const> q,
                 Views const&... others) const {
        if (!in_backward) fail_at(call, q.heads());
        uly::reference_attention::forward(call, q, others...);
    }
    void backward(uly::attention_call const& call,
                  uly::attention_backward_views<double> const& views) const {
        if (in_backward) fail_at(call, views.q.heads());
        uly::reference_attention::backward(call, views);
    }
    void fail_at(uly::attention_call const& call, int64_t heads) const {
        if (call.query_head <= head && head < call.query_head + heads)
            uly::throw_error(uly::errc::functor_failed, uly::concat("refused head ", head));
    }
};

}  // namespace

TEST_CASE("chunks: an error in any chunk is the same on every rank, and the group goes on") {
    for (auto const policy : policies)
        for (bool const overlap : {false, true})
            for (bool const in_backward : {false, true})
                for (int64_t head = 0; head < 6; ++head) {
                    CAPTURE(static_cast<int>(policy));
                    CAPTURE(overlap);
                    CAPTURE(in_backward);
                    CAPTURE(head);
                    auto const p = make_problem<double>(
                        1, chunked({.heads = 6, .head_dim = 3, .keep = policy}, 3, overlap), 1, 9);
                    auto const right = compute<uly::reference_attention>(p, equal_shares(9, 2));
                    results<double> whole(p);
                    std::vector<outcome> seen(2);
                    run_ranks(2, [&](communicator c) {
                        auto const step = uly::sequence::split(2, 1, 9);
                        local_problem<double> local(p, step, c.rank());
                        uly::pipeline failing{c, uly::sequence_local{},
                                              failing_attention{{}, head, in_backward}, p.layer};
                        uly::pipeline layer{c, uly::sequence_local{}, failing_attention{}, p.layer};
                        auto saved = layer.make_context();
                        auto const forward = [&](auto& by) {
                            by.attend(step, saved, local.q, local.k, local.v, local.o);
                        };
                        auto& mine = seen[static_cast<std::size_t>(c.rank())];
                        if (in_backward) {
                            forward(layer);
                            mine =
                                outcome_of([&] { attend_backward(failing, step, saved, local); });
                        } else {
                            mine = outcome_of([&] { forward(failing); });
                            forward(layer);
                        }
                        CHECK(saved.filled());
                        attend_backward(layer, step, saved, local);
                        local.put_back_into(whole, step, c.rank());
                    });
                    // Two heads a chunk, the first of each on rank 0.
                    auto const text = uly::concat("refused head ", head, " (rank ", head % 2, ")");
                    for (auto const& each : seen) {
                        CHECK(each.code == uly::errc::functor_failed);
                        CHECK(each.text == text);
                    }
                    CHECK(same_bits(whole.o, right.o));
                    CHECK(same_bits(whole.dq, right.dq));
                    CHECK(same_bits(whole.dk, right.dk));
                    CHECK(same_bits(whole.dv, right.dv));
                }
}

TEST_CASE("chunks: what is wrong is found before the first chunk moves") {
    auto const p =
        make_problem<double>(1, {.heads = 4, .head_dim = 3, .keep = uly::keep::local}, 1, 8);
    std::vector<std::vector<outcome>> seen(2);
    run_ranks(2, [&](communicator c) {
        auto const me = static_cast<std::size_t>(c.rank());
        auto const step = uly::sequence::split(2, 1, 8);
        local_problem<double> local(p, step, c.rank());
        auto const call = [&](uly::shape const& layer, tensor<double> const& v) {
            uly::pipeline pipeline{c, uly::sequence_local{}, uly::reference_attention{}, layer};
            seen[me].push_back(
                outcome_of([&] { pipeline.attend(step, local.q, local.k, v, local.o); }));
        };
        for (bool const overlap : {false, true})
            call(chunked(p.layer, 4, overlap),
                 c.rank() == 0 ? local.v : tensor<double>({1, 4, 4, 2}));
        if (plans_may_differ) {
            call(chunked(p.layer, c.rank() == 0 ? 4 : 2, false), local.v);
            call(chunked(p.layer, 2, c.rank() == 0), local.v);
        }
        for (auto const value : local.o.memory) CHECK(std::isnan(value));
        uly::pipeline pipeline{c, uly::sequence_local{}, uly::reference_attention{},
                               chunked(p.layer, 4, true)};
        pipeline.attend(step, local.q, local.k, local.v, local.o);
        auto saved = pipeline.make_context();
        pipeline.attend(step, saved, local.q, local.k, local.v, local.o);
        CHECK(pipeline.chunks(step) == 4);
        CHECK(saved.log_sum_exp<double>(pipeline.planned(step, 3), 0).heads() == 1);
        for (int64_t const chunk : {int64_t{-1}, int64_t{4}})
            CHECK(
                outcome_of([&] { static_cast<void>(pipeline.planned(step, chunk)); })
                    .text.starts_with(uly::concat(
                        "ulysses: pipeline: a chunk must be one that the step's calls run: chunk ",
                        chunk, " of 4")));
    });
    for (auto const& each : seen) {
        for (std::size_t i : {0u, 1u}) {
            CHECK(each[i].code == uly::errc::invalid_tensor);
            CHECK(each[i].text.starts_with("ulysses: attend: v: extents"));
            CHECK(each[i].rank == 1);
        }
        if (!plans_may_differ) continue;
        CHECK(each[2].text == "ulysses: fence: every rank must pass the same chunks: rank 0 has 4, "
                              "rank 1 has 2");
        CHECK(each[3].text ==
              "ulysses: fence: every rank must pass the same overlap: rank 0 has 1, "
              "rank 1 has 0");
    }
}

namespace {

/// Bytes by (from, to), and fences.
struct recorder {
    struct record {
        std::vector<std::size_t> moved;
        int fences = 0, open = 0, most_open = 0;
    };
    record* seen;
    int ranks;
    void begin(uly::step_id) const noexcept {
        seen->most_open = std::max(seen->most_open, ++seen->open);
    }
    void end(uly::step_id) const noexcept { --seen->open; }
    void moved(int from, int to, std::size_t bytes) const noexcept {
        seen->moved.resize(static_cast<std::size_t>(ranks * ranks));
        seen->moved[static_cast<std::size_t>(from * ranks + to)] += bytes;
    }
    void fence() const noexcept { ++seen->fences; }
};

/// What leaves each rank.
std::vector<std::size_t> sent_of(std::vector<recorder::record> const& records) {
    auto const ranks = records.size();
    std::vector<std::size_t> sent(ranks);
    for (auto const& record : records)
        for (std::size_t from = 0; from < ranks; ++from)
            for (std::size_t to = 0; to < ranks; ++to)
                if (from != to) sent[from] += record.moved[from * ranks + to];
    return sent;
}

}  // namespace

TEST_CASE(
    "chunks: observers see the bytes of all plans, and the fences: two a chunk, or one and one "
    "more where they overlap") {
    constexpr int ranks = 3;
    for (auto const policy : policies)
        for (bool const overlap : {false, true}) {
            CAPTURE(static_cast<int>(policy));
            CAPTURE(overlap);
            auto const p = make_problem<double>(
                1,
                chunked({.heads = 10, .kv_heads = 5, .head_dim = 4, .value_dim = 3, .keep = policy},
                        3, overlap),
                2, 19);
            std::vector<recorder::record> forward(ranks), backward(ranks);
            std::vector<std::size_t> forward_sent(ranks), backward_sent(ranks);
            run_ranks(ranks, [&](communicator c) {
                auto const me = static_cast<std::size_t>(c.rank());
                recorder::record record;
                uly::pipeline layer{c,       uly::sequence_local{}, uly::reference_attention{},
                                    p.layer, uly::no_projection{},  recorder{&record, ranks}};
                auto const step = p.step(zigzag(19, ranks));
                auto saved = layer.make_context();
                local_problem<double> local(p, step, c.rank());
                layer.attend(step, saved, local.q, local.k, local.v, local.o);
                forward[me] = std::exchange(record, {});
                attend_backward(layer, step, saved, local);
                backward[me] = record;
                for (int64_t chunk = 0; chunk < 3; ++chunk) {
                    auto const& moves = layer.planned(step, chunk);
                    forward_sent[me] += uly::forward_traffic(moves, 8).sent;
                    backward_sent[me] += uly::backward_traffic(moves, 8, 8, false).sent;
                }
            });
            CHECK(sent_of(forward) == forward_sent);
            CHECK(sent_of(backward) == backward_sent);
            for (auto const* pass : {&forward, &backward})
                for (auto const& each : *pass) {
                    CHECK(each.fences == (overlap ? 4 : 6));
                    CHECK(each.open == 0);
                    CHECK(each.most_open == 1);
                }
        }
}

TEST_CASE("chunks: calls of layers with and without them follow each other over one group") {
    constexpr int ranks = 4;
    std::vector<problem<double>> problems;
    std::vector<results<double>> right, whole;
    for (std::uint64_t i = 0; i < 5; ++i) {
        uly::shape const layer{.heads = 8, .kv_heads = 4, .head_dim = i == 3 ? 9 : 4};
        int64_t const chunks[] = {4, 1, 4, 2, 3};
        problems.push_back(
            make_problem<double>(i, chunked(layer, chunks[i], i % 2 == 0), 1, i == 1 ? 30 : 17));
        problems.back().layer.keep = policies[i % 3];
        right.push_back(compute<uly::reference_attention>(
            problems.back(), equal_shares(problems.back().tokens, ranks)));
        whole.emplace_back(problems.back());
    }
    run_ranks(ranks, [&](communicator c) {
        for (int round = 0; round < 3; ++round)
            for (std::size_t i = 0; i < problems.size(); ++i) {
                auto const step = problems[i].step(equal_shares(problems[i].tokens, ranks));
                uly::pipeline layer{c, uly::sequence_local{}, uly::reference_attention{},
                                    problems[i].layer};
                auto saved = layer.make_context();
                local_problem<double> local(problems[i], step, c.rank());
                // One after the other, each at once upon the last.
                for (int call = 0; call < 3; ++call) {
                    layer.attend(step, local.q, local.k, local.v, local.o);
                    layer.attend(step, saved, local.q, local.k, local.v, local.o);
                    attend_backward(layer, step, saved, local);
                }
                local.put_back_into(whole[i], step, c.rank());
            }
    });
    for (std::size_t i = 0; i < problems.size(); ++i) {
        CAPTURE(i);
        CHECK(same_bits(whole[i].o, right[i].o));
        CHECK(same_bits(whole[i].dq, right[i].dq));
        CHECK(same_bits(whole[i].dk, right[i].dk));
        CHECK(same_bits(whole[i].dv, right[i].dv));
    }
}

namespace {

/// Host memory that counts what is allocated in it and not given back.
struct counted_space : uly::host_space {
    static inline std::size_t bytes = 0;
    static void* allocate(queue on, std::size_t wanted) {
        bytes += wanted;
        return uly::host_space::allocate(on, wanted);
    }
    static void deallocate(queue on, void* memory, std::size_t given) {
        bytes -= given;
        uly::host_space::deallocate(on, memory, given);
    }
};

/// One rank, whose windows are counted too.
struct counted_rank : uly::serial {
    using space_type = counted_space;
    window_type make_window(std::size_t bytes) const {
        counted_space::bytes += bytes;
        return uly::serial::make_window(bytes);
    }
    window_type shared_window(uly::arena which, std::size_t bytes) const {
        auto const before = shared_window_bytes(which);
        auto window = uly::serial::shared_window(which, bytes);
        counted_space::bytes += shared_window_bytes(which) - before;
        return window;
    }
};

/// Half of the tokens before the other: one rank must exchange.
uly::sequence turned(int64_t tokens) {
    return uly::sequence::of(1, orders{{{tokens / 2, tokens - tokens / 2}, {0, tokens / 2}}});
}

/// Bytes that one rank has allocated after calls of all kinds, contexts not counted.
template <class T>
std::size_t allocated(uly::shape const& layer, int64_t tokens) {
    auto const p = converted<T>(make_problem<float>(1, layer, 1, tokens));
    auto const step = turned(tokens);
    local_problem<T> local(p, step, 0);
    auto const before = counted_space::bytes;
    uly::pipeline pipeline{counted_rank{}, uly::sequence_local{}, builtin_attention{}, layer};
    auto saved = pipeline.make_context();
    pipeline.attend(step, local.q, local.k, local.v, local.o);
    pipeline.attend(step, saved, local.q, local.k, local.v, local.o);
    attend_backward(pipeline, step, saved, local);
    auto const used = counted_space::bytes - before - saved.bytes();
    CHECK(pipeline.workspace_bytes(step, uly::dtype_of<T>) == used);
    return used;
}

}  // namespace

TEST_CASE("chunks: 8 take at most 0.15 of one's workspace, as reported and as allocated") {
    for (int64_t const kv_heads : {32, 8})
        for (auto const policy : {uly::keep::local, uly::keep::nothing}) {
            // A narrow window: what attention takes, not what is exchanged.
            uly::shape layer{.heads = 32,
                             .kv_heads = kv_heads,
                             .head_dim = 64,
                             .window = {4, 0},
                             .keep = policy};
            auto const ratio = [&](auto const& bytes_of) {
                auto const one = bytes_of(chunked(layer, 1, false));
                auto const eight = bytes_of(chunked(layer, 8, false));
                CHECK(bytes_of(chunked(layer, 8, true)) > eight);
                CHECK(eight * 8 >= one);
                return static_cast<double>(eight) / static_cast<double>(one);
            };
            auto const reported = [&](uly::shape const& with) {
                uly::pipeline pipeline{uly::serial{}, uly::sequence_local{}, builtin_attention{},
                                       with};
                return pipeline.workspace_bytes(turned(16384));
            };
            CHECK(ratio(reported) <= 0.15);
            // Calls over one rank, long ones: nothing for the thread sanitizer.
            constexpr int64_t tokens = TEST_UNDER_SANITIZER ? 1024 : 2048;
            if (policy == uly::keep::local && !TEST_UNDER_THREAD_SANITIZER)
                CHECK(ratio([](uly::shape const& with) {
                          return allocated<float>(with, tokens);
                      }) <= 0.15);
        }
}

TEST_CASE("chunks: the workspace that is reported is the one that is used") {
    for (auto const policy : policies) {
        allocated<float>({.heads = 6, .kv_heads = 3, .head_dim = 5, .keep = policy, .chunks = 2},
                         40);
        allocated<uly::bf16>({.heads = 6, .kv_heads = 3, .head_dim = 5, .keep = policy}, 40);
    }
    uly::pipeline floats{uly::serial{}, uly::sequence_local{}, failing_attention{},
                         uly::shape{.heads = 2, .head_dim = 4}};
    CHECK_THROWS_AS(static_cast<void>(floats.workspace_bytes(turned(8), uly::dtype::none)),
                    uly::unsupported);
    // With messages, projections and where nothing is exchanged, by what each holds itself.
    for (auto const policy : policies)
        for (int ranks : {1, 3})
            for (int64_t const chunks : {1, 2}) {
                // Of 10 tokens those that every rank holds; their o and dO alone move.
                auto const replicated = chunks == 1 && ranks == 3 ? 4 : 0;
                CAPTURE(static_cast<int>(policy));
                CAPTURE(ranks);
                CAPTURE(chunks);
                six_problem<float> const six(1, {.heads = 6, .kv_heads = 2, .head_dim = 4}, 2, 10,
                                             5);
                auto const shape = [&] {
                    auto layer = chunked(six.layer, chunks, policy != uly::keep::local);
                    layer.keep = policy;
                    return layer;
                }();
                auto const p = make_problem<float>(1, shape, 2, 10);
                auto const step = uly::sequence::of(2, replicated_front(replicated, 10, ranks));
                for (bool const whole : {false, true})
                    run_ranks(ranks, [&](communicator c) {
                        auto const held = [&](auto& layer, auto const& calls) {
                            calls(layer);
                            auto const used = layer.scratch_bytes() +
                                              c.shared_window_bytes(uly::arena::inbox) +
                                              c.shared_window_bytes(uly::arena::outbox);
                            CHECK(layer.workspace_bytes(step) == used);
                            auto const line =
                                uly::concat("workspace      ", used, " bytes: inbox ");
                            CHECK(layer.describe(step).find(line) != std::string::npos);
                        };
                        if (!whole) {
                            local_problem<float> l(p, step, c.rank());
                            uly::pipeline layer{c, uly::sequence_local{}, builtin_attention{},
                                                shape};
                            held(layer, [&](auto& by) {
                                auto saved = by.make_context();
                                by.attend(step, l.q, l.k, l.v, l.o);
                                by.attend(step, saved, l.q, l.k, l.v, l.o);
                                attend_backward(by, step, saved, l);
                            });
                            return;
                        }
                        uly::pipeline layer{c, uly::sequence_local{}, builtin_attention{}, shape,
                                            uly::dense{uly::builtin_gemm{}}};
                        held(layer, [&](auto& by) {
                            auto saved = by.make_context();
                            auto const x = own_part(step.queries(), c.rank(), six.x);
                            tensor<float> y(x.sizes), dx(x.sizes);
                            auto gradients = six.parameters;
                            auto const weights = six.places().weights(six.parameters.data());
                            by.forward(step, token_operand(x), weights, token_operand(y));
                            by.forward(step, saved, token_operand(x), weights, token_operand(y));
                            by.backward(step, saved, token_operand(x), weights, token_operand(y),
                                        token_operand(dx),
                                        six.places().gradients(gradients.data()));
                        });
                    });
            }
}

TEST_CASE("chunks: describe lists the items and bytes of all") {
    run_ranks(2, [&](communicator c) {
        uly::pipeline layer{
            c, uly::sequence_local{}, builtin_attention{},
            uly::shape{.heads = 8, .kv_heads = 4, .head_dim = 8, .chunks = 2, .overlap = true}};
        if (c.rank() != 1) return;
        auto const text = layer.describe(uly::sequence::split(2, 1, 16));
        // As without chunks: q, o of four heads, k, v of two, to the tokens' other half.
        for (auto const* part :
             {"2 chunks of heads, each exchanged while another is computed", "2 work items",
              "heads 2-4 | key-value heads 1-2 | rows 0-16 | keys 0-16",
              "heads 6-8 | key-value heads 3-4 | rows 0-16 | keys 0-16",
              "bytes sent     forward 3072, backward 3072"}) {
            CAPTURE(part);
            CAPTURE(text);
            CHECK(text.find(part) != std::string::npos);
        }
    });
}
