#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/plan/plan.hpp>

#include <cstddef>
#include <cstdint>
#include <numeric>

namespace ulysses::inline ULYSSES_ABI {

/// Bytes of one layer that leave and reach a rank, its own share not counted.
struct traffic {
    std::size_t sent = 0;
    std::size_t received = 0;
    /// Of several chunks together.
    constexpr traffic& operator+=(traffic const& other) {
        sent += other.sent;
        received += other.received;
        return *this;
    }
    friend constexpr bool operator==(traffic const&, traffic const&) = default;
};

/// Forward: q, k, v out and o back to others; as counted in elements of `element_bytes`.
inline traffic forward_traffic(plan const& moves, std::size_t element_bytes) {
    auto const& layer = moves.layer();
    std::int64_t sent = 0, received = 0;
    for (int peer = 0; peer < moves.ranks(); ++peer) {
        if (peer == moves.rank()) continue;
        auto const& rows = moves.rows(peer);
        auto const both = layer.head_dim + layer.value_dim;
        sent += rows.queries_to * layer.head_dim + rows.keys_to * both +
                rows.outputs_from * layer.value_dim;
        received += rows.queries_from * layer.head_dim + rows.keys_from * both +
                    rows.outputs_to * layer.value_dim;
    }
    return {static_cast<std::size_t>(sent) * element_bytes,
            static_cast<std::size_t>(received) * element_bytes};
}

/// Backward: dO out; dq, dk and dv back to others, dk and dv in elements of `accumulator_bytes`.
/// What the context did not keep moves again: q, k, v and o out under keep::local; q, k and v out
/// under keep::nothing, and o back when `six_steps` need it.
inline traffic backward_traffic(plan const& moves, std::size_t element_bytes,
                                std::size_t accumulator_bytes, bool six_steps = true) {
    auto const& layer = moves.layer();
    std::int64_t sent = 0, received = 0, sent_keys = 0, received_keys = 0;
    for (int peer = 0; peer < moves.ranks(); ++peer) {
        if (peer == moves.rank()) continue;
        auto const& rows = moves.rows(peer);
        auto const both = layer.head_dim + layer.value_dim;
        sent += rows.outputs_to * layer.value_dim + rows.queries_from * layer.head_dim;
        received += rows.outputs_from * layer.value_dim + rows.queries_to * layer.head_dim;
        sent_keys += rows.keys_from * both;
        received_keys += rows.keys_to * both;
        if (layer.keep == keep::exchanged) continue;
        sent += rows.queries_to * layer.head_dim + rows.keys_to * both;
        received += rows.queries_from * layer.head_dim + rows.keys_from * both;
        if (layer.keep == keep::local) {
            sent += rows.queries_to * layer.value_dim;
            received += rows.queries_from * layer.value_dim;
        } else if (six_steps) {
            sent += rows.outputs_from * layer.value_dim;
            received += rows.outputs_to * layer.value_dim;
        }
    }
    return {static_cast<std::size_t>(sent) * element_bytes +
                static_cast<std::size_t>(sent_keys) * accumulator_bytes,
            static_cast<std::size_t>(received) * element_bytes +
                static_cast<std::size_t>(received_keys) * accumulator_bytes};
}

/// The closed form of the elements that all ranks together send in one forward pass when every head
/// weighs alike and no mask spares a key: (P - 1) / P * S * B * (Hq (D + Dv) + (Hkv + P - gcd(Hkv,
/// P)) (D + Dv)), with equal shares of S. Exact when ranks divide heads; of a cut head's query rows
/// more or fewer than 1 / P may be at home. *Source*: counting, as in docs/shapes.md.
inline std::int64_t closed_form_elements(shape const& layer, std::int64_t batch,
                                         std::int64_t tokens, int ranks) {
    auto const copies =
        layer.kv_heads + ranks - std::gcd(layer.kv_heads, static_cast<std::int64_t>(ranks));
    return tokens / ranks * (ranks - 1) * batch * (layer.heads + copies) *
           (layer.head_dim + layer.value_dim);
}

}  // namespace ulysses::inline ULYSSES_ABI
