#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "../table.hpp"

#include <exception>
#include <string>
#include <vector>

/// Parts of the benchmark that need more than CUDA. Where it is not there, `missing.cpp` has lines that say so.
namespace ulysses_bench {

void measure_cudnn(std::vector<result>& rows, bool quick);
void measure_six_steps(std::vector<result>& rows, bool quick);

/// A part that ends with an error is a line of the table, and the others go on.
template <class Body>
void section(std::vector<result>& rows, std::string const& name, Body const& body) {
    try {
        body();
    } catch (std::exception const& e) {
        rows.push_back(failed(name, e.what()));
    }
}

}  // namespace ulysses_bench
