// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: attention and projection run on the communicator's queue; their `space_type` must be the communicator's or one that it derives from.

#include <ulysses/attention/reference.hpp>
#include <ulysses/comm/serial.hpp>
#include <ulysses/pipeline.hpp>
#include <ulysses/space/host.hpp>

struct own_space : ulysses::host_space {};
#if defined(ULYSSES_CONTROL)
struct ranks : ulysses::serial {
    using space_type = own_space;
};
#else
using ranks = ulysses::serial;
#endif
struct attention : ulysses::reference_attention {
    using space_type = own_space;
};

void use() {
    ulysses::pipeline layer{ranks{}, ulysses::sequence_local{}, attention{},
                            ulysses::shape{.heads = 2, .head_dim = 4}};
}
