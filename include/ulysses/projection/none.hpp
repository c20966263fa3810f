#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/projection.hpp>
#include <ulysses/core/space.hpp>

namespace ulysses::inline ULYSSES_ABI {

/// For engines that project themselves and use steps 3 to 5 alone.
struct no_projection {
    using space_type = host_space;
};

}  // namespace ulysses::inline ULYSSES_ABI
