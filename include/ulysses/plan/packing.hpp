#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/visibility.hpp>
#include <ulysses/plan/token_order.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// What a step says of its samples: packed documents, padding, where the queries stand.
namespace ulysses::inline ULYSSES_ABI {

/// Equal on every rank; what is left out asks for nothing.
struct packing_options {
    /// First tokens of the documents that are packed into the samples, ascending, counted over all
    /// samples one behind the other ([B, S], as `cu_seqlens` are). A sample always begins one; a
    /// last entry of B * S may end the list. A row sees keys of its own document only.
    std::span<std::int64_t const> documents{};
    /// For each sample how many of its keys are there, from the first on; the others are padding.
    std::span<std::int64_t const> lengths{};
    /// For each sample the position of query row 0 among its keys, where the last query does not
    /// stand at the last key, as in a cache with room to spare.
    std::span<std::int64_t const> query_positions{};
    /// For each sample and key ([B, S]) whether it is there; 0: padding. Any key may be padding.
    std::span<std::uint8_t const> present{};
    /// For each sample how many of its keys are in a cache. The step's tokens are then the new
    /// ones, queries and keys alike: row i stands at position past + i, and behind the cached keys
    /// come those of all tokens, or of the first `lengths`.
    std::span<std::int64_t const> past{};

    bool empty() const {
        return documents.empty() && lengths.empty() && query_positions.empty() && present.empty() &&
               past.empty();
    }
};

class packing {
   public:
    /// Takes the options over. *Throws* `invalid_sequence`, and is then as it was.
    void set(packing_options const& given, std::int64_t batch, std::int64_t queries,
             std::int64_t keys, where at = where::here()) {
        check(given, batch, queries, keys, at);
        clear();
        if (given.empty()) return;
        has_past_ = !given.past.empty();
        if (has_past_) largest_past_ = *std::max_element(given.past.begin(), given.past.end());
        auto next = given.documents.begin();
        for (std::int64_t b = 0; b < batch; ++b) {
            auto const place = static_cast<std::size_t>(b);
            auto const there = keys_there(given, b, keys);
            auto const past = has_past_ ? given.past[place] : 0;
            sample_keys own{there.begin, past + there.end,
                            queries == keys ? past : there.end - queries, 0, 0};
            if (!given.query_positions.empty()) own.position = given.query_positions[place];
            if (!given.documents.empty()) {
                own.first_document = static_cast<std::int64_t>(documents_.size());
                documents_.push_back(0);
                for (; next != given.documents.end() && *next < (b + 1) * keys; ++next)
                    if (*next > b * keys) documents_.push_back(*next - b * keys);
                own.documents = static_cast<std::int64_t>(documents_.size()) - own.first_document;
            }
            samples_.push_back(own);
        }
        if (has_holes(given, keys)) {
            present_.resize(given.present.size());
            std::transform(given.present.begin(), given.present.end(), present_.begin(),
                           [](auto value) { return value != 0; });
        }
    }

    void clear() {
        samples_.clear();
        documents_.clear();
        present_.clear();
        has_past_ = false;
        largest_past_ = 0;
    }
    void reserve(std::size_t samples, std::size_t documents, std::size_t present = 0) {
        samples_.reserve(samples);
        documents_.reserve(samples + documents);
        present_.reserve(present);
    }

    std::span<sample_keys const> samples() const { return samples_; }
    /// First keys within their sample, sample by sample.
    std::span<std::int64_t const> documents() const { return documents_; }
    /// [samples, keys], 1 or 0; empty where every sample's keys are there from its first to its
    /// last.
    std::span<std::uint8_t const> present() const { return present_; }
    /// True when the step's keys come behind those of a cache.
    bool has_past() const { return has_past_; }
    std::int64_t largest_past() const { return largest_past_; }

   private:
    /// A sample's entries of `present`.
    static std::span<std::uint8_t const> present_of(packing_options const& given, std::int64_t b,
                                                    std::int64_t keys) {
        return given.present.subspan(static_cast<std::size_t>(b * keys),
                                     static_cast<std::size_t>(keys));
    }

    /// The keys of a sample from the first to the last that is there.
    static index_range keys_there(packing_options const& given, std::int64_t b, std::int64_t keys) {
        index_range there{0, given.lengths.empty() ? keys
                                                   : given.lengths[static_cast<std::size_t>(b)]};
        if (given.present.empty()) return there;
        auto const own = present_of(given, b, keys);
        while (there.size() > 0 && own[static_cast<std::size_t>(there.end - 1)] == 0) --there.end;
        while (there.size() > 0 && own[static_cast<std::size_t>(there.begin)] == 0) ++there.begin;
        return there.size() > 0 ? there : index_range{};
    }

    bool has_holes(packing_options const& given, std::int64_t keys) const {
        if (given.present.empty()) return false;
        for (std::int64_t b = 0; b < static_cast<std::int64_t>(samples_.size()); ++b) {
            auto const& range = samples_[static_cast<std::size_t>(b)];
            auto const own = present_of(given, b, keys)
                                 .subspan(static_cast<std::size_t>(range.begin),
                                          static_cast<std::size_t>(range.end - range.begin));
            if (std::find(own.begin(), own.end(), 0) != own.end()) return true;
        }
        return false;
    }

    static void check(packing_options const& given, std::int64_t batch, std::int64_t queries,
                      std::int64_t keys, where at) {
        auto const samples = static_cast<std::size_t>(batch);
        auto const all_keys = keys + checked_past(given, samples, keys, at);
        // Work is counted over all samples.
        if (!given.empty() && batch > (std::int64_t{1} << 62) / queries / all_keys)
            raise(errc::invalid_sequence, at, "sequence",
                  "samples that differ must see less than 2^62 keys together", batch,
                  " samples of ", queries, " queries and ", all_keys, " keys");
        if (!given.lengths.empty() && given.lengths.size() != samples)
            raise(errc::invalid_sequence, at, "sequence", "lengths must name one for each sample",
                  given.lengths.size(), " lengths, batch ", batch);
        for (std::size_t b = 0; b < given.lengths.size(); ++b)
            if (given.lengths[b] < 0 || given.lengths[b] > keys)
                raise(errc::invalid_sequence, at, "sequence",
                      "a sample's length must lie in 0 .. keys", "sample ", b, " has length ",
                      given.lengths[b], " of ", keys, " keys");
        if (!given.query_positions.empty() && given.query_positions.size() != samples)
            raise(errc::invalid_sequence, at, "sequence",
                  "query_positions must name one for each sample", given.query_positions.size(),
                  " positions, batch ", batch);
        for (std::size_t b = 0; b < given.query_positions.size(); ++b)
            if (given.query_positions[b] < -queries || given.query_positions[b] > keys)
                raise(errc::invalid_sequence, at, "sequence",
                      "a query position must lie in -queries .. keys", "sample ", b, " has ",
                      given.query_positions[b], ", ", queries, " queries, ", keys, " keys");
        if (!given.present.empty() &&
            given.present.size() != samples * static_cast<std::size_t>(keys))
            raise(errc::invalid_sequence, at, "sequence",
                  "present must name one for each sample and key", given.present.size(),
                  " given, batch ", batch, ", ", keys, " keys");
        if (given.documents.empty()) return;
        if (queries != keys && given.query_positions.empty())
            raise(errc::invalid_sequence, at, "sequence",
                  "documents of other queries than keys need query_positions", queries,
                  " queries, ", keys, " keys");
        std::int64_t before = -1;
        for (auto const first : given.documents) {
            if (first <= before || first > batch * keys)
                raise(errc::invalid_sequence, at, "sequence",
                      "documents must begin in ascending order within the step", first, " after ",
                      before, ", ", batch, " samples of ", keys, " keys");
            before = first;
        }
    }

    /// *Returns* the largest.
    static std::int64_t checked_past(packing_options const& given, std::size_t samples,
                                     std::int64_t tokens, where at) {
        if (given.past.empty()) return 0;
        if (given.past.size() != samples)
            raise(errc::invalid_sequence, at, "sequence", "past must name one for each sample",
                  given.past.size(), " pasts, batch ", samples);
        if (!given.documents.empty() || !given.query_positions.empty() || !given.present.empty())
            raise(errc::invalid_sequence, at, "sequence",
                  "past says where queries stand, in one document a sample without padding",
                  given.documents.size(), " documents, ", given.query_positions.size(),
                  " query_positions, ", given.present.size(), " present");
        for (std::size_t b = 0; b < samples; ++b)
            if (given.past[b] < 0 || given.past[b] >= token_limit - tokens)
                raise(errc::invalid_sequence, at, "sequence",
                      "a sample's past and the step's tokens together must lie in 0 .. 2^31 - 1",
                      "sample ", b, " has past ", given.past[b], " and ", tokens, " tokens");
        return *std::max_element(given.past.begin(), given.past.end());
    }

    std::vector<sample_keys> samples_;
    std::vector<std::int64_t> documents_;
    std::vector<std::uint8_t> present_;
    bool has_past_ = false;
    std::int64_t largest_past_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI
