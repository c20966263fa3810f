// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/threads.hpp>
#include <ulysses/plan/plan.hpp>
#include <ulysses/plan/traffic.hpp>

#include "cases.hpp"
#include "replicated.hpp"

#include <doctest/doctest.h>

#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace uly = ulysses;
using namespace plan_cases;
using namespace replicated_cases;

namespace {

constexpr int64_t nothing = -1;

/// Plays every move of a group whose ranks hold some tokens alike. What lies where is taken from the
/// work items alone; throws at the first row that is not there, or not once.
class replicated_player {
   public:
    void play(problem const& p) {
        layer_ = p.layer;
        step_ = p.step();
        ranks_ = p.ranks;
        batch_ = step_.batch();
        plans_.resize(at(ranks_));
        for (int r = 0; r < ranks_; ++r)
            plans_[at(r)].rebuild(layer_, step_, ranks_, r, p.row_multiple);
        expect_regions();
        check_queries();
        check_outputs();
        check_output_gradients();
        check_query_gradients();
        check_keys();
        check_key_gradients();
        check_traffic();
    }

   private:
    template <class... Parts>
    static void require(bool right, Parts const&... parts) {
        if (!right) throw std::runtime_error(uly::concat(parts...));
    }
    static int64_t id(int64_t b, int64_t token, int64_t head) {
        return (b * 4096 + token) * 4096 + head;
    }
    static int64_t token_in(int64_t row_id) { return row_id / 4096 % 4096; }
    bool everywhere(uly::token_orders const& orders, int64_t token) const {
        for (auto const& run : orders.runs(0)) {
            auto const part = run.within(token, token + 1);
            if (run.replicated && part.begin < part.end) return true;
        }
        return false;
    }

    /// `use(id, local row, region row, message row)` for every row of a block.
    template <class Use>
    void walk(uly::token_orders const& orders, int holder, int64_t heads,
              uly::plan_block const& block, Use const& use) const {
        for (int64_t b = 0; b < batch_; ++b)
            for (int64_t t = 0; t < block.tokens; ++t)
                for (int64_t h = 0; h < block.heads; ++h) {
                    auto const along = [&](auto const& s) {
                        return b * s[0] + t * s[1] + h * s[2];
                    };
                    auto const token = block.token + t, head = block.head + h;
                    use(id(b, orders.position(holder, token), head),
                        (b * orders.count(holder) + token) * heads + head,
                        block.row + along(block.row_strides),
                        block.message_row + along(block.message_strides));
                }
    }

    /// What each row of each rank's regions is, by its items.
    void expect_regions() {
        queries_in_.assign(at(ranks_), {});
        keys_in_.assign(at(ranks_), {});
        int64_t computed = 0;
        for (int r = 0; r < ranks_; ++r) {
            auto const& moves = plans_[at(r)];
            auto &queries = queries_in_[at(r)], &keys = keys_in_[at(r)];
            queries.assign(at(moves.own_query_rows()), nothing);
            keys.assign(at(moves.own_key_rows()), nothing);
            for (auto const& item : moves.items())
                for (int64_t b = 0; b < batch_; ++b) {
                    auto const& work = item.work;
                    for (int64_t h = 0; h < work.heads(); ++h)
                        for (int64_t i = 0; i < work.rows(); ++i, ++computed)
                            queries[at(item.query_row + (h * batch_ + b) * work.rows() + i)] =
                                id(b, work.row_begin + i, work.head_begin + h);
                    for (int64_t g = 0; g < work.kv_heads(); ++g)
                        for (int64_t j = 0; j < work.keys(); ++j)
                            keys[at(item.key_row + (g * batch_ + b) * moves.key_capacity() + j)] =
                                id(b, work.key_begin + j, work.kv_begin + g);
                }
        }
        require(computed == layer_.heads * batch_ * step_.queries().total(),
                "rows computed: ", computed);
    }

    /// Both ends mean the same rows of a message, which has no holes; returns its rows.
    template <class Moves>
    int64_t check_message(uly::token_orders const& orders, int64_t heads, int from, int to,
                          Moves const& moves_of) const {
        std::map<int64_t, int64_t> written, read;
        for (auto const& block : moves_of(plans_[at(from)]).blocks)
            if (block.peer == to)
                walk(orders, from, heads, block, [&](auto, auto, int64_t row, int64_t place) {
                    require(written.emplace(place, row).second, "message row twice: ", place);
                });
        for (auto const& block : moves_of(plans_[at(to)]).arrivals)
            if (block.peer == from)
                walk(orders, from, heads, block,
                     [&](auto, auto, int64_t row, int64_t place) { read.emplace(place, row); });
        require(written == read, "ranks ", from, " and ", to, " mean other rows of a message");
        if (!written.empty())
            require(written.rbegin()->first + 1 == static_cast<int64_t>(written.size()),
                    "a message between ranks ", from, " and ", to, " has holes");
        return static_cast<int64_t>(written.size());
    }

    /// Every row of every region is written once: of replicated tokens by the rank itself.
    template <class Moves>
    void check_regions(uly::token_orders const& orders, int64_t heads,
                       std::vector<std::vector<int64_t>> const& expected,
                       Moves const& moves_of) const {
        auto left = expected;
        for (int r = 0; r < ranks_; ++r)
            for (auto const& block : moves_of(plans_[at(r)]).blocks)
                walk(orders, r, heads, block, [&](int64_t what, auto, int64_t row, auto) {
                    require(left[at(block.peer)].at(at(row)) == what, "rank ", r,
                            " writes a wrong row of rank ", block.peer, ", or twice");
                    left[at(block.peer)][at(row)] = nothing;
                    require(block.peer == r || !everywhere(orders, token_in(what)), "rank ", r,
                            " sends a replicated token to rank ", block.peer);
                });
        for (auto const& region : left)
            for (auto const what : region)
                require(what == nothing, "a row was not written: token ", token_in(what));
    }

    void check_queries() const {
        auto const moves_of = [](uly::plan const& m) { return m.query_moves(); };
        check_regions(step_.queries(), layer_.heads, queries_in_, moves_of);
        for (int r = 0; r < ranks_; ++r)
            for (int to = 0; to < ranks_; ++to) {
                // A rank sends itself no message: rows of its own are not numbered as one.
                if (to == r) continue;
                auto const rows = check_message(step_.queries(), layer_.heads, r, to, moves_of);
                require(rows == plans_[at(r)].rows(to).queries_to &&
                            rows == plans_[at(to)].rows(r).queries_from,
                        "ranks ", r, " and ", to, " count ", rows, " queries otherwise");
            }
    }

    /// Each rank gets each row of its tokens once, from a rank that computed it.
    void check_outputs() const {
        auto const moves_of = [](uly::plan const& m) { return m.output_moves(); };
        std::map<int64_t, int> left;  // how often a replicated row leaves the rank that computes it
        for (int r = 0; r < ranks_; ++r) {
            std::vector<int> got(at(batch_ * step_.queries().count(r) * layer_.heads));
            for (auto const& block : moves_of(plans_[at(r)]).blocks)
                walk(step_.queries(), r, layer_.heads, block,
                     [&](int64_t what, int64_t own, int64_t row, auto) {
                         ++got[at(own)];
                         require(queries_in_[at(block.peer)].at(at(row)) == what, "rank ", r,
                                 " gets a wrong output of rank ", block.peer);
                         if (block.peer != r && everywhere(step_.queries(), token_in(what)))
                             ++left[what];
                     });
            for (auto const times : got) require(times == 1, "an output is got ", times, " times");
            for (int to = 0; to < ranks_; ++to)
                if (to != r) {
                    auto const rows = check_message(step_.queries(), layer_.heads, r, to, moves_of);
                    require(rows == plans_[at(r)].rows(to).outputs_to &&
                                rows == plans_[at(to)].rows(r).outputs_from,
                            "ranks ", r, " and ", to, " count ", rows, " outputs otherwise");
                }
        }
        for (auto const& [what, times] : left)
            require(times == ranks_ - 1, "an output leaves ", times, " times");
        if (ranks_ > 1)
            require(static_cast<int64_t>(left.size()) ==
                        batch_ * layer_.heads * step_.queries().replicated(),
                    "replicated outputs do not reach all");
    }

    /// dO of a token that one rank holds goes straight to its row; of others every rank's part lies in
    /// a slot of its own, and the slots are summed in rank order.
    void check_output_gradients() const {
        auto const& orders = step_.queries();
        auto left = queries_in_;
        std::vector<std::map<int64_t, std::pair<int, int64_t>>> slots(at(ranks_));
        for (int r = 0; r < ranks_; ++r) {
            auto const gradient = plans_[at(r)].output_gradient();
            for (auto const& block : gradient.sharded.blocks)
                walk(orders, r, layer_.heads, block, [&](int64_t what, auto, int64_t row, auto) {
                    require(left[at(block.peer)].at(at(row)) == what, "a wrong row of dO");
                    left[at(block.peer)][at(row)] = nothing;
                });
            for (auto const& block : gradient.partials.blocks)
                walk(orders, r, layer_.heads, block, [&](int64_t what, auto, int64_t row, auto) {
                    require(row >= 0 && row < plans_[at(block.peer)].slot_rows(), "no slot row ",
                            row);
                    require(slots[at(block.peer)].emplace(row, std::pair{r, what}).second,
                            "a slot's row is written twice");
                });
            for (int to = 0; to < ranks_; ++to)
                if (to != r) {
                    auto const sharded =
                        check_message(orders, layer_.heads, r, to, [](uly::plan const& m) {
                            return m.output_gradient().sharded;
                        });
                    auto const partial =
                        check_message(orders, layer_.heads, r, to, [](uly::plan const& m) {
                            return m.output_gradient().partials;
                        });
                    require(sharded + partial == plans_[at(r)].rows(to).outputs_to,
                            "dO is counted otherwise");
                }
        }
        for (int r = 0; r < ranks_; ++r) {
            auto const gradient = plans_[at(r)].output_gradient();
            require(gradient.slot_rows * ranks_ == plans_[0].slot_rows(), "slots differ");
            for (auto const& block : gradient.sums)
                walk(orders, r, layer_.heads, block,
                     [&](int64_t what, auto, int64_t row, int64_t in_slot) {
                         require(left[at(r)].at(at(row)) == what, "a wrong sum of dO");
                         left[at(r)][at(row)] = nothing;
                         for (int from = 0; from < ranks_; ++from) {
                             auto const part =
                                 slots[at(r)].extract(from * gradient.slot_rows + in_slot);
                             require(!part.empty() && part.mapped() == std::pair{from, what},
                                     "rank ", from, "'s part of dO lies elsewhere");
                         }
                     });
            require(slots[at(r)].empty(), "parts of dO are left over");
            for (auto const what : left[at(r)]) require(what == nothing, "dO does not arrive");
        }
    }

    void check_query_gradients() const {
        for (int r = 0; r < ranks_; ++r) {
            auto const& moves = plans_[at(r)];
            auto const count = step_.queries().count(r);
            std::vector<int> got(at(batch_ * count * layer_.heads));
            for (auto const& block : moves.query_moves().blocks)
                walk(step_.queries(), r, layer_.heads, block,
                     [&](auto, int64_t own, auto, auto) { ++got[at(own)]; });
            for (auto const& zeros : moves.query_zeros())
                for (int64_t b = 0; b < batch_; ++b)
                    for (int64_t t = 0; t < zeros.tokens; ++t)
                        for (int64_t h = 0; h < zeros.heads; ++h) {
                            require(zeros.sources == 0, "a zero has sources");
                            ++got[at((b * count + zeros.token + t) * layer_.heads + zeros.head +
                                     h)];
                        }
            for (auto const times : got) require(times == 1, "a dq is set ", times, " times");
        }
    }

    void check_keys() {
        auto const moves_of = [](uly::plan const& m) { return m.key_moves(); };
        check_regions(step_.keys(), layer_.kv_heads, keys_in_, moves_of);
        for (int r = 0; r < ranks_; ++r)
            for (int to = 0; to < ranks_; ++to) {
                if (to == r) continue;
                auto const rows = check_message(step_.keys(), layer_.kv_heads, r, to, moves_of);
                require(rows == plans_[at(r)].rows(to).keys_to &&
                            rows == plans_[at(to)].rows(r).keys_from,
                        "keys are counted otherwise");
            }
    }

    /// A key's gradient comes from all ranks that saw it, in rank order; a replicated key's from this
    /// rank alone, or from none.
    void check_key_gradients() const {
        for (int r = 0; r < ranks_; ++r) {
            auto const returns = plans_[at(r)].key_returns();
            auto const count = step_.keys().count(r);
            std::vector<int> got(at(batch_ * count * layer_.kv_heads));
            auto const take = [&](auto const& each, std::span<uly::plan_source const> sources) {
                for (int64_t b = 0; b < batch_; ++b)
                    for (int64_t t = 0; t < each.tokens; ++t)
                        for (int64_t h = 0; h < each.heads; ++h) {
                            auto const token = each.token + t, head = each.head + h;
                            ++got[at((b * count + token) * layer_.kv_heads + head)];
                            auto const global = step_.keys().position(r, token);
                            auto const what = id(b, global, head);
                            std::size_t next = 0;
                            for (int user = 0; user < ranks_; ++user) {
                                auto const& region = keys_in_[at(user)];
                                if (std::find(region.begin(), region.end(), what) == region.end())
                                    continue;
                                if (user != r && everywhere(step_.keys(), global)) continue;
                                require(next < sources.size() && sources[next].peer == user,
                                        "rank ", r, " misses a gradient of rank ", user);
                                auto const row = sources[next].row + b * each.row_strides[0] +
                                                 t * each.row_strides[1] + h * each.row_strides[2];
                                require(region.at(at(row)) == what, "a wrong gradient of a key");
                                ++next;
                            }
                            require(next == sources.size(), "gradients of keys nobody saw");
                        }
            };
            for (auto const& each : returns.single) {
                uly::plan_source const source{each.peer, each.row, each.message_row,
                                              each.message_strides};
                take(each, {&source, 1});
            }
            for (auto const& each : returns.sums)
                take(each, returns.sources.subspan(each.first_source, each.sources));
            for (auto const times : got) require(times == 1, "a dk is set ", times, " times");
        }
    }

    void check_traffic() const {
        std::size_t sent = 0, received = 0, back_sent = 0, back_received = 0;
        for (auto const& moves : plans_) {
            auto const forward = uly::forward_traffic(moves, 2);
            auto const backward = uly::backward_traffic(moves, 2, 4);
            sent += forward.sent, received += forward.received;
            back_sent += backward.sent, back_received += backward.received;
        }
        require(sent == received && back_sent == back_received, "bytes sent are not received");
    }

    uly::shape layer_;
    uly::sequence step_;
    int ranks_ = 0;
    int64_t batch_ = 1;
    std::vector<uly::plan> plans_;
    std::vector<std::vector<int64_t>> queries_in_, keys_in_;
};

/// A random group some of whose queries, or keys of their own, every rank holds.
problem random_replicated(std::uint64_t seed) {
    auto p = random_problem(seed);
    plan_cases::random_engine random{seed + 1};
    auto const replicate = [&](std::vector<runs>& order) {
        int64_t tokens = 0;
        for (auto const& each : order) tokens += tokens_of(each);
        auto const segments = random_segments(random, tokens);
        auto const kind = static_cast<order_kind>(below(random, order_kinds));
        auto const rest = tokens - tokens_of(segments);
        order = with_replicated(random, tokens, segments,
                                rest == 0 ? std::vector<runs>(at(p.ranks))
                                          : random_order(random, kind, p.ranks, rest));
    };
    auto const cross = !p.keys.empty();
    if (!cross || below(random, 2) == 0) replicate(p.queries);
    if (cross && below(random, 3) > 0) replicate(p.keys);
    return p;
}

std::string refusal_of(std::vector<runs> const& orders) {
    try {
        uly::sequence::of(1, orders, {}, uly::where{});
    } catch (uly::invalid_sequence const& e) {
        return e.what();
    }
    return "";
}

constexpr uly::token_run everywhere(int64_t begin, int64_t count, int64_t stride = 1) {
    return {begin, count, stride, true};
}

}  // namespace

TEST_CASE("replicated: random groups: computed once, sent once, no query or key in vain") {
    replicated_player player;
    int held_alike = 0;
    for (std::uint64_t seed = 1; seed <= how_many(2000); ++seed) {
        auto const p = random_replicated(seed);
        held_alike += p.step().queries().replicated() > 0;
        try {
            player.play(p);
        } catch (std::exception const& fault) {
            CAPTURE(seed);
            INFO(p.text());
            FAIL(fault.what());
        }
    }
    CHECK(held_alike > 50);
}

TEST_CASE("replicated: text of 5 tokens on 4 ranks with an image of 16, counted by hand") {
    std::vector<runs> const orders{{everywhere(0, 5), {5, 4}},
                                   {{9, 4}, everywhere(0, 5)},
                                   {everywhere(0, 5), {13, 4}},
                                   {everywhere(0, 5), {17, 4}}};
    auto const step = uly::sequence::of(1, orders);
    CHECK(step.queries().total() == 21);
    CHECK(step.queries().replicated() == 5);
    CHECK(step.queries().count(1) == 9);
    CHECK(step.queries().position(1, 4) == 0);
    uly::shape const layer = uly::checked({.heads = 4, .head_dim = 3, .value_dim = 5});
    for (int r = 0; r < 4; ++r) {
        uly::plan moves;
        moves.rebuild(layer, step, 4, r, 1);
        CHECK(moves.replicated_queries() == 5);
        CHECK(moves.own_query_rows() == 21);  // one head, each row once
        for (int peer = 0; peer < 4; ++peer) {
            auto const& rows = moves.rows(peer);
            CHECK(rows.queries_to == (peer == r ? 9 : 4));
            CHECK(rows.keys_to == (peer == r ? 9 : 4));
            CHECK(rows.outputs_to == 9);
            CHECK(rows.outputs_from == 9);
        }
        // q, k and v of 4 tokens, o of 9, to and from 3 peers.
        auto const each = std::size_t{3} * (4 * 3 + 4 * (3 + 5) + 9 * 5);
        CHECK(uly::forward_traffic(moves, 1) == uly::traffic{each, each});
        // dO of 9, dq, dk and dv of 4.
        auto const back = std::size_t{3} * (9 * 5 + 4 * 3 + 4 * (3 + 5));
        CHECK(uly::backward_traffic(moves, 1, 1) == uly::traffic{back, back});
    }
}

TEST_CASE("replicated: without such runs nothing is listed for them") {
    auto const step = uly::sequence::split(4, 1, 21);
    uly::plan moves;
    // Rebuilt over a plan that had some.
    std::vector<runs> const all(4, runs{everywhere(0, 21)});
    moves.rebuild(uly::checked({.heads = 4, .head_dim = 3}), uly::sequence::of(1, all), 4, 1, 1);
    CHECK(moves.slot_rows() == 4 * 21);
    CHECK(moves.query_zeros().size() > 0);
    moves.rebuild(uly::checked({.heads = 4, .head_dim = 3}), step, 4, 1, 1);
    CHECK(moves.slot_rows() == 0);
    CHECK(moves.query_zeros().empty());
    CHECK(moves.output_gradient().sums.empty());
    CHECK(moves.output_gradient().partials.blocks.empty());
    CHECK(moves.output_moves().blocks.data() == moves.query_moves().blocks.data());
    CHECK(moves.output_moves().blocks.size() == moves.query_moves().blocks.size());
    CHECK(moves.output_gradient().sharded.blocks.size() == moves.query_moves().blocks.size());
}

TEST_CASE("replicated: one rank holds its whole sequence in order, whoever else holds it") {
    uly::plan moves;
    std::vector<runs> const front{{everywhere(0, 5), {5, 16}}}, back{{{5, 16}, everywhere(0, 5)}};
    auto const layer = uly::checked({.heads = 4, .head_dim = 3});
    moves.rebuild(layer, uly::sequence::of(1, front), 1, 0, 1);
    CHECK(moves.holds_all_in_order());
    moves.rebuild(layer, uly::sequence::of(1, back), 1, 0, 1);
    CHECK(!moves.holds_all_in_order());
}

TEST_CASE("replicated: the hash tells a replicated run from a sharded one") {
    std::vector<runs> const alike{{everywhere(0, 5)}}, own{{{0, 5}}};
    CHECK(uly::sequence::of(1, alike).hash() != uly::sequence::of(1, own).hash());
}

TEST_CASE("replicated: runs that not every rank lists alike are refused, with both sides named") {
    std::string const rule = "ulysses: sequence: every rank must list each replicated run: ";
    CHECK(refusal_of({{everywhere(0, 5), {5, 2}}, {{7, 2}, everywhere(0, 5)}}) == "");
    CHECK(refusal_of(
              {{everywhere(0, 2), everywhere(2, 3)}, {everywhere(2, 3), everywhere(0, 2)}}) == "");
    CHECK(refusal_of({{everywhere(0, 5), {5, 2}}, {{7, 2}}}) ==
          rule + "rank 0 has {begin 0, count 5, stride 1}, rank 1 has no such run");
    CHECK(refusal_of({{{5, 2}}, {{7, 2}}, {everywhere(0, 5)}}) ==
          rule + "rank 0 has no such run, rank 2 has {begin 0, count 5, stride 1}");
    CHECK(refusal_of({{everywhere(0, 5)}, {everywhere(0, 4), {4, 1}}}) ==
          rule +
              "rank 0 has {begin 0, count 5, stride 1}, rank 1 has {begin 0, count 4, stride 1}");
    CHECK(refusal_of({{everywhere(0, 5)}, {{0, 5}}}) ==
          rule + "rank 0 has {begin 0, count 5, stride 1}, rank 1 has no such run");
    CHECK(refusal_of({{everywhere(0, 3, 2)}, {everywhere(0, 3, 1)}}) ==
          rule +
              "rank 0 has {begin 0, count 3, stride 2}, rank 1 has {begin 0, count 3, stride 1}");
    CHECK(
        refusal_of({{everywhere(0, 5), {4, 2}}, {everywhere(0, 5)}}) ==
        "ulysses: sequence: ranks must cover the sequence exactly once: token held twice: 4 of 7");
    CHECK(refusal_of({{everywhere(0, 3, 2), {1, 1}}, {everywhere(0, 3, 2), {3, 1}}}) == "");
    CHECK(
        refusal_of({{everywhere(0, 3, 2), {1, 1}}, {everywhere(0, 3, 2), {2, 1}}}) ==
        "ulysses: sequence: ranks must cover the sequence exactly once: token held twice: 2 of 5");
    CHECK(
        refusal_of({{everywhere(0, 2), everywhere(0, 2)}, {everywhere(0, 2), everywhere(0, 2)}}) ==
        "ulysses: sequence: ranks must cover the sequence exactly once: token held twice: 0 of 4");
}

TEST_CASE("replicated: agree by a number, or by orders, on threads") {
    uly::threads::run(3, [](uly::threads::communicator group) {
        auto const me = group.rank();
        auto const front = uly::sequence::agree(group, {.tokens = 5 + me, .replicated = 5});
        std::vector<runs> const orders{
            {everywhere(0, 5)}, {everywhere(0, 5), {5, 1}}, {everywhere(0, 5), {6, 2}}};
        if (front.hash() != uly::sequence::of(1, orders).hash())
            throw std::runtime_error("another step");
        auto const keys =
            uly::sequence::agree(group, {.tokens = 4, .keys = 7 + me, .replicated_keys = 7});
        std::vector<runs> const queries{{{0, 4}}, {{4, 4}}, {{8, 4}}},
            all_keys{{everywhere(0, 7)}, {everywhere(0, 7), {7, 1}}, {everywhere(0, 7), {8, 2}}};
        if (keys.hash() != uly::sequence::of(1, queries, all_keys).hash() ||
            keys.keys().total() != 10)
            throw std::runtime_error("another step with keys");
        // More runs than the first collective call carries.
        runs many{everywhere(0, 1)};
        for (int64_t i = 0; i < 5; ++i) many.push_back({1 + me + 3 * i, 1});
        auto const scattered = uly::sequence::agree(group, {.tokens = 6, .order = many});
        if (scattered.queries().total() != 16 || scattered.queries().replicated() != 1)
            throw std::runtime_error("another scattered step");
    });
}

TEST_CASE("replicated: what does not fit is the same error on every rank") {
    auto const refused = [](auto const& options_of) {
        std::vector<std::string> texts(2);
        uly::threads::run(2, [&](uly::threads::communicator group) {
            try {
                uly::sequence::agree(group, options_of(group.rank()), uly::where{});
            } catch (uly::error const& e) {
                texts[at(group.rank())] = e.what();
            }
        });
        CHECK(texts[0] == texts[1]);
        return texts[1];
    };
    using options = uly::sequence_options;
    CHECK(refused([](int r) { return options{.tokens = 9, .replicated = 4 + r}; }) ==
          "ulysses: sequence: the number of replicated tokens must be equal on every rank: rank 0 "
          "has 4, rank 1 has 5");
    CHECK(refused([](int r) { return options{.tokens = 9 - 5 * r, .replicated = 6}; }) ==
          "ulysses: sequence: replicated tokens are among those of each rank: rank 1 has 4 tokens, "
          "6 of them replicated");
    CHECK(refused([](int) { return options{.tokens = 9, .replicated = -1}; }) ==
          "ulysses: sequence: replicated tokens are among those of each rank: rank 0 has 9 tokens, "
          "-1 of them replicated");
    CHECK(refused([](int) { return options{.tokens = 9, .replicated_keys = 2}; }) ==
          "ulysses: sequence: replicated tokens are among those of each rank: rank 0 has 0 keys, 2 "
          "of them replicated");
    static constexpr uly::token_run own{5, 4};
    CHECK(
        refused([](int r) {
            options mine{.tokens = 9, .replicated = 5};
            if (r == 1) mine.order = {&own, 1};
            return mine;
        }) ==
        "ulysses: sequence: replicated tokens come from a number or from an order, not from both: "
        "5 replicated tokens, rank 1 has an order of 1 runs");
    static constexpr uly::token_run orders[2][2] = {{{0, 2, 1, true}, {2, 2}}, {{4, 2}, {}}};
    CHECK(refused([](int r) { return options{.tokens = r == 0 ? 4 : 2, .order = orders[r]}; }) ==
          "ulysses: sequence: every rank must list each replicated run: rank 0 has {begin 0, count "
          "2, stride 1}, rank 1 has no such run");
    // Positions of one and the same token.
    static constexpr int64_t positions[2][3] = {{0, 1, 2}, {0, 7, 3}};
    CHECK(refused([](int r) {
              return options{.tokens = 3, .replicated = 2, .positions = positions[r]};
          }) ==
          "ulysses: sequence: positions of replicated tokens must be equal on every rank: token 1 "
          "of sample 0: rank 0 has 1, rank 1 has 7");
}
