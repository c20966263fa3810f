// SPDX-License-Identifier: Apache-2.0
// Four units that see all headers, in one program; see tests/headers.py. Ends with 7 when all is well.

#include <cstdio>

namespace one {
void const* place();
bool refuses();
}  // namespace one
namespace two {
void const* place();
bool refuses();
}  // namespace two
namespace other {
void const* place();
bool refuses();
}  // namespace other
namespace no_exceptions {
void const* place();
[[noreturn]] void refuses(int good);
}  // namespace no_exceptions

int main() {
    auto good = true;
    auto const check = [&](bool right, char const* wrong) {
        if (!right) std::printf("%s\n", wrong);
        good = good && right;
    };
    check(one::place() == two::place(), "equal units have two copies of a function");
    check(one::place() != other::place(), "another ULYSSES_ABI shares a function");
    check(one::place() != no_exceptions::place(), "units with and without exceptions share one");
    check(one::refuses() && two::refuses(), "a wrong shape is not thrown");
    check(other::refuses(), "a wrong shape is not thrown under another ULYSSES_ABI");
    if (!good) return 1;
    no_exceptions::refuses(7);
}
