// SPDX-License-Identifier: Apache-2.0

#include "../doubles/nvtx.hpp"

#include <ulysses/adapters/nvtx.hpp>
#include <ulysses/attention/reference.hpp>
#include <ulysses/comm/threads.hpp>
#include <ulysses/observer/counting.hpp>
#include <ulysses/observer/several.hpp>
#include <ulysses/pipeline.hpp>
#include <ulysses/space/host.hpp>

#include <doctest/doctest.h>

#include <string>
#include <vector>

/// Ranges as a tool sees them.
namespace {

namespace uly = ulysses;
using events = std::vector<std::string>;

constexpr uly::shape shape{.heads = 2, .head_dim = 4};

struct operands {
    std::vector<double> q = std::vector<double>(3 * 2 * 4, 0.5), o = q;
    uly::token_view<double> view(std::vector<double>& x, std::int64_t heads = 2) const {
        return {x.data(), {1, 3, heads, 4}};
    }
};

}  // namespace

TEST_CASE("nvtx: a range for each call and step, on each rank's thread") {
    uly::threads::run(2, [](uly::threads::communicator ranks) {
        operands x;
        uly::pipeline layer{
            ranks,
            uly::sequence_local{},
            uly::reference_attention{},
            shape,
            uly::no_projection{},
            uly::observers{uly::nvtx_observer{"layer 7"}, uly::counting_observer{ranks.rank()}}};
        auto const step = uly::sequence::split(2, 1, 6);
        layer.attend(step, x.view(x.q), x.view(x.q), x.view(x.q), x.view(x.o));
        doubles::nvtx_events();  // windows were made
        auto const fences = layer.observer().get<uly::counting_observer>().fences;
        layer.attend(step, x.view(x.q), x.view(x.q), x.view(x.q), x.view(x.o));
        CHECK(layer.observer().get<uly::counting_observer>().fences == fences + 2);
        CHECK(doubles::nvtx_depth() == 0);
        auto const seen = doubles::nvtx_events();
        events expected{"ulysses push layer 7: attend"};
        for (auto const* const text : {"push to_heads", "mark fence", "pop", "push attend", "pop",
                                       "push to_tokens", "mark fence", "pop", "pop"})
            expected.push_back(std::string("ulysses ") + text);
        CHECK(seen == expected);
    });
}

TEST_CASE("nvtx: ranges of a call that fails are closed by the next") {
    uly::threads::run(1, [](uly::threads::communicator ranks) {
        operands x;
        uly::pipeline layer{ranks, uly::sequence_local{}, uly::reference_attention{},
                            shape, uly::no_projection{},  uly::nvtx_observer{}};
        auto const step = uly::sequence::split(1, 1, 3);
        CHECK_THROWS_AS(layer.attend(step, x.view(x.q, 1), x.view(x.q), x.view(x.q), x.view(x.o)),
                        uly::invalid_tensor);
        CHECK(doubles::nvtx_depth() == 1);
        doubles::nvtx_events();
        layer.attend(step, x.view(x.q), x.view(x.q), x.view(x.q), x.view(x.o));
        CHECK(doubles::nvtx_depth() == 0);
        auto const seen = doubles::nvtx_events();
        REQUIRE(seen.size() > 4);
        CHECK(events(seen.begin(), seen.begin() + 4) ==
              events{"ulysses push attend", "ulysses pop", "ulysses pop", "ulysses push attend"});
    });
}
