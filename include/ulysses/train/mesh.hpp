#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/gather.hpp>
#include <ulysses/core/guarded.hpp>
#include <ulysses/train/accounting.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace ulysses::inline ULYSSES_ABI {

/// The ranks of a group, divided as a `parallel_config` says, and the group of each division.
///
///     ulysses::mesh ranks{world, {.sp = 4, .dp_shard = 2}};
///     ulysses::pipeline layer{ranks.sp(), ...};
///
/// *Thread safety*: a handle, as its communicators are.
template <class Comm>
class mesh {
    static_assert(gathers<Comm> || explain_gathers<Comm>());
    static_assert(splits<Comm> || explain_splits<Comm>());

   public:
    /// *Blocking*: collective. *Throws* the same on every rank: `disagreement` when ranks were
    /// configured differently, `invalid_config` with all numbers when the ranks cannot be divided so,
    /// `out_of_memory`.
    mesh(Comm const& world, parallel_config const& config, where at = where::here())
        : mesh(agreed(world, config, at), world) {}

    parallel_config const& config() const { return config_; }
    Comm const& world() const { return world_; }
    /// Ranks that share this rank's sequences: contiguous, the fastest in the world's order.
    Comm const& sp() const { return sp_; }
    /// Ranks at this rank's place of a sequence, each with other samples.
    Comm const& dp() const { return dp_; }
    /// Ranks that hold one copy of the model between them: shards of all sequences, sp * dp_shard.
    Comm const& states() const { return states_; }
    /// Ranks that hold the same part of the model: over its copies.
    Comm const& dp_replicate() const { return dp_replicate_; }

    /// Which group of data this rank is in, 0 .. data_ranks() - 1.
    std::int64_t data_rank() const { return world_.rank() / config_.sp; }

   private:
    /// `config` is what all ranks passed.
    mesh(parallel_config const& config, Comm const& world)
        : config_(config),
          world_(world),
          sp_(split(world, world.rank() / config.sp)),
          dp_(split(world, world.rank() % config.sp)),
          states_(split(world, world.rank() / model_ranks())),
          dp_replicate_(split(world, world.rank() % model_ranks())) {}

    static Comm split(Comm const& world, std::int64_t color) {
        std::optional<Comm> part;
        leaving_on_failure(
            world, [&] { part.emplace(world.split(static_cast<int>(color), world.rank())); });
        return *part;
    }
    std::int64_t model_ranks() const { return config_.sp * config_.dp_shard; }

    static parallel_config const& agreed(Comm const& world, parallel_config const& config,
                                         where at) {
        std::vector<parallel_config> all;
        fence_status status;
        guarded(status, [&] { all.resize(static_cast<std::size_t>(world.size())); });
        all_gather_or_fail(world, std::as_bytes(std::span(&config, 1)),
                           std::as_writable_bytes(std::span(all)), status);
        for (std::size_t r = 1; r < all.size(); ++r)
            if (all[r] != all[0])
                raise(errc::disagreement, at, "mesh", "every rank must be divided alike",
                      "rank 0 has ", detail::text_of(all[0]), ", rank ", r, " has ",
                      detail::text_of(all[r]));
        checked(config, at);
        if (config.ranks() != world.size())
            raise(errc::invalid_config, at, "mesh",
                  "sp * dp_replicate * dp_shard must be the number of ranks",
                  detail::text_of(config), ": ", config.ranks(), " ranks, the group has ",
                  world.size());
        return config;
    }

    parallel_config config_;
    Comm world_, sp_, dp_, states_, dp_replicate_;
};

}  // namespace ulysses::inline ULYSSES_ABI
