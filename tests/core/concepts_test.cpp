// SPDX-License-Identifier: Apache-2.0

#include <ulysses/comm/serial.hpp>
#include <ulysses/comm/threads.hpp>
#include <ulysses/observer/counting.hpp>
#include <ulysses/observer/several.hpp>
#include <ulysses/observer/trace.hpp>
#include <ulysses/pipeline.hpp>
#include <ulysses/space/host.hpp>

#include "../archetypes.hpp"

#include <doctest/doctest.h>

#include <span>
#include <vector>

// Each concept holds for the smallest type that has what its documentation lists, and fails for
// each type that lacks one of those things.

namespace uly = ulysses;
namespace a = archetypes;

static_assert(uly::space<a::space>);
static_assert(!uly::space<a::space_without_queue>);
static_assert(!uly::space<a::space_with_unique_queue>);
static_assert(!uly::space<a::space_without_allocate>);
static_assert(!uly::space<a::space_with_typed_allocate>);
static_assert(!uly::space<a::space_without_deallocate>);
static_assert(!uly::space<a::space_without_copy>);
static_assert(!uly::space<a::space_without_add>);
static_assert(uly::space<uly::host_space>);

static_assert(uly::communicator<a::communicator>);
static_assert(!uly::communicator<a::communicator_without_space>);
static_assert(!uly::communicator<a::unique_communicator>);
static_assert(!uly::communicator<a::communicator_without_rank>);
static_assert(!uly::communicator<a::communicator_with_throwing_rank>);
static_assert(!uly::communicator<a::communicator_with_mutable_rank>);
static_assert(!uly::communicator<a::communicator_with_wide_rank>);
static_assert(!uly::communicator<a::communicator_without_size>);
static_assert(!uly::communicator<a::communicator_with_throwing_size>);
static_assert(!uly::communicator<a::communicator_without_begin_call>);
static_assert(!uly::communicator<a::communicator_without_fence>);

static_assert(uly::reaches_memory<a::reaching_communicator>);
static_assert(!uly::reaches_memory<a::communicator>);
static_assert(!uly::reaches_memory<a::reaching_without_window_type>);
static_assert(!uly::reaches_memory<a::reaching_with_unique_window>);
static_assert(!uly::reaches_memory<a::reaching_without_make_window>);
static_assert(!uly::reaches_memory<a::reaching_without_shared_window>);
static_assert(!uly::reaches_memory<a::reaching_without_address>);
static_assert(!uly::reaches_memory<a::reaching_with_untyped_address>);
static_assert(!uly::reaches_memory<a::reaching_without_fence>);

static_assert(uly::reduces<a::reducing_communicator>);
static_assert(!uly::reduces<a::communicator>);
static_assert(!uly::reduces<a::reducing_floats_only>);
static_assert(!uly::reduces<a::reducing_without_fence>);

static_assert(uly::gathers<a::gathering_communicator>);
static_assert(!uly::gathers<a::gathering_without_all_gather>);
static_assert(!uly::gathers<a::gathering_without_broadcast>);
static_assert(!uly::gathers<a::gathering_without_fence>);

static_assert(uly::splits<a::splitting_communicator>);
static_assert(!uly::splits<a::communicator>);
static_assert(!uly::splits<a::splitting_into_others>);

// One capability does not bring another.
static_assert(!uly::reaches_memory<a::reducing_communicator>);
static_assert(!uly::reduces<a::gathering_communicator>);
static_assert(!uly::gathers<a::splitting_communicator>);
static_assert(!uly::splits<a::reaching_communicator>);

static_assert(uly::sends_messages<a::messaging_communicator>);
static_assert(!uly::sends_messages<a::reaching_communicator>);
static_assert(!uly::sends_messages<a::messaging_without_ticket_type>);
static_assert(!uly::sends_messages<a::messaging_without_start>);
static_assert(!uly::sends_messages<a::messaging_with_another_ticket>);
static_assert(!uly::sends_messages<a::messaging_without_wait>);
static_assert(!uly::sends_messages<a::messaging_without_fence>);

static_assert(uly::can_leave<a::leaving_communicator>);
static_assert(!uly::can_leave<a::communicator>);
static_assert(!uly::can_leave<a::leaving_without_leave>);

template <class C>
concept complete = uly::reaches_memory<C> && uly::reduces<C> && uly::gathers<C> && uly::splits<C>;
static_assert(complete<uly::serial>);
static_assert(complete<uly::threads::communicator>);
static_assert(uly::sends_messages<uly::threads::communicator> && uly::can_leave<uly::threads::communicator>);

static_assert(uly::attention_for<a::attention, float>);
static_assert(!uly::attention_for<a::attention, double>);  // its views are of floats
static_assert(!uly::attention_for<a::attention, uly::half>);
static_assert(!uly::attention_for<a::attention_without_space, float>);
static_assert(!uly::attention_for<a::attention_without_features, float>);
static_assert(!uly::attention_for<a::attention_without_row_multiple, float>);
static_assert(!uly::attention_for<a::attention_without_workspace_bytes, float>);
static_assert(!uly::attention_for<a::attention_without_forward, float>);
static_assert(!uly::attention_for<a::attention_with_mutable_forward, float>);
static_assert(!uly::attention_for<a::attention_on_shards, float>);

static_assert(uly::differentiable_attention_for<a::differentiable_attention, float>);
static_assert(!uly::differentiable_attention_for<a::differentiable_attention, double>);
static_assert(!uly::differentiable_attention_for<a::attention, float>);
static_assert(
    !uly::differentiable_attention_for<a::differentiable_attention_without_forward, float>);

static_assert(uly::differentiable_attention_for<a::queued_attention, float>);
static_assert(uly::prepared_attention_for<a::queued_attention, float>);
static_assert(!uly::attention_for<a::queued_attention_of_the_host, float>);

static_assert(uly::gemm_for<a::gemm, float>);
static_assert(!uly::gemm_for<a::gemm, double>);
static_assert(!uly::gemm_for<a::gemm_without_space, float>);
static_assert(!uly::gemm_for<a::gemm_without_call, float>);
static_assert(!uly::gemm_for<a::gemm_with_mutable_call, float>);
static_assert(!uly::gemm_for<a::gemm_without_rows_independent, float>);

static_assert(uly::projection_for<a::projection, float, a::weights>);
static_assert(!uly::projection_for<a::projection, double, a::weights>);
static_assert(!uly::projection_for<a::projection, float, int>);
static_assert(!uly::projection_for<a::projection_without_space, float, a::weights>);
static_assert(!uly::projection_for<a::projection_without_project_in, float, a::weights>);
static_assert(!uly::projection_for<a::projection_without_project_out, float, a::weights>);
static_assert(!uly::projection_for<uly::no_projection, float, a::weights>);

template <class Projection>
concept differentiable =
    uly::differentiable_projection_for<Projection, float, a::weights, a::gradients>;
static_assert(differentiable<a::differentiable_projection>);
static_assert(!differentiable<a::projection>);
static_assert(!differentiable<a::projection_without_in_backward>);
static_assert(!differentiable<a::projection_without_out_backward>);
static_assert(!differentiable<a::projection_without_out_gradients>);

static_assert(uly::observer<a::observer>);
static_assert(uly::observer<uly::no_observer>);
static_assert(uly::observer<uly::counting_observer>);
static_assert(!uly::observer<a::observer_without_begin>);
static_assert(!uly::observer<a::observer_without_end>);
static_assert(!uly::observer<a::observer_without_moved>);
static_assert(!uly::observer<a::observer_without_fence>);
static_assert(!uly::observer<a::observer_with_throwing_begin>);
static_assert(!uly::observer<a::observer_with_throwing_end>);
static_assert(!uly::observer<a::observer_with_throwing_moved>);
static_assert(!uly::observer<a::observer_with_throwing_fence>);
static_assert(uly::observer<a::call_observer>);
static_assert(!uly::observer<a::call_observer_with_throwing_begin>);
static_assert(!uly::observer<a::call_observer_without_end>);
static_assert(!uly::observer<a::call_observer_without_begin>);
static_assert(uly::observes_calls<a::call_observer>);
static_assert(!uly::observes_calls<a::observer>);
static_assert(!uly::observes_calls<uly::counting_observer>);
static_assert(uly::observer<uly::trace_observer>);
static_assert(uly::observes_calls<uly::trace_observer>);
static_assert(uly::observer<uly::observers<>>);
static_assert(uly::observer<uly::observers<a::observer, a::call_observer>>);
static_assert(!uly::observer<a::unique_observer>);

// Three tiers, each with every element type and const ones.
static_assert(uly::tensor_like<a::foreign_tensor<float, 4>>);
static_assert(uly::tensor_like<a::foreign_tensor<double const, 3>>);
static_assert(uly::tensor_like<a::member_tensor<uly::half, 4>>);
static_assert(uly::tensor_like<a::member_tensor<uly::bf16 const, 2>>);
static_assert(uly::tensor_like<a::span_tensor<float, 4>>);
static_assert(uly::tensor_like<a::span_tensor<float const, 3>>);
static_assert(uly::tensor_like<uly::token_view<float>>);
static_assert(!uly::tensor_like<a::foreign_tensor<int, 4>>);
static_assert(!uly::tensor_like<a::member_tensor<long double, 4>>);
static_assert(!uly::tensor_like<a::span_tensor<std::byte, 4>>);
static_assert(!uly::tensor_like<a::no_tensor>);
static_assert(!uly::tensor_like<a::tensor_without_data>);
static_assert(!uly::tensor_like<a::tensor_without_extents>);
static_assert(!uly::tensor_like<a::tensor_with_extents_of_no_size>);
static_assert(!uly::tensor_like<a::tensor_of_void>);
static_assert(!uly::tensor_like<a::span_without_strides>);
static_assert(!uly::tensor_like<std::vector<float>>);

TEST_CASE("pipeline: its stages call no more than the concepts list") {
    // Instantiates every call of a pipeline over types that have nothing else.
    uly::pipeline layer{a::reaching_communicator{},     uly::sequence_local{},
                        a::differentiable_attention{},  uly::shape{.heads = 2, .head_dim = 4},
                        a::differentiable_projection{}, a::observer{}};
    auto const step = uly::sequence::split(1, 1, 3);
    std::vector<float> values(5 * 24, 7.0f);
    auto const tensor = [&](std::size_t place) {
        return a::foreign_tensor<float, 4>{values.data() + 24 * place, {1, 3, 2, 4}};
    };
    auto saved = layer.make_context();
    layer.attend(step, saved, tensor(0), tensor(1), tensor(2), tensor(3));
    for (std::size_t i = 72; i < 96; ++i) CHECK(values[i] == 0.0f);
    layer.attend_backward(step, saved, tensor(3), tensor(0), tensor(1), tensor(2));

    auto const tokens = [&](std::size_t place) {
        return a::foreign_tensor<float, 3>{values.data() + 24 * place, {1, 3, 8}};
    };
    layer.forward(step, saved, tokens(0), a::weights{}, tokens(1));
    layer.backward(step, saved, tokens(0), a::weights{}, tokens(1), tokens(2), a::gradients{});
}
