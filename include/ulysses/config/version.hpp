// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The version, in its one place: meson.build reads these three lines.
#define ULYSSES_VERSION_MAJOR 0
#define ULYSSES_VERSION_MINOR 1
#define ULYSSES_VERSION_PATCH 0
