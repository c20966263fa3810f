// SPDX-License-Identifier: Apache-2.0

#include "parts.hpp"

#include "../table.hpp"

#include <ulysses/core/error.hpp>

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <thread>
#include <utility>

namespace ulysses_bench {

namespace {

namespace uly = ulysses;
using clock = std::chrono::steady_clock;

/// A line of the pipe: fields, each ended by a character that no text holds; none where a part has ended, and an
/// empty one where the process goes no further.
constexpr char end_of_field = '\x1f', end_of_line = '\n';

void write_all(int to, std::string_view text) {
    while (!text.empty()) {
        auto const written = ::write(to, text.data(), text.size());
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) _exit(1);  // nobody reads
        text.remove_prefix(static_cast<std::size_t>(written));
    }
}

result parsed(std::string_view line) {
    std::array<std::string, 7> fields;
    for (auto& field : fields) {
        auto const end = line.find(end_of_field);
        field = line.substr(0, end);
        line.remove_prefix(end + 1);
    }
    return {fields[0],       std::strtod(fields[1].c_str(), nullptr), fields[2],
            fields[3],       std::strtod(fields[4].c_str(), nullptr), fields[5],
            fields[6] == "1"};
}

/// Runs the parts from `first` on, up to one that fails.
[[noreturn]] void run_here(group const& parts, std::size_t first, report const& to) {
    for (auto i = first; i < parts.size(); ++i) {
        auto const& name = parts[i].name;
        try {
            parts[i].run(to);
        } catch (uly::error const& e) {
            auto const cannot =
                e.code() == uly::errc::out_of_memory || e.code() == uly::errc::unsupported;
            to.add(cannot ? not_measured(name, e.what()) : failed(name, e.what()));
            to.end(false);
            _exit(0);
        } catch (std::exception const& e) {
            to.add(failed(name, e.what()));
            to.end(false);
            _exit(0);
        }
        to.end();
    }
    _exit(0);
}

/// Ends a process and those that it has made, which it has five seconds for; returns its status.
int end_process(pid_t child, bool by_force) {
    int status = 0;
    for (int round = 0; round < 1000; ++round) {
        if (by_force || round == 500) kill(-child, SIGKILL);
        if (waitpid(child, &status, WNOHANG) != 0) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return status;  // one that a driver does not let go of is left behind
}

/// Right or wrong, as a failure is wrong; or a number of elements that nobody asks for; rather than a time.
bool is_result(result const& row) { return row.target == "<= 0" || row.target == "<= 1"; }
bool is_count(result const& row) { return row.unit == "elements"; }

}  // namespace

void report::add(result const& row) const {
    std::string line;
    auto const field = [&](std::string_view text) { (line += text) += end_of_field; };
    auto const number = [&](double value) {
        std::array<char, 64> text{};
        std::snprintf(text.data(), text.size(), "%.17g", value);
        field(text.data());
    };
    field(row.name), number(row.value), field(row.unit), field(row.against);
    number(row.ratio), field(row.target), field(row.measured ? "1" : "0");
    std::ranges::replace(line, end_of_line, ' ');
    write_all(pipe_, line += end_of_line);
}

void report::end(bool goes_on) const {
    std::string const line{end_of_field, end_of_line};
    write_all(pipe_, std::string_view(line).substr(goes_on ? 1 : 0));
}

table::table(char const* json, std::chrono::seconds most, std::FILE* to)
    : json_(json), to_(to), end_(clock::now() + most) {}

void table::run(group const& parts) {
    silent_ = 0;
    std::size_t next = 0;
    while (next < parts.size() && silent_ < 2 && clock::now() < end_) next = run_from(parts, next);
    if (next == parts.size()) return;
    auto const* const why =
        silent_ < 2 ? "there is no time left" : "two parts before it were silent";
    add(not_measured(parts[next].name,
                     uly::concat(why, ", nor are ", parts.size() - next - 1, " parts behind it")));
}

/// Returns the part to go on with.
std::size_t table::run_from(group const& parts, std::size_t first) {
    std::array<int, 2> ends{};
    std::fflush(nullptr);
    if (pipe(ends.data()) != 0) throw std::runtime_error(std::strerror(errno));
    auto const child = fork();
    if (child < 0) throw std::runtime_error(std::strerror(errno));
    if (child == 0) {
        close(ends[0]);
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        run_here(parts, first, report(ends[1]));
    }
    close(ends[1]);
    setpgid(child, child);
    auto next = first;
    auto silent = false, goes_on = true;
    auto last = clock::now();
    std::string text;
    while (!silent && goes_on && next < parts.size()) {
        std::array<char, 4096> bytes{};
        pollfd waiting{ends[0], POLLIN, 0};
        if (poll(&waiting, 1, 100) > 0) {
            auto const count = read(ends[0], bytes.data(), bytes.size());
            if (count <= 0) break;
            text.append(bytes.data(), static_cast<std::size_t>(count));
            last = clock::now();
        }
        for (auto end = text.find(end_of_line); end != text.npos; end = text.find(end_of_line)) {
            auto const line = std::string_view(text).substr(0, end);
            goes_on = goes_on && line != std::string_view(&end_of_field, 1);
            if (line.empty() || !goes_on)
                ++next;
            else
                add(parsed(line));
            text.erase(0, end + 1);
        }
        silent = next < parts.size() &&
                 clock::now() > std::min(end_, last + std::chrono::seconds(parts[next].seconds));
    }
    close(ends[0]);
    auto const status = end_process(child, silent);
    if (next == parts.size() || !goes_on) return next;
    auto const& name = parts[next].name;
    if (silent && clock::now() > end_)
        add(not_measured(name, "there was no time left"));
    else if (silent)
        ++silent_, add(failed(name, uly::concat("silent for ", parts[next].seconds, " seconds")));
    else
        add(failed(name, uly::concat("its process ended with status ", status)));
    return next + 1;
}

void table::add(result row) {
    if (rows_.empty()) print_head(to_);
    print(row, to_);
    std::fflush(to_);
    rows_.push_back(std::move(row));
    save();
}

void table::save() const {
    if (json_ != nullptr && !write_json(json_, rows_))
        throw std::runtime_error(uly::concat("cannot write ", json_));
}

bool table::print_summary() const {
    std::fprintf(to_, "\nin short\n");
    print_head(to_);
    std::ptrdiff_t results = 0, missed = 0, missing = 0;
    auto right = true;
    for (auto const& row : rows_) {
        auto const is_right = is_result(row) ? met(row) : is_count(row) && row.value == 0;
        results += row.measured && is_result(row);
        missed += !met(row);
        missing += !row.measured && met(row);
        right = right && (met(row) || !is_result(row));
        if (!row.measured || !is_right) print(row, to_);
    }
    std::fprintf(to_, "%td results; %td lines missed their target, %td were not measured\n",
                 results, missed, missing);
    return right;
}

}  // namespace ulysses_bench
