#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "draws.hpp"

#include <doctest/doctest.h>

/// Results of drawn problems against exact ones.
namespace pipeline_test {

template <class T>
void check_bounds(results<T> const& seen, results<double> const& exact, bounds const& allowed) {
    CHECK(largest_difference(seen.o, exact.o) <= allowed.o);
    CHECK(largest_difference(seen.lse, exact.lse) <= allowed.lse);
    CHECK(largest_difference(seen.dq, exact.dq) <= allowed.dq);
    CHECK(largest_difference(seen.dk, exact.dk) <= allowed.dk);
    CHECK(largest_difference(seen.dv, exact.dv) <= allowed.dv);
    CHECK(largest_difference(seen.dsinks, exact.dsinks) <= allowed.dsinks);
    CHECK(largest_difference(seen.dbias, exact.dbias) <= allowed.dbias);
}

}  // namespace pipeline_test
