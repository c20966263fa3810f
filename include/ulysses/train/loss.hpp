#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/gather.hpp>
#include <ulysses/core/guarded.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

/// Loss, metrics and gradients that mean the same on any number of ranks, by one contract: a
/// backward yields the gradient of the loss *summed* over tokens; summed over ranks and
/// micro-batches and multiplied once by `gradient_factor` it is the gradient of the mean.
///
///     for (each micro-batch) mine += loss of its valid tokens;        // and backward
///     auto const all = sum_over_ranks(world, mine);                   // all.mean_loss(), ...
///     reduce_gradients(world, gradients, gradient_factor(all.tokens));
namespace ulysses::inline ULYSSES_ABI {

/// The label of a token that does not count.
inline constexpr std::int64_t ignored_label = -100;

/// Sums over valid tokens, those whose label counts: of a micro-batch, a step, or all ranks.
struct token_sums {
    double loss = 0;           ///< in nats
    double entropy = 0;        ///< of the predictions, in nats
    std::int64_t tokens = 0;   ///< valid ones
    std::int64_t correct = 0;  ///< whose label is the most probable

    /// From a mean over `tokens` valid tokens, which is anything, such as NaN, when there are none.
    static constexpr token_sums of_mean(double mean_loss, std::int64_t tokens) {
        return tokens == 0 ? token_sums{}
                           : token_sums{mean_loss * static_cast<double>(tokens), 0, tokens, 0};
    }

    /// A part without valid tokens adds nothing, whatever its sums are.
    constexpr token_sums& operator+=(token_sums const& part) {
        if (part.tokens == 0) return *this;
        loss += part.loss;
        entropy += part.entropy;
        tokens += part.tokens;
        correct += part.correct;
        return *this;
    }

    /// Of a token, in nats; 0 of none.
    constexpr double mean_loss() const { return mean(loss); }
    constexpr double mean_entropy() const { return mean(entropy); }
    constexpr double accuracy() const { return mean(static_cast<double>(correct)); }

   private:
    constexpr double mean(double sum) const {
        return tokens == 0 ? 0 : sum / static_cast<double>(tokens);
    }
};

namespace detail {

/// Sums over ranks in place, or throws on all what a rank brings instead; the last value is used
/// to tell.
template <class Comm>
void sum_or_fail(Comm const& ranks, std::span<double> values, fence_status const& status) {
    static_assert(reduces<Comm> || explain_reduces<Comm>());
    values.back() = status.code == errc::none ? 0 : 1;
    leaving_on_failure(ranks, [&] { ranks.all_reduce(values, reduction::sum); });
    if (values.back() != 0) leaving_on_failure(ranks, [&] { ranks.fence(status); });
}

}  // namespace detail

/// The sums of all ranks, the same bits on each; ranks without valid tokens add nothing.
/// *Blocking*: one small collective. *Throws* the same on every rank: `invalid_call` for counts that
/// cannot be.
template <class Comm>
token_sums sum_over_ranks(Comm const& ranks, token_sums const& mine, where at = where::here()) {
    fence_status status;
    guarded(status, [&] {
        if (mine.tokens < 0 || mine.correct < 0 || mine.correct > mine.tokens)
            raise(errc::invalid_call, at, "sum_over_ranks",
                  "correct tokens are among the valid ones, which are not negative", mine.correct,
                  " of ", mine.tokens);
    });
    token_sums counted;
    counted += mine;
    std::array sums{counted.loss, counted.entropy, static_cast<double>(counted.tokens),
                    static_cast<double>(counted.correct), 0.0};
    detail::sum_or_fail(ranks, sums, status);
    return {sums[0], sums[1], static_cast<std::int64_t>(sums[2]),
            static_cast<std::int64_t>(sums[3])};
}

/// What gradients of the token-sum loss are multiplied with, once, to become those of the mean over
/// the step's `tokens` valid tokens, all ranks and micro-batches together. `averaged_over`: how many
/// ranks the engine's own reducer divides by; 1 for one that sums. Of no tokens 0.
/// *Throws* `invalid_call`.
inline double gradient_factor(std::int64_t tokens, std::int64_t averaged_over = 1,
                              where at = where::here()) {
    if (tokens < 0 || averaged_over < 1)
        raise(errc::invalid_call, at, "gradient_factor",
              "tokens are not negative, and a reducer averages over at least 1 rank", tokens,
              " tokens, averaged over ", averaged_over);
    return tokens == 0 ? 0 : static_cast<double>(averaged_over) / static_cast<double>(tokens);
}

/// `values` times `factor`; a factor of 0 makes zeros of anything.
template <std::floating_point T>
void scale_gradients(std::span<T> values, double factor) {
    if (factor == 0)
        std::fill(values.begin(), values.end(), T(0));
    else if (factor != 1)
        for (auto& each : values) each = static_cast<T>(factor * each);  // a factor may be tiny
}

/// Sums gradients over ranks in rank order, and multiplies them by `factor`: the same bits on every
/// rank. *Blocking*: one collective. *Shape*: as many on every rank.
template <class Comm, std::floating_point T>
void reduce_gradients(Comm const& ranks, std::span<T> gradients, double factor) {
    static_assert(reduces<Comm> || explain_reduces<Comm>());
    leaving_on_failure(ranks, [&] { ranks.all_reduce(gradients, reduction::sum); });
    scale_gradients(gradients, factor);
}

/// Gradients of some weights on a rank.
template <std::floating_point T>
struct gradient_part {
    std::span<T> values{};
    bool sharded = false;  ///< each rank has others; else all have the same
};

struct clip_result {
    double norm = 0;     ///< of all gradients, before; the same bits on every rank
    double factor = 1;   ///< that they were multiplied with
    bool finite = true;  ///< else they are as they were: skip the update, on every rank alike
};

/// Keeps the L2 norm of all gradients of a mesh below a limit.
template <class Comm>
class gradient_clip {
    static_assert(reduces<Comm> || explain_reduces<Comm>());
    static_assert(gathers<Comm> || explain_gathers<Comm>());

   public:
    /// `ranks` hold the gradients between them: those of one copy of the model, `mesh::states()`.
    /// An infinite limit only measures. *Blocking*: collective. *Throws* the same on every rank:
    /// `disagreement`, `invalid_config` for a limit that is not positive.
    gradient_clip(Comm const& ranks, double largest_norm, where at = where::here())
        : ranks_(ranks), largest_(largest_norm) {
        std::vector<double> all;
        fence_status status;
        guarded(status, [&] {
            all.resize(static_cast<std::size_t>(ranks.size()));
            if (!(largest_norm > 0))
                raise(errc::invalid_config, at, "gradient_clip", "the largest norm is positive",
                      largest_norm);
        });
        all_gather_or_fail(ranks, std::as_bytes(std::span(&largest_norm, 1)),
                           std::as_writable_bytes(std::span(all)), status);
        for (std::size_t r = 1; r < all.size(); ++r)
            if (all[r] != all[0])
                raise(errc::disagreement, at, "gradient_clip",
                      "every rank must have the same largest norm", "rank 0 has ", all[0],
                      ", rank ", r, " has ", all[r]);
    }

    /// *Blocking*: one small collective, however many parts.
    template <std::floating_point T>
    clip_result operator()(std::span<gradient_part<T> const> parts) const {
        std::array squares{0.0, 0.0};
        for (auto const& part : parts)
            if (part.sharded || ranks_.rank() == 0)
                for (auto const each : part.values)
                    squares[0] += static_cast<double>(each) * static_cast<double>(each);
        detail::sum_or_fail(ranks_, squares, {});
        clip_result result{.norm = std::sqrt(squares[0])};
        result.finite = result.norm <= std::numeric_limits<double>::max();
        if (result.finite && result.norm > largest_) {
            result.factor = largest_ / result.norm;
            for (auto const& part : parts) scale_gradients(part.values, result.factor);
        }
        return result;
    }

   private:
    Comm ranks_;
    double largest_;
};

}  // namespace ulysses::inline ULYSSES_ABI
