#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/train/accounting.hpp>
#include <ulysses/train/agree.hpp>
#include <ulysses/train/batch.hpp>
#include <ulysses/train/loss.hpp>
#include <ulysses/train/mesh.hpp>
#include <ulysses/train/source.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <limits>
#include <optional>
#include <ranges>
#include <span>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>

/// Training around a forward and a backward of one's own: mesh, sharded micro-batches, weighted loss,
/// the gradient contract, clipping, numbers and evaluation.
///
///     auto run = ulysses::prepare(config, group, samples, std::tuple{ids_field(&sample::ids), ...});
///     while (auto const update = run.step(gradients, forward_and_backward))
///         if (update->clip.finite) optimizer(gradients);
namespace ulysses::inline ULYSSES_ABI {

/// How a session evaluates; results are equal within the rounding of adding in another order.
enum class evaluation : std::uint8_t {
    sharded,  ///< the ranks of a sequence share it, as in training
    bypass,   ///< each rank has whole sequences of its own; layers exchange nothing
};

/// Equal on every rank.
struct session_config {
    parallel_config parallel{};
    step_config step{};
    /// Of `step` are `micro_batch`, and `tokens`, which is `max_length`.
    batch_options batches{};
    double largest_norm = std::numeric_limits<double>::infinity();  ///< of the mean's gradients
    evaluation evaluates = evaluation::sharded;
};

constexpr std::array<setting, 6> settings_of(session_config& config) {
    auto const ranks = settings_of(config.parallel);
    auto const step = settings_of(config.step);
    return {ranks[0], ranks[1], ranks[2], step[0], step[1], step[2]};
}

/// What an update of the weights is made from.
struct update_result {
    token_sums sums{};  ///< of all ranks and micro-batches
    clip_result clip{};
};

/// A source of a rank's own samples as it is; of a range that all ranks have, this rank's share.
template <class Given, class Comm>
auto source_of(Given&& given, mesh<Comm> const& ranks, std::int64_t micro_batch) {
    constexpr bool own = sample_source<std::remove_cvref_t<Given>>;
    static_assert(own ||
                      (std::ranges::random_access_range<Given> && std::ranges::sized_range<Given>),
                  "ulysses: a session takes a sample_source of each rank's own samples, or a "
                  "random-access range that all ranks have.");
    if constexpr (own)
        return std::forward<Given>(given);
    else
        return dealt_source{std::forward<Given>(given), dealing_of(ranks, micro_batch)};
}

/// What is dealt out is no rank's twice, though the range may have equal samples.
template <class Given>
void allow_duplicates_of(batch_options& options) {
    if (!sample_source<std::remove_cvref_t<Given>>) options.duplicates_allowed = true;
}

/// A run, seen from one rank; made by `prepare`. The model, its gradients and the optimizer are the
/// engine's.
///
/// *Thread safety*: one per rank, on the thread of its communicators.
template <class Comm, sample_source Source, class... Fields>
class session {
    static_assert(reduces<Comm> || explain_reduces<Comm>());

   public:
    using batches_type = batch_adapter<Comm, Source, Fields...>;
    using batch_type = typename batches_type::batch_type;

    session(mesh<Comm> const& ranks, session_config const& config, Source source,
            std::tuple<Fields...> const& fields, where at = where::here())
        : at_(at),
          ranks_(ranks),
          config_(agreed(ranks.world(), config, at)),
          alone_(config.evaluates == evaluation::bypass
                     ? mesh<Comm>(ranks.world(), {.dp_shard = ranks.world().size()}, at)
                     : ranks),
          fields_(fields),
          numbers_(config.parallel, config.step, at),
          batches_(ranks, std::move(source), fields, options_of(config), at),
          clip_(ranks.states(), config.largest_norm, at) {}

    mesh<Comm> const& ranks() const { return ranks_; }
    accounting const& numbers() const { return numbers_; }
    batches_type& batches() { return batches_; }

    /// One update's micro-batches: `body(batch)` computes a micro-batch forward and backward, and
    /// returns the sums of this rank's tokens; gradients are those of the loss sum, added up over
    /// micro-batches. *Returns* the sums over all ranks, whose `tokens` `gradient_factor` takes, or
    /// nothing at the end of the epoch; the epoch's last update may be of fewer micro-batches.
    ///
    /// *Blocking*: collective over the mesh. *Throws* the same on every rank what
    /// `batch_adapter::next` and `sum_over_ranks` do, and `invalid_call` within a body. What `body`
    /// throws on some ranks alone, as on those of one sequence among several, ends the session: the
    /// others get `peer_failed`.
    template <class Body>
    std::optional<token_sums> accumulate(Body&& body) {
        check_between_updates();
        within const update{in_update_};
        token_sums mine;
        std::int64_t done = 0;
        while (done < numbers_.step().gradient_accumulation && batches_.next(batch_)) {
            mine += called(ranks_.sp(), body, std::as_const(batch_));
            ++done;
        }
        if (done == 0) return {};
        return sum_over_ranks(ranks_.world(), mine, at_);
    }

    /// `accumulate` for gradients of which every rank has all: they begin at zero, are summed over
    /// ranks, become those of the mean loss, and are clipped. Where `clip.finite` is false, on every
    /// rank alike, the update is to be left out.
    template <std::floating_point T, class Body>
    std::optional<update_result> step(std::span<T> gradients, Body&& body) {
        check_between_updates();
        std::ranges::fill(gradients, T(0));
        auto const sums = accumulate(body);
        if (!sums) return {};
        reduce_gradients(ranks_.world(), gradients, gradient_factor(sums->tokens, 1, at_));
        gradient_part<T> const part{.values = gradients};
        return update_result{*sums, clip_(std::span<gradient_part<T> const>(&part, 1))};
    }

    /// As those of `batch_adapter`, between updates. *Throws* `invalid_call` within a body too.
    void restart() {
        check_between_updates();
        batches_.restart();
    }
    batch_state state() const {
        check_between_updates();
        return batches_.state();
    }
    void restore(batch_state const& state) {
        check_between_updates();
        batches_.restore(state);
    }

    /// The ranks that share a sequence in evaluation, which a model's pipelines for it are made over:
    /// `ranks().sp()`, or a group of this rank alone.
    Comm const& evaluation_ranks() const { return alone_.sp(); }

    /// Sums over all samples, each once, of a source or range as `prepare` takes it: `body(batch)`
    /// computes a micro-batch forward and returns the sums of this rank's tokens. Training goes on
    /// afterwards where it was. *Blocking*, *Throws* as `accumulate`.
    template <class Given, class Body>
    token_sums evaluate(Given&& given, Body&& body) {
        auto options = options_of(config_);
        options.end = at_end::pad;
        allow_duplicates_of<Given>(options);
        batch_adapter batches{alone_,
                              source_of(std::forward<Given>(given), alone_, options.micro_batch),
                              fields_, options, at_};
        typename decltype(batches)::batch_type batch;
        token_sums mine;
        while (batches.next(batch)) mine += called(alone_.sp(), body, std::as_const(batch));
        return sum_over_ranks(ranks_.world(), mine, at_);
    }

   private:
    struct within {
        bool& flag;
        explicit within(bool& entered) : flag(entered) { flag = true; }
        within(within const&) = delete;
        within& operator=(within const&) = delete;
        ~within() { flag = false; }
    };
    void check_between_updates() const {
        if (in_update_)
            raise(errc::invalid_call, at_, "session",
                  "an update ends before the next, and before the run is saved or restored",
                  "called within the body of one");
    }

    static session_config const& agreed(Comm const& world, session_config const& config, where at) {
        agree_on(world, "session",
                 std::array<std::string_view, 4>{"micro_batch", "gradient_accumulation", "tokens",
                                                 "evaluation"},
                 std::array{config.step.micro_batch, config.step.gradient_accumulation,
                            config.step.tokens, static_cast<std::int64_t>(config.evaluates)},
                 {}, at);
        return config;
    }
    static batch_options options_of(session_config const& config) {
        auto options = config.batches;
        options.micro_batch = config.step.micro_batch;
        options.max_length = config.step.tokens;
        return options;
    }

    /// An error that `group`, which the batch is shared by, has left a call with has a rank that broke
    /// the rule. Where other ranks do not know of it, they are released.
    template <class Body, class Batch>
    token_sums called(Comm const& group, Body& body, Batch const& batch) {
        token_sums sums;
        auto const& world = ranks_.world();
        leaving_unless(
            world, [&](error const& e) { return e.rank() >= 0 && group.size() == world.size(); },
            [&] { sums = body(batch); });
        return sums;
    }

    where at_;  ///< where the session was made: what its errors name
    mesh<Comm> ranks_;
    session_config config_;
    mesh<Comm> alone_;  ///< for evaluation
    std::tuple<Fields...> fields_;
    accounting numbers_;
    batches_type batches_;
    batch_type batch_;
    gradient_clip<Comm> clip_;
    bool in_update_ = false;
};

/// A session over a group. `given` is a source of each rank's own samples, or a random-access range
/// that all ranks have: it is dealt out, so that updates are of the same samples at every division of
/// the ranks. *Blocking*: collective. *Throws* the same on every rank: `disagreement` when ranks pass
/// other configurations or fields, `invalid_config` with all numbers for what cannot be.
template <class Comm, class Given, class... Fields>
auto prepare(session_config config, Comm const& group, Given&& given,
             std::tuple<Fields...> const& fields, where at = where::here()) {
    mesh<Comm> const ranks(group, config.parallel, at);
    allow_duplicates_of<Given>(config.batches);
    auto source = source_of(std::forward<Given>(given), ranks, config.step.micro_batch);
    return session<Comm, decltype(source), Fields...>(ranks, config, std::move(source), fields, at);
}

}  // namespace ulysses::inline ULYSSES_ABI
