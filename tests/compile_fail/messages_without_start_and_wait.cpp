// SPDX-License-Identifier: Apache-2.0
// expect: a communicator whose ranks send messages must have a const member `ticket_type start(std::span<outgoing const>, std::span<incoming const>)`.
// expect: a communicator whose ranks send messages must have a const member `wait(ticket_type)`.

#include <ulysses/attention/reference.hpp>
#include <ulysses/comm/serial.hpp>
#include <ulysses/pipeline.hpp>
#include <ulysses/space/host.hpp>

struct ranks : ulysses::serial {
#if !defined(ULYSSES_CONTROL)
    using ticket_type = int;
#endif
};

void use() {
    ulysses::pipeline layer{ranks{}, ulysses::sequence_local{}, ulysses::reference_attention{},
                            ulysses::shape{.heads = 2, .head_dim = 4}};
}
