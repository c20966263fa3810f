#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>

#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>

/// What an exception becomes on its way to the other ranks: a status for the next fence, or the
/// departure of its rank.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

inline std::string place_of(where at) {
    return at.line == 0 ? "" : concat(" [", at.file, ":", at.line, "]");
}
inline std::string caught(std::string_view operation, std::string_view rule,
                          std::string_view values, where at) {
    return concat("ulysses: ", operation, ": ", rule, ": ", values, place_of(at));
}

}  // namespace detail

/// Runs `body` and turns what it throws into a status for the next fence, so that the error leaves
/// the call on every rank. No collective call of the same group is made in it.
///
/// `operation` and `at` are the call that `body` is a part of, or empty: they are told with what does
/// not know it, which is what a functor throws, and memory that was not had.
template <class Body>
void guarded(fence_status& status, std::string_view operation, where at, Body&& body) {
#if ULYSSES_EXCEPTIONS
    auto const functor_threw = [&](std::string_view what) {
        status.fail(errc::functor_failed, detail::caught(operation.empty() ? "functor" : operation,
                                                         "a functor threw", what, at));
    };
    try {
        body();
    } catch (error const& e) {
        // What failed is another group of the body's own, not this one.
        auto const foreign = e.code() == errc::peer_failed || e.code() == errc::timed_out ||
                             e.code() == errc::transport;
        auto const placed = e.code() != errc::out_of_memory || operation.empty();
        status.fail(foreign ? errc::functor_failed : e.code(),
                    placed ? e.what() : concat(e.what(), " in ", operation, detail::place_of(at)));
    } catch (std::bad_alloc const&) {
        status.fail(errc::out_of_memory,
                    detail::caught(operation.empty() ? "memory" : operation, "an allocation failed",
                                   "std::bad_alloc", at));
    } catch (std::exception const& e) {
        functor_threw(e.what());
    } catch (...) {
        functor_threw("what is of unknown type");
    }
#else
    static_cast<void>(status);
    static_cast<void>(operation);
    static_cast<void>(at);
    body();
#endif
}

template <class Body>
void guarded(fence_status& status, Body&& body) {
    guarded(status, {}, {}, std::forward<Body>(body));
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
