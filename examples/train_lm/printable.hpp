#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/observer/write_trace.hpp>

#include <algorithm>
#include <cstddef>
#include <string>
#include <string_view>

namespace lm {

/// `bytes` as text that any terminal takes: UTF-8, line ends and tabs are kept, every other control
/// byte, and what is not UTF-8, is written as \xNN.
inline std::string printable(std::string_view bytes) {
    constexpr std::string_view digits = "0123456789abcdef";
    std::string text;
    while (!bytes.empty()) {
        auto const c = static_cast<unsigned char>(bytes.front());
        auto const length = ulysses::detail::utf8_length(bytes);
        auto const control =
            c < 0x20 || c == 0x7f ||
            (c == 0xc2 && length == 2 && static_cast<unsigned char>(bytes[1]) < 0xa0);
        if (length != 0 && (!control || c == '\n' || c == '\t')) {
            text += bytes.substr(0, length);
        } else {
            for (auto const each : bytes.substr(0, std::max<std::size_t>(length, 1))) {
                auto const byte = static_cast<unsigned char>(each);
                text += "\\x";
                (text += digits[byte / 16]) += digits[byte % 16];
            }
        }
        bytes.remove_prefix(std::max<std::size_t>(length, 1));
    }
    return text;
}

}  // namespace lm
