// SPDX-License-Identifier: Apache-2.0
// Three ranks add up their numbers.

#include <ulysses/ulysses.hpp>

#include <cstdio>
#include <span>

int main() {
    bool right[3] = {};
    ulysses::threads::run(3, [&](ulysses::threads::communicator ranks) {
        double values[] = {ranks.rank() + 1.0};
        ranks.all_reduce(std::span<double>(values), ulysses::reduction::sum);
        right[ranks.rank()] = values[0] == 6;
    });
    auto const all = right[0] && right[1] && right[2];
    std::puts(all ? "three ranks agree" : "three ranks do not agree");
    return all ? 0 : 1;
}
