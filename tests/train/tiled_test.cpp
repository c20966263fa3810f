// SPDX-License-Identifier: Apache-2.0

#include "failure.hpp"

#include <ulysses/gemm/builtin.hpp>
#include <ulysses/train/cross_entropy.hpp>
#include <ulysses/train/tiled.hpp>
#include <ulysses/train/tiling.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <span>
#include <utility>
#include <vector>

using namespace train_test;

namespace {

using std::int64_t;
using values = std::vector<double>;

values random_values(int64_t count, unsigned seed) {
    std::mt19937_64 generator(seed);
    std::uniform_real_distribution<double> draw(-1, 1);
    values all(static_cast<std::size_t>(count));
    for (auto& each : all) each = draw(generator);
    return all;
}
values poison(int64_t count) {
    return values(static_cast<std::size_t>(count), std::numeric_limits<double>::quiet_NaN());
}
/// Equal as bits, but for the two zeros.
void check_same(values const& got, values const& expected) {
    REQUIRE(got.size() == expected.size());
    std::size_t differ = 0;
    for (std::size_t i = 0; i < got.size(); ++i) differ += !(got[i] == expected[i]);
    CHECK(differ == 0);
}
void check_near(values const& got, values const& expected, double tolerance) {
    REQUIRE(got.size() == expected.size());
    double largest = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        auto const error = std::abs(got[i] - expected[i]);
        if (!(error <= largest)) largest = error;
    }
    CHECK(largest <= tolerance);
}

std::vector<int64_t> sizes(uly::tiling const& tiles) {
    std::vector<int64_t> all;
    int64_t next = 0;
    for (int64_t i = 0; i < tiles.count(); ++i) {
        CHECK(tiles[i].begin == next);
        all.push_back(tiles[i].size());
        next = tiles[i].end;
    }
    CHECK(next == tiles.rows());
    return all;
}
using list = std::vector<int64_t>;

// ----- the formulas, token by token

constexpr int64_t width = 5, hidden = 7, vocabulary = 11;

/// Row times matrix [K, N].
values times(double const* x, values const& w, int64_t k, int64_t n) {
    values y(static_cast<std::size_t>(n));
    for (int64_t j = 0; j < n; ++j)
        for (int64_t i = 0; i < k; ++i)
            y[static_cast<std::size_t>(j)] += x[i] * w[static_cast<std::size_t>(i * n + j)];
    return y;
}

struct mlp {
    values gate = random_values(width * hidden, 1), up = random_values(width * hidden, 2),
           down = random_values(hidden * width, 3);

    values forward(values const& x) const {
        values y;
        for (std::size_t i = 0; i < x.size(); i += width) {
            auto g = times(x.data() + i, gate, width, hidden);
            auto const u = times(x.data() + i, up, width, hidden);
            for (std::size_t f = 0; f < g.size(); ++f) g[f] *= u[f] / (1 + std::exp(-g[f]));
            auto const row = times(g.data(), down, hidden, width);
            y.insert(y.end(), row.begin(), row.end());
        }
        return y;
    }
    uly::mlp_weights<double const> weights() const {
        return {{gate.data(), hidden}, {up.data(), hidden}, {down.data(), width}};
    }
    uly::mlp_weights<double> gradients() {
        return {{gate.data(), hidden}, {up.data(), hidden}, {down.data(), width}};
    }
};

struct loss_result {
    double loss = 0, entropy = 0;
    int64_t tokens = 0, correct = 0;
    values dx, dw;
};

/// Of `upstream` times the sum over the tokens that count; W [C, V].
loss_result loss_of(values const& x, values const& w, std::vector<int64_t> const& labels,
                    double upstream) {
    loss_result all{.dx = values(x.size()), .dw = values(w.size())};
    for (std::size_t i = 0; i < labels.size(); ++i) {
        if (labels[i] == -100) continue;
        auto const label = static_cast<std::size_t>(labels[i]);
        auto const* const row = x.data() + i * width;
        auto p = times(row, w, width, vocabulary);
        all.correct += std::max_element(p.begin(), p.end()) - p.begin() == labels[i];
        double total = 0;
        for (auto& each : p) total += each = std::exp(each);
        for (auto& each : p) each /= total;
        ++all.tokens;
        all.loss -= std::log(p[label]);
        for (auto const each : p) all.entropy -= each * std::log(each);
        p[label] -= 1;
        for (std::size_t c = 0; c < width; ++c)
            for (std::size_t v = 0; v < vocabulary; ++v) {
                all.dx[i * width + c] += upstream * p[v] * w[c * vocabulary + v];
                all.dw[c * vocabulary + v] += upstream * p[v] * row[c];
            }
    }
    return all;
}

/// Host memory that counts.
struct counted_space : uly::host_space {
    static inline std::size_t bytes = 0, most = 0, allocations = 0;
    static void* allocate(queue q, std::size_t n) {
        most = std::max(most, bytes += n);
        ++allocations;
        return uly::host_space::allocate(q, n);
    }
    static void deallocate(queue q, void* memory, std::size_t n) {
        bytes -= n;
        uly::host_space::deallocate(q, memory, n);
    }
};
struct counted_gemm : uly::builtin_gemm {
    using space_type = counted_space;
};
using loss_type = uly::fused_cross_entropy<double, counted_gemm>;

uly::row_view<double const> rows_of(values const& x, int64_t columns) {
    return {x.data(), static_cast<int64_t>(x.size()) / columns, columns};
}
uly::row_view<double> rows_of(values& x, int64_t columns) {
    return {x.data(), static_cast<int64_t>(x.size()) / columns, columns};
}

}  // namespace

TEST_CASE("tiling: golden vectors") {
    CHECK(sizes(uly::tiling::of(125, 4)) == list{32, 32, 32, 29});
    CHECK(sizes(uly::tiling::of(5, 4)) == list{2, 2, 1});
    CHECK(sizes(uly::tiling::of(2, 4)) == list{1, 1});
    CHECK(sizes(uly::tiling::of(7, 4)) == list{2, 2, 2, 1});
    CHECK(sizes(uly::tiling::of(1, 8)) == list{1});
    CHECK(sizes(uly::tiling::of(0, 3)) == list{0});
    CHECK(sizes(uly::tiling::of_rows(10, 4)) == list{4, 4, 2});
    CHECK(sizes(uly::tiling::of_rows(10, 100)) == list{10});
    CHECK(uly::tiling::of_rows(10, 100).tile_rows() == 10);
}

TEST_CASE("tiling: case 24, ranks with 100 and 900 tokens agree on the count") {
    pipeline_test::run_ranks(3, [](ranks_type ranks) {
        int64_t const tokens[] = {100, 900, 0};
        auto const tiles = uly::tiling::agree(ranks, tokens[ranks.rank()], 256);
        list const expected[] = {{100, 0, 0, 0}, {256, 256, 256, 132}, {0, 0, 0, 0}};
        CHECK(sizes(tiles) == expected[ranks.rank()]);
        // What is collective in a tile finishes.
        int64_t rows = 0;
        for (int64_t i = 0; i < tiles.count(); ++i) {
            auto sum = tiles[i].size();
            ranks.all_reduce(std::span<int64_t>(&sum, 1), uly::reduction::sum);
            rows += sum;
        }
        CHECK(rows == 1000);
    });
    auto const wrong = failure_on_all(
        2, [](ranks_type ranks) { uly::tiling::agree(ranks, 7, ranks.rank() == 1 ? 0 : 2); });
    CHECK(wrong.code == uly::errc::invalid_call);
    CHECK(wrong.text == "ulysses: tiling: a tile has at least 1 of 0 or more rows: 0 of 7");
    auto const none = failure_of([] { uly::tiling::of(-1, 0); });
    CHECK(rule_of(none.text) ==
          "ulysses: tiling: a tiling has at least 1 tile of 0 or more rows: -1 rows, 0 tiles");
}

TEST_CASE("tiled mlp: the formula, with the same bits for every tiling") {
    mlp const model;
    constexpr int64_t tokens = 13;
    auto const x = random_values(tokens * width, 4), dy = random_values(tokens * width, 5);
    values first_y, first_dx;
    mlp first_gradients;
    for (auto const tile_rows : {13, 100, 5, 2, 1}) {
        CAPTURE(tile_rows);
        auto const tiles = uly::tiling::of_rows(tokens, tile_rows);
        mlp gradients;  // added to what is there
        uly::tiled_mlp<double, counted_gemm> f{{}, hidden, model.weights(), gradients.gradients()};
        auto y = poison(tokens * width), dx = y;
        uly::tiled_forward<double>(tiles, f, rows_of(x, width), rows_of(y, width));
        std::vector<std::size_t> ready;
        uly::tiled_backward<double>(tiles, f, rows_of(x, width), rows_of(dy, width),
                                    rows_of(dx, width), [&](std::size_t i) { ready.push_back(i); });
        CHECK(ready == std::vector<std::size_t>{0, 1, 2});
        CHECK(f.workspace_bytes() ==
              static_cast<std::size_t>(4 * std::min<int64_t>(tile_rows, tokens) * hidden) * 8);
        if (first_y.empty()) {
            check_near(y, model.forward(x), 1e-14);
            first_y = y;
            first_dx = dx;
            first_gradients = gradients;
        }
        check_same(y, first_y);
        check_same(dx, first_dx);
        check_same(gradients.gate, first_gradients.gate);
        check_same(gradients.up, first_gradients.up);
        check_same(gradients.down, first_gradients.down);
    }
    // Central differences of dy . forward(x), of every weight and input.
    auto const objective = [&](mlp const& of, values const& at) {
        auto const y = of.forward(at);
        double sum = 0;
        for (std::size_t i = 0; i < y.size(); ++i) sum += dy[i] * y[i];
        return sum;
    };
    constexpr double step = 1e-5;
    auto varied = model;
    auto moved = x;
    auto const check = [&](values& parameter, values const& gradient, values const& before) {
        values quotients, computed;
        for (std::size_t i = 0; i < parameter.size(); ++i) {
            auto const kept = parameter[i];
            parameter[i] = kept + step;
            auto const above = objective(varied, moved);
            parameter[i] = kept - step;
            quotients.push_back((above - objective(varied, moved)) / (2 * step));
            computed.push_back(gradient[i] - (before.empty() ? 0 : before[i]));
            parameter[i] = kept;
        }
        check_near(computed, quotients, 1e-8);
    };
    mlp const untouched;
    check(varied.gate, first_gradients.gate, untouched.gate);
    check(varied.up, first_gradients.up, untouched.up);
    check(varied.down, first_gradients.down, untouched.down);
    check(moved, first_dx, {});
}

TEST_CASE("tiled backward: case 25, once per weight with 7 tiles, and with tiles of other ranks") {
    mlp const model;
    auto const x = random_values(7 * width, 1);
    auto dx = poison(7 * width);
    uly::tiled_mlp<double, counted_gemm> f{{}, hidden, model.weights()};
    std::vector<int> calls(3);
    uly::tiled_backward<double>(uly::tiling::of(7, 7), f, rows_of(x, width), rows_of(x, width),
                                rows_of(dx, width), [&](std::size_t i) { ++calls[i]; });
    CHECK(calls == std::vector<int>{1, 1, 1});
    pipeline_test::run_ranks(2, [&](ranks_type ranks) {
        int64_t const n = ranks.rank() == 0 ? 0 : 7;
        auto const tiles = uly::tiling::agree(ranks, n, 2);
        uly::tiled_mlp<double, uly::builtin_gemm> mine{{}, hidden, model.weights()};
        auto own = poison(n * width);
        values const in(x.begin(), x.begin() + n * width);
        int count = 0;
        uly::tiled_backward<double>(tiles, mine, rows_of(in, width), rows_of(in, width),
                                    rows_of(own, width), [&](std::size_t) { ++count; });
        CHECK(count == 3);
    });
}

TEST_CASE("tiled: errors") {
    mlp const model;
    uly::tiled_mlp<double, counted_gemm> f{{}, hidden, model.weights()};
    values x(4 * width);
    auto const tiles = uly::tiling::of(3, 2);
    auto const wrong = failure_of([&] {
        uly::tiled_forward<double>(tiles, f, rows_of(std::as_const(x), width), rows_of(x, width));
    });
    CHECK(wrong.code == uly::errc::invalid_tensor);
    CHECK(rule_of(wrong.text) ==
          "ulysses: tiled_forward: operands must have one row a token: [4, 5], expected [3, 5]");
    auto const null = failure_of([&] {
        uly::row_view<double const> const in(x.data(), 3, width, width - 1);
        uly::tiled_forward<double>(tiles, f, in, {x.data(), 3, width});
    });
    CHECK(null.code == uly::errc::invalid_tensor);
    CHECK(rule_of(null.text) ==
          "ulysses: tiled_forward: rows must have memory and must not overlap: not null, stride 4, "
          "width 5");
}

TEST_CASE("fused cross-entropy: case 23, any tiles, tiles without valid tokens, upstream 0.25") {
    auto const w = random_values(width * vocabulary, 9);
    struct form {
        int64_t tokens, tiles;
        std::vector<int64_t> labels;
    };
    std::vector<form> forms;
    for (auto const& [tokens, tiles] : {std::pair{5, 4}, {2, 4}, {7, 4}, {1, 8}, {13, 13}}) {
        forms.push_back({tokens, tiles, {}});
        for (int64_t i = 0; i < tokens; ++i) forms.back().labels.push_back(i * 3 % vocabulary);
    }
    forms.push_back({8, 2, {3, -100, 0, 10, -100, -100, 2, -100}});  // 3 and 1 valid
    forms.push_back({6, 3, {-100, -100, 1, 1, -100, -100}});         // tiles of none
    forms.push_back({4, 2, {-100, -100, -100, -100}});               // none at all
    forms.push_back({0, 2, {}});
    for (auto const& each : forms) {
        CAPTURE(each.tokens);
        CAPTURE(each.tiles);
        auto const x = random_values(each.tokens * width, 8);
        auto const expected = loss_of(x, w, each.labels, 0.25);
        values untiled_dx, untiled_dw;
        double untiled_loss = 0;
        for (auto const count : {int64_t{1}, each.tiles}) {
            auto const tiles = uly::tiling::of(each.tokens, count);
            loss_type loss{{}, {w.data(), vocabulary}, vocabulary};
            auto dx = poison(each.tokens * width);
            values dw(w.size());
            int ready = 0;
            auto const sums =
                loss.backward(tiles, 0.25, rows_of(x, width), each.labels, rows_of(dx, width),
                              {dw.data(), vocabulary}, [&](std::size_t) { ++ready; });
            CHECK(ready == 1);
            CHECK(sums.tokens == expected.tokens);
            CHECK(sums.correct == expected.correct);
            CHECK(std::abs(sums.loss - expected.loss) <= 1e-13);
            CHECK(std::abs(sums.entropy - expected.entropy) <= 1e-13);
            check_near(dx, expected.dx, 1e-14);
            check_near(dw, expected.dw, 1e-14);
            auto const again = loss.forward(tiles, rows_of(x, width), each.labels);
            CHECK(again.loss == sums.loss);
            CHECK(again.entropy == sums.entropy);
            CHECK(again.correct == sums.correct);
            if (count == 1) {
                untiled_dx = dx;
                untiled_dw = dw;
                untiled_loss = sums.loss;
            }
            CHECK(sums.loss == untiled_loss);
            check_same(dx, untiled_dx);
            check_same(dw, untiled_dw);
        }
    }
}

TEST_CASE("fused cross-entropy: gradients scale with upstream, and are added to") {
    auto const w = random_values(width * vocabulary, 9), x = random_values(6 * width, 8);
    std::vector<int64_t> const labels{1, 2, 3, 4, 5, 6};
    auto const tiles = uly::tiling::of(6, 3);
    values dx(x.size()), dw(w.size()), quarter_dx(x.size()), twice_dw(w.size());
    loss_type loss{{}, {w.data(), vocabulary}, vocabulary};
    loss.backward(tiles, 1, rows_of(x, width), labels, rows_of(dx, width), {dw.data(), vocabulary});
    for (int i = 0; i < 2; ++i)
        loss.backward(tiles, 0.25, rows_of(x, width), labels, rows_of(quarter_dx, width),
                      {twice_dw.data(), vocabulary});
    for (auto& each : dx) each *= 0.25;
    for (auto& each : dw) each *= 0.5;
    check_same(quarter_dx, dx);
    check_near(twice_dw, dw, 1e-14);
    // Tied to an embedding, as [V, C]; and a gradient that is not wanted.
    values tied(w.size()), dtied(w.size());
    for (std::size_t c = 0; c < width; ++c)
        for (std::size_t v = 0; v < vocabulary; ++v) tied[v * width + c] = w[c * vocabulary + v];
    loss_type of_tied{{}, {tied.data(), width, true}, vocabulary};
    of_tied.backward(tiles, 0.25, rows_of(x, width), labels, rows_of(dx, width),
                     {dtied.data(), width, true});
    check_same(dx, quarter_dx);
    for (std::size_t c = 0; c < width; ++c)
        for (std::size_t v = 0; v < vocabulary; ++v)
            CHECK(std::abs(2 * dtied[v * width + c] - twice_dw[c * vocabulary + v]) < 1e-14);
    of_tied.backward(tiles, 0.25, rows_of(x, width), labels, rows_of(dx, width), {});
    check_same(dx, quarter_dx);
}

TEST_CASE("fused cross-entropy: memory of one tile, however long the sequence") {
    auto const w = random_values(width * vocabulary, 9);
    loss_type loss{{}, {w.data(), vocabulary}, vocabulary};
    counted_space::most = counted_space::bytes;
    auto const before = counted_space::bytes, allocated = counted_space::allocations;
    for (int64_t const tokens : {8, 4096, 40, 4096}) {
        auto const x = random_values(tokens * width, 8);
        std::vector<int64_t> labels(static_cast<std::size_t>(tokens), 3);
        labels[0] = -100;  // the first tile has one row less
        values dx(x.size()), dw(w.size());
        loss.backward(uly::tiling::of_rows(tokens, 8), 1, rows_of(x, width), labels,
                      rows_of(dx, width), {dw.data(), vocabulary});
    }
    CHECK(counted_space::most - before == 8 * vocabulary * sizeof(double));
    CHECK(counted_space::allocations - allocated == 1);
    CHECK(loss.workspace_bytes() == 8 * vocabulary * sizeof(double));
}

TEST_CASE("fused cross-entropy: logits of any size, in float") {
    // Logits x * w of up to 3e4: their exponentials are no floats.
    float const w[] = {1, 2, 3};
    float const x[] = {1e4f, -1e4f};
    std::vector<int64_t> const labels{0, 1};
    uly::fused_cross_entropy<float, uly::builtin_gemm> loss{{}, {w, 3}, 3};
    float dx[2];
    auto const sums = loss.backward(uly::tiling::of(2, 1), 1, {x, 2, 1}, labels, {dx, 2, 1}, {});
    CHECK(sums.loss == 2e4 + 1e4);
    CHECK(dx[0] == 2);  // probability 1 of the last, label the first: w[2] - w[0]
    CHECK(dx[1] == -1);
    CHECK(sums.entropy == 0);
}

TEST_CASE("fused cross-entropy: errors") {
    values const w(width * vocabulary);
    values x(2 * width);
    loss_type loss{{}, {w.data(), vocabulary}, vocabulary};
    auto const of = [&](std::vector<int64_t> const& labels) {
        auto const thrown = failure_of(
            [&] { loss.forward(uly::tiling::of(2, 1), rows_of(std::as_const(x), width), labels); });
        CHECK(thrown.code == uly::errc::invalid_tensor);
        return rule_of(thrown.text);
    };
    CHECK(of({1}) == "ulysses: cross_entropy: every row has a label: 1 labels, 2 rows");
    CHECK(of({1, 11}) ==
          "ulysses: cross_entropy: a label is ignored or in the vocabulary: label 11 of row 1, "
          "ignored -100, vocabulary 11");
    CHECK(of({-1, 1}) ==
          "ulysses: cross_entropy: a label is ignored or in the vocabulary: label -1 of row 0, "
          "ignored -100, vocabulary 11");
}
