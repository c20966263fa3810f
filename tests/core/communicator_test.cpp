// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>

#include <doctest/doctest.h>

#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace uly = ulysses;
using uly::errc;
using uly::fence_status;

// A status crosses between processes and machines as bytes.
static_assert(std::is_trivially_copyable_v<fence_status>);

namespace {

std::vector<fence_status> agreeing(std::size_t ranks) {
    std::vector<fence_status> statuses(ranks);
    for (auto& each : statuses) each.call = 7, each.plan = 99;
    return statuses;
}

template <class Error>
std::string verdict_text(std::vector<fence_status> const& statuses, int rank) {
    try {
        uly::throw_verdict(statuses);
    } catch (Error const& e) {
        CHECK(e.rank() == rank);
        return e.what();
    }
    return "nothing was thrown";
}

}  // namespace

TEST_CASE("throw_verdict: nothing when all agree") {
    CHECK_NOTHROW(uly::throw_verdict({}));
    for (std::size_t ranks = 1; ranks < 5; ++ranks)
        CHECK_NOTHROW(uly::throw_verdict(agreeing(ranks)));
}

TEST_CASE("throw_verdict: the error of the lowest failing rank, before any disagreement") {
    auto statuses = agreeing(4);
    statuses[1].call = 8;
    statuses[2].fail(errc::invalid_tensor, "ulysses: attend: q: wrong: 1");
    statuses[3].fail(errc::functor_failed, "ulysses: functor: broke: 2");
    CHECK(verdict_text<uly::invalid_tensor>(statuses, 2) ==
          "ulysses: attend: q: wrong: 1 (rank 2)");
}

TEST_CASE("throw_verdict: a disagreement names the first rank that differs from rank 0") {
    auto calls = agreeing(4);
    calls[2].call = calls[3].call = 8;
    CHECK(verdict_text<uly::disagreement>(calls, 2).find("rank 0 is in call 7, rank 2 in call 8") !=
          std::string::npos);
    auto plans = agreeing(3);
    plans[1].plan = 100;
    CHECK(verdict_text<uly::disagreement>(plans, 1).find("plan of rank 0 is 99, of rank 1 100") !=
          std::string::npos);
    auto terms = agreeing(3);
    terms[2].terms[static_cast<std::size_t>(uly::term::keep)] = 2;
    CHECK(verdict_text<uly::disagreement>(terms, 2) ==
          "ulysses: fence: every rank must pass the same keep: rank 0 has exchanged, rank 2 has "
          "nothing");
    auto first = agreeing(3);  // rank 0 is the odd one: still said from rank 0
    first[0].plan = 1;
    CHECK(verdict_text<uly::disagreement>(first, 1).find("plan of rank 0 is 1, of rank 1 99") !=
          std::string::npos);
}

TEST_CASE("fence_status: a text of any length fits") {
    for (std::size_t const length : {0u, 1u, 234u, 235u, 236u, 237u, 10000u}) {
        CAPTURE(length);
        fence_status status;
        std::string const text(length, 'x');
        status.fail(errc::invalid_call, text);
        CHECK(std::string(status.text) == text.substr(0, sizeof status.text - 1));
        status.fail(errc::invalid_call, "short");  // nothing of the longer one is left
        CHECK(std::string(status.text) == "short");
    }
}

TEST_CASE("guarded: whatever a body throws becomes a status") {
    fence_status status;
    uly::guarded(status, [] {});
    CHECK(status.code == errc::none);
    uly::guarded(status, [] { uly::raise(errc::unsupported, {}, "a", "b", "c"); });
    CHECK(status.code == errc::unsupported);
    CHECK(std::string(status.text) == "ulysses: a: b: c");
    status = {};
    uly::guarded(status, [] { throw std::logic_error("mine"); });
    CHECK(status.code == errc::functor_failed);
    CHECK(std::string(status.text) == "ulysses: functor: a functor threw: mine");
    status = {};
    uly::guarded(status, [] { throw 5; });
    CHECK(status.code == errc::functor_failed);
    CHECK(std::string(status.text).find("unknown type") != std::string::npos);
    status = {};
    uly::guarded(status, [] { throw std::bad_alloc(); });
    CHECK(status.code == errc::out_of_memory);
    // What does not know the call is told with it.
    uly::where const here{"engine.cpp", 7};
    auto const text_of = [&](std::string_view call, auto const& body) {
        status = {};
        uly::guarded(status, call, here, body);
        return std::string(status.text);
    };
    CHECK(text_of("attend", [] { throw std::logic_error("mine"); }) ==
          "ulysses: attend: a functor threw: mine [engine.cpp:7]");
    CHECK(text_of("forward", [] { throw std::bad_alloc(); }) ==
          "ulysses: forward: an allocation failed: std::bad_alloc [engine.cpp:7]");
    CHECK(text_of("attend", [] { uly::raise(errc::out_of_memory, {}, "a", "b", "c"); }) ==
          "ulysses: a: b: c in attend [engine.cpp:7]");
    CHECK(text_of("attend", [] { uly::raise(errc::unsupported, {}, "a", "b", "c"); }) ==
          "ulysses: a: b: c");
    // A functor's own group failed, not the one whose fence carries the status.
    for (auto const code : {errc::peer_failed, errc::timed_out, errc::none}) {
        status = {};
        uly::guarded(status, [&] { uly::throw_error(code, "ulysses: theirs: failed: x"); });
        CHECK(status.code == errc::functor_failed);
        CHECK(std::string(status.text) == "ulysses: theirs: failed: x");
    }
}

namespace {

/// Notes what it leaves with.
struct leaving_ranks {
    using space_type = int;
    std::vector<std::string>* left;
    int rank() const noexcept { return 0; }
    int size() const noexcept { return 1; }
    std::uint64_t begin_call() const { return 1; }
    void fence(fence_status const&) const {}
    void leave(std::string_view text) const { left->emplace_back(text); }
};

}  // namespace

TEST_CASE("leaving_on_failure: leaves with what the group cannot know, and passes it on") {
    std::vector<std::string> left;
    leaving_ranks const ranks{&left};
    uly::leaving_on_failure(ranks, [] {});
    CHECK(left.empty());
    CHECK_THROWS_AS(uly::leaving_on_failure(ranks, [] { throw 7; }), int);
    CHECK_THROWS_AS(uly::leaving_on_failure(ranks, [] { throw std::bad_alloc(); }), std::bad_alloc);
    CHECK_THROWS_AS(uly::leaving_on_failure(ranks, [] { throw uly::transport_error("cable cut"); }),
                    uly::transport_error);
    CHECK_THROWS_AS(uly::leaving_on_failure(ranks, [] { throw uly::error(errc::none, "odd"); }),
                    uly::error);
    CHECK(left == std::vector<std::string>{"an exception of unknown type", std::bad_alloc().what(),
                                           "cable cut", "odd"});
    left.clear();
    for (auto const code : {errc::invalid_tensor, errc::disagreement, errc::peer_failed,
                            errc::timed_out, errc::out_of_memory, errc::functor_failed})
        CHECK_THROWS_AS(uly::leaving_on_failure(ranks, [&] { uly::throw_error(code, "known"); }),
                        uly::error);
    CHECK(left.empty());
}
