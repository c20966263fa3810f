// SPDX-License-Identifier: Apache-2.0
// Compiled several times, as namespace UNIT, behind all headers of the library; see tests/headers.py.

#include <cstdlib>

namespace {

constexpr ulysses::shape wrong{.heads = 3, .kv_heads = 2, .head_dim = 4};

}  // namespace

namespace UNIT {

/// Where this unit finds a function of the library.
void const* place() { return reinterpret_cast<void const*>(&ulysses::softmax_scale); }

/// Whether a wrong shape is an error that this unit can handle; without exceptions: ends the
/// process with `good` when it is.
#if ULYSSES_EXCEPTIONS
bool refuses() {
    try {
        ulysses::checked(wrong);
    } catch (ulysses::invalid_shape const&) {
        return true;
    }
    return false;
}
#else
[[noreturn]] void refuses(int good) {
    static int status;
    status = good;
    ulysses::set_error_handler([](ulysses::error const& failure) {
        std::_Exit(failure.code() == ulysses::errc::invalid_shape ? status : 1);
    });
    ulysses::checked(wrong);
    std::_Exit(1);
}
#endif

}  // namespace UNIT
