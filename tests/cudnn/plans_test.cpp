// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/sdpa_plan.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace uly = ulysses;

namespace {

using uly::dtype;
using uly::sdpa_key;

uly::cudnn_device described(int capability) {
    uly::load_cudnn(ULYSSES_CUDNN_LIBRARY);
    std::ifstream file(ULYSSES_DEVICES "/sm_" + std::to_string(capability) + ".json");
    return {capability, std::string{std::istreambuf_iterator<char>(file), {}}};
}

/// Rows that lie [head, batch, token], `pitch` elements apart, as they do after an exchange.
uly::row_strides heads_first(std::int64_t batch, std::int64_t tokens, std::int64_t pitch) {
    return {tokens * pitch, pitch, batch * tokens * pitch};
}
/// Rows of a caller's [batch, token, head, dim].
uly::row_strides tokens_first(std::int64_t tokens, std::int64_t heads, std::int64_t pitch) {
    return {tokens * heads * pitch, heads * pitch, pitch};
}

sdpa_key with_strides(sdpa_key key, bool by_heads = true) {
    auto const strides = [&](std::int64_t heads, std::int64_t tokens, std::int64_t dim) {
        return by_heads ? heads_first(key.batch, tokens, dim) : tokens_first(tokens, heads, dim);
    };
    key.q = key.dq = strides(key.heads, key.rows, key.head_dim);
    key.o = key.dout = strides(key.heads, key.rows, key.value_dim);
    key.lse = strides(key.heads, key.rows, 1);
    key.k = strides(key.kv_heads, key.keys, key.head_dim);
    key.v = strides(key.kv_heads, key.keys, key.value_dim);
    return key;
}

/// The rows of the table in docs/cudnn.md.
std::map<std::string, sdpa_key> options() {
    sdpa_key const base{.type = dtype::bf16,
                        .batch = 2,
                        .heads = 4,
                        .kv_heads = 2,
                        .rows = 512,
                        .keys = 512,
                        .head_dim = 128,
                        .value_dim = 128,
                        .scale = 0.125};
    auto const changed = [&](auto const& change, bool by_heads = true) {
        auto key = base;
        change(key);
        return with_strides(key, by_heads);
    };
    return {
        {"full", changed([](auto&) {})},
        {"half", changed([](auto& k) { k.type = dtype::f16; })},
        {"tokens first", changed([](auto&) {}, false)},
        {"heads of their own", changed([](auto& k) { k.kv_heads = 4; })},
        {"causal", changed([](auto& k) {
             k.band = {-1, 0, false};
         })},
        {"causal, cut rows", changed([](auto& k) {
             k.rows = 256, k.band = {-1, 0, true};
         })},
        {"causal, cut rows, from the first", changed([](auto& k) {
             k.rows = 256, k.band = {-1, 256, false};
         })},
        {"causal window, cut rows", changed([](auto& k) {
             k.rows = 256, k.band = {101, 0, true};
         })},
        {"window of both sides", changed([](auto& k) {
             k.band = {101, 50, false};
         })},
        {"Dv 64", changed([](auto& k) { k.value_dim = 64; })},
        {"D 192, Dv 128", changed([](auto& k) { k.head_dim = 192; })},
        {"odd lengths", changed([](auto& k) { k.rows = 131, k.keys = 517; })},
        {"one row", changed([](auto& k) { k.rows = 1; })},
        {"sinks", changed([](auto& k) {
             k.band = {-1, 0, false}, k.sinks = true;
         })},
        {"dropout", changed([](auto& k) {
             k.band = {-1, 0, false}, k.dropout = 0.1;
         })},
        {"bias", changed([](auto& k) {
             k.band = {-1, 0, false}, k.bias_type = dtype::bf16;
             k.bias_extents = {1, 512, 4, 512}, k.bias_strides = {4 * 512 * 512, 512, 512 * 512, 1};
         })},
        {"deterministic", changed([](auto& k) {
             k.band = {-1, 0, false}, k.deterministic = true;
         })},
    };
}

}  // namespace

TEST_CASE("cudnn: plans for what can be asked, on devices that are described") {
    for (auto const capability : {80, 90, 100}) {
        auto const device = described(capability);
        for (auto const& [name, forward] : options())
            for (auto const backward : {false, true}) {
                auto key = forward;
                key.backward = backward;
                if (!backward && key.deterministic) continue;
                std::string result;
                try {
                    uly::sdpa_plan const plan(key, device);
                    result = "yes, " + std::to_string(plan.workspace_bytes()) + " bytes";
                } catch (uly::unsupported const& failure) {
                    result = std::string("no: ") + failure.what();
                }
                INFO("sm_", capability, ", ", name, ", ", key.text(), ": ", result);
                if (std::getenv("ULYSSES_CUDNN_TABLE") != nullptr) MESSAGE(result);
                // Ampere's backward ends at 128.
                auto const refused = capability == 80 && backward && key.head_dim > 128;
                CHECK(result.starts_with(refused ? "no" : "yes"));
                CHECK(refused == (result.find("hidden_dim") != std::string::npos));
            }
    }
}
