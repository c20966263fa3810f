// SPDX-License-Identifier: Apache-2.0

#include <ulysses/ulysses.hpp>

#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace uly = ulysses;

// [snippet]
void log_and_end(ulysses::error const& failure) {
    std::fprintf(stderr, "engine: rank %d: %s: %s\n", failure.rank(),
                 std::string(ulysses::name(failure.code())).c_str(), failure.what());
    std::_Exit(3);
}
// [/snippet]

namespace {

struct ending {
    std::string printed;  // on stderr
    int signal = 0, status = 0;
};

/// How a process ends in which `body` is run; 0 and 0 when `body` returns.
template <class Body>
ending ending_of(Body const& body) {
    int ends[2];
    if (pipe(ends) != 0) return {"no pipe", -1, -1};
    auto const child = fork();
    if (child < 0) return {"no process", -1, -1};
    if (child == 0) {
        std::signal(SIGABRT, SIG_DFL);  // doctest's handler would report a failed test
        dup2(ends[1], STDERR_FILENO);
        close(ends[0]);
        close(ends[1]);
        body();
        std::_Exit(0);
    }
    close(ends[1]);
    ending seen;
    char part[512];
    for (ssize_t count; (count = read(ends[0], part, sizeof part)) > 0;)
        seen.printed.append(part, static_cast<std::size_t>(count));
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status)) seen.signal = WTERMSIG(status);
    if (WIFEXITED(status)) seen.status = WEXITSTATUS(status);
    return seen;
}

bool contains(ending const& seen, std::string_view text) {
    return seen.printed.find(text) != std::string::npos;
}

constexpr uly::shape layer{.heads = 4, .head_dim = 8};

/// One rank's call, whose k has `key_heads` heads and should have 4.
template <class Comm>
void attend(Comm const& ranks, std::int64_t key_heads) {
    uly::pipeline pipeline{ranks, uly::sequence_local{},
                           uly::blocked_attention{uly::builtin_gemm{}}, layer};
    std::vector<float> q(64), k(64), v(64), o(64);
    auto const view = [](std::vector<float>& x, std::int64_t heads) {
        return uly::token_view<float>(x.data(), {1, 2, heads, 8});
    };
    pipeline.attend(uly::sequence::split(ranks.size(), 1, 2 * ranks.size()), view(q, 4),
                    view(k, key_heads), view(v, 4), view(o, 4));
}

}  // namespace

TEST_CASE("no exceptions: what is right returns") {
    auto const seen = ending_of([] { attend(uly::serial{}, 4); });
    CHECK(seen.printed == "");
    CHECK(seen.signal == 0);
    CHECK(seen.status == 0);
}

TEST_CASE("no exceptions: a wrong shape prints the whole message and aborts") {
    auto const seen = ending_of([] {
        uly::checked({.heads = 5, .kv_heads = 2, .head_dim = 8}, {"engine.cpp", 12});
    });
    CHECK(seen.printed.starts_with("ulysses: shape: kv_heads must divide heads: heads 5, kv_heads "
                                   "2, head_dim 8, value_dim 0, window -1 and "
                                   "-1, head_windows 0, scale 0"));
    CHECK(seen.printed.ends_with(" [engine.cpp:12]\n"));
    CHECK(seen.signal == SIGABRT);
}

TEST_CASE("no exceptions: a wrong operand prints the whole message and aborts") {
    auto const seen = ending_of([] { attend(uly::serial{}, 2); });
    CAPTURE(seen.printed);
    CHECK(seen.printed.starts_with("ulysses: attend: k"));
    CHECK(contains(seen, "[1, 2, 2, 8]"));
    CHECK(contains(seen, "[1, 2, 4, 8]"));
    CHECK(contains(seen, "death_test.cpp:"));
    CHECK(seen.signal == SIGABRT);
}

TEST_CASE("no exceptions: a rank that fails ends the process, whatever the others do") {
    auto const seen = ending_of([] {
        uly::threads::run(
            3, [](uly::threads::communicator ranks) { attend(ranks, ranks.rank() == 1 ? 2 : 4); });
    });
    CAPTURE(seen.printed);
    CHECK(seen.printed.starts_with("ulysses: attend: k"));
    CHECK(contains(seen, "[1, 2, 2, 8]"));
    CHECK(seen.signal == SIGABRT);
}

TEST_CASE("no exceptions: an error handler sees the error in place of stderr") {
    auto const seen = ending_of([] {
        uly::set_error_handler(log_and_end);
        uly::throw_error(uly::errc::peer_failed, "a text", 2);
    });
    CHECK(seen.printed == "engine: rank 2: peer_failed: a text\n");
    CHECK(seen.signal == 0);
    CHECK(seen.status == 3);

    auto const on_a_thread = ending_of([] {
        uly::set_error_handler(log_and_end);
        uly::threads::run(
            3, [](uly::threads::communicator ranks) { attend(ranks, ranks.rank() == 2 ? 2 : 4); });
    });
    CAPTURE(on_a_thread.printed);
    CHECK(contains(on_a_thread, "engine: rank -1: invalid_tensor: ulysses: attend: k"));
    CHECK(on_a_thread.status == 3);
}

TEST_CASE("no exceptions: when a handler returns, the process aborts") {
    auto const seen = ending_of([] {
        uly::set_error_handler([](uly::error const&) { std::fputs("seen\n", stderr); });
        uly::throw_error(uly::errc::invalid_call, "a text");
    });
    CHECK(seen.printed == "seen\n");
    CHECK(seen.signal == SIGABRT);
}

TEST_CASE("no exceptions: set_error_handler returns the handler before; null prints again") {
    CHECK((uly::set_error_handler(log_and_end) == nullptr));
    CHECK((uly::set_error_handler(nullptr) == log_and_end));
    auto const seen = ending_of([] { uly::throw_error(uly::errc::invalid_call, "a text"); });
    CHECK(seen.printed == "a text\n");
    CHECK(seen.signal == SIGABRT);
}
