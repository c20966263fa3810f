#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>

#include <charconv>
#include <concepts>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

/// Configurations as text: `key=value`, apart by blanks, commas or line ends; `#` begins a comment.
///
///     auto parallel = ulysses::config_from_text<ulysses::parallel_config>("sp=4, dp_shard=2");
///     parallel = ulysses::config_from_environment(parallel);  // ULYSSES_SP, ULYSSES_DP_SHARD, ...
namespace ulysses::inline ULYSSES_ABI {

/// A number of a configuration and what it is called in text.
struct setting {
    std::string_view key;
    std::int64_t* value;
};

/// A configuration that can be read from text: `settings_of(config)` lists its numbers.
template <class Config>
concept configurable = std::copyable<Config> && requires(Config& config) {
    std::span<setting const>(settings_of(config));
};

namespace detail {

inline std::string keys_of(std::span<setting const> settings) {
    std::string text;
    for (auto const& each : settings) text += concat(text.empty() ? "" : ", ", each.key);
    return text;
}

inline void set(setting const& to, std::string_view given, std::string_view value, where at) {
    std::int64_t number = 0;
    auto const* const end = value.data() + value.size();
    auto const read = std::from_chars(value.data(), end, number);
    if (value.empty() || read.ec != std::errc{} || read.ptr != end)
        raise(errc::invalid_config, at, "config", "a value must be a whole number", given, " is '",
              value, "'");
    *to.value = number;
}

/// The text up to the next separator, which is taken off it.
inline std::string_view next_word(std::string_view& text) {
    constexpr std::string_view separators = " \t\r\n,";
    for (;;) {
        auto const begin = text.find_first_not_of(separators);
        text.remove_prefix(begin == std::string_view::npos ? text.size() : begin);
        if (text.empty() || text.front() != '#') break;
        auto const line = text.find('\n');
        text.remove_prefix(line == std::string_view::npos ? text.size() : line);
    }
    auto const word = text.substr(0, text.find_first_of(" \t\r\n,#"));
    text.remove_prefix(word.size());
    return word;
}

inline std::string variable_of(std::string_view key) {
    std::string name = "ULYSSES_";
    for (auto const c : key) name += c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
    return name;
}

}  // namespace detail

/// `defaults`, with what `text` says otherwise. What the numbers mean together is checked where they
/// are used. *Throws* `invalid_config` for a word that is no `key=value`, an unknown key, one given
/// twice, or a value that is no whole number.
template <configurable Config>
Config config_from_text(std::string_view text, Config defaults = {}, where at = where::here()) {
    auto const list = settings_of(defaults);
    std::span<setting const> const settings = list;
    std::vector<bool> seen(settings.size());
    for (auto word = detail::next_word(text); !word.empty(); word = detail::next_word(text)) {
        auto const sign = word.find('=');
        if (sign == std::string_view::npos)
            raise(errc::invalid_config, at, "config", "settings are written key=value", "'", word,
                  "'");
        auto const key = word.substr(0, sign);
        std::size_t i = 0;
        while (i < settings.size() && settings[i].key != key) ++i;
        if (i == settings.size())
            raise(errc::invalid_config, at, "config", "a key must be known", "'", key,
                  "', known are ", detail::keys_of(settings));
        if (seen[i])
            raise(errc::invalid_config, at, "config", "a key is given once", "'", key, "' again");
        seen[i] = true;
        detail::set(settings[i], key, word.substr(sign + 1), at);
    }
    return defaults;
}

/// `defaults`, with what the environment says otherwise: `sp` is ULYSSES_SP. An empty variable is as
/// one that is not set. *Throws* `invalid_config` for a value that is no whole number.
template <configurable Config>
Config config_from_environment(Config defaults = {}, where at = where::here()) {
    for (auto const& each : settings_of(defaults)) {
        auto const name = detail::variable_of(each.key);
        if (auto const* const value = std::getenv(name.c_str()); value != nullptr && *value != '\0')
            detail::set(each, name, value, at);
    }
    return defaults;
}

}  // namespace ulysses::inline ULYSSES_ABI
