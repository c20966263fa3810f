// SPDX-License-Identifier: Apache-2.0
// What the program prints of a text that a model wrote, which may be any bytes.

#include "printable.hpp"

#include <cstdio>
#include <string_view>
#include <utility>

int main() {
    using namespace std::string_view_literals;
    constexpr std::pair<std::string_view, std::string_view> cases[] = {
        {"", ""},
        {"a line\n\tand \\ \"another\"", "a line\n\tand \\ \"another\""},
        {"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80", "\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"},
        {"\0\r\x1b[2J\x7f"sv, "\\x00\\x0d\\x1b[2J\\x7f"},
        {"\xc2\x9b", "\\xc2\\x9b"},    // a control character of two bytes
        {"\xff\xc3", "\\xff\\xc3"},    // never, and cut
        {"\xe2\x82z", "\\xe2\\x82z"},  // cut
        {"\xc0\xaf", "\\xc0\\xaf"},    // overlong
    };
    int wrong = 0;
    for (auto const& [bytes, text] : cases)
        if (auto const got = lm::printable(bytes); got != text) {
            std::printf("got `%s`, expected `%s`\n", got.c_str(), std::string(text).c_str());
            ++wrong;
        }
    std::printf("%d of %zu cases wrong\n", wrong, std::size(cases));
    return wrong;
}
