// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn.hpp>
#include <ulysses/adapters/cudnn/engine.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace uly = ulysses;

namespace {

uly::cudnn_device described(int capability) {
    uly::load_cudnn(ULYSSES_CUDNN_LIBRARY);
    std::ifstream file(ULYSSES_DEVICES "/sm_" + std::to_string(capability) + ".json");
    return {capability, std::string{std::istreambuf_iterator<char>(file), {}}};
}

/// A call of the functor as a pipeline makes it. Its operands lie nowhere: nothing is run.
struct scene {
    std::int64_t batch = 2, heads = 4, kv_heads = 2, rows = 512, keys = 512;
    std::int64_t head_dim = 128, value_dim = 128;
    bool tokens_first = false;  ///< a caller's [batch, token, head, dim], else as after an exchange
    uly::attention_call call{};
    uly::sdpa_options options{};
    std::vector<uly::sample_keys> samples{};
    std::vector<std::int64_t> documents{};
    uly::extents4 bias{};
    bool sinks = false, slopes = false, dbias = true;

    scene() {
        call.visible.queries = call.visible.keys = 512;
        call.scale = 0.125;
    }

    void cut(std::int64_t begin, std::int64_t end) {
        call.query_begin = begin;
        rows = end - begin;
    }

    template <class T>
    uly::head_view<T> view(std::int64_t tokens, std::int64_t of_heads, std::int64_t dim) const {
        // Rows begin on multiples of 64 bytes.
        auto const pitch = (dim * static_cast<std::int64_t>(sizeof(T)) + 63) / 64 * 64 /
                           static_cast<std::int64_t>(sizeof(T));
        uly::extents4 const extents{batch, tokens, of_heads, dim};
        auto* const nowhere = reinterpret_cast<T*>(std::uintptr_t{1} << 20);
        if (tokens_first)
            return {nowhere, extents, {tokens * of_heads * dim, of_heads * dim, dim, 1}};
        return {nowhere, extents, {tokens * pitch, pitch, batch * tokens * pitch, 1}};
    }

    /// The bytes of workspace that the functor says, forward or backward.
    template <class T>
    std::size_t prepare(uly::cudnn_engine& engine, bool backward) {
        uly::cudnn_attention const attention(engine, options);
        call.visible.samples = samples;
        call.visible.documents = documents;
        static std::array<float, 64> const numbers{};
        std::span<float const> const of_heads(numbers.data(), static_cast<std::size_t>(heads));
        if (sinks) call.sinks = of_heads;
        if (slopes) call.slopes = of_heads;
        if (bias[0] > 0) call.bias = {static_cast<T const*>(nullptr), bias};
        auto const q = view<T>(rows, heads, head_dim), o = view<T>(rows, heads, value_dim);
        auto const k = view<T>(keys, kv_heads, head_dim), v = view<T>(keys, kv_heads, value_dim);
        uly::head_view<float> const lse(reinterpret_cast<float*>(std::uintptr_t{1} << 20),
                                        {batch, rows, heads, 1}, {rows, 1, batch * rows, 1});
        using input = uly::head_view<T const>;
        if (!backward) return attention.prepare(call, input(q), input(k), input(v), o, lse);
        uly::attention_backward_views<T> views{q, k, v, o, o, lse, q, {}, {}, {}};
        views.dk = view<float>(keys, kv_heads, head_dim);
        views.dv = view<float>(keys, kv_heads, value_dim);
        std::vector<float> dsinks(static_cast<std::size_t>(heads));
        if (sinks) views.dlogits.sinks = dsinks;
        if (bias[0] > 0 && dbias) views.dlogits.bias = {dsinks.data(), bias};
        return attention.prepare(call, views);
    }
};

struct option {
    std::string name;
    std::function<void(scene&)> change;
    std::set<int> refused = {};  ///< backward, by these devices
};

void causal(scene& s) { s.call.visible.mask = uly::mask::causal; }

/// The rows of the table in docs/cudnn.md.
std::vector<option> options() {
    auto const documents = [](scene& s) {
        s.documents = {0, 100, 300, 0, 17};
        s.samples = {{0, 512, 0, 0, 3}, {0, 512, 0, 3, 2}};
    };
    auto const padded = [](scene& s) { s.samples = {{0, 300, 0, 0, 0}, {20, 512, 0, 0, 0}}; };
    auto const with_bias = [](scene& s) { s.bias = {1, 4, 512, 512}; };
    auto const dropout = [](scene& s) { s.call.dropout = {0.1, {.seed = 1}}; };
    auto const window = [](scene& s, std::int64_t left, std::int64_t right) {
        s.call.visible.window = {left, right};
    };
    return {
        {"full, rows [batch, token, head], as many key-value heads",
         [](scene& s) { s.tokens_first = true, s.kv_heads = 4; }},
        {"causal", causal},
        {"causal, cut rows", [](scene& s) { causal(s), s.cut(0, 300), s.keys = 300; }},
        {"causal, cut rows, the last", [](scene& s) { causal(s), s.cut(256, 512); }},
        {"causal window, cut rows",
         [=](scene& s) {
             causal(s), window(s, 100, -1), s.cut(256, 512);
             s.call.key_begin = 156, s.keys = 356;
         }},
        {"window of both sides", [=](scene& s) { window(s, 100, 50); }},
        {"Dv 64", [](scene& s) { s.value_dim = 64; }},
        {"D 192, Dv 128", [](scene& s) { s.head_dim = 192; }, {80}},
        {"odd lengths, D and Dv 72",
         [](scene& s) {
             s.head_dim = s.value_dim = 72;
             s.rows = s.call.visible.queries = 131, s.keys = s.call.visible.keys = 517;
         }},
        {"one row", [](scene& s) { s.rows = s.call.visible.queries = 1; }},
        {"one row, lengths rounded",
         [](scene& s) { s.rows = s.call.visible.queries = 1, s.options.round_lengths = true; }},
        {"documents", documents},
        {"documents, causal, rows [batch, token, head]",
         [=](scene& s) { documents(s), causal(s), s.tokens_first = true; }},
        {"documents, causal, cut rows",
         [=](scene& s) { documents(s), causal(s), s.cut(200, 512); }},
        {"documents, causal window", [=](scene& s) { documents(s), causal(s), window(s, 50, -1); }},
        {"documents, Dv 64", [=](scene& s) { documents(s), s.value_dim = 64; }, {80}},
        {"documents, sinks", [=](scene& s) { documents(s), causal(s), s.sinks = true; }},
        {"documents, dropout", [=](scene& s) { documents(s), causal(s), dropout(s); }},
        {"documents, deterministic",
         [=](scene& s) { documents(s), causal(s), s.options.deterministic = true; },
         {80}},
        {"padding, causal, cut rows", [=](scene& s) { padded(s), causal(s), s.cut(256, 512); }},
        {"sinks", [](scene& s) { causal(s), s.sinks = true; }},
        {"sinks, one row", [](scene& s) { s.rows = s.call.visible.queries = 1, s.sinks = true; }},
        {"softcap, causal window, cut rows",
         [=](scene& s) { causal(s), s.call.softcap = 50, window(s, 100, -1), s.cut(256, 512); },
         {80}},
        {"ALiBi, full", [](scene& s) { s.slopes = true; }},
        {"softcap and ALiBi",
         [](scene& s) { causal(s), s.call.softcap = 50, s.slopes = true; },
         {80}},
        {"dropout, causal, cut rows", [=](scene& s) { causal(s), dropout(s), s.cut(256, 512); }},
        {"bias, causal, cut rows", [=](scene& s) { with_bias(s), causal(s), s.cut(256, 512); }},
        {"bias of all heads, odd lengths",
         [](scene& s) {
             s.rows = s.call.visible.queries = 131, s.keys = s.call.visible.keys = 517;
             s.bias = {2, 1, 131, 517};
         }},
        {"bias of keys and its gradient",
         [](scene& s) {
             s.bias = {2, 1, 1, 512};
         }},
        {"deterministic", [](scene& s) { causal(s), s.options.deterministic = true; }},
        {"deterministic, dropout",
         [=](scene& s) { causal(s), dropout(s), s.options.deterministic = true; },
         {100}},
    };
}

}  // namespace

TEST_CASE("cudnn: plans for what the functor can be asked, on devices that are described") {
    for (auto const capability : {80, 90, 100}) {
        uly::cudnn_engine engine(described(capability));
        for (auto const& [name, change, refused_by] : options())
            for (auto const backward : {false, true}) {
                scene asked;
                change(asked);
                std::string result;
                try {
                    result = "yes, " + std::to_string(asked.prepare<uly::bf16>(engine, backward)) +
                             " bytes";
                } catch (uly::unsupported const& failure) {
                    result = std::string("no: ") + failure.what();
                }
                auto const refused = backward && refused_by.contains(capability);
                INFO("sm_", capability, ", ", name, std::string(backward ? ", backward: " : ": "),
                     result);
                if (std::getenv("ULYSSES_CUDNN_TABLE") != nullptr) MESSAGE(result);
                CHECK(result.starts_with(refused ? "no" : "yes"));
            }
    }
}
