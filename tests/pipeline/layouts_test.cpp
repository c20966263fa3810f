// SPDX-License-Identifier: Apache-2.0

#include <ulysses/observer/counting.hpp>

#include "harness.hpp"

#include <doctest/doctest.h>

using namespace pipeline_test;
namespace uly = ulysses;

namespace {

/// An engine's tensor: a view of strided memory, whose type says the order of its axes.
template <uly::axes Order>
struct engine_tensor {
    float* memory;
    uly::extents4 sizes, steps;
};

template <uly::axes Order>
engine_tensor<Order> packed(std::vector<float>& memory, uly::extents4 const& sizes) {
    memory.assign(static_cast<std::size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3]),
                  not_a_number<float>());
    return {memory.data(), sizes, uly::packed_strides(sizes)};
}

/// Copies between a tensor [B, S, H, D] and a strided view.
template <class View>
void copy_in(tensor<float> const& from, View const& to) {
    for (int64_t b = 0; b < to.batch(); ++b)
        for (int64_t s = 0; s < to.tokens(); ++s)
            for (int64_t h = 0; h < to.heads(); ++h)
                for (int64_t d = 0; d < to.dim(); ++d) to(b, s, h, d) = from(b, s, h, d);
}
template <class View>
tensor<float> copy_out(View const& from) {
    tensor<float> to(from.extents);
    for (int64_t b = 0; b < from.batch(); ++b)
        for (int64_t s = 0; s < from.tokens(); ++s)
            for (int64_t h = 0; h < from.heads(); ++h)
                for (int64_t d = 0; d < from.dim(); ++d) to(b, s, h, d) = from(b, s, h, d);
    return to;
}

uly::shape const gqa{
    .heads = 6, .kv_heads = 2, .head_dim = 4, .value_dim = 4, .mask = uly::mask::causal};

/// Forward and backward with operands that `lay(b, s, h, d extents)` makes; compares with
/// `compute`.
template <class Layer, class Views>
void run_with(Layer& layer, uly::sequence const& step, local_problem<float> const& l,
              Views const& x, results<float>& whole, int rank) {
    copy_in(l.q, uly::view_of_heads<uly::sequence_local>(x.q, "q"));
    copy_in(l.k, uly::view_of_heads<uly::sequence_local>(x.k, "k"));
    copy_in(l.v, uly::view_of_heads<uly::sequence_local>(x.v, "v"));
    copy_in(l.dout, uly::view_of_heads<uly::sequence_local>(x.dout, "dout"));
    auto saved = layer.make_context();
    layer.attend(step, saved, x.q, x.k, x.v, x.o);
    layer.attend_backward(step, saved, x.dout, x.dq, x.dk, x.dv);
    auto back = l;
    back.o = copy_out(uly::view_of_heads<uly::sequence_local>(x.o, "o"));
    back.dq = copy_out(uly::view_of_heads<uly::sequence_local>(x.dq, "dq"));
    back.dk = copy_out(uly::view_of_heads<uly::sequence_local>(x.dk, "dk"));
    back.dv = copy_out(uly::view_of_heads<uly::sequence_local>(x.dv, "dv"));
    back.put_back_into(whole, step, rank);
}

void check_same(results<float> const& a, results<float> const& b) {
    CHECK(same_bits(a.o, b.o));
    CHECK(same_bits(a.dq, b.dq));
    CHECK(same_bits(a.dk, b.dk));
    CHECK(same_bits(a.dv, b.dv));
}

template <uly::axes Order>
struct operands {
    engine_tensor<Order> q, k, v, o, dout, dq, dk, dv;
};

}  // namespace

template <ulysses::axes Order>
struct ulysses::tensor_traits<engine_tensor<Order>> {
    static constexpr axes order = Order;
    static float* data(engine_tensor<Order> const& x) { return x.memory; }
    static extents4 extents(engine_tensor<Order> const& x) { return x.sizes; }
    static extents4 strides(engine_tensor<Order> const& x) { return x.steps; }
};

TEST_CASE_TEMPLATE("layouts: operands in any axis order", Order,
                   std::integral_constant<uly::axes, uly::axes::sbhd>,
                   std::integral_constant<uly::axes, uly::axes::bhsd>) {
    constexpr auto order = Order::value;
    auto const p = make_problem<float>(1, gqa, 2, 13);
    for (int ranks : {1, 4}) {
        CAPTURE(ranks);
        auto const deal = zigzag(13, ranks);
        auto const step = uly::sequence::of(2, deal);
        results<float> whole(p);
        run_ranks(ranks, [&](uly::threads::communicator c) {
            uly::pipeline layer{c, uly::sequence_local{}, builtin_attention{}, p.layer};
            local_problem<float> const l(p, step, c.rank());
            std::vector<float> m[8];
            auto const like = [&](std::vector<float>& memory, tensor<float> const& x) {
                auto const& e = x.sizes;
                return packed<order>(memory, order == uly::axes::sbhd
                                                 ? uly::extents4{e[1], e[0], e[2], e[3]}
                                                 : uly::extents4{e[0], e[2], e[1], e[3]});
            };
            run_with(layer, step, l,
                     operands<order>{like(m[0], l.q), like(m[1], l.k), like(m[2], l.v),
                                     like(m[3], l.o), like(m[4], l.dout), like(m[5], l.dq),
                                     like(m[6], l.dk), like(m[7], l.dv)},
                     whole, c.rank());
        });
        check_same(whole, compute<builtin_attention>(p, deal));
    }
}

namespace {

/// How a token's q, k and v lie in one row, in units of one head: where the first head of each is,
/// and from head to head.
struct packing {
    char const* name;
    int64_t heads, kv_heads;
    int64_t k_first, v_first, q_step, kv_step;
    bool q_inside = true;
};

}  // namespace

TEST_CASE("layouts: q, k and v packed in one row a token, their gradients too") {
    // After each row 3 elements that belong to somebody else.
    packing const all[] = {
        {"side by side", 6, 2, 6, 8, 1, 1},
        {"interleaved by head, [H, 3, D]", 5, 5, 1, 2, 3, 3},
        // Megatron's linear layers write 3 q, 1 k, 1 v for each of two key-value heads. Six query
        // heads do not lie at one stride there: a view can only take them group by group, so q
        // stays packed and k and v are taken from the interleaved rows.
        {"interleaved by group, [Hkv, G + 2, D]", 6, 2, 3, 4, 0, 5, false},
    };
    for (auto const& form : all)
        for (int ranks : {1, 3}) {
            CAPTURE(form.name);
            CAPTURE(ranks);
            auto shape = gqa;
            shape.heads = form.heads, shape.kv_heads = form.kv_heads;
            auto const p = make_problem<float>(2, shape, 2, 11);
            auto const deal = striped(11, ranks);
            auto const step = uly::sequence::of(2, deal);
            int touched = 0;
            results<float> whole(p);
            std::mutex mutex;
            run_ranks(ranks, [&](uly::threads::communicator c) {
                uly::pipeline layer{c, uly::sequence_local{}, builtin_attention{}, p.layer};
                local_problem<float> const l(p, step, c.rank());
                auto const s = step.queries().count(c.rank());
                auto const heads = form.heads, kv_heads = form.kv_heads;
                constexpr int64_t dim = 4;
                auto const own = (heads + 2 * kv_heads) * dim, row = own + 3;
                constexpr auto foreign = 12345.0f;
                std::vector<float> x(static_cast<std::size_t>(2 * s * row), foreign), dx = x;
                std::vector<float> o(static_cast<std::size_t>(2 * s * heads * dim),
                                     not_a_number<float>());
                auto dout = o, q = o, dq = o;
                using view = uly::token_view<float>;
                auto const alone = [&](std::vector<float>& memory) {
                    return view{memory.data(), {2, s, heads, dim}};
                };
                auto const part = [&](std::vector<float>& memory, int64_t first, int64_t count,
                                      int64_t head) {
                    return view{memory.data() + first * dim,
                                {2, s, count, dim},
                                {s * row, row, head * dim, 1}};
                };
                struct {
                    view q, k, v, o, dout, dq, dk, dv;
                } const views{form.q_inside ? part(x, 0, heads, form.q_step) : alone(q),
                              part(x, form.k_first, kv_heads, form.kv_step),
                              part(x, form.v_first, kv_heads, form.kv_step),
                              alone(o),
                              alone(dout),
                              form.q_inside ? part(dx, 0, heads, form.q_step) : alone(dq),
                              part(dx, form.k_first, kv_heads, form.kv_step),
                              part(dx, form.v_first, kv_heads, form.kv_step)};
                run_with(layer, step, l, views, whole, c.rank());
                std::lock_guard lock(mutex);
                for (auto* memory : {&x, &dx})
                    for (std::size_t i = 0; i < memory->size(); ++i) {
                        auto const column = static_cast<int64_t>(i) % row;
                        auto const ours = column < own && (form.q_inside || column / dim % 5 >= 3);
                        touched += !ours && (*memory)[i] != foreign;
                    }
            });
            CHECK(touched == 0);
            check_same(whole, compute<builtin_attention>(p, deal));
        }
}

TEST_CASE("layouts: operands of three axes are a batch of one") {
    auto const p = make_problem<float>(3, gqa, 1, 9);
    auto const step = uly::sequence::split(2, 1, 9);
    results<float> whole(p);
    run_ranks(2, [&](uly::threads::communicator c) {
        struct unbatched {
            float* memory;
            std::array<int64_t, 3> sizes;
            float* data() const { return memory; }
            std::array<int64_t, 3> extents() const { return sizes; }
        };
        uly::pipeline layer{c, uly::sequence_local{}, builtin_attention{}, p.layer};
        local_problem<float> l(p, step, c.rank());
        auto const flat = [](tensor<float> const& x) {
            return unbatched{x.data(), {x.sizes[1], x.sizes[2], x.sizes[3]}};
        };
        auto saved = layer.make_context();
        layer.attend(step, saved, flat(l.q), flat(l.k), flat(l.v), flat(l.o));
        layer.attend_backward(step, saved, flat(l.dout), flat(l.dq), flat(l.dk), flat(l.dv));
        l.put_back_into(whole, step, c.rank());
    });
    check_same(whole, compute<builtin_attention>(p, equal_shares(9, 2)));
}

TEST_CASE("layouts: head_local operands are attended where they lie, without a fence") {
    // Whole heads; three ranks of five heads hold 2, 2 and 1.
    auto const p = make_problem<double>(4,
                                        {.heads = 5,
                                         .head_dim = 4,
                                         .mask = uly::mask::causal,
                                         .assignment = uly::assignment::whole_heads},
                                        2, 9);
    auto const right = compute_alone<builtin_attention>(p);
    auto const step = uly::sequence::split(3, 2, 9);
    for (auto const keep : {uly::keep::exchanged, uly::keep::local, uly::keep::nothing}) {
        results<double> whole(p);
        std::vector<uly::counting_observer> seen(3);
        run_ranks(3, [&](uly::threads::communicator c) {
            auto shape = p.layer;
            shape.keep = keep;
            uly::pipeline layer{c,     uly::head_local{},    builtin_attention{},
                                shape, uly::no_projection{}, uly::counting_observer{c.rank()}};
            auto const& items = layer.planned(step).items();
            auto const first = items.front().work.head_begin,
                       count = items.back().work.head_end - first;
            auto const heads_of = [&](tensor<double> const& x) {
                tensor<double> part({2, 9, count, 4});
                for (int64_t b = 0; b < 2; ++b)
                    for (int64_t s = 0; s < 9; ++s)
                        for (int64_t h = 0; h < count; ++h)
                            for (int64_t d = 0; d < 4; ++d)
                                part(b, s, h, d) = x(b, s, first + h, d);
                return part;
            };
            auto const q = heads_of(p.q), k = heads_of(p.k), v = heads_of(p.v),
                       dout = heads_of(p.dout);
            tensor<double> o(q.sizes), dq(q.sizes), dk(q.sizes), dv(q.sizes);
            auto saved = layer.make_context();
            layer.attend(step, saved, q, k, v, o);
            if (keep == uly::keep::exchanged)
                layer.attend_backward(step, saved, dout, dq, dk, dv);
            else
                layer.attend_backward(step, saved, q, k, v, o, dout, dq, dk, dv);
            for (auto const& [from, to] :
                 {std::pair{&o, &whole.o}, {&dq, &whole.dq}, {&dk, &whole.dk}, {&dv, &whole.dv}})
                for (int64_t b = 0; b < 2; ++b)
                    for (int64_t s = 0; s < 9; ++s)
                        for (int64_t h = 0; h < count; ++h)
                            for (int64_t d = 0; d < 4; ++d)
                                (*to)(b, s, first + h, d) = (*from)(b, s, h, d);
            seen[static_cast<std::size_t>(c.rank())] = layer.observer();
        });
        CHECK(same_bits(whole.o, right.o));
        CHECK(same_bits(whole.dq, right.dq));
        CHECK(same_bits(whole.dk, right.dk));
        CHECK(same_bits(whole.dv, right.dv));
        for (auto const& each : seen) {
            CHECK(each.fences == 0);
            CHECK(each.bytes_sent + each.bytes_received + each.bytes_kept == 0);
        }
    }
}

TEST_CASE("layouts: head_local operands need whole heads") {
    run_ranks(3, [&](uly::threads::communicator c) {
        uly::pipeline layer{c, uly::head_local{}, builtin_attention{}, {.heads = 5, .head_dim = 4}};
        auto const step = uly::sequence::split(3, 1, 9);
        tensor<float> x({1, 9, 2, 4});
        auto const seen = outcome_of([&] { layer.attend(step, x, x, x, x); });
        CHECK(seen.code == uly::errc::invalid_shape);
        CHECK(
            seen.text.find("ulysses: pipeline: head_local operands need whole heads on every rank "
                           "(assignment::whole_heads): 5 heads on 3 ranks") == 0);
    });
}
