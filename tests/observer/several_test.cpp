// SPDX-License-Identifier: Apache-2.0

#include <ulysses/observer/counting.hpp>
#include <ulysses/observer/several.hpp>

#include "../archetypes.hpp"

#include <doctest/doctest.h>

#include <string>

namespace uly = ulysses;

namespace {

/// Writes what it is told into a text that is not its own.
template <char Sign>
struct writer {
    std::string* text;
    void begin(uly::step_id step) noexcept { add("begin ", name(step)); }
    void end(uly::step_id step) noexcept { add("end ", name(step)); }
    void begin(uly::pass_kind kind) noexcept { add("call ", name(kind)); }
    void end(uly::pass_kind kind) noexcept { add("left ", name(kind)); }
    void moved(int from, int to, std::size_t bytes) noexcept {
        add("moved ", uly::concat(from, " ", to, " ", bytes));
    }
    void fence() noexcept { add("fence", ""); }
    void add(std::string_view what, std::string_view of) const {
        *text += uly::concat(std::string_view(&sign, 1), what, of, "\n");
    }
    static constexpr char sign = Sign;
};

}  // namespace

TEST_CASE("observers: each is told everything, in order") {
    std::string text;
    uly::observers all{writer<'a'>{&text}, uly::counting_observer{1}, archetypes::observer{},
                       writer<'b'>{&text}};
    all.begin(uly::pass_kind::backward);
    all.begin(uly::step_id::to_heads);
    all.moved(1, 2, 30);
    all.fence();
    all.end(uly::step_id::to_heads);
    all.end(uly::pass_kind::backward);
    CHECK(text ==
          "acall backward\nbcall backward\nabegin to_heads\nbbegin to_heads\namoved 1 2 30\n"
          "bmoved 1 2 30\nafence\nbfence\naend to_heads\nbend to_heads\naleft backward\n"
          "bleft backward\n");
    auto const& counted = all.get<uly::counting_observer>();
    CHECK(counted.bytes_sent == 30);
    CHECK(counted.fences == 1);
    CHECK(counted.steps[static_cast<std::size_t>(uly::step_id::to_heads)] == 1);
}

TEST_CASE("observers: none is an observer too") {
    uly::observers<> none;
    none.begin(uly::step_id::attend);
    none.moved(0, 0, 1);
    CHECK(uly::observer<uly::observers<>>);
}
