#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/plan/hash.hpp>
#include <ulysses/plan/token_order.hpp>
#include <ulysses/space/host.hpp>
#include <ulysses/train/accounting.hpp>
#include <ulysses/train/fields.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <ranges>
#include <span>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// What becomes of a sample with more than `max_length` tokens.
enum class overlong : std::uint8_t { refuse, truncate };

/// How `batch_adapter` makes micro-batches; equal on every rank.
struct batch_options {
    std::int64_t micro_batch = 1;  ///< samples that a rank's source gives to one
    std::int64_t max_length = 0;   ///< tokens of a sample, all ranks together; 0: any number
    overlong too_long = overlong::refuse;  ///< a sample with more
    bool fixed_length = false;             ///< every micro-batch has `max_length` tokens
    std::int64_t pad_to_multiple_of = 1;   ///< any number of tokens works on any number of ranks
    bool shift_labels = true;              ///< false: labels are those of the next token already
    bool balance_valid_tokens = false;     ///< ranks get equal parts of those whose label counts
    at_end end = at_end::drop;
    bool duplicates_allowed = false;  ///< sources may begin with the same samples
};

namespace detail {

/// Sizes of a micro-batch before it is sharded.
struct packed_extents {
    std::int64_t samples = 0, tokens = 0;  ///< B and S
    std::int64_t documents = 0;            ///< 0: each sample is one
    std::int64_t lengths = 0;              ///< 0: no sample is padded
};

/// The whole samples of a micro-batch, padded and shifted, in one piece of memory that can be sent.
template <class Sample, class... Fields>
class packed_samples {
   public:
    using fields_type = std::tuple<Fields...>;
    template <std::size_t I>
    using value_type = typename std::tuple_element_t<I, fields_type>::template value_type<Sample>;

    explicit packed_samples(fields_type const& fields) : fields_(fields) {}

    packed_extents const& extents() const { return extents_; }
    std::span<std::byte> bytes() const { return {memory_.data(), size_of(extents_)}; }
    /// What `bytes` of such extents would be.
    std::size_t size_of(packed_extents const& extents) const { return layout_of(extents).back(); }
    std::size_t memory_bytes() const { return memory_.bytes(); }

    void reserve(std::size_t bytes) { memory_.reserve(bytes); }
    /// Makes this a place of such extents. *Throws* `out_of_memory`.
    void reshape(packed_extents const& extents) {
        memory_.reserve(size_of(extents));
        extents_ = extents;
    }

    /// First tokens, counted over all samples.
    std::span<std::int64_t> documents() const { return part<std::int64_t>(0); }
    std::span<std::int64_t> lengths() const { return part<std::int64_t>(1); }
    std::span<std::int64_t> positions() const { return part<std::int64_t>(2); }  // [B, S]
    /// [B, S, width]; of positions, where they are a field, see there.
    template <std::size_t I>
    std::span<value_type<I>> values() const {
        return part<value_type<I>>(3 + I);
    }

    /// Tokens whose label counts; all samples.
    std::int64_t valid_tokens() const {
        if constexpr (has_labels) {
            auto const all = values<labels>();
            return std::ranges::count_if(all, [&](auto label) { return counts(label); });
        } else {
            return 0;
        }
    }
    template <class Label>
    bool counts(Label label) const {
        return static_cast<std::int64_t>(label) != std::get<labels>(fields_).pad;
    }
    /// Whether token t of sample b has a label that counts.
    bool valid(std::int64_t b, std::int64_t t) const {
        return counts(values<labels>()[index(b * extents_.tokens + t)]);
    }

    /// Takes the samples. *Throws* `invalid_config`, with the numbers, for one that does not fit.
    void pack(std::span<Sample const> samples, batch_options const& given, where at) {
        packed_extents extents{.samples = static_cast<std::int64_t>(samples.size())};
        kept_.clear();
        for (auto const& each : samples) {
            check(each, given, at);
            auto const n = size<ids>(each);
            kept_.push_back(given.max_length > 0 ? std::min(n, given.max_length) : n);
            extents.tokens = std::max(extents.tokens, kept_.back());
        }
        if (given.fixed_length) extents.tokens = given.max_length;
        auto const multiple = given.pad_to_multiple_of;
        extents.tokens = (extents.tokens + multiple - 1) / multiple * multiple;
        if (extents.tokens >= token_limit)
            raise(errc::invalid_config, at, "batch", "a sample has less than 2^31 tokens",
                  extents.tokens);
        for (auto const n : kept_)
            if (n < extents.tokens) extents.lengths = extents.samples;
        extents.documents = find_documents(samples, extents.tokens);
        reshape(extents);
        std::ranges::copy(starts_, documents().begin());
        if (extents.lengths > 0) std::ranges::copy(kept_, lengths().begin());
        std::ranges::copy(positions_, positions().begin());
        [&]<std::size_t... I>(std::index_sequence<I...>) { (fill<I>(samples, given), ...); }
        (std::index_sequence_for<Fields...>{});
    }

    /// Takes one token that counts for nothing: what a rank without samples brings.
    void pack_nothing(batch_options const& given) {
        auto const multiple = given.pad_to_multiple_of;
        packed_extents extents{.samples = 1,
                               .tokens = given.fixed_length ? given.max_length : multiple};
        if (extents.tokens > 1) extents.lengths = 1;
        reshape(extents);
        if (extents.lengths > 0) lengths()[0] = 1;
        for (std::size_t t = 0; t < positions().size(); ++t)
            positions()[t] = static_cast<std::int64_t>(t);
        [&]<std::size_t... I>(std::index_sequence<I...>) {
            (std::ranges::fill(values<I>(), pad<I>()), ...);
        }
        (std::index_sequence_for<Fields...>{});
    }

    /// Of what tokens the samples have.
    std::uint64_t hash() const {
        word_hash hash;
        hash.add(extents_.samples);
        for (auto const each : values<ids>()) hash.add(each);
        for (auto const each : values<labels_or_ids>()) hash.add(each);
        return hash.value();
    }

    static constexpr auto ids = index_of<field_role::ids, Fields...>();
    static constexpr auto labels = index_of<field_role::labels, Fields...>();
    static constexpr auto positions_index = index_of<field_role::positions, Fields...>();
    static constexpr bool has_labels = has_role<field_role::labels, Fields...>;

   private:
    static_assert(
        has_role<field_role::ids, Fields...>,
        "ulysses: a sample's fields must have ids_field: they say how many tokens it has.");
    static constexpr auto labels_or_ids = has_labels ? labels : ids;
    static_assert(!has_labels || std::is_signed_v<value_type<labels_or_ids>>,
                  "ulysses: labels are signed: that of a token that does not count is -100.");

    static std::size_t index(std::int64_t i) { return static_cast<std::size_t>(i); }

    template <std::size_t I>
    decltype(auto) of(Sample const& sample) const {
        return std::invoke(std::get<I>(fields_).get, sample);
    }
    template <std::size_t I>
    std::int64_t size(Sample const& sample) const {
        return static_cast<std::int64_t>(std::ranges::size(of<I>(sample)));
    }
    template <std::size_t I>
    value_type<I> pad() const {
        return static_cast<value_type<I>>(std::get<I>(fields_).pad);
    }

    /// Where each part begins, and behind the last where all end.
    std::array<std::size_t, 4 + sizeof...(Fields)> layout_of(packed_extents const& extents) const {
        auto const tokens = extents.samples * extents.tokens;
        std::array<std::size_t, 4 + sizeof...(Fields)> at{};
        std::size_t i = 0;
        auto const add = [&](std::int64_t count, std::size_t size) {
            at[i + 1] = (at[i] + index(count) * size + 7) / 8 * 8;
            ++i;
        };
        add(extents.documents, sizeof(std::int64_t));
        add(extents.lengths, sizeof(std::int64_t));
        add(tokens, sizeof(std::int64_t));
        [&]<std::size_t... I>(std::index_sequence<I...>) {
            (add(I == positions_index ? 0 : tokens * std::get<I>(fields_).width,
                 sizeof(value_type<I>)),
             ...);
        }
        (std::index_sequence_for<Fields...>{});
        return at;
    }
    template <class Value>
    std::span<Value> part(std::size_t i) const {
        static_assert(std::is_trivially_copyable_v<Value> && sizeof(Value) <= 8,
                      "ulysses: the values of a token's field are numbers.");
        auto const at = layout_of(extents_);
        std::int64_t count = 0;
        auto const tokens = extents_.samples * extents_.tokens;
        if (i == 0)
            count = extents_.documents;
        else if (i == 1)
            count = extents_.lengths;
        else if (i == 2)
            count = tokens;
        else if (i - 3 != positions_index)
            count = tokens * widths()[i - 3];
        return {reinterpret_cast<Value*>(memory_.data() + at[i]), index(count)};
    }
    std::array<std::int64_t, sizeof...(Fields)> widths() const {
        return std::apply(
            [](auto const&... field) {
                return std::array<std::int64_t, sizeof...(Fields)>{field.width...};
            },
            fields_);
    }

    void check(Sample const& sample, batch_options const& given, where at) const {
        auto const tokens = size<ids>(sample);
        if (tokens < 1)
            raise(errc::invalid_config, at, "batch", "a sample has at least one token", tokens);
        if (given.max_length > 0 && given.too_long == overlong::refuse && tokens > given.max_length)
            raise(errc::invalid_config, at, "batch",
                  "a sample must not have more tokens than max_length", tokens,
                  " tokens, max_length ", given.max_length);
        [&]<std::size_t... I>(std::index_sequence<I...>) {
            (check_field<I>(sample, tokens, at), ...);
        }
        (std::index_sequence_for<Fields...>{});
    }
    template <std::size_t I>
    void check_field(Sample const& sample, std::int64_t tokens, where at) const {
        auto const& field = std::get<I>(fields_);
        auto const count = size<I>(sample);
        if (count == tokens * field.width || (I == positions_index && count == 0)) return;
        raise(errc::invalid_config, at, "batch",
              "a field has its values for each token of a sample", field.name, " has ", count,
              ", expected ", tokens, " tokens of ", field.width);
    }

    /// Positions [B, S] of all tokens and where documents begin; none when each sample is one.
    std::int64_t find_documents(std::span<Sample const> samples, std::int64_t tokens) {
        positions_.clear();
        starts_.clear();
        for (std::size_t b = 0; b < samples.size(); ++b) {
            auto const first = static_cast<std::int64_t>(positions_.size());
            for (std::int64_t t = 0; t < kept_[b]; ++t) positions_.push_back(t);
            if constexpr (has_role<field_role::positions, Fields...>)
                if (size<positions_index>(samples[b]) > 0)
                    for (std::int64_t t = 0; t < kept_[b]; ++t)
                        positions_[index(first + t)] = static_cast<std::int64_t>(
                            std::ranges::begin(of<positions_index>(samples[b]))[t]);
            for (auto t = kept_[b]; t < tokens; ++t) positions_.push_back(positions_.back() + 1);
            for (std::int64_t t = 0; t < tokens; ++t)
                if (t == 0 || positions_[index(first + t)] <= positions_[index(first + t - 1)])
                    starts_.push_back(first + t);
        }
        if (starts_.size() == samples.size()) starts_.clear();
        return static_cast<std::int64_t>(starts_.size());
    }

    template <std::size_t I>
    void fill(std::span<Sample const> samples, batch_options const& given) {
        if constexpr (I != positions_index) {
            auto to = values<I>();
            auto const width = I == labels ? 1 : std::get<I>(fields_).width;
            for (std::size_t b = 0; b < samples.size(); ++b) {
                auto const from = std::ranges::begin(of<I>(samples[b]));
                for (std::int64_t i = 0; i < extents_.tokens * width; ++i, to = to.subspan(1)) {
                    auto const t = i / width;
                    auto const own =
                        I == labels && given.shift_labels ? follows(b, t) : t < kept_[b];
                    auto const source = I == labels && given.shift_labels ? i + 1 : i;
                    to.front() = own ? from[source] : pad<I>();
                }
            }
        }
    }
    /// Whether token t + 1 is of the sample, and of the document of token t.
    bool follows(std::size_t b, std::int64_t t) const {
        auto const at = index(static_cast<std::int64_t>(b) * extents_.tokens + t);
        return t + 1 < kept_[b] && positions_[at + 1] > positions_[at];
    }

    fields_type fields_;
    packed_extents extents_;
    buffer<host_space> memory_;
    std::vector<std::int64_t> kept_, positions_, starts_;
};

}  // namespace detail
}  // namespace ulysses::inline ULYSSES_ABI
