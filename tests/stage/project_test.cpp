// SPDX-License-Identifier: Apache-2.0

#include <ulysses/space/host.hpp>
#include <ulysses/stage/project_in.hpp>
#include <ulysses/stage/project_out.hpp>

#include "../pipeline/orders.hpp"

#include <doctest/doctest.h>

#include <vector>

namespace uly = ulysses;
using namespace pipeline_test;

namespace {

/// A projection whose weights are a place to note what it was called with.
struct recording_projection {
    using space_type = uly::host_space;
    struct notes {
        std::vector<int64_t> queries, keys;
        std::vector<float const*> views;
    };

    static void note(notes* to, uly::projection_call const& call, int64_t tokens, int64_t keys,
                     std::vector<float const*> views) {
        for (int64_t s = 0; s < tokens; ++s) to->queries.push_back(call.query_positions(s));
        for (int64_t s = 0; s < keys; ++s) to->keys.push_back(call.key_positions(s));
        to->views = std::move(views);
    }

    using in = uly::token_view<float const>;
    using out = uly::token_view<float>;
    void project_in(uly::projection_call const& call, in x, notes* const& to, out q, out k,
                    out v) const {
        note(to, call, x.tokens(), k.tokens(), {x.data, q.data, k.data, v.data});
    }
    void project_in_backward(uly::projection_call const& call, in x, notes* const& to, out dq,
                             out dk, out dv, out dx, notes* const& gradients) const {
        note(to, call, x.tokens(), dk.tokens(), {x.data, dq.data, dk.data, dv.data, dx.data});
        ++gradients->queries.front();
    }
    void project_out(uly::projection_call const& call, in o, notes* const& to, out y) const {
        note(to, call, o.tokens(), 0, {o.data, y.data});
    }
    void project_out_backward(uly::projection_call const& call, notes* const& to, in dy,
                              out dout) const {
        note(to, call, dy.tokens(), 0, {dy.data, dout.data});
    }
    void project_out_gradients(uly::projection_call const& call, in o, in dy,
                               notes* const& to) const {
        note(to, call, o.tokens(), 0, {o.data, dy.data});
    }
};
using notes = recording_projection::notes;
static_assert(uly::projection_for<recording_projection, float, notes*>);
static_assert(uly::differentiable_projection_for<recording_projection, float, notes*, notes*>);

}  // namespace

TEST_CASE(
    "projections see the global positions of the rank's own tokens, and every view in its place") {
    auto const step = uly::sequence::of(1, zigzag(12, 2));
    float m[8]{};
    auto const in = [&](int i) {
        return uly::token_view<float const>(m + i, {1, 6, 1, 1}, {0, 0, 0, 1});
    };
    auto const out = [&](int i) {
        return uly::token_view<float>(m + i, {1, 6, 1, 1}, {0, 0, 0, 1});
    };
    recording_projection const projection;
    for (int rank : {0, 1}) {
        auto const expected = rank == 0 ? std::vector<int64_t>{0, 1, 2, 9, 10, 11}
                                        : std::vector<int64_t>{3, 4, 5, 6, 7, 8};
        auto const check = [&](notes const& seen, std::vector<float const*> const& views,
                               bool keys) {
            CHECK(seen.queries == expected);
            if (keys) CHECK(seen.keys == expected);
            CHECK(seen.views == views);
        };
        notes a, b, c, d, e, gradient{{0}, {}, {}};
        uly::project_in(projection, step, rank, in(0), &a, out(1), out(2), out(3));
        check(a, {m, m + 1, m + 2, m + 3}, true);
        uly::project_in_backward(projection, step, rank, in(0), &b, out(1), out(2), out(3), out(4),
                                 &gradient);
        check(b, {m, m + 1, m + 2, m + 3, m + 4}, true);
        CHECK(gradient.queries.front() == 1);
        uly::project_out(projection, step, rank, in(5), &c, out(6));
        check(c, {m + 5, m + 6}, false);
        uly::project_out_backward(projection, step, rank, &d, in(6), out(5));
        check(d, {m + 6, m + 5}, false);
        uly::project_out_gradients(projection, step, rank, in(5), in(6), &e);
        check(e, {m + 5, m + 6}, false);
    }
}

TEST_CASE("projections see key positions of their own when keys are another sequence") {
    auto const step = uly::sequence::of(1, contiguous({1, 2}), striped(6, 2));
    auto const call = uly::projection_call_of(step, 1);
    CHECK(call.query_positions(0) == 1);
    CHECK(call.query_positions(1) == 2);
    CHECK(call.key_positions(0) == 1);
    CHECK(call.key_positions(1) == 3);
    CHECK(call.key_positions(2) == 5);
    CHECK(call.query_run(0) == 2);
    CHECK(call.query_run(1) == 1);
    CHECK(call.key_run(0) == 3);
}
