#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/progress.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

/// What every communicator must satisfy, as one call:
///
///     conformance::check_communicator([](int ranks, auto const& body) {
///         ulysses::threads::run(ranks, body);
///     });
///
/// The ranks may be threads or processes: nothing is taken from another rank but by the communicator.
namespace conformance {

namespace uly = ulysses;

/// A rule that a type under test breaks: the rule, and what was seen.
struct broken_rule : std::logic_error {
    using std::logic_error::logic_error;
};

inline void expect(bool right, std::string_view rule, std::string const& seen) {
    if (!right) throw broken_rule(uly::concat("conformance: ", rule, ": ", seen));
}

namespace detail {

inline std::size_t at(int index) { return static_cast<std::size_t>(index); }

/// Bytes that depend on a seed and their place.
inline std::vector<std::byte> pattern(int seed, std::size_t bytes) {
    std::vector<std::byte> data(bytes);
    for (std::size_t i = 0; i < bytes; ++i)
        data[i] = static_cast<std::byte>(37 * at(seed) + i * 11 + i / 251 + 5);
    return data;
}

/// Nothing, a yield or a short sleep: ranks meet in any order.
class delays {
   public:
    explicit delays(int rank) : random_(at(rank) + 1) {}
    void wait() {
        auto const drawn = random_() % 16;
        if (drawn == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 200));
        if (drawn < 4) std::this_thread::yield();
    }

   private:
    std::mt19937_64 random_;
};

/// The error that `body` ends with, or none.
struct outcome {
    uly::errc code = uly::errc::none;
    int rank = -1;
    std::string text = "nothing was thrown";
};

template <class Body>
outcome outcome_of(Body const& body) {
    try {
        body();
    } catch (uly::error const& e) {
        return {e.code(), e.rank(), e.what()};
    }
    return {};
}

inline bool contains(std::string const& text, std::string_view part) {
    return text.find(part) != std::string::npos;
}

/// A group that has thrown an error on every rank can go on.
template <class Comm>
void expect_usable(Comm const& ranks, std::string_view rule) {
    auto const seen = outcome_of([&] { ranks.fence({}); });
    expect(seen.code == uly::errc::none, rule, "the group cannot go on: " + seen.text);
}

template <class Comm>
void check_rank_and_size(Comm const& ranks, int size) {
    static_assert(uly::communicator<Comm>);
    expect(ranks.size() == size, "size() is the number of ranks",
           uly::concat(ranks.size(), " of ", size));
    expect(ranks.rank() >= 0 && ranks.rank() < size, "rank() lies in 0 .. size() - 1",
           uly::concat(ranks.rank()));
    auto const copy = ranks;
    expect(copy.rank() == ranks.rank() && copy.size() == size,
           "a copy of a handle names the same rank", uly::concat(copy.rank()));
    if constexpr (std::equality_comparable<Comm>)
        expect(copy == ranks, "a copy of a handle names the same rank", "the two differ");
}

template <class Comm>
void check_calls(Comm const& ranks) {
    constexpr std::string_view counted = "begin_call() counts the calls of a rank";
    auto const copy = ranks;
    for (std::uint64_t i = 1; i < 10; ++i) {
        auto const count = (i % 2 == 0 ? ranks : copy).begin_call();
        expect(count == i, counted, uly::concat("call ", i, " is counted as ", count));
    }
    if (ranks.size() == 1) return;
    constexpr std::string_view resynchronised =
        "a fence brings begin_call() to the largest count of any rank";
    auto const odd = ranks.size() - 1;
    uly::fence_status status;
    for (int i = ranks.rank() == odd ? 0 : 2; i < 4; ++i) status.call = ranks.begin_call();
    auto const seen = outcome_of([&] { ranks.fence(status); });
    expect(seen.code == uly::errc::disagreement && seen.rank == (odd == 0 ? 1 : odd),
           "ranks in different calls are a disagreement on every rank", seen.text);
    expect(contains(seen.text, uly::concat("rank 0 is in call 11, rank ", odd, " in call 13")),
           "a disagreement names both calls", seen.text);
    status.call = ranks.begin_call();
    expect(status.call == 14, resynchronised, uly::concat("call 14 is counted as ", status.call));
    auto const again = outcome_of([&] { ranks.fence(status); });
    expect(again.code == uly::errc::none, resynchronised, again.text);
}

template <class Comm>
void check_verdicts(Comm const& ranks) {
    auto const size = ranks.size(), culprit = size / 2;
    constexpr std::string_view same =
        "every rank leaves a fence with the error of the lowest failing rank";
    for (auto const code : {uly::errc::invalid_tensor, uly::errc::functor_failed,
                            uly::errc::out_of_memory, uly::errc::unsupported}) {
        uly::fence_status status;
        if (ranks.rank() >= culprit)
            status.fail(code, uly::concat("ulysses: kit: wrong: ", ranks.rank()));
        auto const seen = outcome_of([&] { ranks.fence(status); });
        expect(seen.code == code && seen.rank == culprit, same, seen.text);
        expect(seen.text == uly::concat("ulysses: kit: wrong: ", culprit, " (rank ", culprit, ")"),
               "the text of a failed status leaves the fence on every rank", seen.text);
        expect_usable(ranks, same);
    }
    std::string const longest(sizeof(uly::fence_status::text) - 1, 'x');
    uly::fence_status status;
    if (ranks.rank() == culprit) status.fail(uly::errc::invalid_call, longest);
    auto const seen = outcome_of([&] { ranks.fence(status); });
    expect(contains(seen.text, longest), "the whole text of a status leaves the fence", seen.text);
    if (size == 1) return;
    constexpr std::string_view named = "a disagreement names the term, the rank and both values";
    for (std::size_t i = 0; i < uly::term_count; ++i) {
        uly::fence_status terms;
        terms.terms[i] = ranks.rank() == size - 1 ? 1 : 0;
        auto const which = static_cast<uly::term>(i);
        auto const differs = outcome_of([&] { ranks.fence(terms); });
        expect(differs.code == uly::errc::disagreement && differs.rank == size - 1, named,
               differs.text);
        for (std::string const& part :
             {std::string(uly::name(which)), uly::concat("rank ", size - 1), uly::text_of(which, 0),
              uly::text_of(which, 1)})
            expect(contains(differs.text, part), named, differs.text);
        expect_usable(ranks, named);
    }
    uly::fence_status plan;
    plan.plan = ranks.rank() == 0 ? 7 : 8;
    auto const differs = outcome_of([&] { ranks.fence(plan); });
    expect(differs.code == uly::errc::disagreement && differs.rank == 1 &&
               contains(differs.text, "plan of rank 0 is 7, of rank 1 8"),
           named, differs.text);
}

/// Writes into all reachable parts, fences, and looks whether what others wrote is there.
template <class Comm>
void exchange_through(Comm const& ranks, typename Comm::window_type const& window, int rounds) {
    constexpr std::size_t part = 40;
    auto const me = ranks.rank(), size = ranks.size();
    delays slow(me);
    for (int round = 0; round < rounds; ++round) {
        slow.wait();
        for (int r = 0; r < size; ++r)
            if (auto* const memory = ranks.address(window, r)) {
                auto const data = pattern(100 * round + 10 * me + r, part);
                std::memcpy(memory + at(me) * part, data.data(), part);
            }
        slow.wait();
        ranks.fence({});
        for (int r = 0; r < size; ++r) {
            if (ranks.address(window, r) == nullptr) continue;
            auto const data = pattern(100 * round + 10 * r + me, part);
            expect(std::memcmp(ranks.address(window, me) + at(r) * part, data.data(), part) == 0,
                   "memory written before a fence is visible to every rank after it",
                   uly::concat("stale bytes of rank ", r, " in round ", round));
        }
        ranks.fence({});
    }
}

template <class Comm>
void check_windows(Comm const& ranks) {
    auto const me = ranks.rank(), size = ranks.size();
    for (std::size_t const bytes : {std::size_t{0}, std::size_t{1}, std::size_t{64},
                                    std::size_t{1000}, std::size_t{100001}}) {
        auto const window = ranks.make_window(bytes);
        expect(ranks.address(window, me) != nullptr, "a rank reaches its own part of a window",
               uly::concat("null, of ", bytes, " bytes"));
        for (int r = 0; r < size; ++r)
            expect(reinterpret_cast<std::uintptr_t>(ranks.address(window, r)) % 64 == 0,
                   "windows are aligned to 64", uly::concat("part of rank ", r));
        std::memset(ranks.address(window, me), me, bytes);
        ranks.fence({});
    }
    exchange_through(ranks, ranks.make_window(at(size) * 40), 20);

    // Rank 0 lets go first; the others still reach its part.
    constexpr std::string_view kept = "a window lives until every rank has dropped it";
    auto window = ranks.make_window(64);
    std::memset(ranks.address(window, me), me + 1, 64);
    ranks.fence({});
    if (me == 0) window = {};
    ranks.fence({});
    auto const other = ranks.make_window(64);
    std::memset(ranks.address(other, me), 0xee, 64);
    ranks.fence({});
    if (me != 0)
        if (auto const* const memory = ranks.address(window, 0))
            expect(memory[63] == std::byte{1}, kept, "rank 0's bytes are gone");
    ranks.fence({});
}

template <class Comm>
void check_shared_windows(Comm const& ranks) {
    using enum uly::arena;
    auto const me = ranks.rank();
    constexpr std::string_view sized =
        "shared_window_bytes() is the window's size, 0 before the first";
    expect(ranks.shared_window_bytes(inbox) == 0 && ranks.shared_window_bytes(outbox) == 0, sized,
           uly::concat(ranks.shared_window_bytes(inbox)));
    auto const first = ranks.shared_window(inbox, 100);
    auto const second = ranks.shared_window(outbox, 50);
    expect(ranks.shared_window_bytes(inbox) >= 100 && ranks.shared_window_bytes(outbox) >= 50,
           sized, uly::concat(ranks.shared_window_bytes(inbox)));
    std::memset(ranks.address(first, me), 1, 100);
    std::memset(ranks.address(second, me), 2, 50);
    auto const all_of = [&](std::byte const* memory, std::size_t bytes, int value) {
        return std::all_of(memory, memory + bytes,
                           [&](std::byte b) { return b == static_cast<std::byte>(value); });
    };
    expect(all_of(ranks.address(first, me), 100, 1), "inbox and outbox are apart",
           "what is written to one is in the other");
    constexpr std::string_view grown = "a shared window grows, and stays when it is large enough";
    auto const bytes = ranks.shared_window_bytes(inbox);
    expect(ranks.address(ranks.shared_window(inbox, 60), me) == ranks.address(first, me) &&
               ranks.shared_window_bytes(inbox) == bytes,
           grown, "a smaller one is another");
    ranks.fence({});
    auto const large = ranks.shared_window(inbox, 2 * bytes);
    expect(ranks.shared_window_bytes(inbox) >= 2 * bytes, grown, "it has not grown");
    std::memset(ranks.address(large, me), 3, 2 * bytes);
    expect(all_of(ranks.address(second, me), 50, 2), "inbox and outbox are apart",
           "what is written to one is in the other");
    expect(all_of(ranks.address(first, me), 100, 1), "whoever holds the smaller window may use it",
           "its bytes are others");
    ranks.fence({});
    exchange_through(ranks, ranks.shared_window(outbox, at(ranks.size()) * 40), 3);
}

template <class Comm>
void check_gathers(Comm const& ranks) {
    for (std::size_t const bytes :
         {std::size_t{0}, std::size_t{1}, std::size_t{5}, std::size_t{4096}, std::size_t{65537}}) {
        auto const mine = pattern(ranks.rank(), bytes);
        std::vector<std::byte> all(at(ranks.size()) * bytes, std::byte{0xee}), expected;
        for (int r = 0; r < ranks.size(); ++r) {
            auto const part = pattern(r, bytes);
            expected.insert(expected.end(), part.begin(), part.end());
        }
        ranks.all_gather(mine, all);
        expect(all == expected, "all_gather gives every rank's bytes in rank order",
               uly::concat(bytes, " bytes a rank"));
        for (int root = 0; root < ranks.size(); ++root) {
            auto data = mine;
            ranks.broadcast(data, root);
            expect(data == pattern(root, bytes), "broadcast gives every rank the root's bytes",
                   uly::concat(bytes, " bytes, root ", root));
        }
    }
    // Where it takes a status, a rank that cannot take part says why.
    uly::fence_status status;
    if (ranks.rank() == ranks.size() - 1) status.fail(uly::errc::out_of_memory, "no room");
    std::vector<std::byte> const part(8);
    std::vector<std::byte> all(8 * at(ranks.size()));
    if constexpr (requires { ranks.all_gather(part, all, status); }) {
        auto const seen = outcome_of([&] { ranks.all_gather(part, all, status); });
        expect(seen.code == uly::errc::out_of_memory && seen.rank == ranks.size() - 1 &&
                   contains(seen.text, "no room"),
               "the status that a rank brings to all_gather is every rank's error", seen.text);
    }
}

template <class T, class Comm>
void check_reduces(Comm const& ranks) {
    for (int const count : {0, 1, 2, 3, 7, 100, 1025})  // also fewer than ranks
        for (auto const op : {uly::reduction::sum, uly::reduction::min, uly::reduction::max}) {
            std::mt19937_64 random{at(1000 * ranks.size() + count)};
            // Of so different sizes that another order of a sum has other bits.
            std::vector<std::vector<T>> values(at(ranks.size()), std::vector<T>(at(count)));
            for (auto& each : values)
                for (auto& x : each) {
                    auto const drawn = static_cast<std::int64_t>(random() % 2001) - 1000;
                    auto const exponent = static_cast<int>(random() % 60) - 30;
                    x = std::is_integral_v<T>
                            ? static_cast<T>(drawn)
                            : static_cast<T>(std::ldexp(static_cast<double>(drawn), exponent));
                }
            auto expected = values[0];
            for (std::size_t i = 0; i < expected.size(); ++i)
                for (std::size_t r = 1; r < values.size(); ++r) {
                    auto const x = values[r][i];
                    if (op == uly::reduction::sum) expected[i] = static_cast<T>(expected[i] + x);
                    if (op == uly::reduction::min) expected[i] = std::min(expected[i], x);
                    if (op == uly::reduction::max) expected[i] = std::max(expected[i], x);
                }
            auto& mine = values[at(ranks.rank())];
            ranks.all_reduce(std::span<T>(mine), op);
            expect(mine.empty() ||
                       std::memcmp(mine.data(), expected.data(), mine.size() * sizeof(T)) == 0,
                   "all_reduce combines in rank order, with the same bits on every rank",
                   uly::concat(count, " numbers of ", sizeof(T), " bytes"));
        }
}

template <class Comm>
void check_split(Comm const& ranks) {
    constexpr std::string_view grouped = "split groups by color, ordered by key, then rank";
    auto const me = ranks.rank(), size = ranks.size();
    auto const expect_place = [&](Comm const& part, int rank, int of) {
        expect(part.rank() == rank && part.size() == of, grouped,
               uly::concat("rank ", part.rank(), " of ", part.size(), ", not ", rank, " of ", of));
    };
    auto const halves = ranks.split(me % 2, 0);
    expect_place(halves, me / 2, (size + 1 - me % 2) / 2);
    auto const backwards = ranks.split(-7, -me);
    expect_place(backwards, size - 1 - me, size);
    auto const alone = ranks.split(me, 5);
    expect_place(alone, 0, 1);
    constexpr std::string_view apart = "a group that was split off has calls of its own";
    expect(ranks.begin_call() == 1 && halves.begin_call() == 1 && alone.begin_call() == 1, apart,
           "their counts are shared");
    // At work side by side; a failure of one is none of the others.
    uly::fence_status status;
    if (me == 0) status.fail(uly::errc::invalid_call, "ulysses: kit: of one half: 1");
    auto const seen = outcome_of([&] { halves.fence(status); });
    expect((seen.code == uly::errc::invalid_call) == (me % 2 == 0), apart, seen.text);
    ranks.fence({});
    backwards.fence({});
    // Nested, and alive after the group that it was split from is let go.
    auto nested = halves.split(halves.rank() / 2, 0);
    nested = nested.split(0, 0);
    expect(nested.size() <= 2, grouped, "nested");
    nested.fence({});
    if constexpr (uly::reduces<Comm>) {
        std::int64_t sum = me, expected = 0;
        halves.all_reduce(std::span<std::int64_t>(&sum, 1), uly::reduction::sum);
        for (int r = me % 2; r < size; r += 2) expected += r;
        expect(sum == expected, grouped, uly::concat("the ranks of a half sum up to ", sum));
    }
    halves.fence({});
    if constexpr (uly::gathers<Comm>) {
        std::int64_t first = me;
        backwards.broadcast(std::as_writable_bytes(std::span(&first, 1)), 0);
        expect(first == size - 1, grouped, uly::concat("rank ", first, " is the first backwards"));
    }
    ranks.fence({});
}

/// Every rank to every rank, itself included, `groups` at once, waited for in another order.
template <class Comm>
void check_messages(Comm const& ranks, std::size_t bytes, int groups) {
    auto const me = ranks.rank(), size = ranks.size();
    auto const seed = [](int group, int from, int to) { return 1000 * group + 10 * from + to; };
    std::vector<std::vector<std::byte>> sent, received;
    std::vector<typename Comm::ticket_type> tickets;
    for (int g = 0; g < groups; ++g) {
        std::vector<uly::outgoing> out;
        std::vector<uly::incoming> in;
        auto const first = sent.size();
        for (int r = 0; r < size; ++r) {
            sent.push_back(pattern(seed(g, me, r), bytes + at(g)));
            received.emplace_back(bytes + at(g), std::byte{0xee});
        }
        for (int r = 0; r < size; ++r) {
            // In an order of each rank's own.
            auto const peer = (me + r) % size;
            out.push_back({peer, sent[first + at(peer)]});
            in.insert(in.begin(), {peer, received[first + at(peer)]});
        }
        tickets.push_back(ranks.start(out, in));
    }
    for (int i = 0; i < groups; ++i) {
        auto const g = (i + 1) % groups;
        ranks.wait(std::move(tickets[at(g)]));
        for (int r = 0; r < size; ++r)
            expect(received[at(g * size + r)] == pattern(seed(g, r, me), bytes + at(g)),
                   "a message arrives as it was sent, in the order of start",
                   uly::concat("from rank ", r, ", group ", g, ", ", bytes + at(g), " bytes"));
    }
}

template <class Comm>
void check_one_way_messages(Comm const& ranks) {
    // Rank 0 tells all, nobody answers; then all tell rank 0; then nothing to nobody.
    auto const me = ranks.rank(), size = ranks.size();
    for (bool const to_all : {true, false}) {
        std::vector<std::vector<std::byte>> memory;
        std::vector<uly::outgoing> out;
        std::vector<uly::incoming> in;
        for (int r = 1; r < size; ++r)
            memory.push_back(me == 0 && !to_all ? std::vector<std::byte>(7)
                                                : pattern(to_all ? 0 : me, 7));
        std::vector<std::byte> mine(7);
        if (me == 0 && to_all)
            for (int r = 1; r < size; ++r) out.push_back({r, memory[at(r - 1)]});
        if (me == 0 && !to_all)
            for (int r = 1; r < size; ++r) in.push_back({r, memory[at(r - 1)]});
        if (me != 0 && to_all) in.push_back({0, mine});
        if (me != 0 && !to_all) out.push_back({0, memory[0]});
        ranks.wait(ranks.start(out, in));
        auto const right = [](std::vector<std::byte> const& data, int from) {
            expect(data == pattern(from, 7), "a rank may only send, or only receive",
                   uly::concat("wrong bytes of rank ", from));
        };
        if (me != 0 && to_all) right(mine, 0);
        for (int r = 1; r < size && me == 0 && !to_all; ++r) right(memory[at(r - 1)], r);
    }
    ranks.wait(ranks.start({}, {}));
    ranks.fence({});
}

/// Messages arrive by `progress` alone, before anybody waits for them.
template <class Comm>
void check_progress(Comm const& ranks) {
    auto const me = ranks.rank(), size = ranks.size();
    constexpr std::size_t bytes = std::size_t{1} << 20;  // more than is sent at once
    auto const mine = pattern(me, bytes);
    std::vector<std::vector<std::byte>> received(at(size), std::vector<std::byte>(bytes));
    std::vector<std::byte> last(at(size));
    std::vector<uly::outgoing> out;
    std::vector<uly::incoming> in;
    for (int r = 0; r < size; ++r) {
        if (r == me) continue;
        out.push_back({r, mine});
        in.push_back({r, received[at(r)]});
        last[at(r)] = pattern(r, bytes).back();
        received[at(r)].back() = ~last[at(r)];
    }
    auto ticket = ranks.start(out, in);
    auto const until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    auto const is_there = [&](int r) {
        auto const& there = const_cast<std::byte const volatile&>(received[at(r)].back());
        return r == me || there == last[at(r)];
    };
    for (int r = 0; r < size; ++r)
        while (!is_there(r) && std::chrono::steady_clock::now() < until) {
            ranks.progress();
            std::this_thread::yield();
        }
    for (int r = 0; r < size; ++r)
        expect(is_there(r), "progress moves messages that have been started",
               uly::concat("nothing from rank ", r, " after 60 seconds"));
    // Those of ranks that have seen theirs are still to be sent: they move in `wait`.
    ranks.wait(std::move(ticket));
    for (int r = 0; r < size; ++r)
        expect(r == me || received[at(r)] == pattern(r, bytes), "a message arrives as it was sent",
               uly::concat("from rank ", r, ", by progress"));
}

/// Collective calls in random order with random delays: what one call shows, the next may not spoil.
template <class Comm>
void check_sequence_of_calls(Comm const& ranks) {
    auto const me = ranks.rank(), size = ranks.size();
    std::mt19937_64 common{at(size)};  // the same on every rank: what is called
    delays slow(me);
    for (int round = 0; round < 100; ++round) {
        slow.wait();
        auto const drawn = common();
        auto const amount = static_cast<std::size_t>(drawn >> 8) % 300;
        auto const root = static_cast<int>((drawn >> 20) % at(size));
        constexpr std::string_view rule = "collective calls may follow each other in any order";
        if constexpr (uly::reduces<Comm>)
            if (drawn % 6 == 0) {
                std::vector<std::int64_t> values(amount, me);
                ranks.all_reduce(std::span<std::int64_t>(values), uly::reduction::max);
                for (auto const value : values) expect(value == size - 1, rule, "all_reduce");
            }
        if constexpr (uly::gathers<Comm>) {
            if (drawn % 6 == 1) {
                auto const mine = pattern(me + round, amount);
                std::vector<std::byte> all(amount * at(size));
                ranks.all_gather(mine, all);
                for (int r = 0; r < size; ++r) {
                    auto const theirs = pattern(r + round, amount);
                    expect(std::equal(theirs.begin(), theirs.end(),
                                      all.begin() + static_cast<std::ptrdiff_t>(at(r) * amount)),
                           rule, "all_gather");
                }
            }
            if (drawn % 6 == 2) {
                auto data = pattern(me + round, amount);
                ranks.broadcast(data, root);
                expect(data == pattern(root + round, amount), rule, "broadcast");
            }
        }
        if constexpr (uly::splits<Comm>)
            if (drawn % 6 == 3) ranks.split(me % 3, root * me).fence({});
        if constexpr (uly::reaches_memory<Comm>)
            if (drawn % 6 == 4)
                exchange_through(ranks,
                                 ranks.shared_window(uly::arena::inbox, at(size) * 40 + amount), 1);
        if constexpr (uly::sends_messages<Comm>)
            if (drawn % 6 == 5) check_messages(ranks, amount, 1);
        if (drawn % 5 == 0) ranks.fence({});
    }
    ranks.fence({});
}

/// A collective call that one rank, the last, makes in another way than the others: the same error on
/// every rank, which names that rank.
template <class Comm, class Call>
void expect_refused(Comm const& ranks, uly::errc code, std::string_view rule, Call const& call) {
    auto const culprit = ranks.size() - 1;
    auto const seen = outcome_of([&] { call(ranks.rank() == culprit); });
    expect(seen.code == code && seen.rank == culprit, rule, seen.text);
}

/// One of the `disagreement_count` ways in which ranks may differ, each for a group of its own.
constexpr int disagreement_count = 12;
template <class Comm>
void check_disagreement(Comm const& ranks, int which) {
    using enum uly::errc;
    constexpr std::string_view sizes = "a collective call with unequal sizes is a disagreement",
                               roots = "a broadcast of two roots is a disagreement",
                               no_rank = "a root that is no rank is invalid_call on every rank",
                               mixed = "different collective calls are a disagreement";
    auto const size = ranks.size();
    std::vector<std::byte> memory(at(9 * size));
    auto const bytes = [&](bool culprit) { return std::size_t{culprit ? 9u : 8u}; };
    auto const part = [&](bool culprit) { return std::span(memory).first(bytes(culprit)); };
    auto const gather = [&](bool culprit) {
        if constexpr (uly::gathers<Comm>) {
            std::vector<std::byte> all(bytes(culprit) * at(size));
            ranks.all_gather(part(culprit), all);
        }
    };
    auto const window = [&](bool culprit) {
        if constexpr (uly::reaches_memory<Comm>) ranks.make_window(bytes(culprit));
    };
    auto const shared = [&](bool culprit) {
        if constexpr (uly::reaches_memory<Comm>)
            ranks.shared_window(uly::arena::outbox, bytes(culprit));
    };
    auto const reduce = [&](bool culprit) {
        std::vector<float> values(bytes(culprit));
        if constexpr (uly::reduces<Comm>)
            ranks.all_reduce(std::span<float>(values), uly::reduction::sum);
    };
    auto const broadcast = [&](std::size_t count, int root) {
        if constexpr (uly::gathers<Comm>) ranks.broadcast(std::span(memory).first(count), root);
    };
    auto const refused = [&](bool able, uly::errc code, std::string_view rule, auto const& call) {
        if (able) expect_refused(ranks, code, rule, call);
    };
    constexpr bool gathers = uly::gathers<Comm>, reaches = uly::reaches_memory<Comm>,
                   reduces = uly::reduces<Comm>;
    switch (which) {
        case 0: return refused(gathers, disagreement, sizes, gather);
        case 1: return refused(reaches, disagreement, sizes, window);
        case 2: return refused(reaches, disagreement, sizes, shared);
        case 3: return refused(reduces, disagreement, sizes, reduce);
        case 4:
            return refused(gathers, disagreement, sizes,
                           [&](bool culprit) { broadcast(bytes(culprit), 0); });
        case 5:
            return refused(gathers, disagreement, roots,
                           [&](bool culprit) { broadcast(8, culprit ? 1 : 0); });
        case 6:
            return refused(gathers, invalid_call, no_rank,
                           [&](bool culprit) { broadcast(8, culprit ? size : 0); });
        case 7:
            return refused(gathers, invalid_call, no_rank,
                           [&](bool culprit) { broadcast(8, culprit ? -1 : 0); });
        case 8:
            return refused(gathers, disagreement, mixed, [&](bool culprit) {
                if (culprit)
                    ranks.fence({});
                else
                    gather(false);
            });
        case 9:
            return refused(gathers, disagreement, mixed, [&](bool culprit) {
                if (culprit)
                    gather(false);
                else
                    ranks.fence({});
            });
        case 10:
            return refused(reaches && reduces, disagreement, mixed,
                           [&](bool culprit) { culprit ? window(false) : reduce(false); });
        case 11:
            return refused(gathers, disagreement, mixed, [&](bool culprit) {
                if (culprit)
                    broadcast(8, 0);
                else
                    gather(false);
            });
    }
}

/// The last rank does not come to `call`, in a group of that deadline.
template <class Comm, class Call>
void check_silent_rank(Comm const& ranks, std::string_view name, std::chrono::milliseconds deadline,
                       Call const& call) {
    auto const culprit = ranks.size() - 1;
    if (ranks.rank() == culprit) std::this_thread::sleep_for(3 * deadline);
    auto const seen = outcome_of([&] {
        if (ranks.rank() != culprit) call(ranks);
        ranks.fence({});
    });
    expect(seen.code == uly::errc::timed_out,
           "a rank that is silent for longer than the deadline is timed_out on every rank",
           uly::concat(name, ": ", seen.text));
    expect(contains(seen.text, uly::concat(" ", culprit)), "timed_out names the silent rank",
           uly::concat(name, ": ", seen.text));
}

/// A rank leaves while the others wait in `call`, or before they come to it.
template <class Comm, class Call>
void check_release(Comm const& ranks, std::string_view name, bool late, Call const& call) {
    auto const culprit = ranks.size() - 1;
    ranks.fence({});
    if (ranks.rank() == culprit) {
        if (late) std::this_thread::sleep_for(std::chrono::milliseconds(5));
        ranks.leave("conformance");
        return;
    }
    auto const start = std::chrono::steady_clock::now();
    // What needs nothing of the rank that left may still end well; the next fence does not.
    auto const seen = outcome_of([&] {
        call(ranks);
        ranks.fence({});
    });
    constexpr std::string_view released = "a rank that leaves releases the others with peer_failed";
    expect(seen.code == uly::errc::peer_failed && seen.rank == culprit &&
               contains(seen.text, "conformance"),
           released, uly::concat(name, ": ", seen.text));
    expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(60),
           "a rank that leaves releases the others at once", std::string(name));
    auto const again = outcome_of([&] { ranks.fence({}); });
    constexpr std::string_view gone = "a group that a rank has left is gone for good";
    expect(again.code == uly::errc::peer_failed && again.rank == culprit, gone, again.text);
    if constexpr (uly::sends_messages<Comm>) {
        auto const started = outcome_of([&] { ranks.start({}, {}); });
        expect(started.code == uly::errc::peer_failed && started.rank == culprit, gone,
               uly::concat("start: ", started.text));
    }
}

}  // namespace detail

namespace detail {

/// Calls `with(name, call)` for each collective call that waits for all ranks.
template <class With>
void for_each_collective(With const& with) {
    with("fence", [](auto const& ranks) { ranks.fence({}); });
    with("make_window", []<class Comm>(Comm const& ranks) {
        if constexpr (uly::reaches_memory<Comm>) ranks.make_window(8);
    });
    with("all_gather", []<class Comm>(Comm const& ranks) {
        std::array<std::byte, 4> const part{};
        std::vector<std::byte> all(4 * at(ranks.size()));
        if constexpr (uly::gathers<Comm>) ranks.all_gather(part, all);
    });
    with("all_reduce", []<class Comm>(Comm const& ranks) {
        std::array<double, 3> values{};
        if constexpr (uly::reduces<Comm>)
            ranks.all_reduce(std::span<double>(values), uly::reduction::sum);
    });
    with("split", []<class Comm>(Comm const& ranks) {
        if constexpr (uly::splits<Comm>) ranks.split(0, 0);
    });
    with("wait", []<class Comm>(Comm const& ranks) {
        if constexpr (uly::sends_messages<Comm>) check_messages(ranks, 100, 1);
    });
}

}  // namespace detail

/// For groups that have a deadline: a rank that is silent for longer. `make_ranks` as below, with
/// groups of that `deadline`; the check takes three times as long for each collective call.
template <class MakeRanks>
void check_silence(MakeRanks const& make_ranks, std::chrono::milliseconds deadline,
                   std::vector<int> const& sizes = {3}) {
    for (auto const size : sizes)
        detail::for_each_collective([&](std::string_view name, auto const& call) {
            make_ranks(size, [&](auto const& ranks) {
                detail::check_silent_rank(ranks, name, deadline, call);
            });
        });
}

/// Runs every rule that the capabilities of the handle ask for, each on groups of its own of each of
/// `sizes`. `make_ranks(n, body)` runs `body(handle)` on n new ranks, waits for them and rethrows
/// what a body threw. *Throws* `broken_rule`, or what a communicator wrongly threw.
template <class MakeRanks>
void check_communicator(MakeRanks const& make_ranks,
                        std::vector<int> const& sizes = {1, 2, 3, 4, 8}) {
    for (auto const size : sizes) {
        make_ranks(size, [&](auto const& ranks) { detail::check_rank_and_size(ranks, size); });
        make_ranks(size, [](auto const& ranks) { detail::check_calls(ranks); });
        make_ranks(size, [](auto const& ranks) { detail::check_verdicts(ranks); });
        make_ranks(size, []<class Comm>(Comm const& ranks) {
            if constexpr (uly::reaches_memory<Comm>) {
                detail::check_windows(ranks);
                detail::check_shared_windows(ranks);
            }
            if constexpr (uly::gathers<Comm>) detail::check_gathers(ranks);
            if constexpr (uly::reduces<Comm>) {
                detail::check_reduces<float>(ranks);
                detail::check_reduces<double>(ranks);
                detail::check_reduces<std::int64_t>(ranks);
            }
            if constexpr (uly::splits<Comm>) detail::check_split(ranks);
            if constexpr (uly::sends_messages<Comm>) {
                for (std::size_t const bytes : {std::size_t{0}, std::size_t{1}, std::size_t{65537}})
                    detail::check_messages(ranks, bytes, 3);
                detail::check_one_way_messages(ranks);
                if constexpr (uly::progresses<Comm>) detail::check_progress(ranks);
            }
        });
        make_ranks(size, [](auto const& ranks) { detail::check_sequence_of_calls(ranks); });
        if (size == 1) continue;
        for (int which = 0; which < detail::disagreement_count; ++which)
            make_ranks(size, [&](auto const& ranks) { detail::check_disagreement(ranks, which); });
        for (bool const late : {false, true}) {
            auto const release = [&](std::string_view name, auto const& call) {
                make_ranks(size, [&]<class Comm>(Comm const& ranks) {
                    if constexpr (uly::can_leave<Comm>)
                        detail::check_release(ranks, name, late, call);
                });
            };
            detail::for_each_collective(release);
        }
    }
}

}  // namespace conformance
