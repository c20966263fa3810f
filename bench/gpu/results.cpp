// SPDX-License-Identifier: Apache-2.0

#include "layers.hpp"
#include "parts.hpp"

#include <ulysses/attention/reference.hpp>

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <span>
#include <string>
#include <string_view>
#include <vector>

/// What ranks that share the device compute: one against the host, several against one, to the bit.
namespace ulysses_bench {

namespace {

namespace uly = ulysses;
using uly::copy_way;
using uly::cuda_peers::fence_way;

/// o, dq, dk, dv of all tokens, in memory that processes share: NaN until they are there.
struct whole_results {
    explicit whole_results(sizes const& of) {
        for (std::size_t i = 0; i < 4; ++i) {
            auto const count = static_cast<std::size_t>(of.tokens * of.row(i));
            auto* const memory = mmap(nullptr, count * sizeof(float), PROT_READ | PROT_WRITE,
                                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            if (memory == MAP_FAILED) throw std::bad_alloc();
            parts[i] = {static_cast<float*>(memory), count};
            clear(i);
        }
    }
    whole_results(whole_results const&) = delete;
    whole_results& operator=(whole_results const&) = delete;
    ~whole_results() {
        for (auto const part : parts) munmap(part.data(), part.size_bytes());
    }
    void clear(std::size_t i) const {
        std::fill(parts[i].begin(), parts[i].end(), std::numeric_limits<float>::quiet_NaN());
    }
    std::array<std::span<float>, 4> parts;
};
constexpr std::string_view names[] = {"o", "dq", "dk", "dv"};

/// Forward and backward on the host, in double.
void compute_on_host(sizes const& of, whole_results const& to) {
    std::array<std::vector<float>, 4> in;
    for (std::size_t i = 0; i < 4; ++i)
        for (std::int64_t j = 0; j < of.tokens * of.row(i); ++j) in[i].push_back(value_of(i, j));
    auto const view = [&](std::size_t i, float* data) {
        return uly::head_view<float>(data, {1, of.tokens, of.row(i) / of.dim, of.dim});
    };
    auto const constant = [](uly::head_view<float> const& x) {
        return uly::head_view<float const>(x.data, x.extents, x.strides);
    };
    std::vector<float> lse(static_cast<std::size_t>(of.tokens * of.heads));
    uly::head_view<float> const rows(lse.data(), {1, of.tokens, of.heads, 1});
    uly::attention_call call;
    call.visible.mask = uly::mask::causal;
    call.visible.queries = call.visible.keys = of.tokens;
    call.scale = uly::softmax_scale(uly::checked(of.shape()));
    uly::attention_extents const extents{1,           of.tokens, of.heads, of.tokens,
                                         of.kv_heads, of.dim,    of.dim};
    std::vector<double> workspace(
        uly::reference_attention::workspace_bytes<float>(extents) / sizeof(double) + 8);
    call.workspace = std::as_writable_bytes(std::span(workspace));
    auto const q = view(0, in[0].data()), k = view(1, in[1].data()), v = view(2, in[2].data()),
               dout = view(3, in[3].data()), o = view(0, to.parts[0].data());
    uly::reference_attention const reference;
    reference.forward<float>(call, constant(q), constant(k), constant(v), o, rows);
    for (auto const i : {2, 3})
        std::fill(to.parts[static_cast<std::size_t>(i)].begin(),
                  to.parts[static_cast<std::size_t>(i)].end(), 0.0f);
    uly::attention_backward_views<float> views;
    views.q = constant(q), views.k = constant(k), views.v = constant(v);
    views.o = constant(o), views.dout = constant(dout), views.lse = constant(rows);
    views.dq = view(0, to.parts[1].data());
    views.dk = view(1, to.parts[2].data());
    views.dv = view(2, to.parts[3].data());
    reference.backward<float>(call, views);
}

struct place {
    std::string_view name;
    bool processes;
    fence_way fence;
};
constexpr place places[] = {{"threads by events", false, fence_way::events},
                            {"threads by flags", false, fence_way::flags},
                            {"processes", true, fence_way::flags}};

/// The layer over `ranks`, into `to`.
void compute(place const& at, int ranks, copy_way way, sizes const& of, whole_results const& to) {
    for (std::size_t i = 0; i < 4; ++i) to.clear(i);
    auto const body = [&](ranks_type const& each) {
        rank_of_layer layer(each, of, true);
        layer.train();
        layer.train();  // in windows that are there already
        for (std::size_t i = 0; i < 4; ++i) layer.get(i, to.parts[i]);
        each.host().fence({});
    };
    auto const given = group_options(at.fence, way);
    if (at.processes)
        on_processes(ranks, given, body);
    else
        on_threads(ranks, given, body);
}

struct all_results {
    explicit all_results(sizes const& of) : exact(of), one(of), several(of) {}
    whole_results exact, one, several;
};

void check_one(report const& to, sizes const& of, all_results const& all) {
    compute_on_host(of, all.exact);
    compute(places[0], 1, copy_way::kernel, of, all.one);
    for (std::size_t i = 0; i < 4; ++i) {
        double largest = 0, magnitude = 0;
        for (std::size_t j = 0; j < all.one.parts[i].size(); ++j) {
            auto const x = static_cast<double>(all.exact.parts[i][j]);
            auto const off = std::fabs(static_cast<double>(all.one.parts[i][j]) - x);
            if (!(off <= largest)) largest = off;
            magnitude = std::max(magnitude, std::fabs(x));
        }
        // Sums of as many float terms as there are tokens, at worst.
        auto const allowed = static_cast<double>(of.tokens + 8) * 0x1p-23 * magnitude;
        to.add({uly::concat("1 rank: ", names[i]), largest / allowed, "parts",
                "fp64 on the host: what is allowed", largest / allowed, "<= 1"});
    }
}

void check_several(report const& to, std::string const& name, place const& at, int ranks,
                   copy_way way, sizes const& of, all_results const& all) {
    if (std::isnan(all.one.parts[3].back())) compute(at, 1, copy_way::kernel, of, all.one);
    compute(at, ranks, way, of, all.several);
    double differ = 0;
    for (std::size_t i = 0; i < 4; ++i)
        for (std::size_t j = 0; j < all.one.parts[i].size(); ++j) {
            auto const &x = all.one.parts[i][j], &y = all.several.parts[i][j];
            differ += std::memcmp(&x, &y, sizeof x) != 0;
        }
    to.add({name, differ, "elements", "other bits than 1 rank: o, dq, dk, dv", differ, "<= 0"});
}

}  // namespace

std::vector<group> results(bool quick) {
    sizes const of = quick ? sizes{.tokens = 24, .heads = 8, .kv_heads = 8, .dim = 4} : sizes{};
    auto const all = std::make_shared<all_results>(of);
    group threads{{"1 rank", 60, [=](report const&to) { check_one(to, of, *all); }}}, processes;
    for (auto const& at : places)
        for (int const ranks : {2, 4, 8})
            for (auto const way : {copy_way::kernel, copy_way::engine}) {
                auto const name = uly::concat(ranks, " ranks, ", at.name, ", ", text_of(way));
                (at.processes ? processes : threads).push_back({name, 40, [=](report const& to) {
                                                                    check_several(to, name, at,
                                                                                  ranks, way, of,
                                                                                  *all);
                                                                }});
            }
    return {threads, processes};
}

}  // namespace ulysses_bench
