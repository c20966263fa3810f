#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn.hpp>
#include <ulysses/adapters/cudnn/device.hpp>
#include <ulysses/adapters/cudnn/sdpa_plan.hpp>

#include <cudnn_frontend.h>

#include <cstddef>
#include <optional>
#include <span>
#include <string_view>
#include <unordered_map>

/// What cudnn.hpp declares. One file of a program includes it.
namespace ulysses::inline ULYSSES_ABI {

struct cudnn_engine::state {
    cudnnHandle_t handle = nullptr;
    std::optional<cudnn_device> device;
    std::unordered_map<sdpa_key, sdpa_plan, sdpa_key_hash> plans;
    std::unordered_map<sum_key, sum_plan, sum_key_hash> sums;

    state() = default;
    state(state const&) = delete;
    state& operator=(state const&) = delete;
    ~state() {
        if (handle != nullptr) static_cast<void>(fe::detail::destroy_handle(handle));
    }

    sdpa_plan& plan(sdpa_key const& key) {
        auto const found = plans.find(key);
        if (found != plans.end()) return found->second;
        return plans.try_emplace(key, key, *device, where{}).first->second;
    }
    sum_plan& plan(sum_key const& key) {
        auto const found = sums.find(key);
        if (found != sums.end()) return found->second;
        return sums.try_emplace(key, key, *device, where{}).first->second;
    }

    template <class Key>
    void run(cudaStream_t stream, Key const& key, sdpa_operands const& operands, void* workspace) {
        set_stream(stream);
        plan(key).run(handle, operands, workspace);
    }

    void set_stream(cudaStream_t stream) {
        if (handle == nullptr || fe::detail::set_stream(handle, stream) != CUDNN_STATUS_SUCCESS)
            raise(errc::functor_failed, where{}, "cudnn", "plans run on a device that is there",
                  handle == nullptr ? "one that is described" : "cudnnSetStream");
    }
};

cudnn_engine::cudnn_engine(where at) : state_(std::make_unique<state>()) {
#if defined(NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING)
    load_cudnn("libcudnn.so.9", at);
#endif
    auto const result = fe::detail::create_handle(&state_->handle);
    if (result != CUDNN_STATUS_SUCCESS)
        raise(errc::unsupported, at, "cudnn", "cuDNN can be used on the current device",
              fe::detail::get_error_string(result));
    state_->device.emplace(state_->handle);
}

cudnn_engine::cudnn_engine(cudnn_device const& device) : state_(std::make_unique<state>()) {
    state_->device = device;
}

cudnn_engine::~cudnn_engine() = default;

std::size_t cudnn_engine::workspace_bytes(sdpa_key const& key) {
    return state_->plan(key).workspace_bytes();
}
std::size_t cudnn_engine::workspace_bytes(sum_key const& key) {
    return state_->plan(key).workspace_bytes();
}

void cudnn_engine::run(cuda_space::queue queue, sdpa_key const& key, sdpa_operands const& operands,
                       void* workspace) {
    state_->run(queue.stream, key, operands, workspace);
}
void cudnn_engine::run(cuda_space::queue queue, sum_key const& key, sdpa_operands const& operands,
                       void* workspace) {
    state_->run(queue.stream, key, operands, workspace);
}

void cudnn_engine::write(cuda_space::queue queue, void* to, std::span<std::byte const> bytes) {
    cuda_space::write(queue, to, bytes);
}

void cudnn_engine::expect_memory(std::string_view name, void const* first, void const* last) const {
    if (state_->handle != nullptr) cuda_space::expect_memory("cudnn", name, first, last, where{});
}

std::size_t cudnn_engine::plans() const { return state_->plans.size() + state_->sums.size(); }

}  // namespace ulysses::inline ULYSSES_ABI
