// SPDX-License-Identifier: Apache-2.0

#include <ulysses/attention/reference.hpp>
#include <ulysses/comm/serial.hpp>
#include <ulysses/comm/threads.hpp>
#include <ulysses/observer/trace.hpp>
#include <ulysses/observer/write_trace.hpp>
#include <ulysses/pipeline.hpp>
#include <ulysses/space/host.hpp>

#include <doctest/doctest.h>

#include <deque>
#include <iomanip>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace uly = ulysses;
using event_kind = uly::trace_event::kind;
using step = uly::step_id;

namespace {

std::string text_of(uly::trace_recorder const& recorder) {
    std::ostringstream out;
    uly::write_trace(out, recorder);
    return out.str();
}

bool holds(std::string const& text, std::string_view part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("trace: a call, its steps, its fences and what they moved") {
    uly::trace_recorder recorder(1, 3);
    auto seen = recorder.observe("first");
    seen.begin(uly::pass_kind::forward);
    seen.begin(step::to_heads);
    seen.moved(1, 0, 5);
    seen.moved(1, 2, 7);
    seen.moved(1, 0, 6);
    seen.moved(2, 1, 3);
    seen.moved(1, 1, 100);
    seen.fence();
    seen.end(step::to_heads);
    seen.begin(step::attend);
    seen.end(step::attend);
    seen.end(uly::pass_kind::forward);
    auto const events = recorder.events();
    REQUIRE(events.size() == 4);
    CHECK(events[0].what == event_kind::call);
    CHECK(events[1].what == event_kind::step);
    CHECK(events[2].what == event_kind::fence);
    CHECK(events[3].what == event_kind::step);
    CHECK(events[1].id == static_cast<int>(step::to_heads));
    CHECK(events[3].id == static_cast<int>(step::attend));
    CHECK(events[1].kept == 100);
    auto const moved = recorder.transfers(events[1]);
    REQUIRE(moved.size() == 2);
    CHECK(moved[0].peer == 0);
    CHECK(moved[0].written == 11);
    CHECK(moved[0].read == 0);
    CHECK(moved[1].peer == 2);
    CHECK(moved[1].written == 7);
    CHECK(moved[1].read == 3);
    CHECK(recorder.transfers(events[0]).empty());
    CHECK(recorder.transfers(events[3]).empty());
    for (auto const& event : events) {
        CHECK(event.finished);
        CHECK(event.in_call);
        CHECK(event.call == 1);
        CHECK(event.pass == uly::pass_kind::forward);
        CHECK(recorder.layer(event) == "first");
        CHECK(event.begin >= events[0].begin);
        CHECK(event.end >= event.begin);
        CHECK(event.end <= events[0].end);
    }
    CHECK(recorder.dropped() == 0);
}

TEST_CASE("trace: what finds no room is dropped and counted") {
    uly::trace_recorder recorder(0, 2, {.events = 2});
    auto seen = recorder.observe("layer");
    seen.begin(uly::pass_kind::attend);
    seen.begin(step::to_heads);
    seen.fence();  // no room
    seen.moved(0, 1, 8);
    seen.end(step::to_heads);
    CHECK(recorder.dropped() == 1);
    seen.begin(step::to_tokens);  // no room
    seen.moved(1, 0, 8);          // nor for its bytes
    seen.end(step::to_tokens);
    seen.end(uly::pass_kind::attend);
    CHECK(recorder.dropped() == 3);
    REQUIRE(recorder.events().size() == 2);
    CHECK(recorder.events()[0].finished);
    CHECK(recorder.transfers(recorder.events()[1]).size() == 1);
    CHECK(holds(text_of(recorder), "\"events\":2,\"capacity\":2,\"dropped\":3"));
    recorder.clear();
    CHECK(recorder.events().empty());
    CHECK(recorder.dropped() == 0);
    seen.begin(step::attend);
    seen.end(step::attend);
    CHECK(recorder.events().size() == 1);
    CHECK_FALSE(recorder.events()[0].in_call);
}

TEST_CASE("trace: transfers have a limit of their own") {
    uly::trace_recorder recorder(0, 4, {.events = 2});  // 5 transfers
    auto seen = recorder.observe("layer");
    for (int i = 0; i < 2; ++i) {
        seen.begin(step::to_heads);
        for (int peer = 1; peer < 4; ++peer) seen.moved(0, peer, 1);
        seen.end(step::to_heads);
    }
    CHECK(recorder.transfers(recorder.events()[0]).size() == 3);
    CHECK(recorder.transfers(recorder.events()[1]).size() == 2);
    CHECK(recorder.dropped() == 1);
}

TEST_CASE("trace: bytes of ranks that are not of the group are counted as dropped") {
    uly::trace_recorder recorder(0, 2);
    auto seen = recorder.observe("layer");
    seen.begin(step::to_heads);
    seen.moved(0, 2, 1);
    seen.moved(-1, 0, 1);
    seen.moved(1, 1, 1);
    seen.end(step::to_heads);
    CHECK(recorder.dropped() == 3);
    CHECK(recorder.transfers(recorder.events()[0]).empty());
}

TEST_CASE("trace: paused, nothing is recorded but calls are counted") {
    uly::trace_recorder recorder(0, 1, {.recording = false});
    auto seen = recorder.observe("layer");
    auto const call = [&] {
        seen.begin(uly::pass_kind::attend);
        seen.begin(step::attend);
        seen.fence();
        seen.end(step::attend);
        seen.end(uly::pass_kind::attend);
    };
    call();
    CHECK(recorder.events().empty());
    recorder.resume();
    call();
    CHECK(recorder.events().size() == 3);
    CHECK(recorder.events()[0].call == 2);
    // In the middle of a call, which is then unfinished; its end is not that of another span.
    seen.begin(uly::pass_kind::attend);
    seen.begin(step::attend);
    recorder.pause();
    recorder.resume();
    seen.end(step::attend);
    seen.end(uly::pass_kind::attend);
    REQUIRE(recorder.events().size() == 5);
    CHECK_FALSE(recorder.events()[3].finished);
    CHECK_FALSE(recorder.events()[4].finished);
    CHECK(recorder.dropped() == 0);
}

TEST_CASE("trace: an observer of no recorder does nothing") {
    uly::trace_observer seen;
    seen.begin(uly::pass_kind::attend);
    seen.begin(step::attend);
    seen.moved(0, 1, 2);
    seen.fence();
    seen.end(step::attend);
    seen.end(uly::pass_kind::attend);
    CHECK(uly::observer<uly::trace_observer>);
}

TEST_CASE("trace: a recorder's rank lies in its group") {
    for (int rank : {-1, 2, 3})
        CHECK_THROWS_WITH_AS(uly::trace_recorder(rank, 2, {}, uly::where{}),
                             uly::concat("ulysses: trace_recorder: rank must lie in the group: "
                                         "rank ",
                                         rank, " of 2")
                                 .c_str(),
                             uly::invalid_call);
}

namespace {

/// Fails in the call that it is told to.
struct failing_attention : uly::reference_attention {
    int* calls_left;
    template <class... X>
    void forward(X const&... x) const {
        if ((*calls_left)-- == 0) throw std::runtime_error("failed as told");
        uly::reference_attention::forward(x...);
    }
};

}  // namespace

TEST_CASE("trace: a failed step and its call are unfinished, on that rank alone the step") {
    std::deque<uly::trace_recorder> recorders;
    for (int r = 0; r < 2; ++r) recorders.emplace_back(r, 2);
    uly::threads::run(2, [&](uly::threads::communicator c) {
        int calls_left = c.rank() == 1 ? 1 : 100;
        failing_attention attention;
        attention.calls_left = &calls_left;
        uly::pipeline layer{c,
                            uly::sequence_local{},
                            attention,
                            {.heads = 2, .head_dim = 1},
                            uly::no_projection{},
                            recorders[static_cast<std::size_t>(c.rank())].observe("layer")};
        auto const tokens = uly::sequence::split(2, 1, 4);
        std::vector<float> x(4), o(4);
        auto const view = [](auto& of) { return uly::token_view<float>(of.data(), {1, 2, 2, 1}); };
        for (int call = 0; call < 3; ++call) {
            auto const attend = [&] { layer.attend(tokens, view(x), view(x), view(x), view(o)); };
            if (call == 1)
                CHECK_THROWS_AS(attend(), uly::functor_failed);
            else
                attend();
        }
    });
    for (auto const& recorder : recorders) {
        std::vector<bool> calls;
        int unfinished = 0;
        for (auto const& event : recorder.events()) {
            if (event.what == event_kind::call) calls.push_back(event.finished);
            if (event.what == event_kind::step && !event.finished) {
                ++unfinished;
                CHECK(event.call == 2);
                CHECK(event.id ==
                      static_cast<int>(recorder.rank() == 1 ? step::attend : step::to_tokens));
            }
            CHECK(event.end >= event.begin);
        }
        CHECK(calls == std::vector<bool>{true, false, true});
        CHECK(unfinished == 1);
    }
}

TEST_CASE("write_trace: unfinished spans end with the trace") {
    uly::trace_recorder recorder(0, 1);
    auto seen = recorder.observe("layer");
    seen.begin(uly::pass_kind::attend);
    seen.fence();
    CHECK(recorder.events()[0].end == uly::trace_event::open);
    auto const text = text_of(recorder);
    CHECK(holds(text, "\"finished\":false"));
    CHECK_FALSE(holds(text, "\"dur\":-"));
}

TEST_CASE("write_trace: names are escaped, and what is not UTF-8 replaced") {
    auto const written = [](std::string_view name) { return uly::detail::json_string(name); };
    CHECK(written("") == "\"\"");
    CHECK(written("a\"b\\c/\n\x7f") == "\"a\\\"b\\\\c/\\u000a\\u007f\"");
    CHECK(written(std::string_view("\0x", 2)) == "\"\\u0000x\"");
    for (auto const* kept : {"\xc2\x80", "\xdf\xbf", "\xe0\xa0\x80", "\xed\x9f\xbf", "\xee\x80\x80",
                             "\xef\xbf\xbf", "\xf0\x90\x80\x80", "\xf4\x8f\xbf\xbf"})
        CHECK(written(kept) == '"' + std::string(kept) + '"');
    // Overlong, surrogates, out of range, cut, and no first byte.
    CHECK(written("\xc1\xbf") == "\"\\ufffd\\ufffd\"");
    CHECK(written("\xe0\x9f\xbf") == "\"\\ufffd\\ufffd\\ufffd\"");
    CHECK(written("\xed\xa0\x80") == "\"\\ufffd\\ufffd\\ufffd\"");
    CHECK(written("\xf4\x90\x80\x80") == "\"\\ufffd\\ufffd\\ufffd\\ufffd\"");
    CHECK(written("\xf5\x80") == "\"\\ufffd\\ufffd\"");
    CHECK(written("\xe2\x82") == "\"\\ufffd\\ufffd\"");
    CHECK(written("\xc3") == "\"\\ufffd\"");
    CHECK(written("\x80z") == "\"\\ufffdz\"");
}

TEST_CASE("write_trace: numbers are the same in every locale and width") {
    struct grouped : std::numpunct<char> {
        char do_thousands_sep() const override { return '.'; }
        char do_decimal_point() const override { return ','; }
        std::string do_grouping() const override { return "\1"; }
    };
    uly::trace_recorder recorder(0, 2);
    auto seen = recorder.observe("layer");
    seen.begin(step::to_heads);
    seen.moved(0, 1, 123456789);
    seen.end(step::to_heads);
    std::ostringstream strange;
    strange.imbue(std::locale(std::locale::classic(), new grouped));
    strange << std::setw(40) << std::hex << std::showbase;
    uly::write_trace(strange, recorder);
    CHECK(strange.str() == text_of(recorder));
    CHECK(holds(strange.str(), "\"bytes_written\":123456789"));
    CHECK(uly::detail::microseconds(1234005) == "1234.005");
    CHECK(uly::detail::microseconds(7) == "0.007");
}

TEST_CASE("write_trace: several recorders have one origin of time") {
    uly::trace_recorder first(0, 2), second(1, 2);
    auto a = first.observe("layer"), b = second.observe("layer");
    b.begin(step::attend);
    b.end(step::attend);
    a.begin(step::attend);
    a.end(step::attend);
    std::ostringstream out;
    uly::write_trace(out, first, second);
    auto const text = out.str();
    // The second began first: its time is zero, the other's is not before.
    auto const time = [&](std::string_view track) {
        auto const at = text.find(uly::concat("\"attend\",\"pid\":1,\"tid\":", track, ",\"ts\":"));
        REQUIRE(at != std::string::npos);
        return std::stod(text.substr(text.find("\"ts\":", at) + 5));
    };
    CHECK(time("1") == 0);
    CHECK(time("0") >= 0);
    auto const difference = first.events()[0].begin - second.events()[0].begin;
    CHECK(time("0") == doctest::Approx(static_cast<double>(difference) / 1000));
}

TEST_CASE("trace: one name, one layer") {
    uly::trace_recorder recorder(0, 1);
    auto a = recorder.observe("x"), b = recorder.observe("y"), again = recorder.observe("x");
    for (auto* each : {&a, &b, &again}) {
        each->begin(step::attend);
        each->end(step::attend);
    }
    auto const events = recorder.events();
    CHECK(events[0].layer == events[2].layer);
    CHECK(recorder.layer(events[1]) == "y");
}

TEST_CASE("trace: a call that an exception leaves is not finished, be it the last or not") {
    uly::trace_recorder recorder(0, 1);
    auto seen = recorder.observe("layer");
    auto const failing = [&] {
        uly::observed_call const call(seen, uly::pass_kind::attend);
        throw std::runtime_error("wrong operand");
    };
    CHECK_THROWS(failing());
    { uly::observed_call const call(seen, uly::pass_kind::attend); }
    CHECK_THROWS(failing());
    std::ostringstream file;
    uly::write_trace(file, recorder);
    auto const text = file.str();
    std::vector<bool> finished;
    for (auto at = text.find("\"finished\":"); at != std::string::npos;
         at = text.find("\"finished\":", at + 1))
        finished.push_back(text.compare(at + 11, 4, "true") == 0);
    CHECK(finished == std::vector<bool>{false, true, false});
}
