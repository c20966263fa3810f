// SPDX-License-Identifier: Apache-2.0

#include <ulysses/config/version.hpp>

int minor_version() { return ULYSSES_VERSION_MINOR; }
