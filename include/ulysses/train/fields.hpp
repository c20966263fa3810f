#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/plan/sequence.hpp>
#include <ulysses/train/loss.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <ranges>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

/// What a sample has for each of its tokens, and a micro-batch of a rank's tokens of it.
namespace ulysses::inline ULYSSES_ABI {

/// What a field means to the adapter; plain ones it only moves.
enum class field_role : std::uint8_t { plain, ids, labels, positions };

/// A field of a sample: `get(sample)` is a contiguous range of `width` values a token.
template <field_role Role, class Get, class Pad>
struct token_field {
    static constexpr field_role role = Role;

    std::string_view name;
    Get get;
    std::int64_t width = 1;
    Pad pad{};  ///< of tokens that a sample has not

    template <class Sample>
    using value_type = std::ranges::range_value_t<
        std::remove_cvref_t<std::invoke_result_t<Get const&, Sample const&>>>;
};

/// Which tokens a sample has; `get` is a member, or any function of a sample.
template <class Get>
token_field<field_role::ids, Get, std::int64_t> ids_field(Get get, std::int64_t pad = 0) {
    return {"ids", std::move(get), 1, pad};
}
/// For each token its label, `ignored_label` where it has none; that of the *next* token is what is
/// predicted, which the adapter sees to. Often the ids themselves.
template <class Get>
token_field<field_role::labels, Get, std::int64_t> labels_field(Get get) {
    return {"labels", std::move(get), 1, ignored_label};
}
/// Where a token stands in its document: one begins wherever positions do not grow. Without this
/// field, or for a sample without them, a sample is one document, counted from 0.
template <class Get>
token_field<field_role::positions, Get, std::int64_t> positions_field(Get get) {
    return {"positions", std::move(get), 1, 0};
}
/// Any other, such as weights, or positions on `width` axes.
template <class Get, class Pad = int>
token_field<field_role::plain, Get, Pad> values_field(std::string_view name, Get get,
                                                      std::int64_t width = 1, Pad pad = {}) {
    return {name, std::move(get), width, pad};
}

namespace detail {

/// Where the field of a role is among some; their number when there is none.
template <field_role Role, class... Fields>
consteval std::size_t index_of() {
    std::size_t i = 0;
    static_cast<void>(((Fields::role == Role || (++i, false)) || ...));
    return i;
}
template <field_role Role, class... Fields>
inline constexpr bool has_role = index_of<Role, Fields...>() < sizeof...(Fields);

}  // namespace detail

/// A rank's tokens of some samples, [B, s]; memory is kept from one to the next.
template <class Sample, class... Fields>
struct micro_batch {
    sequence step{};                      ///< agreed on by the ranks that share it
    int source = 0;                       ///< which of them brought the samples
    std::int64_t valid_tokens = 0;        ///< of all these ranks
    std::vector<std::int64_t> positions;  ///< [B, s], in documents
    /// [B, s, width] each.
    std::tuple<std::vector<typename Fields::template value_type<Sample>>...> values;

    /// The field that was registered I-th.
    template <std::size_t I>
    auto const& get() const {
        return std::get<I>(values);
    }
    auto const& ids() const { return of<field_role::ids>(); }
    /// Of each token, the label of the next in its document.
    auto const& labels() const { return of<field_role::labels>(); }

   private:
    template <field_role Role>
    auto const& of() const {
        static_assert(detail::has_role<Role, Fields...>,
                      "ulysses: a micro-batch has the fields that its adapter was given; add "
                      "ids_field or labels_field.");
        return std::get<detail::index_of<Role, Fields...>()>(values);
    }
};

}  // namespace ulysses::inline ULYSSES_ABI
