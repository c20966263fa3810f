// SPDX-License-Identifier: Apache-2.0

#include "../visibility.hpp"
#include "six_steps.hpp"

namespace pipeline_test {

template void compute_rank<ulysses::threads::communicator, builtin_attention, double>(
    ulysses::threads::communicator const&, problem<double> const&, ulysses::sequence const&,
    builtin_attention const&, results<double>&);
template results<float> compute<builtin_attention, float>(problem<float> const&, orders const&,
                                                          orders const&, builtin_attention const&,
                                                          reach);
template results<double> compute<builtin_attention, double>(problem<double> const&, orders const&,
                                                            orders const&, builtin_attention const&,
                                                            reach);
template results<double>
compute<ulysses::reference_attention, double>(problem<double> const&, orders const&, orders const&,
                                              ulysses::reference_attention const&, reach);

template six_results<double> six_steps<double, ulysses::reference_attention, ulysses::no_epilogue>(
    six_problem<double> const&, orders const&, bool, ulysses::reference_attention const&,
    ulysses::no_epilogue const&);

namespace {

/// A score from its scaled product, written down once more.
double logit_of(problem<double> const& p, ulysses::visibility const& rule, int64_t b, int64_t h,
                int64_t i, int64_t j, double s) {
    if (auto const cap = p.layer.logits.softcap.value(); cap > 0) s = cap * std::tanh(s / cap);
    auto const& e = p.bias.sizes;
    if (!p.bias.memory.empty())
        s += p.bias(e[0] == 1 ? 0 : b, e[1] == 1 ? 0 : h, e[2] == 1 ? 0 : i, e[3] == 1 ? 0 : j);
    if (!p.slopes.empty())
        s -= p.slopes[static_cast<std::size_t>(h)] *
             std::fabs(static_cast<double>(i + rule.sample(b).position - j));
    return s;
}

}  // namespace

double largest_key_weight(problem<double> const& p) {
    auto const scale = ulysses::softmax_scale(p.layer);
    auto const step =
        p.step(equal_shares(p.tokens, 1), p.keys != p.tokens ? equal_shares(p.keys, 1) : orders{});
    auto rule = step.visible(p.layer);
    double largest = 0;
    std::vector<double> weight, row;
    for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t g = 0; g < p.layer.kv_heads; ++g) {
            auto const group = p.layer.heads / p.layer.kv_heads;
            weight.assign(static_cast<std::size_t>(p.keys), 0);
            for (auto h = g * group; h < (g + 1) * group; ++h) {
                if (!p.layer.head_windows.empty()) rule.window = p.layer.head_windows[h];
                for (int64_t i = 0; i < p.tokens; ++i) {
                    auto const sink =
                        p.sinks.empty() ? 0.0 : std::exp(p.sinks[static_cast<std::size_t>(h)]);
                    double sum = sink;
                    row.clear();
                    for (int64_t j = 0; j < p.keys; ++j) {
                        if (!sees(rule, b, i, j)) {
                            row.push_back(0);
                            continue;
                        }
                        double s = 0;
                        for (int64_t d = 0; d < p.layer.head_dim; ++d)
                            s += p.q(b, i, h, d) * p.k(b, j, g, d);
                        row.push_back(std::exp(logit_of(p, rule, b, h, i, j, scale * s)));
                        sum += row.back();
                    }
                    for (std::size_t j = 0; j < row.size(); ++j)
                        weight[j] += sum == 0 ? 0 : row[j] / sum;
                }
            }
            for (auto const w : weight) largest = std::max(largest, w);
        }
    return largest;
}

}  // namespace pipeline_test
