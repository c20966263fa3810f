// SPDX-License-Identifier: Apache-2.0

#include "engine.hpp"
#include "layers.hpp"
#include "parts.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

/// A causal forward of a million tokens by cuDNN, over ranks that share the device.
namespace ulysses_bench {

namespace {

namespace uly = ulysses;

constexpr std::int64_t heads = 8, dim = 128;  // and one key-value head

/// Values that repeat after a prime number of elements; queries are large, so that few keys count.
constexpr std::int64_t period = 1000003;
uly::bf16 long_value(std::size_t operand, std::int64_t index) {
    auto const value = value_of(operand, index % period);
    return uly::bf16(operand == 0 ? 12 * value : value);
}

/// o of one row and head in double.
std::vector<double> exact_row(std::int64_t row, std::int64_t head) {
    std::array<std::vector<double>, 3> values;
    for (std::size_t i = 0; i < 3; ++i)
        for (std::int64_t j = 0; j < period; ++j)
            values[i].push_back(static_cast<double>(static_cast<float>(long_value(i, j))));
    auto const at = [&](std::size_t i, std::int64_t index) {
        return values[i][static_cast<std::size_t>(index % period)];
    };
    std::vector<double> scores, o(dim);
    for (std::int64_t j = 0; j <= row; ++j) {
        double sum = 0;
        for (std::int64_t d = 0; d < dim; ++d)
            sum += at(0, (row * heads + head) * dim + d) * at(1, j * dim + d);
        scores.push_back(sum / std::sqrt(static_cast<double>(dim)));
    }
    auto const most = *std::ranges::max_element(scores);
    double total = 0;
    for (std::int64_t j = 0; j <= row; ++j) {
        auto const weight = std::exp(scores[static_cast<std::size_t>(j)] - most);
        total += weight;
        if (weight < 1e-12) continue;
        for (std::int64_t d = 0; d < dim; ++d)
            o[static_cast<std::size_t>(d)] += weight * at(2, j * dim + d);
    }
    for (auto& each : o) each /= total;
    return o;
}

/// q, k, v and o of one rank.
class long_operands {
   public:
    long_operands(cudaStream_t stream, std::int64_t first, std::int64_t count) : count_(count) {
        for (std::size_t i = 0; i < 4; ++i) {
            auto const elements = count * columns(i);
            memory_.push_back(std::make_unique<device_array<uly::bf16>>(stream, elements));
            if (i == 3) break;
            std::vector<uly::bf16> part(
                static_cast<std::size_t>(std::min<std::int64_t>(period, elements)));
            for (std::size_t j = 0; j < part.size(); ++j)
                part[j] = long_value(i, first * columns(i) + static_cast<std::int64_t>(j));
            for (std::int64_t done = 0; done < elements; done += period)
                memory_[i]->put(std::span(part).first(
                                    static_cast<std::size_t>(std::min(period, elements - done))),
                                done);
        }
    }
    device_operand<uly::bf16> operator[](std::size_t i) const {
        return {memory_[i]->data(), {1, count_, columns(i) / dim, dim}};
    }
    /// o of one row and head.
    std::vector<uly::bf16> row(std::int64_t row, std::int64_t head) const {
        std::vector<uly::bf16> result(dim);
        memory_[3]->get(result, (row * heads + head) * dim);
        return result;
    }

   private:
    static std::int64_t columns(std::size_t i) { return (i == 0 || i == 3 ? heads : 1) * dim; }

    std::int64_t count_;
    std::vector<std::unique_ptr<device_array<uly::bf16>>> memory_;
};

void measure(report const& to, int ranks, std::int64_t tokens) {
    uly::shape const layer{
        .heads = heads, .kv_heads = 1, .head_dim = dim, .mask = uly::mask::causal};
    std::vector<seconds_of_calls> taken(static_cast<std::size_t>(ranks));
    std::vector<double> off(taken.size());
    on_threads(ranks, group_options(uly::cuda_peers::fence_way::events),
               [&](ranks_type const& each) {
                   auto const me = static_cast<std::size_t>(each.rank());
                   auto const [first, count] = share(tokens, each.rank(), each.size());
                   long_operands const x(each.queue().stream, first, count);
                   engine_type engine;
                   uly::pipeline whole{each, uly::sequence_local{}, sdpa_type(engine), layer};
                   auto const step = uly::sequence::of(1, shares(tokens, ranks));
                   auto const call = [&] { whole.attend(step, x[0], x[1], x[2], x[3]); };
                   call();  // plans, windows and memory
                   taken[me] = timed(1, call, [&] { wait_for(each); });
                   if (each.rank() != 0 && each.rank() + 1 != each.size()) return;
                   auto const head = each.rank() == 0 ? 0 : heads - 1;
                   auto const exact = exact_row(first + count - 1, head);
                   auto const seen = x.row(count - 1, head);
                   for (std::size_t d = 0; d < seen.size(); ++d) {
                       auto const differs = std::fabs(static_cast<double>(seen[d]) - exact[d]);
                       if (!(differs <= off[me])) off[me] = differs;
                   }
               });
    auto const name = uly::concat(tokens, " tokens, causal, ", ranks, " ranks");
    auto const seconds = slowest(taken).all;
    to.add({name, causal_tflop(tokens, heads) / seconds, "TFLOP/s",
            uly::concat("8 heads, 1 kv, of 128; ", brief(seconds), " s")});
    // P is rounded to bf16, as is o. A NaN is no number that is allowed.
    auto worst = off.front() / (4 * 0x1p-8);
    if (auto const last = off.back() / (4 * 0x1p-8); !(last <= worst)) worst = last;
    to.add({name + ": difference", worst, "parts", "fp64 on the host, two rows: what is allowed",
            worst, "<= 1"});
}

}  // namespace

group million(bool quick) {
    std::int64_t const tokens = quick ? 128 : 1048576;
    group parts;
    for (int const ranks : {1, 8})
        parts.push_back({uly::concat(tokens, " tokens, ", ranks, " ranks"), 75,
                         [=](report const& to) { measure(to, ranks, tokens); }});
    return parts;
}

}  // namespace ulysses_bench
