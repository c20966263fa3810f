#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "../pipeline/ranks.hpp"

#include <ulysses/core/error.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <vector>

namespace train_test {

namespace uly = ulysses;
using ranks_type = uly::threads::communicator;

/// What `body()` throws, which is an error of the library, with its code.
struct failure {
    uly::errc code = uly::errc::none;
    std::string text = "nothing was thrown";
};
template <class Body>
failure failure_of(Body const& body) {
    try {
        body();
    } catch (uly::error const& e) {
        return {e.code(), e.what()};
    }
    return {};
}

/// Without the place of the call and the rank that found it.
inline std::string rule_of(std::string text) {
    auto const rank = text.rfind(" (rank ");
    if (rank != std::string::npos) text.resize(rank);
    auto const place = text.rfind(" [");
    if (place != std::string::npos && text.back() == ']') text.resize(place);
    return text;
}

/// Runs `body(handle)` on so many ranks: it must throw the same on all, and leave the group usable.
template <class Body>
failure failure_on_all(int ranks, Body const& body) {
    std::vector<failure> all(static_cast<std::size_t>(ranks));
    pipeline_test::run_ranks(ranks, [&](ranks_type handle) {
        all[static_cast<std::size_t>(handle.rank())] = failure_of([&] { body(handle); });
        handle.fence({});
    });
    for (auto const& each : all) {
        CHECK(each.code == all[0].code);
        CHECK(each.text == all[0].text);
    }
    return {all[0].code, rule_of(all[0].text)};
}

}  // namespace train_test
