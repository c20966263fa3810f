#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/guarded.hpp>
#include <ulysses/core/logits.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/plan/hash.hpp>
#include <ulysses/plan/plan.hpp>

#include <cstddef>
#include <cstdint>

namespace ulysses::inline ULYSSES_ABI {

/// What a call tells at its fences, and where it was made.
struct running_call {
    fence_status status;
    pass_kind kind;
    where at;

    running_call(pass_kind which, where place) : kind(which), at(place) {}
    /// Of a plan, which ranks must have alike.
    running_call(pass_kind which, where place, plan const& moves, dtype type)
        : running_call(which, place) {
        status.plan = moves.hash();
        status.terms = moves.terms();
        set(term::call, static_cast<std::int64_t>(kind));
        set(term::element_type, static_cast<std::int64_t>(type));
    }

    void set(term which, std::int64_t value) {
        status.terms[static_cast<std::size_t>(which)] = value;
    }
    void set_dropout(dropout_key const& key) {
        word_hash hash;
        for (auto const word : {key.seed, key.step, key.layer, key.first_sample}) hash.add(word);
        set(term::dropout_key, static_cast<std::int64_t>(hash.value()));
    }

    /// Runs a part of the call, unless it has failed already; the next fence tells its error.
    template <class Body>
    void guard(Body const& body) {
        if (status.code == errc::none) guarded(status, name(kind), at, body);
    }
    /// Runs a part that no fence follows: an error leaves the call on this rank alone.
    template <class Body>
    void alone(int rank, Body const& body) {
        guard(body);
        if (status.code != errc::none) throw_error(status.code, status.text, rank);
    }
};

}  // namespace ulysses::inline ULYSSES_ABI
