// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a copier has `space_type`, `store_type`, `ticket_type`, `start(queue, to, from, bytes)` that returns a ticket, and `wait(queue, ticket)`.
// expect: ulysses: layers of a checkpoint have `forward(i, x, y)`, `forward_keeping(i, place, x, y)` and `backward(i, place, x, d)` on row_views.
// expect: ulysses: a session takes a sample_source of each rank's own samples, or a random-access range that all ranks have.
// expect: ulysses: softmax_rows reads host memory; give a kernel of the GEMM's space.

#include <ulysses/ulysses.hpp>

#include "../archetypes.hpp"

#include <list>
#include <tuple>
#include <vector>

namespace uly = ulysses;

struct sample {
    std::vector<int> ids;
};
struct layers {
    void forward(std::int64_t, uly::row_view<float const>, uly::row_view<float>);
    void forward_keeping(std::int64_t, std::int64_t, uly::row_view<float const>, uly::row_view<float>);
    void backward(std::int64_t, std::int64_t, uly::row_view<float const>, uly::row_view<float>);
};
struct narrow_space : archetypes::space {};

#if defined(ULYSSES_CONTROL)
using copier = uly::host_copier;
using model = layers;
using samples = std::vector<sample>;
using gemm = uly::builtin_gemm;
#else
struct copier {
    using space_type = uly::host_space;
};
struct model : layers {
    void forward_keeping(std::int64_t, uly::row_view<float const>, uly::row_view<float>);
};
using samples = std::list<sample>;
struct gemm : uly::builtin_gemm {
    using space_type = narrow_space;
};
#endif

static_assert(sizeof(uly::checkpoint<float, copier>) > 0);

void run(uly::checkpoint<float>& saved, model& own, uly::row_view<float> y) { saved.forward(own, y); }

void train(uly::threads::communicator const& group, samples const& all) {
    uly::prepare({}, group, all, std::tuple{uly::ids_field(&sample::ids)});
}

static_assert(sizeof(uly::fused_cross_entropy<float, gemm>) > 0);
