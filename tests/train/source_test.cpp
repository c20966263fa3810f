// SPDX-License-Identifier: Apache-2.0

#include "failure.hpp"

#include <ulysses/train/prefetch.hpp>
#include <ulysses/train/source.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

using namespace train_test;

namespace {

/// 0, 1, ... `count` - 1, plus 100 times the epoch; throws at one of them.
struct numbers {
    using sample_type = int;
    int count, throws_at;
    std::atomic<int>* drawn;
    int next_ = 0, epoch = 0;

    std::optional<int> next() {
        if (next_ == count) return {};
        ++*drawn;
        if (next_ == throws_at) throw std::runtime_error("disk full");
        return 100 * epoch + next_++;
    }
    void restart(std::int64_t to) {
        epoch = static_cast<int>(to);
        next_ = 0;
    }
};
/// A range that can be passed once.
struct read_once {
    std::istringstream* stream;
    auto begin() const { return std::istream_iterator<int>(*stream); }
    auto end() const { return std::istream_iterator<int>(); }
};
template <class Source>
std::vector<int> all_of(Source& source) {
    std::vector<int> all;
    while (auto const each = source.next()) all.push_back(*each);
    return all;
}

}  // namespace

TEST_CASE("source: what can be read once has one epoch, others as many as asked for") {
    std::istringstream stream("3 1 2");
    uly::range_source once{read_once{&stream}};
    CHECK(once.next() == 3);
    uly::skip_samples(once, 1, {});
    CHECK(once.next() == 2);
    CHECK(!once.next());
    CHECK(!once.next());
    auto failed = failure_of([&] { uly::restart_source(once, 1, {}); });
    CHECK(failed.code == uly::errc::invalid_call);
    CHECK(failed.text ==
          "ulysses: source: a source that cannot restart has one epoch: epoch 1 was asked for");
    failed = failure_of([&] { uly::skip_samples(once, 2, {}); });
    CHECK(failed.code == uly::errc::invalid_call);
    CHECK(failed.text == "ulysses: source: samples to be skipped must be there: 0 of 2");

    std::vector<int> const all{0, 1, 2, 3, 4, 5, 6};
    uly::dealt_source mine{all, {.place = 1, .places = 2, .block = 2}};
    CHECK(mine.next() == 2);
    CHECK(mine.next() == 3);
    CHECK(mine.next() == 6);
    CHECK(!mine.next());
    uly::restart_source(mine, 1, {});
    uly::skip_samples(mine, 2, {});
    CHECK(mine.next() == 6);
}

TEST_CASE("source: a share is as many samples as it has, skipped or drawn; and is one there is") {
    for (int size = 0; size < 20; ++size)
        for (std::int64_t places = 1; places < 4; ++places)
            for (std::int64_t block = 1; block < 4; ++block)
                for (std::int64_t place = 0; place < places; ++place) {
                    std::vector<int> range, expected;
                    for (int i = 0; i < size; ++i) {
                        range.push_back(i);
                        if (i / block % places == place) expected.push_back(i);
                    }
                    uly::dealing const share{place, places, block};
                    uly::dealt_source drawn{range, share}, skipped{range, share};
                    CHECK(all_of(drawn) == expected);
                    auto const count = static_cast<std::int64_t>(expected.size());
                    auto const failed =
                        failure_of([&] { uly::skip_samples(skipped, count + 1, {}); });
                    CHECK(failed.code == uly::errc::invalid_call);
                    CHECK(failed.text ==
                          uly::concat("ulysses: source: samples to be skipped must be there: ",
                                      count, " of ", count + 1));
                    uly::skip_samples(skipped, count, {});
                    CHECK(!skipped.next());
                }
    std::vector<int> const one{1};
    for (uly::dealing const share : {uly::dealing{.block = 0}, {.place = 1}, {.place = -1}}) {
        uly::dealt_source source{one, share};
        auto const failed = failure_of([&] { source.next(); });
        CHECK(failed.code == uly::errc::invalid_config);
        CHECK(failed.text.starts_with("ulysses: source: a place is one of those"));
    }
}

TEST_CASE("prefetched: the same samples, ahead of time, no more than asked for") {
    std::atomic<int> drawn = 0;
    uly::prefetched source{numbers{20, -1, &drawn}, 3};
    CHECK(drawn == 0);
    CHECK(source.next() == 0);
    while (drawn < 4) std::this_thread::yield();  // without anyone asking for them
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(drawn == 4);  // one was taken, three are held
    source.skip(2);
    auto moved = std::move(source);
    CHECK(moved.next() == 3);
    uly::restart_source(moved, 2, {});  // while the thread holds samples
    CHECK(moved.next() == 200);
    auto const rest = all_of(moved);
    CHECK(rest.size() == 19);
    CHECK(rest.back() == 219);
    CHECK(!moved.next());
    uly::restart_source(moved, 0, {});
    uly::skip_samples(moved, 18, {});
    CHECK(all_of(moved) == std::vector<int>{18, 19});
    uly::restart_source(moved, 0, {});
    CHECK(moved.next() == 0);
    auto const failed = failure_of([&] { uly::skip_samples(moved, 20, {}); });
    CHECK(failed.code == uly::errc::invalid_call);
    CHECK(failed.text == "ulysses: source: samples to be skipped must be there: 19 of 20");
}

TEST_CASE("prefetched: what the source throws comes where it did, then again") {
    std::atomic<int> drawn = 0;
    uly::prefetched source{numbers{20, 2, &drawn}, 8};
    CHECK(source.next() == 0);
    CHECK(source.next() == 1);
    CHECK_THROWS_WITH_AS(source.next(), "disk full", std::runtime_error);
    CHECK_THROWS_WITH_AS(source.next(), "disk full", std::runtime_error);
    uly::restart_source(source, 1, {});
    CHECK(source.next() == 100);
    auto const wrong = failure_of([&] { uly::prefetched{numbers{1, -1, &drawn}, 0}; });
    CHECK(wrong.code == uly::errc::invalid_config);
    CHECK(rule_of(wrong.text) == "ulysses: prefetch: at least one sample is drawn ahead: 0");
}
