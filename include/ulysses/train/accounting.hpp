#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/error.hpp>
#include <ulysses/train/config.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

/// What a training run is made of, as numbers: ranks, samples, tokens, steps. Pure functions, all of
/// them constexpr but the checks' messages.
namespace ulysses::inline ULYSSES_ABI {

/// How the ranks are divided. Ranks that share a sequence are neighbours, then those that share
/// model states, then replicas: rank = (replica * dp_shard + shard) * sp + place in the sequence.
struct parallel_config {
    std::int64_t sp = 1;            ///< ranks that share each sequence
    std::int64_t dp_replicate = 1;  ///< copies of the model, each with data of its own
    std::int64_t dp_shard = 1;      ///< ranks with data of their own that share one copy

    constexpr std::int64_t ranks() const { return sp * dp_replicate * dp_shard; }
    /// Groups of ranks that each process a sequence at a time: the effective data-parallel size.
    constexpr std::int64_t data_ranks() const { return dp_replicate * dp_shard; }
    friend constexpr bool operator==(parallel_config const&, parallel_config const&) = default;
};

constexpr std::array<setting, 3> settings_of(parallel_config& config) {
    return {{{"sp", &config.sp},
             {"dp_replicate", &config.dp_replicate},
             {"dp_shard", &config.dp_shard}}};
}

/// What is between two updates of the weights.
struct step_config {
    std::int64_t micro_batch = 1;            ///< samples that a group of sp ranks processes at once
    std::int64_t gradient_accumulation = 1;  ///< micro-batches of a group between two updates
    std::int64_t tokens = 1;                 ///< of a sample, all ranks together

    friend constexpr bool operator==(step_config const&, step_config const&) = default;
};

constexpr std::array<setting, 3> settings_of(step_config& config) {
    return {{{"micro_batch", &config.micro_batch},
             {"gradient_accumulation", &config.gradient_accumulation},
             {"tokens", &config.tokens}}};
}

/// Both, for a run that is configured by one text.
struct training_config {
    parallel_config parallel{};
    step_config step{};

    friend constexpr bool operator==(training_config const&, training_config const&) = default;
};

constexpr std::array<setting, 6> settings_of(training_config& config) {
    auto const ranks = settings_of(config.parallel);
    auto const step = settings_of(config.step);
    return {ranks[0], ranks[1], ranks[2], step[0], step[1], step[2]};
}

/// What becomes of the samples at the end that are too few for all ranks.
enum class at_end : std::uint8_t {
    drop,  ///< they are left out: every rank of every micro-batch has samples
    pad,   ///< they are used; a rank without samples brings a token that counts for nothing
};

namespace detail {

inline constexpr auto config_limit = std::int64_t{1} << 31;

/// Whether the product of all is below 2^62.
constexpr bool countable(std::initializer_list<std::int64_t> factors) {
    std::int64_t product = 1;
    for (auto const each : factors) {
        if (each > ((std::int64_t{1} << 62) - 1) / product) return false;
        product *= each;
    }
    return true;
}

inline std::string text_of(parallel_config const& config) {
    return concat("sp ", config.sp, ", dp_replicate ", config.dp_replicate, ", dp_shard ",
                  config.dp_shard);
}
inline std::string text_of(step_config const& config) {
    return concat("micro_batch ", config.micro_batch, ", gradient_accumulation ",
                  config.gradient_accumulation, ", tokens ", config.tokens);
}

}  // namespace detail

/// Whether every size is one that ranks can be divided by; for a configuration known when compiling,
/// `static_assert(valid(config))`.
constexpr bool valid(parallel_config const& config) {
    return std::min({config.sp, config.dp_replicate, config.dp_shard}) >= 1 &&
           std::max({config.sp, config.dp_replicate, config.dp_shard}) < detail::config_limit &&
           detail::countable({config.sp, config.dp_replicate, config.dp_shard});
}
constexpr bool valid(step_config const& config) {
    return std::min({config.micro_batch, config.gradient_accumulation, config.tokens}) >= 1 &&
           std::max({config.micro_batch, config.gradient_accumulation, config.tokens}) <
               detail::config_limit;
}

/// The sizes of a configuration, checked. *Throws* `invalid_config` with all of them.
inline parallel_config checked(parallel_config const& config, where at = where::here()) {
    if (!valid(config))
        raise(errc::invalid_config, at, "mesh", "sizes lie in 1 .. 2^31 - 1",
              detail::text_of(config));
    return config;
}

/// Counts of a training run, from its two configurations.
class accounting {
   public:
    /// *Throws* `invalid_config`, listing all numbers, for sizes below 1 or counts past 2^62.
    accounting(parallel_config const& parallel, step_config const& step, where at = where::here())
        : parallel_(checked(parallel, at)), step_(step) {
        if (!valid(step) || !detail::countable({parallel.ranks(), step.micro_batch,
                                                step.gradient_accumulation, step.tokens}))
            raise(errc::invalid_config, at, "accounting",
                  "sizes lie in 1 .. 2^31 - 1, their product below 2^62", detail::text_of(step),
                  ", ", detail::text_of(parallel));
    }

    parallel_config const& parallel() const { return parallel_; }
    step_config const& step() const { return step_; }

    /// Samples between two updates of the weights, all ranks.
    std::int64_t effective_batch() const {
        return step_.micro_batch * step_.gradient_accumulation * parallel_.data_ranks();
    }
    /// Tokens between two updates of the weights, all ranks.
    std::int64_t tokens_per_step() const { return effective_batch() * step_.tokens; }
    /// Tokens that a rank holds of a micro-batch, at most.
    std::int64_t tokens_per_rank() const {
        return step_.micro_batch * ((step_.tokens + parallel_.sp - 1) / parallel_.sp);
    }

    /// Micro-batches of each group in an epoch of `samples` samples, which all ranks' sources divide
    /// as `dealt` does, in blocks of a micro-batch.
    std::int64_t micro_batches_per_epoch(std::int64_t samples, at_end end) const {
        auto const block = step_.micro_batch, ranks = parallel_.ranks();
        if (end == at_end::drop) return samples / block / ranks * parallel_.sp;
        auto const blocks = (samples + block - 1) / block;
        // The last rotation takes as many micro-batches as groups of data ranks have blocks left.
        auto const rest = blocks % ranks;
        auto const steps = (rest + parallel_.data_ranks() - 1) / parallel_.data_ranks();
        return blocks / ranks * parallel_.sp + steps;
    }
    /// Updates in an epoch; the last may be of fewer micro-batches.
    std::int64_t steps_per_epoch(std::int64_t samples, at_end end) const {
        auto const each = step_.gradient_accumulation;
        return (micro_batches_per_epoch(samples, end) + each - 1) / each;
    }

    /// The same run on ranks that are divided otherwise: gradient accumulation is what keeps the
    /// tokens of a step equal. Sharing sequences over P times as many ranks takes P times as many
    /// micro-batches. *Throws* `invalid_config`, listing all numbers, when no whole number does.
    accounting with_equal_tokens(parallel_config const& parallel, where at = where::here()) const {
        auto const groups = checked(parallel, at).data_ranks();
        auto const all = step_.gradient_accumulation * parallel_.data_ranks();
        if (all % groups != 0)
            raise(errc::invalid_config, at, "accounting",
                  "equal tokens need as many micro-batches on every data rank",
                  detail::text_of(step_), " with ", detail::text_of(parallel_), " are ", all,
                  " micro-batches a step; ", detail::text_of(parallel), " has ", groups,
                  " data ranks");
        auto step = step_;
        step.gradient_accumulation = all / groups;
        return {parallel, step, at};
    }

    std::string describe() const {
        return concat(parallel_.ranks(), " ranks: ", detail::text_of(parallel_), "\n",
                      detail::text_of(step_), "\neffective batch ", effective_batch(), " samples, ",
                      tokens_per_step(), " tokens a step, at most ", tokens_per_rank(),
                      " tokens a rank and micro-batch\n");
    }

   private:
    parallel_config parallel_;
    step_config step_;
};

}  // namespace ulysses::inline ULYSSES_ABI
