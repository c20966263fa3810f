// SPDX-License-Identifier: Apache-2.0

#include "options.hpp"

#include <ulysses/attention/blocked.hpp>
#include <ulysses/attention/reference.hpp>
#include <ulysses/gemm/builtin.hpp>

#include <doctest/doctest.h>

#include <string>

using namespace attention_test;
using builtin_attention = ulysses::blocked_attention<ulysses::builtin_gemm>;
using conformance::check_attention;

TEST_CASE_TEMPLATE("reference_attention is an attention functor", T, double, float, ulysses::bf16,
                   ulysses::half) {
    check_attention<T>(ulysses::reference_attention{}, {.problems = 5, .longest_cut = 0});
}

TEST_CASE_TEMPLATE("blocked_attention over builtin_gemm is an attention functor", T, float, double,
                   ulysses::bf16, ulysses::half) {
    check_attention<T>(builtin_attention{}, options_for<T>());
}

// The kit finds what it is for ----------------------------------------------------------------------

namespace {

using correct = builtin_attention;
using views = ulysses::attention_backward_views<float>;
using in = head_view<float const>;
using out = head_view<float>;
using call = ulysses::attention_call;

/// A functor that is right but for what a derived one spoils.
struct forgets_begin : correct {
    void forward(call with, in q, in k, in v, out o, out lse) const {
        with.query_begin = 0;
        correct::forward<float>(with, q, k, v, o, lse);
    }
};
struct base_2 : correct {
    void forward(call const& with, in q, in k, in v, out o, out lse) const {
        correct::forward<float>(with, q, k, v, o, lse);
        for_each(lse, [&](auto... i) { lse(i...) /= 0.6931472f; });
    }
};
struct wrong_head : correct {
    void forward(call const& with, in q, in k, in v, out o, out lse) const {
        if (k.heads() > 1) {  // pairs query heads with key-value heads in turn
            k.strides[2] = -k.strides[2];
            k.data -= k.strides[2] * (k.heads() - 1);
        }
        correct::forward<float>(with, q, k, v, o, lse);
    }
};
struct overwrites_dk : correct {
    void backward(call const& with, views const& all) const {
        for_each(all.dk, [&](auto... i) { all.dk(i...) = 0; });
        correct::backward<float>(with, all);
    }
};
struct adds_to_dq : correct {
    void backward(call const& with, views const& all) const {
        auto copy = all;
        std::vector<float> before;
        for_each(all.dq, [&](auto... i) { before.push_back(all.dq(i...)); });
        correct::backward<float>(with, copy);
        std::size_t at = 0;
        for_each(all.dq, [&](auto... i) { all.dq(i...) += before[at++]; });
    }
};
struct reads_beyond : correct {
    void forward(call const& with, in q, in k, in v, out o, out lse) const {
        correct::forward<float>(with, q, k, v, o, lse);
        auto const* const last = q.row(q.batch() - 1, q.tokens() - 1, q.heads() - 1) + q.dim();
        o(0, 0, 0, 0) += 1e-12f * *last;
    }
};
struct writes_beyond : correct {
    void forward(call const& with, in q, in k, in v, out o, out lse) const {
        correct::forward<float>(with, q, k, v, o, lse);
        o.row(0, 0, 0)[-1] = 0;
    }
};
struct needs_more_workspace : correct {
    template <class T>
    static std::size_t workspace_bytes(ulysses::attention_extents const& extents) {
        return correct::workspace_bytes<float>(extents) + 64;
    }
    void forward(call const& with, in q, in k, in v, out o, out lse) const {
        correct::forward<float>(with, q, k, v, o, lse);
        *(with.workspace.data() + with.workspace.size()) = std::byte{0};
    }
};
struct forgets_holes : correct {
    void forward(call with, in q, in k, in v, out o, out lse) const {
        with.visible.present = {};
        correct::forward<float>(with, q, k, v, o, lse);
    }
};
/// Bits that depend on how many rows the call has.
struct depends_on_rows : correct {
    void forward(call const& with, in q, in k, in v, out o, out lse) const {
        correct::forward<float>(with, q, k, v, o, lse);
        auto const nudge = 1 + static_cast<float>(q.tokens() % 2) * 0x1p-23f;
        for_each(o, [&](auto... i) { o(i...) *= nudge; });
    }
};

/// Drops by the item's own heads.
struct drops_by_local_heads : correct {
    void forward(call with, in q, in k, in v, out o, out lse) const {
        with.query_head = 0;
        correct::forward<float>(with, q, k, v, o, lse);
    }
    void backward(call with, views const& all) const {
        with.query_head = 0;
        correct::backward<float>(with, all);
    }
};
struct forgets_sinks_gradient : correct {
    void backward(call const& with, views all) const {
        all.dlogits.sinks = {};
        correct::backward<float>(with, all);
    }
};
struct overwrites_bias_gradient : correct {
    void backward(call const& with, views const& all) const {
        auto const& to = all.dlogits.bias;
        float const minus[] = {-0.5f};  // what the kit puts there
        auto const& [b, h, i, j] = to.layout().extents;
        for (int64_t at = 0; !to.empty() && at < b * h * i * j; ++at)
            to.add(at / (h * i * j), at / (i * j) % h, at / j % i, {at % j, at % j + 1}, minus);
        correct::backward<float>(with, all);
    }
};

template <class Spoilt>
void expect_broken(std::string const& rule) {
    std::string found = "none";
    try {
        check_attention<float>(Spoilt{});
    } catch (conformance::broken_attention_rule const& e) {
        found = e.what();
    }
    CAPTURE(found);
    CHECK(found.find("conformance: " + rule) != std::string::npos);
}

}  // namespace

TEST_CASE("conformance: each rule of attention is missed where it is broken") {
    expect_broken<forgets_begin>("o is the formula's");
    expect_broken<base_2>("lse is the formula's");
    expect_broken<wrong_head>("o is the formula's");
    expect_broken<overwrites_dk>("dk, which is added to, is the formula's");
    expect_broken<adds_to_dq>("dq, which is overwritten, is the formula's");
    expect_broken<reads_beyond>("o is the formula's");
    expect_broken<writes_beyond>("nothing is written but the rows of the views");
    expect_broken<needs_more_workspace>("workspace_bytes() is what the functor uses");
    expect_broken<forgets_holes>("o is the formula's");
    expect_broken<depends_on_rows>("a row has the same bits");
    expect_broken<drops_by_local_heads>("o is the formula's");
    expect_broken<forgets_sinks_gradient>("the gradient of sinks, which is added to, is the");
    expect_broken<overwrites_bias_gradient>("the gradient of the bias, which is added to, is the");
}
