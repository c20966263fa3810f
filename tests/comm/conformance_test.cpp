// SPDX-License-Identifier: Apache-2.0

#include "../conformance/communicator.hpp"
#include "../faulty.hpp"

#include <ulysses/comm/serial.hpp>
#include <ulysses/comm/threads.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace uly = ulysses;
using conformance::check_communicator;

namespace {

using correct = uly::threads::communicator;
using body_of_rank = std::function<void(correct const&)>;
/// As `check_communicator` takes it, but with one type of body: the compiler sees each rule once.
using ranks_maker = std::function<void(int, body_of_rank const&)>;

/// `threads::run`, compiled once for all bodies.
void run(int ranks, body_of_rank const& body, uly::threads::options const& given = {}) {
    uly::threads::run(ranks, body, given);
}

}  // namespace

TEST_CASE("serial is a communicator") {
    check_communicator([](int, auto const& body) { body(uly::serial{}); }, {1});
}

TEST_CASE("threads::communicator is a communicator") {
    check_communicator(ranks_maker([](int ranks, auto const& body) { run(ranks, body); }));
}

TEST_CASE("threads::communicator is one where ranks reach no other, or some") {
    for (int const on_a_host : {1, 2})
        check_communicator(ranks_maker([&](int ranks, body_of_rank const& body) {
            uly::threads::options settings;
            for (int r = 0; r < ranks; ++r) settings.hosts.push_back(r / on_a_host);
            run(ranks, body, settings);
        }));
}

namespace {

/// Groups that a silent rank breaks after `deadline`.
ranks_maker ranks_of(std::chrono::milliseconds deadline) {
    return [=](int ranks, body_of_rank const& body) { run(ranks, body, {.deadline = deadline}); };
}

}  // namespace

TEST_CASE("threads::communicator times a silent rank out") {
    std::chrono::milliseconds const deadline(100);
    conformance::check_silence(ranks_of(deadline), deadline, {2, 3});
}

TEST_CASE("conformance: a silent rank that is not timed out is missed") {
    try {
        conformance::check_silence(ranks_of(std::chrono::seconds(600)),
                                   std::chrono::milliseconds(10));
        FAIL("nothing was thrown");
    } catch (std::exception const& e) {
        CHECK(std::string(e.what()).find("conformance: a rank that is silent") !=
              std::string::npos);
    }
}

TEST_CASE("threads::communicator is one in threads of an engine's own") {
    check_communicator(ranks_maker([](int ranks, body_of_rank const& body) {
        uly::threads::group const owner(ranks);
        std::vector<std::exception_ptr> thrown(static_cast<std::size_t>(ranks));
        {
            std::vector<std::jthread> threads;
            for (int r = 0; r < ranks; ++r)
                threads.emplace_back([&, r] {
                    auto const handle = owner.handle(r);
                    try {
                        body(handle);
                    } catch (std::exception const& e) {
                        thrown[static_cast<std::size_t>(r)] = std::current_exception();
                        handle.leave(e.what());
                    }
                });
        }
        for (auto const& each : thrown)
            if (each) std::rethrow_exception(each);
    }));
}

TEST_CASE("a wrapped communicator is one") {
    check_communicator([](int ranks, auto const& body) {
        run(ranks, [&](correct const& handle) { body(faults::faulty<correct>(handle)); });
    });
    check_communicator(
        [](int, auto const& body) { body(faults::faulty<uly::serial>(uly::serial{})); }, {1});
}

// The kit finds what it is for ----------------------------------------------------------------------

namespace {

/// A communicator that is right but for what a derived one spoils.
struct spoilt : correct {
    explicit spoilt(correct const& inner) : correct(inner) {}
};
struct counts_nothing : spoilt {
    using spoilt::spoilt;
    std::uint64_t begin_call() const { return 1; }
};
struct counts_for_itself : spoilt {
    using spoilt::spoilt;
    std::shared_ptr<std::uint64_t> calls = std::make_shared<std::uint64_t>(0);
    std::uint64_t begin_call() const { return ++*calls; }
};
struct hides_status : spoilt {
    using spoilt::spoilt;
    void fence(uly::fence_status const&) const { correct::fence({}); }
};
struct hides_terms : spoilt {
    using spoilt::spoilt;
    void fence(uly::fence_status status) const {
        auto const call = status.terms[0];
        status.terms = {};
        status.terms[0] = call;
        correct::fence(status);
    }
};
struct cuts_texts : spoilt {
    using spoilt::spoilt;
    void fence(uly::fence_status status) const {
        status.text[200] = '\0';
        correct::fence(status);
    }
};
struct fails_alone : spoilt {
    using spoilt::spoilt;
    void fence(uly::fence_status const& status) const {
        correct::fence({});
        uly::throw_verdict({&status, 1});
    }
};
struct misaligned : spoilt {
    using spoilt::spoilt;
    std::byte* address(window_type const& window, int rank) const {
        return correct::address(window, rank) + 8;
    }
};
struct one_arena : spoilt {
    using spoilt::spoilt;
    window_type shared_window(uly::arena, std::size_t bytes) const {
        return correct::shared_window(uly::arena::inbox, bytes);
    }
    std::size_t shared_window_bytes(uly::arena) const {
        return correct::shared_window_bytes(uly::arena::inbox);
    }
};
struct never_grows : spoilt {
    using spoilt::spoilt;
    std::size_t shared_window_bytes(uly::arena which) const {
        return std::min<std::size_t>(correct::shared_window_bytes(which), 100);
    }
};
struct gathers_backwards : spoilt {
    using spoilt::spoilt;
    void all_gather(std::span<std::byte const> mine, std::span<std::byte> all) const {
        correct::all_gather(mine, all);
        std::reverse(all.begin(), all.end());
    }
};
struct broadcasts_of_rank_0 : spoilt {
    using spoilt::spoilt;
    void broadcast(std::span<std::byte> data, int) const { correct::broadcast(data, 0); }
};
struct sums_backwards : spoilt {
    using spoilt::spoilt;
    template <class T>
    void all_reduce(std::span<T> values, uly::reduction op) const {
        correct::split(0, -rank()).all_reduce(values, op);
    }
};
struct splits_without_key : spoilt {
    using spoilt::spoilt;
    splits_without_key split(int color, int) const {
        return splits_without_key(correct::split(color, 0));
    }
};
struct swaps_messages : spoilt {
    using spoilt::spoilt;
    auto start(std::span<uly::outgoing const> out, std::span<uly::incoming const> in) const {
        std::vector<uly::incoming> turned(in.begin(), in.end());
        if (turned.size() > 1 && turned[0].data.size() == turned[1].data.size())
            std::swap(turned[0].data, turned[1].data);
        return correct::start(out, turned);
    }
};
struct leaves_quietly : spoilt {
    using spoilt::spoilt;
    void leave(std::string_view) const { correct::leave("for no reason"); }
};
/// Lets a call that ranks make in different ways pass.
template <class Body>
void hide_disagreement(Body const& body) {
    try {
        body();
    } catch (uly::disagreement const&) {}
}
struct gathers_unequal_parts : spoilt {
    using spoilt::spoilt;
    void all_gather(std::span<std::byte const> mine, std::span<std::byte> all) const {
        hide_disagreement([&] { correct::all_gather(mine, all); });
    }
};
struct makes_unequal_windows : spoilt {
    using spoilt::spoilt;
    window_type make_window(std::size_t bytes) const {
        window_type made;
        hide_disagreement([&] { made = correct::make_window(bytes); });
        return made;
    }
};
struct shares_unequal_windows : spoilt {
    using spoilt::spoilt;
    window_type shared_window(uly::arena which, std::size_t bytes) const {
        window_type made;
        hide_disagreement([&] { made = correct::shared_window(which, bytes); });
        return made;
    }
};
struct reduces_unequal_counts : spoilt {
    using spoilt::spoilt;
    template <class T>
    void all_reduce(std::span<T> values, uly::reduction op) const {
        hide_disagreement([&] { correct::all_reduce(values, op); });
    }
};
struct broadcasts_of_two_roots : spoilt {
    using spoilt::spoilt;
    void broadcast(std::span<std::byte> data, int root) const {
        try {
            correct::broadcast(data, root);
        } catch (uly::disagreement const& e) {
            if (std::string(e.what()).find("the same root") == std::string::npos) throw;
        }
    }
};
struct broadcasts_of_no_rank : spoilt {
    using spoilt::spoilt;
    void broadcast(std::span<std::byte> data, int root) const {
        correct::broadcast(data, std::clamp(root, 0, size() - 1));
    }
};
struct blames_itself : spoilt {  // for a root that is no rank
    using spoilt::spoilt;
    void broadcast(std::span<std::byte> data, int root) const {
        try {
            correct::broadcast(data, root);
        } catch (uly::invalid_call const& e) {
            uly::throw_error(e.code(), e.what(), rank());
        }
    }
};
struct fences_with_anything : spoilt {
    using spoilt::spoilt;
    void fence(uly::fence_status const& status) const {
        try {
            correct::fence(status);
        } catch (uly::disagreement const& e) {
            if (std::string(e.what()).find("same shapes") == std::string::npos) throw;
        }
    }
};

/// The rule that a spoilt communicator breaks.
template <class Spoilt>
std::string broken_by() {
    try {
        check_communicator(
            [](int ranks, auto const& body) {
                run(ranks, [&](correct const& handle) { body(Spoilt(handle)); });
            },
            {3});
    } catch (std::exception const& e) {
        return e.what();
    }
    return "none";
}

template <class Spoilt>
void expect_broken(std::string const& rule) {
    auto const found = broken_by<Spoilt>();
    CAPTURE(found);
    CHECK(found.find("conformance: " + rule) != std::string::npos);
}

}  // namespace

TEST_CASE("conformance: each rule is missed where it is broken") {
    expect_broken<counts_nothing>("begin_call() counts the calls of a rank");
    expect_broken<counts_for_itself>("a fence brings begin_call() to the largest count");
    expect_broken<hides_status>("ranks in different calls are a disagreement");
    expect_broken<hides_terms>("a disagreement names the term");
    expect_broken<cuts_texts>("the whole text of a status");
    expect_broken<fails_alone>("ranks in different calls are a disagreement");
    expect_broken<misaligned>("windows are aligned to 64");
    expect_broken<one_arena>("inbox and outbox are apart");
    expect_broken<never_grows>("a shared window grows");
    expect_broken<gathers_backwards>("all_gather gives every rank's bytes in rank order");
    expect_broken<broadcasts_of_rank_0>("broadcast gives every rank the root's bytes");
    expect_broken<sums_backwards>("all_reduce combines in rank order");
    expect_broken<splits_without_key>("split groups by color, ordered by key");
    expect_broken<swaps_messages>("a message arrives as it was sent");
    expect_broken<gathers_unequal_parts>("a collective call with unequal sizes is a disagreement");
    expect_broken<makes_unequal_windows>("a collective call with unequal sizes is a disagreement");
    expect_broken<shares_unequal_windows>("a collective call with unequal sizes is a disagreement");
    expect_broken<reduces_unequal_counts>("a collective call with unequal sizes is a disagreement");
    expect_broken<broadcasts_of_two_roots>("a broadcast of two roots is a disagreement");
    expect_broken<broadcasts_of_no_rank>("a root that is no rank is invalid_call on every rank");
    expect_broken<blames_itself>("a root that is no rank is invalid_call on every rank");
    expect_broken<fences_with_anything>("different collective calls are a disagreement");
    expect_broken<leaves_quietly>("a rank that leaves releases the others with peer_failed");
}
