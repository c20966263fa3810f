#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/sdpa_key.hpp>
#include <ulysses/adapters/cudnn/sdpa_pass.hpp>
#include <ulysses/core/attention.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/tensor_view.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>

/// Attention by plans that are made at run time, each for one shape: what a work item's rows see, said in
/// cuDNN's words. Needs nothing of cuDNN: an engine makes and runs the plans.
namespace ulysses::inline ULYSSES_ABI {

/// Makes plans and runs them.
///
/// Requirements:
/// 1. `workspace_bytes(key)`, of an `sdpa_key` or a `sum_key`, makes the plan when it is first asked for.
///    It may take seconds, and throws `unsupported` where there is none.
/// 2. `run(queue, key, operands, workspace)` enqueues it.
/// 3. `write(queue, to, bytes)` copies bytes of the host, which the caller may change on return.
/// 4. `takes<T>`: element types. `row_bytes`: rows start on multiples of it.
/// 5. It may have `expect_memory(name, first, last)`, which throws `invalid_tensor` unless plans reach the
///    bytes from `first` to `last`: of what changes scores.
template <class E>
concept sdpa_engine = requires(E& engine, sdpa_key const& key, sum_key const& sum,
                               sdpa_operands const& operands, void* memory,
                               typename E::space_type::queue queue,
                               std::span<std::byte const> bytes) {
    { engine.workspace_bytes(key) } -> std::same_as<std::size_t>;
    { engine.workspace_bytes(sum) } -> std::same_as<std::size_t>;
    engine.run(queue, key, operands, memory);
    engine.run(queue, sum, operands, memory);
    engine.write(queue, memory, bytes);
    { E::template takes<half> } -> std::convertible_to<bool>;
    { E::row_bytes } -> std::convertible_to<std::int64_t>;
};

/// The attention functor over an engine, which outlives it.
///
/// *Shape*: as `attention_for` has it. Where samples or documents have lengths of their own, they go as
/// one plan of varied lengths if one band says what all of them see, else as a plan each.
///
/// Values of sinks, and a bias, lie in the engine's space; sinks are float. dk and dv of a work item are
/// rounded to T before they are added.
///
/// *Throws* `unsupported` by `prepare`, before anything moves, with the plan that there is not.
/// *Thread safety*: its engine's.
template <sdpa_engine Engine>
class sdpa_attention {
   public:
    using space_type = typename Engine::space_type;
    static constexpr attention_features features{.causal = true,
                                                 .full = true,
                                                 .grouped = true,
                                                 .value_dim = true,
                                                 .row_range = true,
                                                 .window = true,
                                                 .documents = true,
                                                 .padding = true,
                                                 .softcap = true,
                                                 .alibi = true,
                                                 .bias = true,
                                                 .sinks = true,
                                                 .local_dropout = true};

    explicit sdpa_attention(Engine& engine, sdpa_options const& options = {})
        : engine_(&engine), options_(options) {}

    /// Of the tiles of rows that cuDNN's kernels compute together.
    static constexpr std::int64_t row_multiple() { return 128; }

    /// About what a call needs; `prepare` says exactly. Backward: sums of dq in float, dk and dv of each
    /// query head, and those of an item; with `deterministic` the products of all rows and keys.
    template <class T>
    std::size_t workspace_bytes(attention_extents const& e) const {
        auto const rows = e.batch * e.heads * e.rows, keys = e.batch * e.keys;
        auto const dims = e.head_dim + e.value_dim;
        auto const element = static_cast<std::int64_t>(sizeof(T));
        auto const sums = options_.deterministic ? 2 * rows * e.keys : 4 * rows * e.head_dim;
        auto const shared = e.heads == e.kv_heads ? 0 : 2 * element * keys * e.heads * dims;
        return static_cast<std::size_t>(sums + 8 * rows + shared +
                                        element * keys * e.kv_heads * dims);
    }

    template <class Call, class T>
        requires(std::derived_from<Call, attention_call>&& Engine::template takes<T>)
    std::size_t prepare(Call const& call, head_view<T const> q, head_view<T const> k,
                        head_view<T const> v, head_view<T> o, head_view<accumulator_t<T>> lse)
    const { return pass<T>(call, false).forward(q, k, v, o, lse); }
    template <class Call, class T>
        requires(std::derived_from<Call, attention_call>&& Engine::template takes<T>)
    std::size_t prepare(Call const& call, attention_backward_views<T> const& views)
    const { return pass<T>(call, false).backward(views); }

    template <class Call, class T>
        requires(std::derived_from<Call, attention_call>&& Engine::template takes<T>)
    void forward(Call const& call, head_view<T const> q, head_view<T const> k, head_view<T const> v,
                 head_view<T> o, head_view<accumulator_t<T>> lse) const {
        expect_workspace(call, prepare(call, q, k, v, o, lse));
        pass<T>(call, true).forward(q, k, v, o, lse);
    }

    template <class Call, class T>
        requires(std::derived_from<Call, attention_call>&& Engine::template takes<T>)
    void backward(Call const& call, attention_backward_views<T> const& views) const {
        expect_workspace(call, prepare(call, views));
        pass<T>(call, true).backward(views);
    }

    /// Refuses views of another layout.
    template <class... Views>
        requires other_layout<Views...>
    void forward(attention_call const&, Views const&...) const {
        static_assert(explain_layout<Views...>());
    }

   private:
    template <class T, class Call>
    auto pass(Call const& call, bool runs) const {
        typename space_type::queue queue{};
        if constexpr (requires { call.queue; }) queue = call.queue;
        return detail::sdpa_pass<Engine, T>(*engine_, options_, call, queue, runs);
    }

    static void expect_workspace(attention_call const& call, std::size_t needed) {
        if (call.workspace.size() < needed)
            raise(errc::invalid_call, where{}, "attention",
                  "workspace must hold what prepare() said", call.workspace.size(),
                  " bytes, needed are ", needed);
    }

    Engine* engine_;
    sdpa_options options_;
};

}  // namespace ulysses::inline ULYSSES_ABI
