// SPDX-License-Identifier: Apache-2.0

#include "../available_memory.hpp"
#include "program.hpp"

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

/// usage: mpiexec -n 2 large_test
///
/// Messages, gathers and broadcasts of more than 2^31 bytes, and a window of that size.
namespace uly = ulysses;

namespace {

constexpr std::size_t large = (std::size_t{1} << 31) + 4099;

void expect(bool right, char const* what) {
    if (!right) uly::throw_error(uly::errc::none, what);
}

/// Marks its place on every 2^20-th byte and at the end.
template <class Visit>
void for_each_mark(Visit const& visit) {
    for (std::size_t i = 0; i < large; i += std::size_t{1} << 20)
        visit(i, static_cast<std::byte>(i >> 20));
    visit(large - 1, std::byte{0x5a});
}

}  // namespace

int main(int argc, char** argv) {
    return mpi_test::run(argc, argv, [](mpi_test::program& test, uly::mpi::communicator world) {
        // Each rank holds that twice, and shares or sends it once more; with room to spare.
        std::int64_t missing = 6 * static_cast<std::int64_t>(large) + (std::int64_t{1} << 30);
        auto const needed = missing >> 30;
        missing -= available_bytes();
        world.broadcast(std::as_writable_bytes(std::span(&missing, 1)), 0);
        if (missing > 0) return test.skip(uly::concat("needs ", needed, " GiB of free memory"));
        std::unique_ptr<std::byte[]> const memory(new std::byte[large]);
        std::span<std::byte> const data(memory.get(), large);
        auto const mark = [&] { for_each_mark([&](auto i, auto value) { data[i] = value; }); };
        auto const check = [&](std::byte const* seen, char const* what) {
            for_each_mark([&](auto i, auto value) { expect(seen[i] == value, what); });
        };
        auto const first = world.rank() == 0;
        test.check("2^31 bytes", "message", [&] {
            if (first) mark();
            uly::outgoing const out[] = {{1, data}};
            uly::incoming const in[] = {{0, data}};
            if (first)
                world.wait(world.start(out, {}));
            else
                world.wait(world.start({}, in));
            check(memory.get(), "message");
        });
        test.check("2^31 bytes", "broadcast", [&] {
            std::memset(memory.get(), 0, large);
            if (!first) mark();
            world.broadcast(data, 1);
            check(memory.get(), "broadcast");
        });
        test.check("2^31 bytes", "all_gather", [&] {
            auto const part = data.first(large / 2 + 1);  // both together are larger
            std::unique_ptr<std::byte[]> const all(new std::byte[2 * part.size()]);
            world.all_gather(part, {all.get(), 2 * part.size()});
            for (std::size_t r = 0; r < 2; ++r)
                expect(std::memcmp(all.get() + r * part.size(), part.data(), part.size()) == 0,
                       "all_gather");
        });
        test.check("2^31 bytes", "window", [&] {
            auto const window = world.make_window(large);
            std::memcpy(world.address(window, 1 - world.rank()), memory.get(), large);
            world.fence({});
            check(world.address(window, world.rank()), "window");
            world.fence({});
        });
    });
}
