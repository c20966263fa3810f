#pragma once
// SPDX-License-Identifier: Apache-2.0

/// Which sanitizer a test is built with, as g++ and clang say it. A sanitizer has allocation functions
/// of its own, ends the program where memory cannot be had, and takes its time.
#if defined(__SANITIZE_ADDRESS__)
#define TEST_UNDER_ADDRESS_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TEST_UNDER_ADDRESS_SANITIZER 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define TEST_UNDER_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TEST_UNDER_THREAD_SANITIZER 1
#endif
#endif

#if !defined(TEST_UNDER_ADDRESS_SANITIZER)
#define TEST_UNDER_ADDRESS_SANITIZER 0
#endif
#if !defined(TEST_UNDER_THREAD_SANITIZER)
#define TEST_UNDER_THREAD_SANITIZER 0
#endif
#define TEST_UNDER_SANITIZER (TEST_UNDER_ADDRESS_SANITIZER || TEST_UNDER_THREAD_SANITIZER)
