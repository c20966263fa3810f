#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/core/communicator.hpp>
#include <ulysses/core/gemm.hpp>
#include <ulysses/core/observer.hpp>
#include <ulysses/core/projection.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/tensor.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <vector>

/// For each concept the smallest type that satisfies it, and types that fail it for a single reason:
/// each of those is the smallest one with one member hidden or spoilt. A derived class that deletes a
/// name hides the base's, which is how "the same without" is said here.
namespace archetypes {

namespace uly = ulysses;

// space -------------------------------------------------------------------------------------------

struct space {
    struct queue {};
    static void* allocate(queue, std::size_t bytes) {
        return ::operator new (bytes, std::align_val_t{64});
    }
    static void deallocate(queue, void* memory, std::size_t) {
        ::operator delete (memory, std::align_val_t{64});
    }
    static void copy(queue, std::span<uly::block_copy const>, std::size_t) {}
    template <class To, class From>
    static void add(queue, std::span<uly::block_sum const>) {}
};
struct space_without_queue {
    static void* allocate(int, std::size_t);
    static void deallocate(int, void*, std::size_t);
    static void copy(int, std::span<uly::block_copy const>, std::size_t);
    template <class To, class From>
    static void add(int, std::span<uly::block_sum const>);
};
struct space_with_unique_queue : space {
    struct queue {
        queue() = default;
        queue(queue const&) = delete;
        queue& operator=(queue const&) = delete;
    };
    static void* allocate(queue const&, std::size_t);
    static void deallocate(queue const&, void*, std::size_t);
    static void copy(queue const&, std::span<uly::block_copy const>, std::size_t);
    template <class To, class From>
    static void add(queue const&, std::span<uly::block_sum const>);
};
struct space_without_allocate : space {
    static void* allocate(queue, std::size_t) = delete;
};
struct space_with_typed_allocate : space {
    static char* allocate(queue, std::size_t);
};
struct space_without_deallocate : space {
    static void deallocate(queue, void*, std::size_t) = delete;
};
struct space_without_copy : space {
    static void copy(queue, std::span<uly::block_copy const>, std::size_t) = delete;
};
struct space_without_add : space {
    template <class To, class From>
    static void add(queue, std::span<uly::block_sum const>) = delete;
};

// communicator ------------------------------------------------------------------------------------

/// One rank; a group of one needs no more than this.
struct communicator {
    using space_type = space;
    int rank() const noexcept { return 0; }
    int size() const noexcept { return 1; }
    std::uint64_t begin_call() const { return 1; }
    void fence(uly::fence_status const& status) const { uly::throw_verdict({&status, 1}); }
};
struct communicator_without_space {
    int rank() const noexcept;
    int size() const noexcept;
    std::uint64_t begin_call() const;
    void fence(uly::fence_status const&) const;
};
struct unique_communicator : communicator {
    unique_communicator() = default;
    unique_communicator(unique_communicator const&) = delete;
    unique_communicator& operator=(unique_communicator const&) = delete;
};
struct communicator_without_rank : communicator {
    int rank() const noexcept = delete;
};
struct communicator_with_throwing_rank : communicator {
    int rank() const;
};
struct communicator_with_mutable_rank : communicator {
    int rank() noexcept;
};
struct communicator_with_wide_rank : communicator {
    std::int64_t rank() const noexcept;
};
struct communicator_without_size : communicator {
    int size() const noexcept = delete;
};
struct communicator_with_throwing_size : communicator {
    int size() const;
};
struct communicator_without_begin_call : communicator {
    std::uint64_t begin_call() const = delete;
};
struct communicator_without_fence : communicator {
    void fence(uly::fence_status const&) const = delete;
};

struct reaching_communicator : communicator {
    using window_type = std::shared_ptr<std::vector<std::byte>>;
    window_type make_window(std::size_t bytes) const {
        return std::make_shared<std::vector<std::byte>>(bytes);
    }
    window_type shared_window(uly::arena, std::size_t bytes) const { return make_window(bytes); }
    std::size_t shared_window_bytes(uly::arena) const { return 0; }
    std::byte* address(window_type const& window, int) const { return window->data(); }
};
struct reaching_without_window_type : communicator {
    std::byte* make_window(std::size_t) const;
    std::byte* shared_window(uly::arena, std::size_t) const;
    std::size_t shared_window_bytes(uly::arena) const;
    std::byte* address(std::byte* const&, int) const;
};
struct reaching_with_unique_window : reaching_communicator {
    using window_type = std::unique_ptr<std::byte>;
    window_type make_window(std::size_t) const;
    window_type shared_window(uly::arena, std::size_t) const;
    std::byte* address(window_type const&, int) const;
};
struct reaching_without_make_window : reaching_communicator {
    window_type make_window(std::size_t) const = delete;
};
struct reaching_without_shared_window : reaching_communicator {
    window_type shared_window(uly::arena, std::size_t) const = delete;
};
struct reaching_without_address : reaching_communicator {
    std::byte* address(window_type const&, int) const = delete;
};
struct reaching_with_untyped_address : reaching_communicator {
    void* address(window_type const&, int) const;
};
/// Has every member that reaching asks for, but is no communicator.
struct reaching_without_fence : reaching_communicator {
    void fence(uly::fence_status const&) const = delete;
};

struct messaging_communicator : reaching_communicator {
    using ticket_type = int;
    ticket_type start(std::span<uly::outgoing const>, std::span<uly::incoming const>) const {
        return 0;
    }
    void wait(ticket_type) const {}
};
struct messaging_without_ticket_type : reaching_communicator {
    int start(std::span<uly::outgoing const>, std::span<uly::incoming const>) const;
    void wait(int) const;
};
struct messaging_without_start : messaging_communicator {
    ticket_type start(std::span<uly::outgoing const>, std::span<uly::incoming const>) const = delete;
};
struct messaging_with_another_ticket : messaging_communicator {
    long start(std::span<uly::outgoing const>, std::span<uly::incoming const>) const;
};
struct messaging_without_wait : messaging_communicator {
    void wait(ticket_type) const = delete;
};
struct messaging_without_fence : messaging_communicator {
    void fence(uly::fence_status const&) const = delete;
};

struct leaving_communicator : communicator {
    void leave(std::string_view) const {}
};
struct leaving_without_leave : leaving_communicator {
    void leave(std::string_view) const = delete;
};

struct reducing_communicator : communicator {
    template <class T>
    void all_reduce(std::span<T>, uly::reduction) const {}
};
struct reducing_floats_only : communicator {
    void all_reduce(std::span<float>, uly::reduction) const;
};
struct reducing_without_fence : reducing_communicator {
    void fence(uly::fence_status const&) const = delete;
};

struct gathering_communicator : communicator {
    void all_gather(std::span<std::byte const>, std::span<std::byte>) const {}
    void broadcast(std::span<std::byte>, int) const {}
};
struct gathering_without_all_gather : gathering_communicator {
    void all_gather(std::span<std::byte const>, std::span<std::byte>) const = delete;
};
struct gathering_without_broadcast : gathering_communicator {
    void broadcast(std::span<std::byte>, int) const = delete;
};
struct gathering_without_fence : gathering_communicator {
    void fence(uly::fence_status const&) const = delete;
};

struct splitting_communicator : communicator {
    splitting_communicator split(int, int) const { return {}; }
};
struct splitting_into_others : communicator {
    communicator split(int, int) const;
};

// attention ---------------------------------------------------------------------------------------

/// Of floats; answers zero.
struct attention {
    using space_type = space;
    static constexpr uly::attention_features features{.full = true};
    static std::int64_t row_multiple() { return 1; }
    template <class T>
    static std::size_t workspace_bytes(uly::attention_extents const&) {
        return 0;
    }
    void forward(uly::attention_call const&, uly::head_view<float const>,
                 uly::head_view<float const>, uly::head_view<float const>, uly::head_view<float> o,
                 uly::head_view<float> lse) const {
        for (std::int64_t b = 0; b < o.batch(); ++b)
            for (std::int64_t s = 0; s < o.tokens(); ++s)
                for (std::int64_t h = 0; h < o.heads(); ++h) {
                    lse(b, s, h, 0) = 0;
                    for (std::int64_t d = 0; d < o.dim(); ++d) o(b, s, h, d) = 0;
                }
    }
};
struct attention_without_space {
    static constexpr uly::attention_features features{};
    static std::int64_t row_multiple();
    template <class T>
    static std::size_t workspace_bytes(uly::attention_extents const&);
    void forward(uly::attention_call const&, uly::head_view<float const>,
                 uly::head_view<float const>, uly::head_view<float const>, uly::head_view<float>,
                 uly::head_view<float>) const;
};
struct attention_without_features : attention {
    void features() const;
};
struct attention_without_row_multiple : attention {
    static std::int64_t row_multiple() = delete;
};
struct attention_without_workspace_bytes : attention {
    static std::size_t workspace_bytes() = delete;
};
struct attention_without_forward : attention {
    void forward() const = delete;
};
struct attention_with_mutable_forward : attention {
    void forward(uly::attention_call const&, uly::head_view<float const>,
                 uly::head_view<float const>, uly::head_view<float const>, uly::head_view<float>,
                 uly::head_view<float>);
};
/// Takes shards where attention needs whole sequences.
struct attention_on_shards : attention {
    void forward(uly::attention_call const&, uly::token_view<float const>,
                 uly::token_view<float const>, uly::token_view<float const>, uly::token_view<float>,
                 uly::token_view<float>) const;
};

struct differentiable_attention : attention {
    void backward(uly::attention_call const&, uly::attention_backward_views<float> const&) const {}
};
struct differentiable_attention_without_forward : differentiable_attention {
    void forward() const = delete;
};
/// Enqueues: its calls have a queue.
struct queued_attention : attention {
    using call = uly::queued<uly::attention_call, space>;
    using in = uly::head_view<float const>;
    using out = uly::head_view<float>;
    void forward(call const&, in, in, in, out, out) const;
    void backward(call const&, uly::attention_backward_views<float> const&) const;
    std::size_t prepare(call const&, in, in, in, out, out) const;
    std::size_t prepare(call const&, uly::attention_backward_views<float> const&) const;
};
struct queued_attention_of_the_host : queued_attention {
    using space_type = uly::host_space;
};

// gemm --------------------------------------------------------------------------------------------

struct gemm {
    using space_type = space;
    static constexpr bool rows_independent = true;
    void operator()(uly::gemm_call<float> const&) const {}
};
struct gemm_without_space {
    static constexpr bool rows_independent = true;
    void operator()(uly::gemm_call<float> const&) const;
};
struct gemm_without_call : gemm {
    void operator()(uly::gemm_call<float> const&) const = delete;
};
struct gemm_with_mutable_call : gemm {
    void operator()(uly::gemm_call<float> const&);
};
struct gemm_without_rows_independent : gemm {
    struct unknown {};
    static constexpr unknown rows_independent{};
};

// projection --------------------------------------------------------------------------------------

struct weights {};
struct gradients {};

struct projection {
    using space_type = space;
    using in = uly::token_view<float const>;
    using out = uly::token_view<float>;
    void project_in(uly::projection_call const&, in, weights const&, out, out, out) const {}
    void project_out(uly::projection_call const&, in, weights const&, out) const {}
};
struct projection_without_space {
    using in = uly::token_view<float const>;
    using out = uly::token_view<float>;
    void project_in(uly::projection_call const&, in, weights const&, out, out, out) const;
    void project_out(uly::projection_call const&, in, weights const&, out) const;
};
struct projection_without_project_in : projection {
    void project_in() const = delete;
};
struct projection_without_project_out : projection {
    void project_out() const = delete;
};

struct differentiable_projection : projection {
    void project_in_backward(uly::projection_call const&, in, weights const&, out, out, out, out,
                             gradients const&) const {}
    void project_out_backward(uly::projection_call const&, weights const&, in, out) const {}
    void project_out_gradients(uly::projection_call const&, in, in, gradients const&) const {}
};
struct projection_without_in_backward : differentiable_projection {
    void project_in_backward() const = delete;
};
struct projection_without_out_backward : differentiable_projection {
    void project_out_backward() const = delete;
};
struct projection_without_out_gradients : differentiable_projection {
    void project_out_gradients() const = delete;
};

// observer ----------------------------------------------------------------------------------------

struct observer {
    void begin(uly::step_id) noexcept {}
    void end(uly::step_id) noexcept {}
    void moved(int, int, std::size_t) noexcept {}
    void fence() noexcept {}
};
struct observer_without_begin : observer {
    void begin(uly::step_id) = delete;
};
struct observer_without_end : observer {
    void end(uly::step_id) = delete;
};
struct observer_without_moved : observer {
    void moved(int, int, std::size_t) = delete;
};
struct observer_without_fence : observer {
    void fence() = delete;
};
struct observer_with_throwing_begin : observer {
    void begin(uly::step_id);
};
struct observer_with_throwing_end : observer {
    void end(uly::step_id);
};
struct observer_with_throwing_moved : observer {
    void moved(int, int, std::size_t);
};
struct observer_with_throwing_fence : observer {
    void fence();
};
/// Is told of whole calls too.
struct call_observer : observer {
    using observer::begin, observer::end;
    void begin(uly::pass_kind) noexcept {}
    void end(uly::pass_kind) noexcept {}
};
struct call_observer_with_throwing_begin : call_observer {
    using call_observer::begin;
    void begin(uly::pass_kind);
};
struct call_observer_without_end : observer {
    using observer::begin;
    void begin(uly::pass_kind) noexcept {}
};
struct call_observer_without_begin : observer {
    using observer::end;
    void end(uly::pass_kind) noexcept {}
};
struct unique_observer : observer {
    unique_observer() = default;
    unique_observer(unique_observer const&) = delete;
    unique_observer& operator=(unique_observer const&) = delete;
};

// tensor ------------------------------------------------------------------------------------------

/// Packed, of any rank below 5 and any element, adopted by traits (below).
template <class T, std::size_t Rank>
struct foreign_tensor {
    T* first = nullptr;
    std::array<std::int64_t, Rank> sizes{};
};

/// By members, packed.
template <class T, std::size_t Rank>
struct member_tensor {
    T* first = nullptr;
    std::array<int, Rank> sizes{};
    T* data() const { return first; }
    std::array<int, Rank> const& extents() const { return sizes; }
};

/// What of std::mdspan is used.
template <class T, std::size_t Rank>
struct span_tensor {
    T* first = nullptr;
    std::array<std::size_t, Rank> sizes{}, steps{};
    T* data_handle() const { return first; }
    static constexpr std::size_t rank() { return Rank; }
    std::size_t extent(std::size_t axis) const { return sizes[axis]; }
    std::size_t stride(std::size_t axis) const { return steps[axis]; }
};

struct no_tensor {};
struct tensor_without_data {
    std::array<int, 3> extents() const;
};
struct tensor_without_extents {
    float* data() const;
};
struct tensor_with_extents_of_no_size {
    float* data() const;
    int const* extents() const;
};
struct tensor_of_void {
    void* data() const;
    std::array<int, 3> extents() const;
};
struct span_without_strides {
    float* data_handle() const;
    static std::size_t rank();
    std::size_t extent(std::size_t) const;
};

}  // namespace archetypes

template <class T, std::size_t Rank>
struct ulysses::tensor_traits<archetypes::foreign_tensor<T, Rank>> {
    using tensor = archetypes::foreign_tensor<T, Rank>;
    using space_type = archetypes::space;
    static T* data(tensor const& t) { return t.first; }
    static std::array<std::int64_t, Rank> extents(tensor const& t) { return t.sizes; }
};
