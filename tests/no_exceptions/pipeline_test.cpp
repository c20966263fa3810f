// SPDX-License-Identifier: Apache-2.0

#include "../pipeline/six_steps.hpp"

#include <ulysses/ulysses.hpp>

#include <doctest/doctest.h>

using namespace pipeline_test;
namespace uly = ulysses;

#if defined(__cpp_exceptions) || defined(__cpp_rtti)
#error "this program is to be built with -fno-exceptions -fno-rtti"
#endif
static_assert(ULYSSES_EXCEPTIONS == 0);

namespace {

constexpr uly::shape five_heads{
    .heads = 5, .head_dim = 8, .value_dim = 6, .mask = uly::mask::causal};
constexpr uly::shape shared_keys{.heads = 6, .kv_heads = 2, .head_dim = 8, .value_dim = 5};

template <class T>
void check_near(results<T> const& found, results<double> const& exact, bounds const& bound) {
    CHECK(largest_difference(found.o, exact.o) <= bound.o);
    CHECK(largest_difference(found.lse, exact.lse) <= bound.lse);
    CHECK(largest_difference(found.dq, exact.dq) <= bound.dq);
    CHECK(largest_difference(found.dk, exact.dk) <= bound.dk);
    CHECK(largest_difference(found.dv, exact.dv) <= bound.dv);
}

template <class T, class Attention>
void check_near_reference(uly::shape const& layer) {
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
        CAPTURE(seed);
        auto const p = make_problem<T>(seed, layer, 2, 19);
        auto const exact = compute_alone<uly::reference_attention>(converted<double>(p));
        auto const bound = bounds_of(p, 3);
        results<T> serial(p);
        compute_rank(uly::serial{}, p, uly::sequence::split(1, 2, 19), Attention{}, serial);
        auto const threads = compute<Attention>(p, zigzag(19, 3));
        check_near(serial, exact, bound);
        check_near(threads, exact, bound);
    }
}

template <class T>
tensor<T> as_tensor(std::vector<T> const& values) {
    tensor<T> all({1, 1, 1, static_cast<int64_t>(values.size())});
    all.memory = values;
    return all;
}

}  // namespace

TEST_CASE_TEMPLATE("no exceptions: forward and backward lie near the reference", T, float,
                   uly::bf16) {
    for (auto const& layer : {five_heads, shared_keys}) {
        CAPTURE(layer.heads);
        check_near_reference<T, builtin_attention>(layer);
    }
}

TEST_CASE("no exceptions: six steps over dense projections lie near the reference") {
    for (auto const& layer : {five_heads, shared_keys}) {
        CAPTURE(layer.heads);
        six_problem<float> const p(7, layer, 2, 19, 9);
        six_problem<double> wide(7, layer, 2, 19, 9);
        wide.x = converted<double>(p.x);
        wide.dy = converted<double>(p.dy);
        wide.parameters.assign(p.parameters.begin(), p.parameters.end());
        auto const exact = six_steps(wide, equal_shares(19, 1));
        auto const order = zigzag(19, 3);
        auto const found = six_steps<float, builtin_attention>(p, order);
        // The sums of these small problems have fewer than 1000 terms of magnitude below 100.
        constexpr double tolerance = 1000 * 100 * 0x1p-24;
        CHECK(largest_difference(found.y, exact.y) <= tolerance);
        CHECK(largest_difference(found.dx, exact.dx) <= tolerance);
        CHECK(largest_difference(as_tensor(found.gradients), as_tensor(exact.gradients)) <=
              tolerance);
        CHECK(largest_difference(exact.y, tensor<double>(exact.y.sizes, 0)) > 100 * tolerance);
    }
}
