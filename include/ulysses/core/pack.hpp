#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <cstddef>
#include <cstring>

/// Vectors of the compiler's own: the widest the target has, through the vector extensions of g++
/// and clang. On a target without them a pack is lowered to narrower instructions; the code stays
/// correct.
namespace ulysses::inline ULYSSES_ABI::detail {

#if defined(__AVX512F__)
inline constexpr std::size_t pack_bytes = 64;
#elif defined(__AVX__)
inline constexpr std::size_t pack_bytes = 32;
#else
inline constexpr std::size_t pack_bytes = 16;
#endif

/// clang splits 64-byte vectors in two on targets that prefer narrower ones, unless told otherwise.
#if defined(__clang__) && defined(__AVX512F__)
#define ULYSSES_WIDE_VECTORS __attribute__((min_vector_width(512)))
#else
#define ULYSSES_WIDE_VECTORS
#endif

template <class T>
struct pack_types;
template <>
struct pack_types<float> {
    typedef float pack __attribute__((vector_size(pack_bytes)));
    typedef unsigned int bits __attribute__((vector_size(pack_bytes)));
};
template <>
struct pack_types<double> {
    typedef double pack __attribute__((vector_size(pack_bytes)));
    typedef unsigned long long bits __attribute__((vector_size(pack_bytes)));
};

/// `lanes<T>` elements side by side.
template <class T>
using pack = typename pack_types<T>::pack;
/// Unsigned integers of the same width and count.
template <class T>
using pack_bits = typename pack_types<T>::bits;
template <class T>
inline constexpr std::size_t lanes = pack_bytes / sizeof(T);

template <class T>
[[gnu::always_inline]] inline pack<T> load_pack(T const* from) {
    pack<T> value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

template <class T>
[[gnu::always_inline]] inline void store_pack(T* to, pack<T> const& value) {
    std::memcpy(to, &value, sizeof value);
}

template <class T>
[[gnu::always_inline]] inline pack<T> fill_pack(T value) {
    return value - pack<T>{};  // not `pack{} + value`: that would turn -0 into +0
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
