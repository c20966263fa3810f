#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "../sanitizers.hpp"

#include <ulysses/comm/threads.hpp>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

/// Rank threads for the tests of pipelines, which run three times: ULYSSES_TEST_REACH says which
/// ranks reach each other's memory, the others send messages.
namespace pipeline_test {

/// Who reaches whom.
enum class reach { all, none, some };

inline std::vector<int> hosts_of(reach way, int ranks) {
    std::vector<int> hosts;
    if (way == reach::all) return hosts;
    for (int r = 0; r < ranks; ++r) hosts.push_back(way == reach::none ? r : r % 3 / 2);
    return hosts;
}

inline reach reach_under_test() {
    auto const* const text = std::getenv("ULYSSES_TEST_REACH");
    std::string const way = text == nullptr ? "all" : text;
    if (way == "all") return reach::all;
    if (way == "none") return reach::none;
    if (way == "some") return reach::some;
    ulysses::throw_error(ulysses::errc::invalid_call,
                         "ULYSSES_TEST_REACH is all, none or some, not " + way);
}

/// Whether a test may give ranks different plans while they have windows already: until the first fence
/// tells, such ranks write the same bytes of an inbox. Nobody reads them, but it is a race by the
/// letter, and one that the thread sanitizer reports.
constexpr bool plans_may_differ = !TEST_UNDER_THREAD_SANITIZER;

/// `threads::run` under the reach that is tested.
template <class Body>
void run_ranks(int ranks, Body&& body, ulysses::threads::options given = {}) {
    if (given.hosts.empty()) given.hosts = hosts_of(reach_under_test(), ranks);
    ulysses::threads::run(ranks, std::forward<Body>(body), given);
}

}  // namespace pipeline_test
