#pragma once
// SPDX-License-Identifier: Apache-2.0

#include "../bench.hpp"

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// The benchmark's parts. They run in processes of their own: what one of them does to its CUDA context, or
/// waits for without end, costs its own lines and no others.
namespace ulysses_bench {

/// Takes a part's lines to the process that keeps the table, as they are measured.
class report {
   public:
    explicit report(int pipe) : pipe_(pipe) {}
    void add(result const& row) const;
    /// The part has ended, and the process goes on with the next.
    void end(bool goes_on = true) const;

   private:
    int pipe_;
};

struct part {
    std::string name;
    int seconds;  ///< that it may be silent
    std::function<void(report const&)> run;
};

/// Parts that share a process, and what they have made there, until one of them fails.
using group = std::vector<part>;

/// Made in the process that first asks for it.
template <class T>
class made_once {
   public:
    template <class... Arguments>
    T& get(Arguments const&... arguments) {
        if (!value_) value_.emplace(arguments...);
        return *value_;
    }

   private:
    std::optional<T> value_;
};

/// The table, which is printed line by line and kept in a file of JSON.
///
/// A part that ends with an error or a signal, or is silent for too long, is a line that is missed. One that has no
/// device memory, or that a library has no kernel for, is one that is not measured.
class table {
   public:
    /// `json`: null for none. After `most` no part begins, and the one that runs is ended.
    table(char const* json, std::chrono::seconds most, std::FILE* to = stdout);

    /// *Throws* `std::runtime_error` when there is no process to be had.
    void run(group const& parts);

    std::vector<result> const& rows() const { return rows_; }
    /// Prints times, and what is not as it should be; how many results there are. False if one is wrong, or a part
    /// has failed.
    bool print_summary() const;

   private:
    void add(result row);
    std::size_t run_from(group const& parts, std::size_t first);
    void save() const;

    char const* json_;
    std::FILE* to_;
    std::chrono::steady_clock::time_point end_;
    std::vector<result> rows_;
    int silent_ = 0;  ///< parts of this group that were
};

/// The parts that there are: of threads, and of processes, which are made by one that has not used CUDA.
std::vector<group> results(bool quick);
group costs(bool quick);
group cudnn(bool quick);
group million(bool quick);
group six_steps(bool quick);

}  // namespace ulysses_bench
