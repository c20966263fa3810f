#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>

#include <cstddef>
#include <limits>
#include <memory>
#include <new>

namespace ulysses::inline ULYSSES_ABI::detail {

/// *Throws* `out_of_memory` for more than a processor addresses: sums of such sizes overflow.
inline void expect_window_bytes(std::size_t bytes) {
    constexpr std::size_t most = std::size_t{1}
                                 << (std::numeric_limits<std::size_t>::digits * 3 / 4);
    if (bytes > most)
        raise(errc::out_of_memory, {}, "make_window", "memory must be available", bytes, " bytes");
}

/// A rank's part of a window in host memory, aligned to 64. *Throws* `out_of_memory`.
inline std::shared_ptr<std::byte> host_window_part(std::size_t bytes) {
    constexpr std::align_val_t alignment{64};
    expect_window_bytes(bytes);
    auto* const memory = static_cast<std::byte*>(::operator new(bytes, alignment, std::nothrow));
    if (memory == nullptr)
        raise(errc::out_of_memory, {}, "make_window", "memory must be available", bytes, " bytes");
    std::shared_ptr<std::byte> part;
    fence_status status;
    // Where the count of owners cannot be had, the memory is given back before that is thrown.
    guarded(status, [&] {
        part = {memory, [](std::byte* each) { ::operator delete(each, std::align_val_t{64}); }};
    });
    if (status.code != errc::none) throw_error(status.code, status.text);
    return part;
}

}  // namespace ulysses::inline ULYSSES_ABI::detail
