#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <string>
#include <vector>

/// A tool that listens to NVTX, linked into the program in place of Nsight.
namespace doubles {

/// What this thread has told since it was last asked: "push TEXT", "pop", "mark TEXT", each after the name
/// of its domain.
std::vector<std::string> nvtx_events();
/// Ranges that are open on this thread.
int nvtx_depth();

}  // namespace doubles
