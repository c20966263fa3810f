#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <array>
#include <cstddef>
#include <utility>

/// What std::mdspan is from C++23 on, and Kokkos' implementation before it: the part of its
/// interface that a program uses, under the standard's names.
namespace mds {

inline constexpr auto dynamic_extent = static_cast<std::size_t>(-1);

template <class Index, std::size_t... Sizes>
class extents {
   public:
    using index_type = Index;
    using rank_type = std::size_t;

    template <class... Given>
    constexpr explicit extents(Given... given) : sizes_{static_cast<Index>(given)...} {
        static_assert(sizeof...(Given) == sizeof...(Sizes));
    }
    static constexpr rank_type rank() noexcept { return sizeof...(Sizes); }
    static constexpr std::size_t static_extent(rank_type axis) {
        return std::array<std::size_t, sizeof...(Sizes)>{Sizes...}[axis];
    }
    constexpr Index extent(rank_type axis) const {
        return static_extent(axis) == dynamic_extent ? sizes_[axis]
                                                     : static_cast<Index>(static_extent(axis));
    }

   private:
    std::array<Index, sizeof...(Sizes)> sizes_;
};

namespace detail {
template <class Index, class>
struct all_dynamic;
template <class Index, std::size_t... I>
struct all_dynamic<Index, std::index_sequence<I...>> {
    using type = extents<Index, (static_cast<void>(I), dynamic_extent)...>;
};
}  // namespace detail
template <class Index, std::size_t Rank>
using dextents = typename detail::all_dynamic<Index, std::make_index_sequence<Rank>>::type;

struct layout_right {
    template <class Extents>
    class mapping {
       public:
        using index_type = typename Extents::index_type;
        constexpr mapping(Extents const& sizes) : sizes_(sizes) {}
        constexpr Extents const& extents() const { return sizes_; }
        constexpr index_type stride(std::size_t axis) const {
            index_type step = 1;
            for (auto a = axis + 1; a < Extents::rank(); ++a) step *= sizes_.extent(a);
            return step;
        }

       private:
        Extents sizes_;
    };
};

struct layout_stride {
    template <class Extents>
    class mapping {
       public:
        using index_type = typename Extents::index_type;
        constexpr mapping(Extents const& sizes,
                          std::array<index_type, Extents::rank()> const& steps)
            : sizes_(sizes), steps_(steps) {}
        constexpr Extents const& extents() const { return sizes_; }
        constexpr index_type stride(std::size_t axis) const { return steps_[axis]; }

       private:
        Extents sizes_;
        std::array<index_type, Extents::rank()> steps_;
    };
};

template <class T>
struct default_accessor {
    using element_type = T;
    using reference = T&;
    using data_handle_type = T*;
};

template <class T, class Extents, class Layout = layout_right, class Accessor = default_accessor<T>>
class mdspan {
   public:
    using extents_type = Extents;
    using mapping_type = typename Layout::template mapping<Extents>;
    using index_type = typename Extents::index_type;
    using element_type = T;
    using reference = typename Accessor::reference;
    using data_handle_type = typename Accessor::data_handle_type;

    constexpr mdspan(data_handle_type first, mapping_type const& map) : first_(first), map_(map) {}

    static constexpr std::size_t rank() noexcept { return Extents::rank(); }
    constexpr Extents const& extents() const noexcept { return map_.extents(); }
    constexpr index_type extent(std::size_t axis) const { return extents().extent(axis); }
    constexpr index_type stride(std::size_t axis) const { return map_.stride(axis); }
    constexpr data_handle_type const& data_handle() const noexcept { return first_; }
    constexpr mapping_type const& mapping() const noexcept { return map_; }

   private:
    data_handle_type first_;
    mapping_type map_;
};

}  // namespace mds
