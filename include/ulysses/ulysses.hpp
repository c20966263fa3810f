#pragma once
// SPDX-License-Identifier: Apache-2.0

/// All of ulysses but its adapters: attention over a sequence sharded over many processors, by
/// Ulysses sequence parallelism. Adapters to other libraries are included one by one from
/// ulysses/adapters/.

#include <ulysses/attention/blocked.hpp>
#include <ulysses/attention/reference.hpp>
#include <ulysses/comm/serial.hpp>
#include <ulysses/comm/threads.hpp>
#include <ulysses/config/version.hpp>
#include <ulysses/gemm/builtin.hpp>
#include <ulysses/observer/counting.hpp>
#include <ulysses/observer/several.hpp>
#include <ulysses/observer/trace.hpp>
#include <ulysses/observer/write_trace.hpp>
#include <ulysses/pipeline.hpp>
#include <ulysses/projection/dense.hpp>
#include <ulysses/projection/epilogues.hpp>
#include <ulysses/projection/qk_norm.hpp>
#include <ulysses/projection/rope.hpp>
#include <ulysses/space/host.hpp>
#include <ulysses/stage/shard.hpp>
#include <ulysses/train/batch.hpp>
#include <ulysses/train/checkpoint.hpp>
#include <ulysses/train/cross_entropy.hpp>
#include <ulysses/train/loss.hpp>
#include <ulysses/train/mesh.hpp>
#include <ulysses/train/prefetch.hpp>
#include <ulysses/train/session.hpp>
#include <ulysses/train/tiled.hpp>

#undef ULYSSES_WIDE_VECTORS
