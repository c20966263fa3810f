#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/macros.hpp>
#include <ulysses/core/error.hpp>

#if defined(NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING)
#include <dlfcn.h>

namespace cudnn_frontend {
/// The frontend declares it and leaves its definition to the program.
inline void* cudnn_dlhandle = nullptr;
}  // namespace cudnn_frontend
#endif

#include <cudnn_frontend.h>

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

/// For which device cuDNN makes plans: one that is there, or one that is described.
///
/// With NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING defined nothing of cuDNN is linked: `load_cudnn` opens
/// it. Every file of a program that includes the frontend is to define it, or none.
namespace ulysses::inline ULYSSES_ABI {

namespace fe = cudnn_frontend;

#if defined(NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING)
/// Opens cuDNN, once before anything else of it is used. *Throws* `unsupported` with the loader's words.
inline void load_cudnn(char const* file = "libcudnn.so.9", where at = where::here()) {
    if (fe::cudnn_dlhandle != nullptr) return;
    fe::cudnn_dlhandle = dlopen(file, RTLD_NOW | RTLD_GLOBAL);
    if (fe::cudnn_dlhandle == nullptr)
        raise(errc::unsupported, at, "cudnn", "the library can be loaded", file, ", ", dlerror());
}
#endif

/// A device that plans are made for.
class cudnn_device {
   public:
    /// The device of a handle, which outlives this.
    explicit cudnn_device(cudnnHandle_t handle) : handle_(handle) {}

    /// A device that need not be there, by its properties as cuDNN writes them in JSON; its plans cannot
    /// be run. `capability` is 90 for sm_90.
    /// *Throws* `unsupported` with cuDNN's own words.
    cudnn_device(int capability, std::string_view properties, where at = where::here())
        : capability_(capability), properties_(std::make_shared<fe::DeviceProperties>()) {
        auto const result = std::const_pointer_cast<fe::DeviceProperties>(properties_)
                                ->deserialize({properties.begin(), properties.end()});
        if (result.is_bad())
            raise(errc::unsupported, at, "cudnn", "a device is described by its properties",
                  result.err_msg);
    }

    /// Null for a device that is described.
    cudnnHandle_t handle() const { return handle_; }

    void describe_to(fe::graph::Graph& graph) const {
        if (properties_ == nullptr) return;
        graph.set_sm_version(capability_);
        graph.set_device_properties(properties_);
    }

   private:
    cudnnHandle_t handle_ = nullptr;
    int capability_ = 0;
    std::shared_ptr<fe::DeviceProperties const> properties_;
};

}  // namespace ulysses::inline ULYSSES_ABI
