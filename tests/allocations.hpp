#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/fence.hpp>

#include "sanitizers.hpp"

#include <atomic>
#include <cstdlib>
#include <new>

/// How often a program allocates; for one file of it. Not under a sanitizer, which has an operator new of its
/// own that clang links into the program.
#if !TEST_UNDER_SANITIZER

namespace {

std::atomic<long> allocations{0};

void* counted(std::size_t bytes, std::size_t alignment) {
    allocations.fetch_add(1, std::memory_order_relaxed);
    return std::aligned_alloc(alignment,
                              (bytes + alignment - 1) / alignment * alignment + alignment);
}
void* counted_or_throw(std::size_t bytes, std::size_t alignment) {
    if (auto* const memory = counted(bytes, alignment)) return memory;
    throw std::bad_alloc();
}
constexpr std::size_t usual = __STDCPP_DEFAULT_NEW_ALIGNMENT__;

}  // namespace

// The whole program allocates through these; the array forms end in them. Not inlined: g++ would
// take the pairs it sees apart for mismatched.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return counted_or_throw(bytes, usual); }
[[gnu::noinline]] void* operator new(std::size_t bytes, std::nothrow_t const&) noexcept {
    return counted(bytes, usual);
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment) {
    return counted_or_throw(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void* operator new(std::size_t bytes, std::align_val_t alignment,
                                     std::nothrow_t const&) noexcept {
    return counted(bytes, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
    std::free(memory);
}

namespace {

/// Calls `body` twice, then eight times more, and returns how often those eight allocated on any
/// rank.
template <class Ranks, class Body>
long steady_allocations(Ranks const& c, Body const& body) {
    for (int i = 0; i < 2; ++i) body();
    c.fence({});
    auto const before = allocations.load();
    c.fence({});
    for (int i = 0; i < 8; ++i) body();
    c.fence({});
    auto const after = allocations.load();
    c.fence({});
    return after - before;
}

}  // namespace

#endif
