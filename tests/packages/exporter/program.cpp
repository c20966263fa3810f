// SPDX-License-Identifier: Apache-2.0
// With the headers where the library brings them along.

#include <cstdio>

#if __has_include(<ulysses/config/version.hpp>)
#include <ulysses/config/version.hpp>
constexpr auto headers = "with";
#else
constexpr auto headers = "without";
#endif

int minor_version();

int main() { std::printf("%d %s headers\n", minor_version(), headers); }
