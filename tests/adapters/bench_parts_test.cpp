// SPDX-License-Identifier: Apache-2.0

#include "../../bench/gpu/parts.hpp"

#include <ulysses/core/error.hpp>

#include <doctest/doctest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using ulysses_bench::group;
using ulysses_bench::made_once;
using ulysses_bench::report;
using ulysses_bench::result;
using ulysses_bench::table;

namespace {

struct outcome {
    std::vector<result> rows;
    std::string text;
    bool right;
};

outcome run(std::vector<group> const& groups,
            std::chrono::seconds most = std::chrono::seconds(60)) {
    auto* const file = std::tmpfile();
    REQUIRE(file != nullptr);
    table all(nullptr, most, file);
    for (auto const& each : groups) all.run(each);
    outcome result{all.rows(), "", all.print_summary()};
    std::rewind(file);
    for (int each = 0; (each = std::fgetc(file)) != EOF;) result.text += static_cast<char>(each);
    std::fclose(file);
    return result;
}

/// A line with the process that measured it.
void add(report const& to, char const* name, double ratio = 0) {
    to.add({name, static_cast<double>(getpid()), "", "nothing", ratio, "<= 1"});
}
group::value_type good(char const* name) {
    return {name, 30, [=](report const& to) { add(to, name); }};
}
bool failed(result const& row) { return !row.measured && row.target == "<= 0" && row.ratio == 1; }
bool said(result const& row, char const* text) {
    return row.against.find(text) != std::string::npos;
}

}  // namespace

TEST_CASE("parts share a process of their own, and what is made in it") {
    auto const made = std::make_shared<made_once<double>>();
    auto const use = [=](report const& to) {
        auto& number = made->get(1.0);
        to.add({"number", number++, "us", "quote \" is not in it"});
    };
    auto const seen =
        run({{{"a", 30, use}, {"b", 30, use}, good("c")}, {{"d", 30, use}, good("e")}});
    REQUIRE(seen.rows.size() == 5);
    CHECK(seen.right);
    CHECK(seen.rows[0].value == 1);
    CHECK(seen.rows[1].value == 2);
    CHECK(seen.rows[3].value == 1);
    CHECK(seen.rows[2].value != seen.rows[4].value);
    CHECK(seen.rows[2].value != getpid());
    CHECK(seen.rows[0].unit == "us");
    CHECK(seen.rows[2].target == "<= 1");
}

TEST_CASE("a part that fails is a line, what it had measured is kept, and the rest go on") {
    auto const fails = [](char const* name, auto const& how) {
        return group::value_type{name, 30, [=](report const& to) {
                                     add(to, name);
                                     how();
                                 }};
    };
    auto const seen = run(
        {{good("first"), fails("throws", [] { throw std::runtime_error("no\n\"reason\""); }),
          fails("lacks", [] { ulysses::throw_error(ulysses::errc::out_of_memory, "no memory"); }),
          fails("refuses", [] { ulysses::throw_error(ulysses::errc::unsupported, "no plan"); }),
          fails("is killed", [] { raise(SIGKILL); }), fails("exits", [] { _exit(0); }),
          good("last")}});
    REQUIRE(seen.rows.size() == 12);
    CHECK_FALSE(seen.right);
    for (std::size_t i : {2, 4, 6, 8, 10}) CHECK(seen.rows[i - 1].name == seen.rows[i].name);
    CHECK(failed(seen.rows[2]));
    CHECK(said(seen.rows[2], "not measured: no"));
    CHECK(said(seen.rows[4], "not measured: no memory"));
    CHECK_FALSE(failed(seen.rows[4]));
    CHECK(said(seen.rows[6], "not measured: no plan"));
    CHECK_FALSE(failed(seen.rows[6]));
    CHECK(failed(seen.rows[8]));
    CHECK(said(seen.rows[8], "ended with status"));
    CHECK(failed(seen.rows[10]));
    CHECK(seen.rows[11].name == "last");
    CHECK(seen.rows[11].measured);
    CHECK(seen.text.find("7 results; 3 lines missed their target, 2 were not measured") !=
          std::string::npos);
}

TEST_CASE("a wrong result is wrong, a time that misses its target is not") {
    auto const line = [](double ratio, char const* target) {
        return group{{"x", 30, [=](report const& to) { to.add({"x", 1, "", "", ratio, target}); }}};
    };
    CHECK(run({line(0.9, "<= 1")}).right);
    CHECK_FALSE(run({line(1.1, "<= 1")}).right);
    CHECK_FALSE(run({line(1, "<= 0")}).right);
    auto const slow = run({line(1.2, "<= 1.05")});
    CHECK(slow.right);
    CHECK(slow.text.find("1 lines missed") != std::string::npos);
}

TEST_CASE(
    "a part that is silent is ended, and the processes that it has made; after two nobody waits") {
    auto const silent = [](report const& to) {
        auto const child = fork();
        if (child > 0) to.add({"child", static_cast<double>(child), "", ""});
        for (;;) pause();
    };
    auto const seen =
        run({{good("a"), {"b", 1, silent}, {"c", 1, silent}, good("d"), good("e")}, {good("f")}});
    CHECK_FALSE(seen.right);
    REQUIRE(seen.rows.size() == 7);
    for (std::size_t const i : {2, 4}) {
        CHECK(failed(seen.rows[i]));
        CHECK(said(seen.rows[i], "silent for 1 seconds"));
        auto const child = static_cast<pid_t>(seen.rows[i - 1].value);
        for (int round = 0; round < 500 && kill(child, 0) == 0; ++round)
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        CHECK(kill(child, 0) != 0);
    }
    CHECK(seen.rows[5].name == "d");
    CHECK(said(seen.rows[5], "two parts before it were silent, nor are 1 parts behind it"));
    CHECK(seen.rows[6].name == "f");
    CHECK(seen.rows[6].measured);
}

TEST_CASE("when there is no time left nothing begins, and what runs is ended") {
    auto const none = run({{good("a")}}, std::chrono::seconds(0));
    REQUIRE(none.rows.size() == 1);
    CHECK(none.right);
    CHECK(said(none.rows[0], "there is no time left"));
    auto const some = run(
        {{{"a", 30, [](report const&) { std::this_thread::sleep_for(std::chrono::seconds(60)); }},
          good("b")}},
        std::chrono::seconds(1));
    REQUIRE(some.rows.size() == 2);
    CHECK(some.right);
    CHECK(said(some.rows[0], "there was no time left"));
    CHECK(said(some.rows[1], "there is no time left"));
}
