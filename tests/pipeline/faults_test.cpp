// SPDX-License-Identifier: Apache-2.0

#include "../faulty.hpp"
#include "../sanitizers.hpp"
#include "six_steps.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

// Every call that a rank makes of its communicator, and every item that a functor is given, fails in
// every way, on every rank. All ranks must end with a typed error, the prompt ones long before the
// deadline; a late rank must change nothing; and a new group must then give the same bits.

using namespace pipeline_test;
using faults::fault;
using faults::kind;
using faults::script;
using std::chrono::milliseconds;
using ulysses::errc;

namespace {

constexpr int ranks_of_all = 4;
/// How long a rank waits for a silent one; all other faults are seen without waiting.
constexpr milliseconds short_deadline{200};
constexpr milliseconds long_deadline = std::chrono::minutes(2);
/// Far above what a loaded machine takes to wake a thread, far below the long deadline.
constexpr milliseconds prompt = std::chrono::seconds(20);
/// Faults that run side by side: most of the time they wait.
constexpr int workers = 24;

/// Ends the program, with a message, when something takes longer than it may: no test hangs.
class watchdog {
   public:
    explicit watchdog(std::chrono::seconds limit)
        : guard_([this, limit](std::stop_token const& stop) {
              std::unique_lock lock(mutex_);
              while (!stop.stop_requested()) {
                  wake_.wait_for(lock, stop, milliseconds(500), [] { return false; });
                  for (auto const& [what, since] : running_)
                      if (faults::clock::now() - since > limit) {
                          std::fprintf(stderr, "a fault has not ended after %d s: %s\n",
                                       static_cast<int>(limit.count()), what.c_str());
                          std::abort();
                      }
              }
          }) {}

    template <class Body>
    auto watched(std::string const& what, Body const& body) {
        std::multimap<std::string, faults::clock::time_point>::iterator mine;
        {
            std::lock_guard const lock(mutex_);
            mine = running_.emplace(what, faults::clock::now());
        }
        auto result = body();
        std::lock_guard const lock(mutex_);
        running_.erase(mine);
        return result;
    }

   private:
    std::mutex mutex_;
    std::condition_variable_any wake_;
    std::multimap<std::string, faults::clock::time_point> running_;
    std::jthread guard_;
};

using bits = std::vector<float>;

void append(bits& all, tensor<float> const& part) {
    all.insert(all.end(), part.memory.begin(), part.memory.end());
}

bool same_bits(bits const& a, bits const& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

/// How one rank ended.
struct ending {
    errc code = errc::none;
    bool foreign = false;  ///< an exception that is not ours
    int rank = -1;
    std::string text;
    bits results;
    faults::clock::time_point when{};

    bool typed() const { return !foreign && code != errc::none; }
    bool well() const { return !foreign && code == errc::none; }
};

/// Where ranks come from: `threads::run`, or threads of the engine's own that catch what their rank
/// throws and tell nobody.
enum class origin { run, own };

std::string_view name(origin from) { return from == origin::run ? "threads::run" : "own threads"; }

/// Runs `body(handle)` on all ranks; `ended` counts those that are done.
template <class Body>
std::vector<ending> endings_of(origin from, ulysses::threads::options const& options,
                               std::atomic<int>& ended, Body const& body) {
    std::vector<ending> endings(ranks_of_all);
    auto const one = [&](ulysses::threads::communicator const& ranks) {
        auto& mine = endings[static_cast<std::size_t>(ranks.rank())];
        std::exception_ptr failure;
        try {
            mine.results = body(ranks);
        } catch (ulysses::error const& e) {
            mine.code = e.code();
            mine.rank = e.rank();
            mine.text = e.what();
            failure = std::current_exception();
        } catch (std::exception const& e) {
            mine.foreign = true;
            mine.text = e.what();
            failure = std::current_exception();
        }
        mine.when = faults::clock::now();
        ++ended;
        if (failure && from == origin::run) std::rethrow_exception(failure);
    };
    if (from == origin::own) {
        ulysses::threads::group const owner(ranks_of_all, options);
        std::vector<std::jthread> threads;
        for (int r = 0; r < ranks_of_all; ++r)
            threads.emplace_back([&, r] { one(owner.handle(r)); });
    } else {
        try {
            ulysses::threads::run(ranks_of_all, one, options);
        } catch (ulysses::error const&) {
            // Each rank has kept what it saw.
        }
    }
    return endings;
}

/// A pipeline's forward and backward, as an engine calls them.
struct program {
    bool six = false;
    ulysses::keep policy = ulysses::keep::exchanged;
    std::vector<int> hosts{};

    std::string text() const {
        std::string where;
        for (auto const host : hosts) where += ulysses::concat(where.empty() ? "" : ",", host);
        return ulysses::concat(six ? "six steps" : "attend",
                               policy == ulysses::keep::exchanged ? ", keep::exchanged"
                                                                  : ", keep::nothing",
                               hosts.empty() ? "" : ", hosts " + where);
    }
    ulysses::threads::options options(milliseconds deadline) const {
        return {.deadline = deadline, .hosts = hosts};
    }
    // Four ranks share five query heads, and so key-value heads as well.
    ulysses::shape layer() const {
        return {.heads = 10,
                .kv_heads = 5,
                .head_dim = 4,
                .value_dim = 3,
                .mask = ulysses::mask::causal,
                .keep = policy};
    }
};

constexpr int64_t tokens = 11, channels = 6;

ulysses::sequence agreed(auto const& ranks) {
    auto const begin = [&](int r) { return tokens * r / ranks.size(); };
    return ulysses::sequence::agree(
        ranks, {.batch = 2, .tokens = begin(ranks.rank() + 1) - begin(ranks.rank())});
}

template <class Comm, class Attention>
bits attend_program(Comm const& ranks, program const& what, script& events,
                    Attention const& attention) {
    auto const p = make_problem<float>(17, what.layer(), 2, tokens);
    ulysses::pipeline layer{ranks, ulysses::sequence_local{}, attention, p.layer};
    auto saved = layer.make_context();
    events.stage("agree");
    auto const step = agreed(ranks);
    local_problem<float> local(p, step, ranks.rank());
    events.stage("attend");
    layer.attend(step, saved, local.q, local.k, local.v, local.o);
    events.stage("attend_backward");
    attend_backward(layer, step, saved, local);
    // Nobody may be left waiting in an engine's next call either.
    events.stage("after");
    ulysses::leaving_on_failure(ranks, [&] { ranks.fence({}); });
    bits all;
    for (auto const* each : {&local.o, &local.dq, &local.dk, &local.dv}) append(all, *each);
    return all;
}

template <class Comm, class Attention, class Projection>
bits six_step_program(Comm const& ranks, program const& what, script& events,
                      Attention const& attention, Projection const& projection) {
    six_problem<float> const p(19, what.layer(), 2, tokens, channels);
    ulysses::pipeline layer{ranks, ulysses::sequence_local{}, attention, p.layer, projection};
    auto saved = layer.make_context();
    events.stage("agree");
    auto const step = agreed(ranks);
    auto const me = ranks.rank();
    auto const places = p.places();
    auto const x = own_part(step.queries(), me, p.x), dy = own_part(step.queries(), me, p.dy);
    tensor<float> y(x.sizes), dx(x.sizes);
    auto const weights = places.weights(p.parameters.data());
    bits gradients(p.parameters.size(), 0.0f);
    events.stage("forward");
    layer.forward(step, saved, token_operand(x), weights, token_operand(y));
    events.stage("backward");
    layer.backward(step, saved, token_operand(x), weights, token_operand(dy), token_operand(dx),
                   places.gradients(gradients.data()));
    events.stage("after");
    ulysses::leaving_on_failure(ranks, [&] { ranks.fence({}); });
    append(gradients, y);
    append(gradients, dx);
    return gradients;
}

using faulty_ranks = faults::faulty<ulysses::threads::communicator>;

bits communicator_program(ulysses::threads::communicator const& plain, program const& what,
                          std::shared_ptr<script> const& events) {
    faulty_ranks const ranks(plain, events);
    if (!what.six) return attend_program(ranks, what, *events, builtin_attention{});
    return six_step_program(ranks, what, *events, builtin_attention{},
                            ulysses::dense{ulysses::builtin_gemm{}});
}

/// The functors are points: `part` says which of them.
enum class part { attention, projection, gemm };

std::string_view name(part which) {
    constexpr std::string_view names[] = {"attention", "projection", "gemm"};
    return names[static_cast<std::size_t>(which)];
}

bits functor_program(ulysses::threads::communicator const& ranks, program const& what, part which,
                     std::shared_ptr<script> const& events) {
    using faulty_product = faults::faulty_gemm<ulysses::builtin_gemm>;
    auto const silent = std::make_shared<script>();
    auto const of = [&](part wanted) { return which == wanted ? events : silent; };
    faulty_product const product({}, of(part::gemm));
    faults::faulty_attention const attention(ulysses::blocked_attention{product},
                                             of(part::attention));
    if (!what.six) return attend_program(ranks, what, *events, attention);
    faults::faulty_projection const projection(ulysses::dense{product}, of(part::projection));
    return six_step_program(ranks, what, *events, attention, projection);
}

/// `body(handle, events)` on all ranks, with a fault on one of them.
struct run_result {
    std::vector<ending> endings;
    std::vector<std::shared_ptr<script>> events;
};

template <class Body>
run_result run_with(origin from, ulysses::threads::options const& options, fault what,
                    Body const& body) {
    std::atomic<int> ended{0};
    what.ended = &ended;
    run_result result;
    for (int r = 0; r < ranks_of_all; ++r)
        result.events.push_back(std::make_shared<script>(r, what));
    result.endings =
        endings_of(from, options, ended, [&](ulysses::threads::communicator const& ranks) {
            return body(ranks, result.events[static_cast<std::size_t>(ranks.rank())]);
        });
    return result;
}

faults::clock::time_point struck_when(run_result const& faulted, fault const& what) {
    return faulted.events[static_cast<std::size_t>(what.rank)]->struck();
}

/// What an entry of the matrix says of the runs over all ranks.
struct entry {
    int fewest_typed = ranks_of_all;
    double slowest_ms = 0;
};

struct matrix {
    std::string title;
    std::vector<std::string> rows;  // of the rank with most points
    std::map<std::pair<std::size_t, kind>, entry> entries;
};

void print(matrix const& m, std::vector<kind> const& kinds) {
    std::printf("\n%-34s", m.title.c_str());
    for (auto const what : kinds) std::printf(" %14s", std::string(faults::name(what)).c_str());
    std::printf("\n");
    for (std::size_t row = 0; row < m.rows.size(); ++row) {
        std::printf("%3zu %-30s", row, m.rows[row].c_str());
        for (auto const what : kinds) {
            auto const found = m.entries.find({row, what});
            if (found == m.entries.end())
                std::printf(" %14s", "-");
            else if (what == kind::delays)
                std::printf(" %14s", found->second.fewest_typed == 0 ? "right" : "WRONG");
            else
                std::printf(" %d of %d %5.0f ms", found->second.fewest_typed, ranks_of_all,
                            found->second.slowest_ms);
        }
        std::printf("\n");
    }
}

/// All faults of one program, run side by side; prints the matrix and returns what went wrong.
class campaign {
   public:
    template <class Body, class Judge>
    void run(std::string const& title, program const& what, origin from,
             std::vector<kind> const& kinds, Body const& body, Judge const& judge) {
        auto const title_of_all = ulysses::concat(title, ", ", name(from));
        auto const undisturbed = [&] {
            return run_with(from, what.options(long_deadline), {}, body);
        };
        auto const right = dog_.watched(title_of_all + ", undisturbed", undisturbed);
        matrix m{title_of_all, {}, {}};
        for (auto const& each : right.events)
            if (each->points().size() > m.rows.size()) m.rows = each->points();
        for (auto const& each : right.endings) expect(each.well(), title_of_all, each.text);

        std::vector<fault> all;
        ++titles_;
        for (auto const each : kinds)
            for (std::size_t r = 0; r < ranks_of_all; ++r)
                for (std::size_t k = 0; k < right.events[r]->points().size(); ++k)
                    if (strikes(each, r, k)) all.push_back({each, static_cast<int>(r), k});
        std::atomic<std::size_t> next{0};
        auto const work = [&] {
            for (auto i = next++; i < all.size(); i = next++) {
                auto const& each = all[i];
                auto const label = ulysses::concat(
                    title_of_all, ": ", faults::name(each.what), " on rank ", each.rank, " at ",
                    each.point, ", ",
                    right.events[static_cast<std::size_t>(each.rank)]->points()[each.point]);
                auto deadline = each.what == kind::silent ? short_deadline : long_deadline;
                auto const run = [&] { return run_with(from, what.options(deadline), each, body); };
                auto faulted = dog_.watched(label, run);
                // On a loaded machine ranks may miss each other before the fault: once more, slower.
                while (struck_when(faulted, each) == faults::clock::time_point{} &&
                       deadline < prompt / 4) {
                    deadline *= 8;
                    faulted = dog_.watched(label, run);
                }
                auto const again = dog_.watched(label + ", a new group", undisturbed);
                std::lock_guard const lock(mutex_);
                for (std::size_t r = 0; r < ranks_of_all; ++r)
                    expect(again.endings[r].well() &&
                               same_bits(again.endings[r].results, right.endings[r].results),
                           label + ": a new group is not right", again.endings[r].text);
                count(m, each, faulted, right, label, judge);
            }
        };
        {
            std::vector<std::jthread> pool;
            for (int w = 0; w < workers; ++w) pool.emplace_back(work);
        }
        print(m, kinds);
    }

    ~campaign() {
        std::printf("\n%zu faults, %s, slowest detection %.0f ms", faults_,
                    wrong_.empty() ? "all typed" : "NOT ALL TYPED", slowest_ms_);
        if (slowest_silent_ms_ > 0)
            std::printf(", of a silent rank %.0f ms with a deadline of %d ms", slowest_silent_ms_,
                        static_cast<int>(short_deadline.count()));
        std::printf("\n");
        for (auto const& each : wrong_) FAIL_CHECK(each);
        CHECK(faults_ > 0);
    }

   private:
    /// Whether this fault is made: all are, but under a sanitizer, which takes its time, each kind at each
    /// point only on one rank in turn.
    bool strikes(kind what, std::size_t rank, std::size_t point) const {
        return !TEST_UNDER_SANITIZER ||
               (point + static_cast<std::size_t>(what) + titles_) % ranks_of_all == rank;
    }

    template <class Judge>
    void count(matrix& m, fault const& each, run_result const& faulted, run_result const& right,
               std::string const& label, Judge const& judge) {
        ++faults_;
        auto const struck = struck_when(faulted, each);
        expect(struck != faults::clock::time_point{}, label, "the fault did not strike");
        auto& to = m.entries[{each.point, each.what}];
        int typed = 0;
        double slowest = 0;
        for (int r = 0; r < ranks_of_all; ++r) {
            auto const& end = faulted.endings[static_cast<std::size_t>(r)];
            auto const& as_it_should = right.endings[static_cast<std::size_t>(r)].results;
            auto const complaint = judge(each, r, end, as_it_should);
            expect(complaint.empty(), label, ulysses::concat("rank ", r, ": ", complaint));
            // The rank that the fault struck may see what it threw itself.
            typed += end.typed() || (end.foreign && r == each.rank) ? 1 : 0;
            slowest = std::max(
                slowest, std::chrono::duration<double, std::milli>(end.when - struck).count());
        }
        to.fewest_typed = std::min(to.fewest_typed, typed);
        to.slowest_ms = std::max(to.slowest_ms, slowest);
        if (each.what == kind::delays) return;
        auto const limit = each.what == kind::silent ? short_deadline + prompt : prompt;
        expect(slowest < static_cast<double>(limit.count()), label,
               ulysses::concat("seen after ", slowest, " ms"));
        auto& slowest_of_all = each.what == kind::silent ? slowest_silent_ms_ : slowest_ms_;
        slowest_of_all = std::max(slowest_of_all, slowest);
    }

    void expect(bool right, std::string const& where, std::string const& what) {
        if (!right) wrong_.push_back(where + ": " + what);
    }

    std::mutex mutex_;
    std::vector<std::string> wrong_;
    std::size_t titles_ = 0, faults_ = 0;
    double slowest_ms_ = 0, slowest_silent_ms_ = 0;
    watchdog dog_{std::chrono::seconds(100)};
};

/// How a rank must end when one rank's communicator fails.
std::string judge_communicator(fault const& what, int rank, ending const& end,
                               bits const& results) {
    if (what.what == kind::delays)
        return end.well() && same_bits(end.results, results) ? ""
                                                             : "a late rank changes: " + end.text;
    if (what.what == kind::silent)
        return end.code == errc::timed_out ? "" : "not timed_out: " + end.text;
    if (rank == what.rank) return end.well() ? "the fault is lost" : "";
    if (end.code != errc::peer_failed || end.rank != what.rank)
        return "not peer_failed of the rank: " + end.text;
    return "";
}

std::vector<program> programs() {
    std::vector<program> all;
    for (bool const six : {false, true})
        for (auto const policy : {ulysses::keep::exchanged, ulysses::keep::nothing})
            all.push_back({six, policy});
    return all;
}

}  // namespace

TEST_CASE("faults: in every communicator call, of every kind, on every rank") {
    campaign all;
    std::vector<kind> const kinds{kind::throws, kind::fails,  kind::bad_alloc,
                                  kind::leaves, kind::silent, kind::delays};
    for (auto const from : {origin::run, origin::own})
        for (auto const& hosts :
             {std::vector<int>{}, std::vector{0, 0, 1, 1}, std::vector{0, 1, 2, 3}})
            for (auto what : programs()) {
                what.hosts = hosts;
                all.run(
                    what.text(), what, from, kinds,
                    [&](ulysses::threads::communicator const& ranks,
                        std::shared_ptr<script> const& events) {
                        return communicator_program(ranks, what, events);
                    },
                    judge_communicator);
            }
}

namespace {

/// How a rank must end when a functor fails on one rank: alike everywhere, unless the functor comes
/// after the call's last fence. Then that rank alone knows, and the rest is released when it leaves.
std::string judge_functor(fault const& what, int rank, ending const& end, bits const& results) {
    if (what.what == kind::delays)
        return end.well() && same_bits(end.results, results) ? ""
                                                             : "a late rank changes: " + end.text;
    // A transport that a functor uses is not the group's.
    auto const code = what.what == kind::bad_alloc ? errc::out_of_memory : errc::functor_failed;
    if (end.rank != what.rank) return "another rank is blamed: " + end.text;
    if (end.code == code) return "";
    if (rank != what.rank && end.code == errc::peer_failed) return "";
    return "another error: " + end.text;
}

}  // namespace

TEST_CASE("faults: in every item and call of a functor, of every kind, on every rank") {
    campaign all;
    std::vector<kind> const kinds{kind::throws, kind::fails, kind::bad_alloc, kind::delays};
    for (auto const from : {origin::run, origin::own})
        for (auto const& what : programs())
            for (auto const which : {part::attention, part::projection, part::gemm}) {
                if (which == part::projection && !what.six) continue;
                // An engine's rank that goes on no more says so, as `threads::run` does.
                auto const body = [&](ulysses::threads::communicator const& ranks,
                                      std::shared_ptr<script> const& events) {
                    try {
                        return functor_program(ranks, what, which, events);
                    } catch (ulysses::error const& e) {
                        ranks.leave(e.what());
                        throw;
                    }
                };
                all.run(ulysses::concat(name(which), " of ", what.text()), what, from, kinds, body,
                        judge_functor);
            }
}

TEST_CASE("faults: close on one rank alone is an error that says so, until all have closed") {
    program const what{.policy = ulysses::keep::nothing};
    bits first[ranks_of_all], last[ranks_of_all];
    std::string texts[ranks_of_all];
    ulysses::threads::run(ranks_of_all, [&](ulysses::threads::communicator const& ranks) {
        auto const me = static_cast<std::size_t>(ranks.rank());
        auto const again = [&] {
            script unused;
            return attend_program(ranks, what, unused, builtin_attention{});
        };
        first[me] = again();
        if (me == 2) ranks.close();
        texts[me] = outcome_of(again).text;
        if (me != 2) ranks.close();
        last[me] = again();
    });
    for (auto const& text : texts) {
        CHECK(text.find("as after close() on it alone: rank 0 has 1, rank 2 has 0") !=
              std::string::npos);
        CHECK(text == texts[0]);
    }
    for (int r = 0; r < ranks_of_all; ++r) CHECK(same_bits(first[r], last[r]));
}
