// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: where the `queue` of a communicator's space is not an empty type, the handle must have a const member `queue()` that returns the one to use.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

struct arena_space : ulysses::host_space {
    struct queue : ulysses::host_space::queue {
        void* arena = nullptr;
    };
    static void* allocate(queue, std::size_t bytes) {
        return ulysses::host_space::allocate({}, bytes);
    }
    static void deallocate(queue, void* memory, std::size_t bytes) {
        ulysses::host_space::deallocate({}, memory, bytes);
    }
};

struct ranks : ulysses::threads::communicator {
    using space_type = arena_space;
#if defined(ULYSSES_CONTROL)
    arena_space::queue queue() const { return {}; }
#endif
};

int main() {
    ulysses::pipeline layer{ranks{}, ulysses::sequence_local{}, ulysses::reference_attention{},
                            ulysses::shape{.heads = 1, .head_dim = 1}};
}
