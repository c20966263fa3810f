// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>

#include <doctest/doctest.h>

#include <stdexcept>
#include <string>
#include <type_traits>

namespace uly = ulysses;
using uly::errc;

namespace {

/// The code of what throw_error(code) throws, when it can be caught as Error.
template <class Error>
bool is_thrown_by(errc code) {
    try {
        uly::throw_error(code, "text", 3);
    } catch (Error const& e) {
        return e.code() == code && e.rank() == 3 && std::string(e.what()) == "text";
    } catch (...) {
        return false;
    }
}

uly::where called_at(uly::where at = uly::where::here()) { return at; }

}  // namespace

TEST_CASE("error: a message is `ulysses: operation: rule: values [file:line]`") {
    try {
        uly::raise(errc::invalid_tensor, {"engine.cpp", 12}, "attend: q", "must be so", "got ", 3,
                   ", expected ", std::string("four"), ", ", true);
        FAIL("nothing was thrown");
    } catch (uly::invalid_tensor const& e) {
        CHECK(std::string(e.what()) ==
              "ulysses: attend: q: must be so: got 3, expected four, true [engine.cpp:12]");
        CHECK(e.code() == errc::invalid_tensor);
        CHECK(e.rank() == -1);
    }
    try {  // without a place
        uly::raise(errc::invalid_call, {}, "fence", "a rule", -1.5);
        FAIL("nothing was thrown");
    } catch (uly::error const& e) {
        CHECK(std::string(e.what()).substr(0, 27) == "ulysses: fence: a rule: -1.");
        CHECK(std::string(e.what()).find('[') == std::string::npos);
    }
}

TEST_CASE("error: each code has its type and name") {
    CHECK(is_thrown_by<uly::invalid_shape>(errc::invalid_shape));
    CHECK(is_thrown_by<uly::invalid_sequence>(errc::invalid_sequence));
    CHECK(is_thrown_by<uly::invalid_tensor>(errc::invalid_tensor));
    CHECK(is_thrown_by<uly::invalid_call>(errc::invalid_call));
    CHECK(is_thrown_by<uly::unsupported>(errc::unsupported));
    CHECK(is_thrown_by<uly::disagreement>(errc::disagreement));
    CHECK(is_thrown_by<uly::peer_failed>(errc::peer_failed));
    CHECK(is_thrown_by<uly::timed_out>(errc::timed_out));
    CHECK(is_thrown_by<uly::transport_error>(errc::transport));
    CHECK(is_thrown_by<uly::functor_failed>(errc::functor_failed));
    CHECK(is_thrown_by<uly::out_of_memory>(errc::out_of_memory));
    CHECK(is_thrown_by<uly::invalid_config>(errc::invalid_config));
    CHECK(is_thrown_by<uly::error>(errc::none));
    CHECK(!is_thrown_by<uly::invalid_shape>(errc::invalid_tensor));

    // Codes travel between ranks as numbers: each has its own name, in one place without a gap.
    std::string names = " ";
    for (std::uint32_t code = 0; code <= static_cast<std::uint32_t>(errc::invalid_config); ++code) {
        auto const name = std::string(uly::name(static_cast<errc>(code)));
        CHECK(name != "unknown");
        CHECK(names.find(" " + name + " ") == std::string::npos);
        names += name + " ";
    }
    CHECK(uly::name(static_cast<errc>(1000)) == "unknown");
    static_assert(std::is_base_of_v<std::runtime_error, uly::peer_failed>);
}

TEST_CASE("error: a defaulted `where` names the line of the call") {
    auto const at = called_at();
    CHECK(at.line == __LINE__ - 1);
    CHECK(std::string(at.file).find("error_test.cpp") != std::string::npos);
}
