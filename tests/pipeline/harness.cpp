// SPDX-License-Identifier: Apache-2.0

#include "../visibility.hpp"
#include "six_steps.hpp"

namespace pipeline_test {

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
                    double sum = 0;
                    row.clear();
                    for (int64_t j = 0; j < p.keys; ++j) {
                        if (!sees(rule, b, i, j)) {
                            row.push_back(0);
                            continue;
                        }
                        double s = 0;
                        for (int64_t d = 0; d < p.layer.head_dim; ++d)
                            s += p.q(b, i, h, d) * p.k(b, j, g, d);
                        row.push_back(std::exp(scale * s));
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
