#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/observer.hpp>

#include <nvtx3/nvToolsExt.h>

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

/// Calls and steps as ranges of NVTX, which Nsight shows on the thread of a rank and above the kernels
/// that they enqueue:
///
///     ulysses::pipeline layer{ranks,      ulysses::sequence_local{},     attention, shape,
///                             projection, ulysses::nvtx_observer{"layer 0"}};
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

/// The domain of all ranges; its stacks of open ones, one a thread, are nobody else's.
inline nvtxDomainHandle_t nvtx_domain() {
    static auto* const domain = nvtxDomainCreateA("ulysses");
    return domain;
}

}  // namespace detail

/// An `observer`: a range of the domain "ulysses" for each call, in it one for each step, and a mark for
/// each fence. Ranges last as long as the host enqueues, not as the device computes. Where no tool
/// listens, each costs a test of a pointer.
///
/// *Thread safety*: copies are independent; pipelines of one thread do not call each other.
class nvtx_observer {
   public:
    /// *Shape*: `layer` goes before the call's name.
    explicit nvtx_observer(std::string_view layer = {}) {
        for (std::size_t i = 0; i < calls_.size(); ++i) {
            auto const text = name(static_cast<pass_kind>(i));
            calls_[i] = message(layer.empty() ? std::string(text) : concat(layer, ": ", text));
        }
        for (std::size_t i = 0; i < steps_.size(); ++i)
            steps_[i] = message(std::string(name(static_cast<step_id>(i))));
        fence_ = message("fence");
    }

    void begin(pass_kind kind) noexcept {
        auto const& call = calls_[static_cast<std::size_t>(kind)];
        auto const open = push(call);
        if (open <= 0) return;
        // Of a call that an error left, on this thread.
        for (int i = 0; i <= open; ++i) nvtxDomainRangePop(detail::nvtx_domain());
        push(call);
    }
    void end(pass_kind) noexcept { nvtxDomainRangePop(detail::nvtx_domain()); }
    void begin(step_id step) noexcept { push(steps_[static_cast<std::size_t>(step)]); }
    void end(step_id) noexcept { nvtxDomainRangePop(detail::nvtx_domain()); }
    static void moved(int, int, std::size_t) noexcept {}
    void fence() noexcept {
        auto const event = event_of(fence_);
        nvtxDomainMarkEx(detail::nvtx_domain(), &event);
    }

   private:
    /// Copied by the tool once.
    static nvtxStringHandle_t message(std::string const& text) {
        return nvtxDomainRegisterStringA(detail::nvtx_domain(), text.c_str());
    }
    static nvtxEventAttributes_t event_of(nvtxStringHandle_t message) noexcept {
        nvtxEventAttributes_t event{};
        event.version = NVTX_VERSION;
        event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
        event.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
        event.message.registered = message;
        return event;
    }
    /// Ranges that were open on this thread; negative where no tool counts them.
    static int push(nvtxStringHandle_t message) noexcept {
        auto const event = event_of(message);
        return nvtxDomainRangePushEx(detail::nvtx_domain(), &event);
    }

    std::array<nvtxStringHandle_t, 1 + static_cast<std::size_t>(pass_kind::make_cache)> calls_{};
    std::array<nvtxStringHandle_t, 1 + static_cast<std::size_t>(step_id::project_out)> steps_{};
    nvtxStringHandle_t fence_{};
};
static_assert(observer<nvtx_observer> && observes_calls<nvtx_observer>);

}  // namespace ulysses::inline ULYSSES_ABI
