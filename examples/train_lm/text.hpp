#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "options.hpp"

#include <ulysses/train/fields.hpp>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <ranges>
#include <span>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

namespace lm {

/// A text as bytes. The last twentieth is held out: no training step sees it.
class text {
   public:
    /// *Throws* `bad_input` for a file that cannot be read, is empty, or is too short for sequences
    /// of `tokens` tokens in both parts.
    text(std::string const& file, std::int64_t tokens) {
        std::error_code failure;
        bytes_.resize(std::filesystem::file_size(file, failure) * (failure ? 0 : 1));
        std::ifstream in(file, std::ios::binary);
        auto const size = static_cast<std::streamsize>(bytes_.size());
        if (!failure && !in.read(reinterpret_cast<char*>(bytes_.data()), size))
            failure.assign(errno, std::generic_category());
        if (failure)
            throw bad_input("cannot read the text file '" + file + "': " + failure.message());
        if (bytes_.empty()) throw bad_input("the text file '" + file + "' is empty");
        auto const least = 20 * static_cast<std::size_t>(tokens + 1);
        if (bytes_.size() < least)
            throw bad_input(
                "the text file '" + file + "' is too short: " + std::to_string(bytes_.size()) +
                " bytes; sequences of " + std::to_string(tokens) + " tokens need at least " +
                std::to_string(least) + ": " + mend(bytes_.size()));
    }

    std::span<std::uint8_t const> all() const { return bytes_; }
    std::span<std::uint8_t const> training() const {
        return all().first(bytes_.size() - bytes_.size() / 20);
    }
    std::span<std::uint8_t const> held_out() const { return all().last(bytes_.size() / 20); }

   private:
    static std::string mend(std::size_t bytes) {
        auto const longest = bytes / 20;  // of a sequence and the byte that follows it
        if (longest < 2) return "give a longer text";
        return "give a longer text, or lower --tokens to " + std::to_string(longest - 1) +
               " or less";
    }

    std::vector<std::uint8_t> bytes_;
};

/// A sample of a text: its bytes, and for each the one that follows.
struct excerpt {
    std::span<std::uint8_t const> bytes;
    std::vector<std::int64_t> following;
};
inline auto const excerpt_fields =
    std::tuple{ulysses::ids_field(&excerpt::bytes), ulysses::labels_field(&excerpt::following)};

/// The samples of a text that start at `starts`, each of `tokens` tokens; refers to both.
inline auto excerpts(std::span<std::uint8_t const> from, std::vector<std::size_t> const& starts,
                     std::int64_t tokens) {
    return starts | std::views::transform([=](std::size_t start) {
               auto const count = static_cast<std::size_t>(tokens);
               auto const following = from.subspan(start + 1, count);
               return excerpt{from.subspan(start, count), {following.begin(), following.end()}};
           });
}

/// Where `count` samples start that are drawn at random, the same at every rank count.
inline std::vector<std::size_t> random_starts(std::uint64_t seed, std::int64_t count,
                                              std::int64_t tokens, std::size_t length) {
    std::mt19937_64 generator(seed);
    std::vector<std::size_t> starts;
    for (std::int64_t i = 0; i < count; ++i)
        starts.push_back(generator() % (length - static_cast<std::size_t>(tokens)));
    return starts;
}

/// Where `count` samples start that are spread evenly over a text.
inline std::vector<std::size_t> even_starts(std::int64_t count, std::int64_t tokens,
                                            std::size_t length) {
    auto const last = length - static_cast<std::size_t>(tokens) - 1;
    std::vector<std::size_t> starts;
    for (std::int64_t i = 0; i < count; ++i)
        starts.push_back(last * static_cast<std::size_t>(i) /
                         static_cast<std::size_t>(std::max<std::int64_t>(count - 1, 1)));
    return starts;
}

}  // namespace lm
