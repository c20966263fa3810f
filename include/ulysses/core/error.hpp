#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

/// Errors: one base class, one type per kind, one message form.
///
///     ulysses: <operation>: <rule>: <values> [file:line]
///
/// An error raised on one rank inside a pipeline call leaves that call on every rank with the same
/// kind and the same text, so a handler may act on it without asking the others.
namespace ulysses::inline ULYSSES_ABI {

/// What kind of rule was broken.
enum class errc : std::uint32_t {
    none = 0,
    invalid_shape,     ///< heads, dims or options that no plan exists for
    invalid_sequence,  ///< token orders that do not cover the sequence exactly once
    invalid_tensor,    ///< extents, strides, pointer or element type of an operand
    invalid_call,      ///< a call out of order, such as a second forward into an unconsumed context
    unsupported,       ///< a feature the attention functor does not have
    disagreement,      ///< ranks passed different things to one collective call
    peer_failed,       ///< another rank left the group
    timed_out,         ///< another rank has been silent for longer than the deadline
    transport,         ///< the communicator's own library reported an error
    functor_failed,    ///< an exception left a user's functor
    out_of_memory,     ///< a space could not allocate
    invalid_config,    ///< a mesh, a training step or a batch that cannot be
};

constexpr std::string_view name(errc code) {
    switch (code) {
        case errc::none: return "none";
        case errc::invalid_shape: return "invalid_shape";
        case errc::invalid_sequence: return "invalid_sequence";
        case errc::invalid_tensor: return "invalid_tensor";
        case errc::invalid_call: return "invalid_call";
        case errc::unsupported: return "unsupported";
        case errc::disagreement: return "disagreement";
        case errc::peer_failed: return "peer_failed";
        case errc::timed_out: return "timed_out";
        case errc::transport: return "transport";
        case errc::functor_failed: return "functor_failed";
        case errc::out_of_memory: return "out_of_memory";
        case errc::invalid_config: return "invalid_config";
    }
    return "unknown";
}

/// The place of a call, taken by a defaulted last parameter `where at = where::here()`.
struct where {
    char const* file = "";
    int line = 0;

    static constexpr where here(char const* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};

/// Base of everything the library throws.
class error : public std::runtime_error {
   public:
    error(errc code, std::string const& text, int rank = -1)
        : std::runtime_error(text), code_(code), rank_(rank) {}

    errc code() const noexcept { return code_; }

    /// The lowest rank on which the rule was broken, where the group knows it, else -1.
    int rank() const noexcept { return rank_; }

   private:
    errc code_;
    int rank_;
};

/// One catchable type per kind of error.
template <errc Code>
class error_of : public error {
   public:
    explicit error_of(std::string const& text, int rank = -1) : error(Code, text, rank) {}
};

using invalid_shape = error_of<errc::invalid_shape>;
using invalid_sequence = error_of<errc::invalid_sequence>;
using invalid_tensor = error_of<errc::invalid_tensor>;
using invalid_call = error_of<errc::invalid_call>;
using unsupported = error_of<errc::unsupported>;
using disagreement = error_of<errc::disagreement>;
using peer_failed = error_of<errc::peer_failed>;
using timed_out = error_of<errc::timed_out>;
using transport_error = error_of<errc::transport>;
using functor_failed = error_of<errc::functor_failed>;
using out_of_memory = error_of<errc::out_of_memory>;
using invalid_config = error_of<errc::invalid_config>;

#if !ULYSSES_EXCEPTIONS
/// What a build without exceptions calls with an error before it aborts.
using error_handler = void (*)(error const&);

namespace detail {

/// Null: the text goes to stderr.
inline std::atomic<error_handler> installed_error_handler = nullptr;

[[noreturn]] inline void fail(error const& failure) {
    if (auto const handler = installed_error_handler.load())
        handler(failure);
    else
        std::fprintf(stderr, "%s\n", failure.what());
    std::abort();
}

}  // namespace detail

/// Only without exceptions: `handler` is called with every error from now on, in place of printing
/// its text, to write a log or to end the process in its own way. When it returns, the process
/// aborts. Null brings the printing back. Returns the handler before. One for the whole program,
/// among the files that are built without exceptions and with one ULYSSES_ABI.
///
/// *Thread safety*: may be called at any time. The handler runs on the thread that found the error,
/// on several at once when several ranks fail, while other ranks go on or wait for this one: it
/// must not call back into the library.
inline error_handler set_error_handler(error_handler handler) noexcept {
    return detail::installed_error_handler.exchange(handler);
}
#endif

/// Throws the type that belongs to `code`. Without exceptions: calls the error handler, which
/// prints `text` unless `set_error_handler` has installed another, and aborts.
[[noreturn]] inline void throw_error(errc code, std::string const& text, int rank = -1) {
#if ULYSSES_EXCEPTIONS
    switch (code) {
        case errc::invalid_shape: throw invalid_shape(text, rank);
        case errc::invalid_sequence: throw invalid_sequence(text, rank);
        case errc::invalid_tensor: throw invalid_tensor(text, rank);
        case errc::invalid_call: throw invalid_call(text, rank);
        case errc::unsupported: throw unsupported(text, rank);
        case errc::disagreement: throw disagreement(text, rank);
        case errc::peer_failed: throw peer_failed(text, rank);
        case errc::timed_out: throw timed_out(text, rank);
        case errc::transport: throw transport_error(text, rank);
        case errc::functor_failed: throw functor_failed(text, rank);
        case errc::out_of_memory: throw out_of_memory(text, rank);
        case errc::invalid_config: throw invalid_config(text, rank);
        case errc::none: break;
    }
    throw error(code, text, rank);
#else
    detail::fail(error(code, text, rank));
#endif
}

namespace detail {

inline void append(std::string& text, std::string_view part) { text += part; }
template <class Number>
    requires std::is_arithmetic_v<Number>
void append(std::string& text, Number part) {
    if constexpr (std::is_same_v<Number, bool>)
        text += part ? "true" : "false";
    else
        text += std::to_string(part);
}

}  // namespace detail

/// Joins strings and numbers into one text.
template <class... Parts>
std::string concat(Parts const&... parts) {
    std::string text;
    (detail::append(text, parts), ...);
    return text;
}

/// Raises `ulysses: operation: rule: values [file:line]`; the values are joined as by `concat`.
template <class... Values>
[[noreturn]] void raise(errc code, where at, std::string_view operation, std::string_view rule,
                        Values const&... values) {
    std::string text = concat("ulysses: ", operation, ": ", rule, ": ", values...);
    if (at.line != 0) text += concat(" [", at.file, ":", at.line, "]");
    throw_error(code, text);
}

}  // namespace ulysses::inline ULYSSES_ABI
