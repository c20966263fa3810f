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
#include <string>
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
            cuda_test::mapped_memory const sinks(p.sinks), slopes(p.slopes), bias(p.bias.memory);
            sdpa_double_on_stream plans;
            uly::sdpa_attention const attention(plans);
            cuda_test::run(ranks, [&](cuda_test::ranks_type const& of) {
                cuda_test::compute_rank_on_device(of, p, step, whole, attention);
            });
            check_bounds(whole, exact, bounds_of(p, ranks));
        }
}

TEST_CASE(
    "cudnn: what changes scores is the device's, or an error on every rank before anything moves") {
    for (auto const one : {feature::sinks, feature::bias}) {
        auto const p = problem_with<float>(1, one, feature::causal, 20);
        auto const step = p.step(equal_shares(p.tokens, 2));
        results<float> whole(p);
        sdpa_double_on_stream plans;
        std::vector<std::string> texts(2);
        cuda_test::run(2, [&](cuda_test::ranks_type const& of) {
            try {
                cuda_test::compute_rank_on_device(of, p, step, whole, uly::sdpa_attention(plans));
            } catch (uly::error const& e) {
                CHECK(e.code() == uly::errc::invalid_tensor);
                texts[static_cast<std::size_t>(of.rank())] = e.what();
            }
        });
        CHECK(texts[0] == texts[1]);
        CHECK(
            texts[0].find(uly::concat("ulysses: cudnn: ", one == feature::sinks ? "sinks" : "bias",
                                      ": an operand must be memory of the rank's device: the "
                                      "host's, which CUDA does not know")) == 0);
    }
}
