// SPDX-License-Identifier: Apache-2.0

#include "six_steps.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cstdint>

using namespace pipeline_test;
namespace uly = ulysses;

namespace {

constexpr auto most = (int64_t{1} << 31) - 1;  // of heads, dims and tokens

/// What nobody has memory for: an address to look at, and extents of any size.
struct imagined {
    using space_type = uly::host_space;
    std::array<int64_t, 4> sizes{};
    float* data() const {
        static float none[16];
        return none;
    }
    std::array<int64_t, 4> const& extents() const { return sizes; }
};
struct imagined_tokens {
    std::array<int64_t, 3> sizes{};
    float* data() const { return imagined{}.data(); }
    std::array<int64_t, 3> const& extents() const { return sizes; }
};

/// The error of `attend` on each of two ranks, rank 1 of which has no tokens.
std::vector<outcome> outcomes_of(uly::shape const& given, int64_t batch, int64_t tokens) {
    auto const layer = uly::checked(given);
    auto const step = uly::sequence::of(batch, contiguous({tokens, 0}));
    std::vector<outcome> seen(2);
    run_ranks(2, [&](uly::threads::communicator c) {
        seen[static_cast<std::size_t>(c.rank())] = outcome_of([&] {
            uly::pipeline pipeline{c, uly::sequence_local{}, uly::reference_attention{}, layer};
            auto const own = step.queries().count(c.rank());
            imagined const q{{batch, own, layer.heads, layer.head_dim}};
            imagined const k{{batch, own, layer.kv_heads, layer.head_dim}};
            pipeline.attend(step, q, k, k, q);
        });
    });
    return seen;
}

}  // namespace

TEST_CASE("integers: layers whose sizes 64 bits do not hold are refused on every rank") {
    struct refused {
        uly::shape layer;
        int64_t batch, tokens;
        uly::errc code;
        char const* text;
    };
    for (auto const& test : {
             refused{{.heads = most, .head_dim = 1},
                     most,
                     most,
                     uly::errc::invalid_sequence,
                     "a layer must stay below 2^62 rows"},
             refused{{.heads = 1, .head_dim = most},
                     1,
                     most,
                     uly::errc::invalid_shape,
                     "an arena must stay below 2^62 bytes"},
             refused{{.heads = 1 << 20, .kv_heads = 1, .head_dim = most},
                     1 << 10,
                     1 << 20,
                     uly::errc::invalid_shape,
                     "an arena must stay below 2^62 bytes"},
             refused{{.heads = 1, .head_dim = 1, .value_dim = most},
                     most,
                     1,
                     uly::errc::invalid_shape,
                     "an arena must stay below 2^62 bytes"},
         }) {
        CAPTURE(test.text);
        for (auto const& each : outcomes_of(test.layer, test.batch, test.tokens)) {
            CHECK(each.code == test.code);
            CHECK_MESSAGE(each.text.find(test.text) != std::string::npos, each.text);
        }
    }
}

TEST_CASE("integers: a whole-token operand that 64 bits do not address is refused on every rank") {
    six_problem<float> const p(1, {.heads = 2, .head_dim = 2}, 1, 4, 3);
    auto const step = uly::sequence::of(1, contiguous({3, 1}));
    std::vector<outcome> seen(2);
    run_ranks(2, [&](uly::threads::communicator c) {
        uly::pipeline layer{c, uly::sequence_local{}, uly::reference_attention{}, p.layer,
                            uly::dense{uly::builtin_gemm{}}};
        // Packed strides of such extents wrap.
        imagined_tokens const x{{1, step.queries().count(c.rank()), int64_t{1} << 62}};
        seen[static_cast<std::size_t>(c.rank())] =
            outcome_of([&] { layer.forward(step, x, p.places().weights(p.parameters.data()), x); });
    });
    for (auto const& each : seen) {
        CHECK(each.code == uly::errc::invalid_tensor);
        CHECK_MESSAGE(each.text.find("forward: x: an operand must span less than 2^62 bytes") !=
                          std::string::npos,
                      each.text);
    }
}
