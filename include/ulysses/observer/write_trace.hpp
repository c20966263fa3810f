#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/observer/trace.hpp>

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <ostream>
#include <string>
#include <string_view>
#include <vector>

/// Writes what recorders hold as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

/// Length of the well-formed UTF-8 character that `text` begins with, or 0.
inline std::size_t utf8_length(std::string_view text) {
    auto const byte = [&](std::size_t i) {
        return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u;
    };
    auto const first = byte(0);
    if (first < 0x80) return 1;
    // What the second byte may be depends on the first: no overlong forms, no surrogates.
    auto const low = first == 0xe0 ? 0xa0u : first == 0xf0 ? 0x90u : 0x80u;
    auto const high = first == 0xed ? 0x9fu : first == 0xf4 ? 0x8fu : 0xbfu;
    if (first < 0xc2 || first > 0xf4 || byte(1) < low || byte(1) > high) return 0;
    auto const length = first < 0xe0 ? std::size_t{2} : first < 0xf0 ? 3 : 4;
    for (std::size_t i = 2; i < length; ++i)
        if ((byte(i) & 0xc0u) != 0x80u) return 0;
    return length;
}

/// `text` as a JSON string; what is not UTF-8 becomes U+FFFD.
inline std::string json_string(std::string_view text) {
    std::string result = "\"";
    while (!text.empty()) {
        auto const length = utf8_length(text);
        auto const c = static_cast<unsigned char>(text.front());
        if (length == 0)
            result += "\\ufffd";
        else if (c == '"' || c == '\\')
            (result += '\\') += text.front();
        else if (c < 0x20 || c == 0x7f) {
            constexpr std::string_view digits = "0123456789abcdef";
            result += "\\u00";
            (result += digits[c / 16]) += digits[c % 16];
        } else
            result += text.substr(0, length);
        text.remove_prefix(std::max<std::size_t>(length, 1));
    }
    return result += '"';
}

/// Nanoseconds as microseconds, to the last digit.
inline std::string microseconds(std::int64_t nanoseconds) {
    auto const fraction = std::to_string(1000 + nanoseconds % 1000);
    return concat(nanoseconds / 1000, ".", std::string_view(fraction).substr(1));
}

class trace_writer {
   public:
    explicit trace_writer(std::ostream& out) : out_(out) {}

    void write(std::vector<trace_recorder const*> const& recorders) {
        auto origin = std::numeric_limits<std::int64_t>::max();
        for (auto const* each : recorders)
            for (auto const& event : each->events()) origin = std::min(origin, event.begin);
        put("[");
        put_event("{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":1,\"tid\":0,"
                  "\"args\":{\"name\":\"ulysses\"}}");
        for (auto const* each : recorders) write_track(*each, origin);
        put("\n]\n");
        out_.flush();
    }

   private:
    void write_track(trace_recorder const& of, std::int64_t origin) {
        auto const track = concat("\"pid\":1,\"tid\":", of.rank());
        put_event(concat("{\"name\":\"thread_name\",\"ph\":\"M\",", track,
                         ",\"args\":{\"name\":\"rank ", of.rank(), "\"}}"));
        put_event(concat("{\"name\":\"thread_sort_index\",\"ph\":\"M\",", track,
                         ",\"args\":{\"sort_index\":", of.rank(), "}}"));
        std::int64_t latest = 0;
        for (auto const& event : of.events()) latest = std::max({latest, event.begin, event.end});
        for (auto const& event : of.events()) {
            auto const open = event.end == trace_event::open;
            auto const length = (open ? latest : event.end) - event.begin;
            auto text = concat("{\"name\":", name_of(of, event), ",", track,
                               ",\"ts\":", microseconds(event.begin - origin));
            if (event.what == trace_event::kind::fence)
                text += ",\"ph\":\"i\",\"s\":\"t\",\"cat\":\"fence\"";
            else
                text += concat(",\"ph\":\"X\",\"dur\":", microseconds(length), ",\"cat\":",
                               event.what == trace_event::kind::call ? "\"call\"" : "\"step\"");
            put_event(text + ",\"args\":{" + arguments(of, event, event.finished && !open) + "}}");
        }
        // Nothing is lost silently: a track says at its end what it lacks.
        if (of.dropped() == 0) return;
        auto const end = of.events().empty() ? 0 : latest - origin;
        put_event(concat("{\"name\":\"", of.dropped(), " dropped\",\"ph\":\"i\",\"s\":\"t\",",
                         "\"cat\":\"recorder\",", track, ",\"ts\":", microseconds(end),
                         ",\"args\":{\"events\":", of.events().size(),
                         ",\"capacity\":", of.capacity(), ",\"dropped\":", of.dropped(), "}}"));
    }

    static std::string name_of(trace_recorder const& of, trace_event const& event) {
        switch (event.what) {
            case trace_event::kind::step: return json_string(name(static_cast<step_id>(event.id)));
            case trace_event::kind::fence: return "\"fence\"";
            default: return json_string(concat(of.layer(event), ": ", name(event.pass)));
        }
    }

    static std::string arguments(trace_recorder const& of, trace_event const& event,
                                 bool finished) {
        auto text = concat("\"layer\":", json_string(of.layer(event)));
        if (event.in_call)
            text += concat(",\"pass\":\"", name(event.pass), "\",\"call\":", event.call);
        if (event.what == trace_event::kind::fence) return text;
        text += concat(",\"finished\":", finished);
        std::size_t written = 0, read = 0;
        std::string to, from;
        auto const add = [](std::string& list, int peer, std::size_t bytes) {
            if (bytes > 0) list += concat(list.empty() ? "" : ",", "\"", peer, "\":", bytes);
        };
        for (auto const& each : of.transfers(event)) {
            written += each.written;
            read += each.read;
            add(to, each.peer, each.written);
            add(from, each.peer, each.read);
        }
        if (written + read + event.kept > 0)
            text += concat(",\"bytes_written\":", written, ",\"bytes_read\":", read,
                           ",\"bytes_kept\":", event.kept, ",\"written_to\":{", to,
                           "},\"read_from\":{", from, "}");
        return text;
    }

    void put_event(std::string_view text) {
        put(first_ ? "\n" : ",\n");
        put(text);
        first_ = false;
    }
    /// Unformatted: neither the stream's locale nor its width may change a number.
    void put(std::string_view text) {
        out_.write(text.data(), static_cast<std::streamsize>(text.size()));
    }

    std::ostream& out_;
    bool first_ = true;
};

}  // namespace detail

/// Writes a trace in the Trace Event Format, an array of JSON objects, of all `recorders`: one track
/// a rank, times from the first event of any. A call is a span (`cat` "call", named after its layer
/// and kind) around the spans of its steps (`cat` "step") and its fences, which are moments. `args`
/// hold the layer, the kind of call and its number on that rank, whether it finished, and the bytes
/// that this rank copied in a step: written to and read from the memory of each other. A track from
/// which something was dropped ends in a moment that tells how much.
///
/// `recorders` is a range of them (a `std::deque`, as they cannot be moved), or each an argument.
/// All must have used one clock, as threads of one process do. Whether the stream took it all is
/// for the caller to ask it.
template <class Recorders>
    requires requires(Recorders const& all) {
        { *all.begin() } -> std::same_as<trace_recorder const&>;
    }
void write_trace(std::ostream& out, Recorders const& recorders) {
    std::vector<trace_recorder const*> all;
    for (auto const& each : recorders) all.push_back(&each);
    detail::trace_writer(out).write(all);
}
template <std::same_as<trace_recorder>... Recorder>
void write_trace(std::ostream& out, Recorder const&... recorders) {
    detail::trace_writer(out).write({&recorders...});
}

}  // namespace ulysses::inline ULYSSES_ABI
