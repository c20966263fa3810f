// SPDX-License-Identifier: Apache-2.0

#include <ulysses/plan/plan.hpp>
#include <ulysses/plan/traffic.hpp>

#include "cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

namespace uly = ulysses;
using namespace plan_cases;

namespace {

/// What lies in a rank's region after all ranks have moved: for each row the identity of the token
/// and head that was written there, or -1.
using region_contents = std::vector<int64_t>;

/// Checks all plans of one group against what the words of the design say, by playing every move.
/// One object serves many problems, so that plans are rebuilt in place over whatever was there.
class plan_player {
   public:
    /// The first rule that is broken, or "".
    std::string fault_of(problem const& p) {
        auto const step = p.step();
        p_ = &p;
        step_ = &step;
        ranks_ = p.ranks;
        queries_ = step.queries().total();
        keys_ = step.keys().total();
        if (plans_.size() < at(ranks_)) plans_.resize(at(ranks_));
        for (int r = 0; r < ranks_; ++r)
            plans_[at(r)].rebuild(p.layer, step, ranks_, r, p.row_multiple);
        fault_.clear();
        alike() && queries_arrive() && keys_arrive() && messages_arrive() && gradients_return() &&
            rows_match() && bytes_match();
        return fault_;
    }

   private:
    template <class... Parts>
    bool broken(Parts const&... parts) {
        fault_ = uly::concat(parts...);
        return false;
    }

    int64_t batch() const { return p_->batch; }
    int64_t query_id(int64_t b, int64_t row, int64_t head) const {
        return (b * queries_ + row) * p_->layer.heads + head;
    }
    int64_t key_id(int64_t b, int64_t key, int64_t head) const {
        return (b * keys_ + key) * p_->layer.kv_heads + head;
    }

    /// Every rank has the same picture of the group.
    bool alike() {
        auto const& first = plans_[0];
        for (int r = 0; r < ranks_; ++r) {
            auto const& mine = plans_[at(r)];
            if (mine.rank() != r || mine.ranks() != ranks_ || mine.batch() != batch())
                return broken("rank ", r, " is another's");
            if (mine.query_region_rows() != first.query_region_rows() ||
                mine.key_region_rows() != first.key_region_rows() ||
                mine.key_capacity() != first.key_capacity() || mine.hash() != first.hash())
                return broken("regions or hash of rank ", r, " differ from rank 0's");
            if (mine.own_query_rows() > mine.query_region_rows() ||
                mine.own_key_rows() > mine.key_region_rows())
                return broken("rank ", r, " needs more rows than a region has");
            if (mine.own_queries() != step_->queries().count(r) ||
                mine.own_keys() != step_->keys().count(r))
                return broken("rank ", r, " miscounts its tokens");
            for (int peer = 0; peer < ranks_; ++peer) {
                auto const& theirs = plans_[at(peer)].items();
                auto const& seen = mine.items(peer);
                if (theirs.size() != seen.size())
                    return broken("rank ", r, " miscounts items of rank ", peer);
                for (std::size_t i = 0; i < seen.size(); ++i)
                    if (!(theirs[i].work == seen[i]))
                        return broken("rank ", r, " sees another item of rank ", peer);
            }
        }
        return true;
    }

    /// Writes the identities of all ranks' tokens to where `blocks` say.
    template <class Blocks, class Id>
    bool play(char const* what, uly::token_orders const& orders, int64_t heads,
              Blocks const& blocks_of, Id const& id_of, std::vector<region_contents>& regions,
              std::vector<int64_t> const& sizes) {
        if (regions.size() < at(ranks_)) regions.resize(at(ranks_));
        for (int r = 0; r < ranks_; ++r) regions[at(r)].assign(at(sizes[at(r)]), -1);
        for (int r = 0; r < ranks_; ++r) {
            positions_of(orders, r);
            for (auto const& block : blocks_of(plans_[at(r)])) {
                if (block.tokens < 1 || block.heads < 1 || block.token < 0 || block.head < 0 ||
                    block.token + block.tokens > orders.count(r) ||
                    block.head + block.heads > heads)
                    return broken("rank ", r, " has a ", what, " block outside its operand");
                auto& region = regions[at(block.peer)];
                for (int64_t b = 0; b < batch(); ++b)
                    for (int64_t t = 0; t < block.tokens; ++t)
                        for (int64_t h = 0; h < block.heads; ++h) {
                            auto const row = block.row + b * block.row_strides[0] +
                                             t * block.row_strides[1] + h * block.row_strides[2];
                            if (row < 0 || row >= static_cast<int64_t>(region.size()))
                                return broken("rank ", r, " writes ", what, " row ", row,
                                              " of rank ", block.peer, ", which has ",
                                              region.size());
                            if (region[at(row)] != -1)
                                return broken(what, " row ", row, " of rank ", block.peer,
                                              " is written twice");
                            region[at(row)] =
                                id_of(b, positions_[at(block.token + t)], block.head + h);
                        }
            }
        }
        return true;
    }

    void positions_of(uly::token_orders const& orders, int rank) {
        positions_.clear();
        for (auto const& run : orders.runs(rank))
            for (int64_t i = 0; i < run.count; ++i)
                positions_.push_back(run.begin + i * run.stride);
    }

    /// Each (token, head) lies once in the region of exactly the rank whose item computes it, where
    /// that item expects it.
    bool queries_arrive() {
        sizes_.clear();
        for (int r = 0; r < ranks_; ++r) sizes_.push_back(plans_[at(r)].own_query_rows());
        if (!play(
                "query", step_->queries(), p_->layer.heads,
                [](uly::plan const& m) { return m.query_moves().blocks; },
                [&](auto... x) { return query_id(x...); }, query_regions_, sizes_))
            return false;
        int64_t arrived = 0;
        for (int r = 0; r < ranks_; ++r) {
            auto const& region = query_regions_[at(r)];
            arrived += static_cast<int64_t>(region.size());
            for (auto const& item : plans_[at(r)].items()) {
                auto const& work = item.work;
                for (int64_t h = 0; h < work.heads(); ++h)
                    for (int64_t b = 0; b < batch(); ++b)
                        for (int64_t i = 0; i < work.rows(); ++i) {
                            auto const row = item.query_row + (h * batch() + b) * work.rows() + i;
                            if (row >= static_cast<int64_t>(region.size()) ||
                                region[at(row)] !=
                                    query_id(b, work.row_begin + i, work.head_begin + h))
                                return broken("rank ", r, " misses query row ", work.row_begin + i,
                                              " of head ", work.head_begin + h);
                        }
            }
        }
        return arrived == batch() * queries_ * p_->layer.heads ||
               broken(arrived, " query rows arrive");
    }

    /// Each (key, head) lies once in the region of exactly the ranks whose items see it.
    bool keys_arrive() {
        sizes_.clear();
        for (int r = 0; r < ranks_; ++r) sizes_.push_back(plans_[at(r)].own_key_rows());
        if (!play(
                "key", step_->keys(), p_->layer.kv_heads,
                [](uly::plan const& m) { return m.key_moves().blocks; },
                [&](auto... x) { return key_id(x...); }, key_regions_, sizes_))
            return false;
        keys_used_.assign(at(ranks_), 0);
        if (row_of_key_.size() < at(ranks_)) row_of_key_.resize(at(ranks_));
        auto const capacity = plans_[0].key_capacity();
        for (int r = 0; r < ranks_; ++r) {
            auto const& region = key_regions_[at(r)];
            auto& row_of_key = row_of_key_[at(r)];
            row_of_key.assign(at(batch() * keys_ * p_->layer.kv_heads), -1);
            for (auto const& item : plans_[at(r)].items()) {
                auto const& work = item.work;
                for (int64_t g = 0; g < work.kv_heads(); ++g)
                    for (int64_t b = 0; b < batch(); ++b)
                        for (int64_t j = 0; j < work.keys(); ++j) {
                            auto const row = item.key_row + (g * batch() + b) * capacity + j;
                            auto const id = key_id(b, work.key_begin + j, work.kv_begin + g);
                            if (row >= static_cast<int64_t>(region.size()) || region[at(row)] != id)
                                return broken("rank ", r, " misses key ", work.key_begin + j,
                                              " of head ", work.kv_begin + g);
                            keys_used_[at(r)] += row_of_key[at(id)] == -1;
                            row_of_key[at(id)] = row;
                        }
            }
            int64_t written = 0;
            for (auto const id : region) written += id != -1;
            if (written != keys_used_[at(r)])
                return broken("rank ", r, " is sent ", written, " key rows and uses ",
                              keys_used_[at(r)]);
        }
        return true;
    }

    /// Packs every region's rows by one rank's arrivals into messages, and compares them with what the
    /// rank they are of expects: both ends must mean the same places.
    bool messages_arrive() {
        return messages_agree(
                   "query", step_->queries(), query_regions_,
                   [](uly::plan const& m) { return m.query_moves(); },
                   [&](auto... x) { return query_id(x...); }, query_messages_) &&
               messages_agree(
                   "key", step_->keys(), key_regions_,
                   [](uly::plan const& m) { return m.key_moves(); },
                   [&](auto... x) { return key_id(x...); }, key_messages_);
    }

    template <class Moves, class Id>
    bool messages_agree(char const* what, uly::token_orders const& orders,
                        std::vector<region_contents> const& regions, Moves const& moves_of,
                        Id const& id_of, std::vector<region_contents>& messages) {
        messages.resize(at(ranks_ * ranks_));
        auto const rows_of = [&](auto const& block, auto const& use) {
            for (int64_t b = 0; b < batch(); ++b)
                for (int64_t t = 0; t < block.tokens; ++t)
                    for (int64_t h = 0; h < block.heads; ++h)
                        use(b, t, h,
                            block.row + b * block.row_strides[0] + t * block.row_strides[1] +
                                h * block.row_strides[2],
                            block.message_row + b * block.message_strides[0] +
                                t * block.message_strides[1] + h * block.message_strides[2]);
        };
        for (int r = 0; r < ranks_; ++r) {
            for (int peer = 0; peer < ranks_; ++peer) messages[at(r * ranks_ + peer)].clear();
            for (auto const& block : moves_of(plans_[at(r)]).arrivals) {
                auto& message = messages[at(r * ranks_ + block.peer)];
                rows_of(block, [&](auto, auto, auto, int64_t row, int64_t place) {
                    if (place < 0) place = int64_t{1} << 30;
                    if (message.size() <= at(place)) message.resize(at(place) + 1, -1);
                    if (message[at(place)] == -1) message[at(place)] = regions[at(r)][at(row)];
                });
            }
        }
        for (int r = 0; r < ranks_; ++r) {
            positions_of(orders, r);
            taken_.assign(at(ranks_), 0);
            std::string fault;
            for (auto const& block : moves_of(plans_[at(r)]).blocks) {
                auto const& message = messages[at(block.peer * ranks_ + r)];
                rows_of(block, [&](int64_t b, int64_t t, int64_t h, auto, int64_t place) {
                    ++taken_[at(block.peer)];
                    if (place < 0 || place >= static_cast<int64_t>(message.size()) ||
                        message[at(place)] !=
                            id_of(b, positions_[at(block.token + t)], block.head + h))
                        fault = uly::concat("ranks ", r, " and ", block.peer,
                                            " mean different rows of a ", what, " message");
                });
            }
            if (!fault.empty()) return broken(fault);
            for (int peer = 0; peer < ranks_; ++peer) {
                auto const& message = messages[at(peer * ranks_ + r)];
                auto const holes = std::count(message.begin(), message.end(), -1);
                if (holes != 0 || static_cast<int64_t>(message.size()) != taken_[at(peer)])
                    return broken("a ", what, " message between ranks ", r, " and ", peer, " has ",
                                  message.size(), " rows, ", holes, " of them empty, for ",
                                  taken_[at(peer)]);
            }
        }
        return true;
    }

    /// Each local (key, head) takes its gradient once, from exactly the ranks that saw the key, in
    /// rank order, from where they have it.
    bool gradients_return() {
        for (int r = 0; r < ranks_; ++r) {
            auto const& moves = plans_[at(r)];
            positions_of(step_->keys(), r);
            taken_.assign(at(batch() * moves.own_keys() * p_->layer.kv_heads), 0);
            auto const returns = moves.key_returns();
            for (auto const& each : returns.single) {
                uly::plan_source const source{each.peer, each.row, each.message_row,
                                              each.message_strides};
                if (!take(r, each, {&source, 1})) return false;
            }
            for (auto const& each : returns.sums) {
                if (each.sources == 1) return broken("rank ", r, " sums one source");
                if (each.first_source + each.sources > returns.sources.size())
                    return broken("rank ", r, " sums sources that are not listed");
                if (!take(r, each, returns.sources.subspan(each.first_source, each.sources)))
                    return false;
            }
            for (auto const times : taken_)
                if (times != 1) return broken("rank ", r, " takes a gradient ", times, " times");
        }
        return true;
    }

    template <class Each>
    bool take(int r, Each const& each, std::span<uly::plan_source const> sources) {
        auto const& moves = plans_[at(r)];
        if (each.tokens < 1 || each.heads < 1 || each.token < 0 || each.head < 0 ||
            each.token + each.tokens > moves.own_keys() ||
            each.head + each.heads > p_->layer.kv_heads)
            return broken("rank ", r, " returns gradients outside its operand");
        for (int64_t b = 0; b < batch(); ++b)
            for (int64_t t = 0; t < each.tokens; ++t)
                for (int64_t h = 0; h < each.heads; ++h) {
                    auto const head = each.head + h;
                    auto const id = key_id(b, positions_[at(each.token + t)], head);
                    ++taken_[at((b * moves.own_keys() + each.token + t) * p_->layer.kv_heads +
                                head)];
                    std::size_t next = 0;
                    for (int peer = 0; peer < ranks_; ++peer) {
                        auto const row = row_of_key_[at(peer)][at(id)];
                        if (row == -1) continue;
                        if (next == sources.size() || sources[next].peer != peer)
                            return broken("rank ", r, " leaves out or misplaces rank ", peer,
                                          " in a gradient of head ", head);
                        auto const from = sources[next].row + b * each.row_strides[0] +
                                          t * each.row_strides[1] + h * each.row_strides[2];
                        if (from != row)
                            return broken("rank ", r, " takes a gradient of head ", head,
                                          " from row ", from, " of rank ", peer, ", it is in row ",
                                          row);
                        auto const& strides = sources[next].message_strides;
                        auto const place = sources[next].message_row + b * strides[0] +
                                           t * strides[1] + h * strides[2];
                        auto const& message = key_messages_[at(peer * ranks_ + r)];
                        if (place < 0 || place >= static_cast<int64_t>(message.size()) ||
                            message[at(place)] != id)
                            return broken("rank ", r, " takes a gradient of head ", head,
                                          " from a wrong row of the message of rank ", peer);
                        ++next;
                    }
                    if (next != sources.size())
                        return broken("rank ", r, " sums ranks that never saw the key");
                }
        return true;
    }

    /// What one rank says it sends is what the other says it gets, and both are what was played.
    bool rows_match() {
        for (int r = 0; r < ranks_; ++r) {
            uly::plan_rows all;
            for (int peer = 0; peer < ranks_; ++peer) {
                auto const& mine = plans_[at(r)].rows(peer);
                auto const& theirs = plans_[at(peer)].rows(r);
                if (mine.queries_to != theirs.queries_from || mine.keys_to != theirs.keys_from)
                    return broken("ranks ", r, " and ", peer, " count rows differently");
                all.queries_from += mine.queries_from;
                all.keys_from += mine.keys_from;
                all.queries_to += mine.queries_to;
            }
            if (all.queries_from != plans_[at(r)].own_query_rows() ||
                all.keys_from != keys_used_[at(r)] ||
                all.queries_to != batch() * plans_[at(r)].own_queries() * p_->layer.heads)
                return broken("rank ", r, " miscounts its rows");
        }
        return true;
    }

    /// Bytes equal what was played, and the closed form where one exists.
    bool bytes_match() {
        auto const& layer = p_->layer;
        auto const both = layer.head_dim + layer.value_dim;
        int64_t queries = 0, keys = 0;  // rows that lie with another rank than their token
        owner_of_query_.assign(at(queries_), 0);
        owner_of_key_.assign(at(keys_), 0);
        for (int r = 0; r < ranks_; ++r) {
            positions_of(step_->queries(), r);
            for (auto const place : positions_) owner_of_query_[at(place)] = r;
            positions_of(step_->keys(), r);
            for (auto const place : positions_) owner_of_key_[at(place)] = r;
        }
        for (int r = 0; r < ranks_; ++r) {
            for (auto const id : query_regions_[at(r)])
                queries += owner_of_query_[at(id / layer.heads % queries_)] != r;
            for (auto const id : key_regions_[at(r)])
                keys += id != -1 && owner_of_key_[at(id / layer.kv_heads % keys_)] != r;
        }
        std::size_t sent = 0, received = 0, back_sent = 0, back_received = 0;
        for (int r = 0; r < ranks_; ++r) {
            auto const forward = uly::forward_traffic(plans_[at(r)], 2);
            auto const backward = uly::backward_traffic(plans_[at(r)], 2, 4);
            sent += forward.sent, received += forward.received;
            back_sent += backward.sent, back_received += backward.received;
        }
        if (sent != received || back_sent != back_received)
            return broken("bytes sent are not those received");
        if (sent != at((queries + keys) * both * 2))
            return broken(sent, " bytes are counted forward");
        if (back_sent != at(queries * both * 2 + keys * both * 4))
            return broken(back_sent, " bytes are counted backward");

        if (!p_->equal_shares || queries_ != keys_ || !p_->plain()) return true;
        if (layer.heads % ranks_ == 0) {
            auto const closed = uly::closed_form_elements(layer, batch(), queries_, ranks_);
            if (sent != at(closed * 2))
                return broken(sent, " bytes sent, closed form ", closed * 2);
            ++closed_forms;
        } else if (layer.mask == uly::mask::full && layer.assignment == uly::assignment::balanced &&
                   p_->row_multiple == 1) {
            // With cut heads a rank's own share of the query rows depends on where its tokens lie;
            // that of the keys does not.
            auto const copies = layer.kv_heads + ranks_ - std::gcd(layer.kv_heads, int64_t{ranks_});
            auto const closed = queries_ / ranks_ * (ranks_ - 1) * batch() * copies;
            if (keys != closed) return broken(keys, " key rows move, closed form ", closed);
            ++closed_key_forms;
        }
        return true;
    }

    problem const* p_ = nullptr;
    uly::sequence const* step_ = nullptr;
    int ranks_ = 0;
    int64_t queries_ = 0, keys_ = 0;
    std::vector<uly::plan> plans_;
    std::string fault_;
    std::vector<int64_t> positions_, sizes_, keys_used_;
    std::vector<int> taken_, owner_of_query_, owner_of_key_;
    std::vector<region_contents> query_regions_, key_regions_, row_of_key_;
    std::vector<region_contents> query_messages_, key_messages_;  // [from * ranks + to]

   public:
    int closed_forms = 0, closed_key_forms = 0;
};

uly::plan plan_of(uly::shape const& layer, uly::sequence const& step, int rank,
                  int64_t row_multiple = 1) {
    uly::plan moves;
    moves.rebuild(uly::checked(layer), step, step.ranks(), rank, row_multiple);
    return moves;
}

}  // namespace

TEST_CASE("plan: random groups: every row arrives once where it is needed and returns once") {
    plan_player player;
    auto const cases = how_many(100000);
    for (std::uint64_t seed = 1; seed <= cases; ++seed) {
        auto const p = random_problem(seed);
        if (auto const fault = player.fault_of(p); !fault.empty()) {
            CAPTURE(seed);
            INFO(p.text());
            FAIL(fault);
        }
    }
    // The closed forms must have been met.
    CHECK(player.closed_forms > static_cast<int>(cases / 100));
    CHECK(player.closed_key_forms > static_cast<int>(cases / 100));
}

TEST_CASE("plan: each order of tokens with each odd group") {
    plan_player player;
    for (int kind = 0; kind < order_kinds; ++kind)
        for (int64_t tokens : {1, 2, 5, 7, 16, 61})
            for (auto const& [ranks, heads, kv_heads] : {std::array<int64_t, 3>{2, 3, 1},
                                                         {4, 7, 7},
                                                         {5, 4, 2},
                                                         {8, 3, 1},
                                                         {8, 12, 12},
                                                         {8, 28, 7},
                                                         {16, 40, 8},
                                                         {8, 16, 2},
                                                         {17, 1, 1}}) {
                problem p;
                plan_cases::random_engine random{static_cast<std::uint64_t>(kind)};
                p.ranks = static_cast<int>(ranks);
                p.layer = {.heads = heads,
                           .kv_heads = kv_heads,
                           .head_dim = 2,
                           .value_dim = 3,
                           .mask = uly::mask::causal};
                p.queries = random_order(random, static_cast<order_kind>(kind), p.ranks, tokens);
                INFO(p.text());
                CHECK(player.fault_of(p) == "");
            }
}

TEST_CASE("plan: bytes sent by 32 heads, 8 of keys, on 8 ranks") {
    // (P-1)/P * S/P * (2 Hq + 2 Hkv) * D * b for each rank.
    constexpr int64_t tokens = 4096, dim = 128, width = 2;
    auto const step = uly::sequence::split(8, 1, tokens);
    for (auto const mask : {uly::mask::causal, uly::mask::full})
        for (int r = 0; r < 8; ++r) {
            auto const moves =
                plan_of({.heads = 32, .kv_heads = 8, .head_dim = dim, .mask = mask}, step, r);
            auto const bytes = uly::forward_traffic(moves, width);
            CHECK(bytes.sent == at(tokens / 8 * 7 / 8 * (2 * 32 + 2 * 8) * dim * width));
            CHECK(bytes.received == bytes.sent);
        }
}

TEST_CASE("plan: rebuilt for another layer it is that layer's") {
    // A head count must not survive from one plan to the next.
    uly::plan moves;
    auto const two = uly::sequence::split(2, 1, 10), four = uly::sequence::split(4, 1, 10);
    uly::shape const a = uly::checked({.heads = 3, .head_dim = 4}),
                     b = uly::checked({.heads = 12, .head_dim = 4});
    moves.rebuild(a, two, 2, 0, 1);
    moves.rebuild(b, four, 4, 0, 1);
    for (int r = 0; r < 4; ++r) {
        REQUIRE(moves.items(r).size() == 1);
        CHECK(moves.items(r)[0].heads() == 3);
    }
}

TEST_CASE("plan: keeps the windows of its heads, also when it is copied") {
    auto const step = uly::sequence::split(2, 1, 10);
    std::vector<uly::window> windows{{1, 0}, {}, {2, 2}, {}};
    auto layer = uly::checked({.heads = 4, .head_dim = 8, .head_windows = windows});
    uly::plan copy;
    {
        auto const moves = plan_of(layer, step, 0);
        copy = moves;
    }
    auto const kept = windows;
    windows.assign(4, {9, 9});  // as freed memory might be
    CHECK(std::equal(kept.begin(), kept.end(), copy.layer().head_windows.begin(),
                     copy.layer().head_windows.end()));
    CHECK(copy.items(1)[0].window == kept[2]);
    copy.rebuild(copy.layer(), step, 2, 1, 1);
    CHECK(copy.layer().head_windows[2] == kept[2]);
}

TEST_CASE("plan: the hash tells plans apart") {
    auto const step = uly::sequence::split(2, 1, 10);
    uly::shape const layer{.heads = 4, .kv_heads = 2, .head_dim = 8, .value_dim = 8};
    auto const hash = plan_of(layer, step, 0).hash();
    CHECK(plan_of(layer, step, 1).hash() == hash);  // every rank's
    auto const other = [&](auto change) {
        auto changed = layer;
        change(changed);
        return plan_of(changed, step, 0).hash();
    };
    CHECK(other([](auto& s) { s.heads = 6; }) != hash);
    CHECK(other([](auto& s) { s.kv_heads = 4; }) != hash);
    CHECK(other([](auto& s) { s.head_dim = 9; }) != hash);
    CHECK(other([](auto& s) { s.value_dim = 9; }) != hash);
    CHECK(other([](auto& s) { s.mask = uly::mask::causal; }) != hash);
    static constexpr uly::window windows[2][4] = {{{1, 0}, {}, {}, {}}, {{}, {1, 0}, {}, {}}};
    auto const first = other([](auto& s) { s.head_windows = windows[0]; });
    CHECK(first != hash);
    CHECK(other([](auto& s) { s.head_windows = windows[1]; }) != first);
    CHECK(other([](auto& s) { s.scale = 2.0; }) != hash);
    CHECK(other([](auto& s) { s.assignment = uly::assignment::whole_heads; }) != hash);
    CHECK(other([](auto& s) { s.keep = uly::keep::nothing; }) != hash);
    CHECK(plan_of(layer, step, 0, 2).hash() != hash);
    CHECK(plan_of(layer, uly::sequence::split(2, 1, 12), 0).hash() != hash);
    uly::plan cached;
    cached.rebuild(layer, step, 2, 0, 1, {{0, layer.kv_heads}}, 20);
    CHECK(cached.hash() != hash);
}

namespace {

/// The identities of the rows of `blocks` that are of `peer`, by the row that `row_of` names.
template <class RowOf, class Id>
void place_rows(std::span<uly::plan_block const> blocks, int peer, int64_t batch,
                std::vector<int64_t>& rows, RowOf const& row_of, Id const& id_of) {
    for (auto const& block : blocks) {
        if (block.peer != peer) continue;
        for (int64_t b = 0; b < block.samples_of(batch); ++b)
            for (int64_t t = 0; t < block.tokens; ++t)
                for (int64_t h = 0; h < block.heads; ++h) {
                    auto& row = rows.at(at(row_of(block, b, t, h)));
                    REQUIRE(row == -1);  // written once
                    row = id_of(block.sample + b, block.token + t, block.head + h);
                }
    }
}

}  // namespace

TEST_CASE("plan: the keys of a step go behind each sample's own in a cache") {
    auto const cases = how_many(2000);
    for (std::uint64_t seed = 1; seed <= cases; ++seed) {
        CAPTURE(seed);
        random_engine random{seed};
        auto const ranks = static_cast<int>(1 + below(random, 6));
        auto const batch = 1 + below(random, 4), tokens = 1 + below(random, 9);
        auto const kv_heads = 1 + below(random, 4);
        auto const layer = uly::checked({.heads = kv_heads * (1 + below(random, 3)),
                                         .kv_heads = kv_heads,
                                         .head_dim = 1,
                                         .mask = uly::mask::causal,
                                         .assignment = uly::assignment::whole_heads});
        auto step = uly::sequence::of(
            batch, random_order(random, order_kind(below(random, order_kinds)), ranks, tokens));
        std::vector<int64_t> past, lengths;
        for (int64_t b = 0; b < batch; ++b) {
            past.push_back(below(random, 3));
            lengths.push_back(below(random, tokens + 1));
        }
        if (below(random, 2) == 0) lengths.assign(at(batch), tokens);
        step.pack({.lengths = lengths, .past = past});
        auto const capacity = 2 + tokens + below(random, 5);
        std::vector<uly::plan> plans(at(ranks));
        for (int r = 0; r < ranks; ++r)
            plans[at(r)].rebuild(layer, step, ranks, r, 1, {{0, layer.kv_heads}}, capacity);
        auto const id_on = [&](int rank) {
            return [&, rank](int64_t b, int64_t token, int64_t head) {
                return (b * tokens + step.queries().position(rank, token)) * kv_heads + head;
            };
        };
        auto const region_row = [](uly::plan_block const& x, int64_t b, int64_t t, int64_t h) {
            return x.row + b * x.row_strides[0] + t * x.row_strides[1] + h * x.row_strides[2];
        };
        auto const message_row = [](uly::plan_block const& x, int64_t b, int64_t t, int64_t h) {
            return x.message_row + b * x.message_strides[0] + t * x.message_strides[1] +
                   h * x.message_strides[2];
        };
        for (int r = 0; r < ranks; ++r) {
            auto const& mine = plans[at(r)];
            auto const items = mine.items();
            REQUIRE(mine.key_capacity() == capacity);
            // What the rank's region must hold, by the words of the design.
            auto const g0 = items.empty() ? 0 : items.front().work.kv_begin;
            auto const g1 = items.empty() ? 0 : items.back().work.kv_end;
            std::vector<int64_t> wanted(at((g1 - g0) * batch * capacity), -1), got(wanted);
            for (auto g = g0; g < g1; ++g)
                for (int64_t b = 0; b < batch; ++b)
                    for (int64_t i = 0; i < lengths[at(b)]; ++i)
                        wanted[at(((g - g0) * batch + b) * capacity + past[at(b)] + i)] =
                            (b * tokens + i) * kv_heads + g;
            for (int from = 0; from < ranks; ++from)
                place_rows(plans[at(from)].key_moves().blocks, r, batch, got, region_row,
                           id_on(from));
            CHECK(got == wanted);
            for (auto const& item : items)
                CHECK(item.key_row ==
                      (item.work.kv_begin - g0) * batch * capacity + item.work.key_begin);
            CHECK(mine.key_returns().moves.blocks.size() == mine.key_moves().blocks.size());
            CHECK(mine.key_returns().single.empty());
            CHECK(mine.key_returns().sums.empty());
            // Both ends of a message know it alike, and it has no gaps.
            for (int from = 0; from < ranks; ++from) {
                auto const rows = plans[at(from)].rows(r).keys_to;
                CHECK(rows == mine.rows(from).keys_from);
                std::vector<int64_t> sent(at(rows), -1), taken(at(rows), -1);
                place_rows(plans[at(from)].key_moves().blocks, r, batch, sent, message_row,
                           id_on(from));
                place_rows(mine.key_moves().arrivals, from, batch, taken, message_row, id_on(from));
                CHECK(sent == taken);
                CHECK(std::count(sent.begin(), sent.end(), -1) == 0);
            }
        }
    }
}

TEST_CASE("plan: samples that hold as many keys move together") {
    auto const layer = uly::checked({.heads = 2, .head_dim = 1});
    auto const blocks = [&](std::vector<int64_t> const& past) {
        auto step = uly::sequence::split(1, 4, 3);
        step.pack({.past = past});
        return plan_of(layer, step, 0).key_moves().blocks.size();
    };
    CHECK(blocks({5, 5, 5, 5}) == 1);
    CHECK(blocks({5, 5, 2, 2}) == 2);
    CHECK(blocks({5, 2, 5, 2}) == 4);
}

TEST_CASE("plan: what no plan exists for is refused with its values") {
    uly::plan moves;
    auto const layer = uly::checked({.heads = 4, .head_dim = 8, .mask = uly::mask::causal});
    auto const message = [&](auto const& body) -> std::string {
        try {
            body();
        } catch (uly::invalid_sequence const& e) {
            return e.what();
        }
        return "";
    };
    auto const two = uly::sequence::split(2, 1, 10);
    CHECK(message([&] { moves.rebuild(layer, two, 3, 0, 1); })
              .starts_with("ulysses: plan: the sequence must name the group's ranks: sequence of 2 "
                           "ranks, group of 3"));
    CHECK(message([&] {
              moves.rebuild(layer, uly::sequence{}, 3, 0, 1);
          }).find("sequence of 0 ranks") != std::string::npos);
    for (int64_t const multiple : {int64_t{0}, int64_t{-3}})
        CHECK_THROWS_AS(moves.rebuild(layer, two, 2, 0, multiple), uly::unsupported);
    auto const vast = uly::sequence::split(2, (int64_t{1} << 31) - 1, (int64_t{1} << 31) - 1);
    CHECK(message([&] {
              moves.rebuild(layer, vast, 2, 0, 1);
          }).find("a layer must stay below 2^62 rows: heads 4, batch 2147483647") !=
          std::string::npos);
}

TEST_CASE(
    "plan: a chunk's is that of a layer of so many heads, with heads counted over the whole") {
    std::vector<std::vector<uly::token_run>> const runs{{{0, 5}}, {}, {{5, 9}}};
    for (int64_t const chunks : {1, 2, 3, 5}) {
        auto const layer = uly::checked({.heads = 10,
                                         .kv_heads = 5,
                                         .head_dim = 4,
                                         .mask = uly::mask::causal,
                                         .chunks = chunks});
        int64_t next = 0;
        for (int64_t c = 0; c < chunks; ++c) {
            auto const chunk = uly::head_chunk::of(layer, c);
            CHECK(chunk.kv_heads.begin == next);
            next = chunk.kv_heads.end;
            auto const heads = chunk.kv_heads.size();
            CHECK(heads >= 5 / chunks);
            CHECK(heads <= (5 + chunks - 1) / chunks);
            auto const step = uly::sequence::of(2, runs);
            for (int rank = 0; rank < 3; ++rank) {
                uly::plan part, alone;
                part.rebuild(layer, step, 3, rank, 1, chunk);
                auto fewer = layer;
                fewer.heads = 2 * heads;
                fewer.kv_heads = heads;
                alone.rebuild(fewer, step, 3, rank, 1);
                CHECK(part.layer() == layer);
                CHECK(part.query_region_rows() == alone.query_region_rows());
                CHECK(part.key_region_rows() == alone.key_region_rows());
                REQUIRE(part.items().size() == alone.items().size());
                for (std::size_t i = 0; i < part.items().size(); ++i) {
                    auto expected = alone.items()[i].work;
                    for (auto* edge : {&expected.head_begin, &expected.head_end})
                        *edge += 2 * chunk.kv_heads.begin;
                    for (auto* edge : {&expected.kv_begin, &expected.kv_end})
                        *edge += chunk.kv_heads.begin;
                    CHECK(part.items()[i].work == expected);
                    CHECK(part.items()[i].query_row == alone.items()[i].query_row);
                    CHECK(part.items()[i].key_row == alone.items()[i].key_row);
                }
                auto const same = [](auto const& ours, auto const& theirs, int64_t offset) {
                    return std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(),
                                      [&](uly::plan_block const& a, uly::plan_block const& b) {
                                          return a.peer == b.peer && a.token == b.token &&
                                                 a.tokens == b.tokens && a.row == b.row &&
                                                 a.head == b.head + offset && a.heads == b.heads &&
                                                 a.message_row == b.message_row;
                                      });
                };
                CHECK(same(part.query_moves().blocks, alone.query_moves().blocks,
                           2 * chunk.kv_heads.begin));
                CHECK(same(part.key_moves().arrivals, alone.key_moves().arrivals,
                           chunk.kv_heads.begin));
                CHECK(same(part.key_returns().single, alone.key_returns().single,
                           chunk.kv_heads.begin));
                REQUIRE(part.key_returns().sums.size() == alone.key_returns().sums.size());
                for (std::size_t i = 0; i < part.key_returns().sums.size(); ++i)
                    CHECK(part.key_returns().sums[i].head ==
                          alone.key_returns().sums[i].head + chunk.kv_heads.begin);
            }
        }
        CHECK(next == 5);
    }
}
