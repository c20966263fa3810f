// SPDX-License-Identifier: Apache-2.0

#include <ulysses/observer/trace.hpp>
#include <ulysses/projection/epilogues.hpp>
#include <ulysses/projection/qk_norm.hpp>
#include <ulysses/projection/rope.hpp>

#include "../allocations.hpp"
#include "six_steps.hpp"

#include <doctest/doctest.h>

#if !TEST_UNDER_SANITIZER

using namespace pipeline_test;
namespace uly = ulysses;

namespace {

template <class T>
void check_steady_state(uly::keep keep, int ranks, orders const& order, int64_t chunks = 1,
                        bool overlap = false) {
    // Cut heads, shared key-value heads, an order of several runs, another step in between.
    six_problem<T> const six(1,
                             {.heads = 6,
                              .kv_heads = 2,
                              .head_dim = 4,
                              .mask = uly::mask::causal,
                              .keep = keep,
                              .chunks = chunks,
                              .overlap = overlap},
                             2, 21, 5);
    auto const p = make_problem<T>(1, six.layer, 2, 21);
    std::vector<long> seen(6, -1);
    run_ranks(ranks, [&](uly::threads::communicator c) {
        // Nor does recording, neither while there is room nor after.
        uly::trace_recorder recorder(c.rank(), ranks, {.events = 100});
        uly::pipeline layer{
            c,
            uly::sequence_local{},
            builtin_attention{},
            six.layer,
            uly::dense{uly::builtin_gemm{}, uly::epilogues{uly::qk_norm{}, uly::rope{4}}},
            recorder.observe("layer")};
        auto saved = layer.make_context(), saved_six = layer.make_context();
        auto const step = uly::sequence::of(2, order);
        auto const me = c.rank();
        local_problem<T> local(p, step, me);
        auto const x = own_part(step.queries(), me, six.x),
                   dy = own_part(step.queries(), me, six.dy);
        tensor<T> y(x.sizes), dx(x.sizes);
        std::vector<T> gradients(six.parameters.size());
        auto const weights = six.places().weights(six.parameters.data());
        auto const count = [&](std::size_t i, auto const& body) {
            auto const number = steady_allocations(c, body);
            if (me == 0) seen[i] = number;
        };
        count(0, [&] { layer.attend(step, local.q, local.k, local.v, local.o); });
        count(1, [&] {
            layer.attend(step, saved, local.q, local.k, local.v, local.o);
            attend_backward(layer, step, saved, local);
        });
        count(2, [&] { layer.forward(step, token_operand(x), weights, token_operand(y)); });
        count(3, [&] {
            layer.forward(step, saved_six, token_operand(x), weights, token_operand(y));
            layer.backward(step, saved_six, token_operand(x), weights, token_operand(dy),
                           token_operand(dx), six.places().gradients(gradients.data()));
        });
        // A step renewed in place, and the plan with it, alternating between two lengths.
        uly::sequence renewed;
        int64_t which = 0;
        count(4, [&] {
            which = 1 - which;
            renewed.renew(
                c,
                {.batch = 2, .tokens = me == 0 ? 7 - which : 5 + which, .replicated = 3 * which});
            static_cast<void>(layer.planned(renewed));
        });
        // The same of heads with other windows, and of keys with holes and documents.
        static constexpr uly::window windows[] = {{1, -1}, {}, {1, -1}, {}, {2, 2}, {}};
        auto uneven = six.layer;
        uneven.head_windows = windows;
        uly::pipeline other{c, uly::sequence_local{}, builtin_attention{}, uneven};
        std::uint8_t const present[] = {1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1};
        int64_t const positions[] = {0, 1, 2, 0, 1, 0, 1, 2, 3, 0, 1, 2, 0, 1};
        count(5, [&] {
            which = 1 - which;
            auto const tokens = me == 0 ? 7 - which : 5 + which;
            auto const both = static_cast<std::size_t>(2 * tokens);
            renewed.renew(c, {.batch = 2,
                              .tokens = tokens,
                              .positions = std::span(positions).first(both),
                              .present = std::span(present).first(both)});
            static_cast<void>(other.planned(renewed));
        });
    });
    CHECK(seen == std::vector<long>(6, 0));
}

}  // namespace

TEST_CASE("allocation: the counter counts") {
    // Called by name: compilers may leave out what a new expression or a container allocates.
    auto const before = allocations.load();
    ::operator delete(::operator new(100));
    ::operator delete(::operator new(100, std::align_val_t{64}), std::align_val_t{64});
    ::operator delete(::operator new(100, std::align_val_t{64}, std::nothrow),
                       std::align_val_t{64});
    CHECK(allocations.load() == before + 3);
}

namespace {

/// Decode, one token of each sample a call, by tokens and by heads in turn over one cache.
template <class Attention, class T>
void check_steady_decode(int ranks) {
    uly::shape const shape = uly::checked({.heads = 4,
                                           .kv_heads = 2,
                                           .head_dim = 4,
                                           .mask = uly::mask::causal,
                                           .assignment = uly::assignment::whole_heads});
    long seen = -1;
    run_ranks(ranks, [&](uly::threads::communicator c) {
        uly::pipeline layer{c, uly::sequence_local{}, Attention{}, shape};
        uly::pipeline decode{c, uly::head_local{}, Attention{}, shape};
        auto cache = layer.template make_cache<T>(3, 600);
        auto const own = [&](int64_t tokens) { return c.rank() == 0 ? tokens : 0; };
        uly::sequence step;
        auto const renew = [&](std::vector<int64_t> const& lengths, int64_t tokens) {
            step.renew(c, {.batch = 3,
                           .tokens = own(tokens),
                           .packing = {.lengths = lengths, .past = cache.lengths()}});
        };
        auto const q = tensor<T>({3, own(1), 4, 4}, T(1)), k = tensor<T>({3, own(1), 2, 4}, T(1));
        auto const heads = 4 / ranks, kv_heads = std::max(1, 2 / ranks);
        auto const q1 = tensor<T>({3, 1, heads, 4}, T(1)),
                   k1 = tensor<T>({3, 1, kv_heads, 4}, T(1));
        tensor<T> const o(q.sizes), o1(q1.sizes);
        std::vector<int64_t> const uneven{0, 1, 1}, none;
        renew(uneven, 1);  // pasts that differ: most blocks
        layer.attend(step, cache, q, k, k, o);
        auto const number = steady_allocations(c, [&] {
            for (int i = 0; i < 29; ++i) {  // past a tile of keys
                renew(none, 1);
                layer.attend(step, cache, q, k, k, o);
                renew(none, 1);
                decode.attend(step, cache, q1, k1, k1, o1);
            }
            cache.truncate(0, cache.lengths()[0] - 1);
        });
        if (c.rank() == 0) seen = number;
    });
    CHECK(seen == 0);
}

}  // namespace

TEST_CASE("allocation: decode over a cache allocates nothing, however long it grows") {
    for (int ranks : {1, 4}) {
        CAPTURE(ranks);
        check_steady_decode<builtin_attention, float>(ranks);
        check_steady_decode<uly::reference_attention, double>(ranks);  // workspace grows with keys
    }
}

TEST_CASE("allocation: a steady state allocates nothing") {
    for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing})
        for (int ranks : {1, 4}) {
            CAPTURE(static_cast<int>(keep));
            CAPTURE(ranks);
            check_steady_state<float>(keep, ranks, zigzag(21, ranks));
            check_steady_state<float>(keep, ranks, replicated_front(5, 21, ranks));
            for (bool const overlap : {false, true})
                check_steady_state<float>(keep, ranks, replicated_front(5, 21, ranks), 2, overlap);
        }
}

#endif
