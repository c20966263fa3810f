#pragma once
// SPDX-License-Identifier: Apache-2.0

#if defined(ULYSSES_BENCH_ON_DOUBLES)
#include "../../tests/doubles/sdpa_on_stream.hpp"

#include <ulysses/adapters/cudnn/sdpa_attention.hpp>
#else
#include <ulysses/adapters/cudnn.hpp>
#endif

/// cuDNN's plans; in tests, their double.
namespace ulysses_bench {

#if defined(ULYSSES_BENCH_ON_DOUBLES)
using engine_type = sdpa_double_on_stream;
#else
using engine_type = ulysses::cudnn_engine;
#endif
using sdpa_type = ulysses::sdpa_attention<engine_type>;

}  // namespace ulysses_bench
