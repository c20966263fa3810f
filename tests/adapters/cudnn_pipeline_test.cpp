// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/sdpa_attention.hpp>

#include "../doubles/sdpa_on_stream.hpp"
#include "../pipeline/features.hpp"
#include "cuda_pipeline.hpp"
#include "cuda_ranks.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

/// cuDNN's functor in pipelines on streams: over doubles of the CUDA runtime and of cuDNN's plans.
namespace {

namespace uly = ulysses;
using namespace pipeline_test;

}  // namespace

TEST_CASE(
    "cudnn: pipelines over cuda_peers compute what a layer asks for, in the order of streams") {
    feature const asked[] = {feature::documents, feature::lengths, feature::sinks,
                             feature::bias,      feature::softcap, feature::window};
    for (auto const one : asked)
        for (auto const ranks : {1, 2, 4}) {
            CAPTURE(ranks);
            auto const p =
                problem_with<float>(static_cast<std::uint64_t>(ranks), one, feature::causal, 200);
            INFO(p.text());
            auto const exact = compute_alone<uly::reference_attention>(converted<double>(p));
            auto const step = p.step(equal_shares(p.tokens, ranks));
            results<float> whole(p);
            sdpa_double_on_stream plans;
            uly::sdpa_attention const attention(plans);
            cuda_test::run(ranks, [&](cuda_test::ranks_type const& of) {
                cuda_test::compute_rank_on_device(of, p, step, whole, attention);
            });
            check_bounds(whole, exact, bounds_of(p, ranks));
        }
}
