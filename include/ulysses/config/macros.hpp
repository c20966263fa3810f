#pragma once
// SPDX-License-Identifier: Apache-2.0

/// The few macros the library needs. Each starts with ULYSSES_ and can be defined by the user
/// before the first include.

#if defined(_MSVC_LANG) ? _MSVC_LANG < 202002L : __cplusplus < 201709L
#error "ulysses needs C++20: compile with -std=c++20"
#endif

/// Marks functions that also run in device code.
#if !defined(ULYSSES_HD)
#if defined(__CUDACC__)
#define ULYSSES_HD __host__ __device__
#else
#define ULYSSES_HD
#endif
#endif

/// 1 when the translation unit is built with exceptions, else 0 (errors then call the error
/// handler).
#if !defined(ULYSSES_EXCEPTIONS)
#if defined(__cpp_exceptions)
#define ULYSSES_EXCEPTIONS 1
#else
#define ULYSSES_EXCEPTIONS 0
#endif
#endif

/// The inline namespace of everything, so that two versions of the library, or files built with and
/// without exceptions, can be linked into one program without meeting. An engine that compiles some
/// files for another instruction set names it here for them: -DULYSSES_ABI=v0_avx512.
#if !defined(ULYSSES_ABI)
#if ULYSSES_EXCEPTIONS
#define ULYSSES_ABI v0
#else
#define ULYSSES_ABI v0_no_exceptions
#endif
#endif
