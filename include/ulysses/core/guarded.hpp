#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>

#include <exception>
#include <new>
#include <string_view>

/// What an exception becomes on its way to the other ranks: a status for the next fence, or the
/// departure of its rank.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

/// The text of what was caught, with the call it was caught in.
inline std::string caught(std::string_view operation, std::string_view rule,
                          std::string_view values, where at) {
    auto text = concat("ulysses: ", operation, ": ", rule, ": ", values);
    if (at.line != 0) text += concat(" [", at.file, ":", at.line, "]");
    return text;
}

}  // namespace detail

/// Runs `body` and turns what it throws into a status for the next fence, so that the error leaves
/// the call on every rank. No collective call of the same group is made in it. What is not an `error`
/// is told with the name and the place of the call that `body` is a part of, where they are given.
template <class Body>
void guarded(fence_status& status, Body&& body, std::string_view operation = {}, where at = {}) {
#if ULYSSES_EXCEPTIONS
    auto const functor_failed = [&](std::string_view what) {
        auto const call = operation.empty() ? "functor" : operation;
        status.fail(errc::functor_failed,
                    detail::caught(call, "an exception left a functor", what, at));
    };
    try {
        body();
    } catch (error const& e) {
        // What failed is another group of the body's own, not this one.
        auto const foreign = e.code() == errc::peer_failed || e.code() == errc::timed_out ||
                             e.code() == errc::transport;
        status.fail(foreign ? errc::functor_failed : e.code(), e.what());
    } catch (std::bad_alloc const&) {
        auto const call = operation.empty() ? "memory" : operation;
        status.fail(errc::out_of_memory,
                    detail::caught(call, "an allocation failed", "std::bad_alloc", at));
    } catch (std::exception const& e) {
        functor_failed(e.what());
    } catch (...) {
        functor_failed("of unknown type");
    }
#else
    static_cast<void>(status);
    static_cast<void>(operation);
    static_cast<void>(at);
    body();
#endif
}

/// Runs `body`, a collective call. When it ends on this rank by something that the others cannot
/// know of (an exception that is not an `error`, or one of the transport), they are released.
template <class C, class Body>
void leaving_on_failure(C const& ranks, Body&& body) {
#if ULYSSES_EXCEPTIONS
    if constexpr (requires { ranks.leave(std::string_view{}); }) {
        try {
            body();
        } catch (error const& e) {
            if (e.code() == errc::transport || e.code() == errc::none) ranks.leave(e.what());
            throw;
        } catch (std::exception const& e) {
            ranks.leave(e.what());
            throw;
        } catch (...) {
            ranks.leave("an exception of unknown type");
            throw;
        }
        return;
    }
#else
    static_cast<void>(ranks);
#endif
    body();
}

}  // namespace ulysses::inline ULYSSES_ABI
