#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/device.hpp>
#include <ulysses/adapters/cudnn/sdpa_key.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>

#include <cudnn_frontend.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

/// One plan of cuDNN's attention, forward or backward, from its key.
namespace ulysses::inline ULYSSES_ABI {

/// Which operand of a plan an address is for.
enum class sdpa_operand : std::int64_t {
    q = 1,
    k,
    v,
    o,
    lse,
    dout,
    dq,
    dk,
    dv,
    sinks,
    dsinks,
    bias,
    seed,
    offset,
};

/// A graph that cuDNN has made a plan of. Operands lie where the key says; dk and dv, in the operands'
/// element type, lie packed [batch, head, key, dim].
class sdpa_plan {
   public:
    /// *Blocking*: up to seconds, while cuDNN compiles.
    /// *Throws* `unsupported` with cuDNN's own words where it has no plan for the key.
    sdpa_plan(sdpa_key const& key, cudnn_device const& device, where at = where::here())
        : key_(key), graph_(std::make_unique<fe::graph::Graph>()) {
        auto const type = frontend_type(key.type);
        graph_->set_io_data_type(type)
            .set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        device.describe_to(*graph_);
        if (key.backward)
            add_backward(type);
        else
            add_forward(type);
        auto const expect = [&](fe::error_t const& result) {
            if (result.is_bad())
                raise(errc::unsupported, at, "cudnn", "a plan exists for what is asked", key.text(),
                      "; ", one_line(result.err_msg));
        };
        expect(graph_->validate());
        if (device.handle() != nullptr)
            expect(graph_->build_operation_graph(device.handle()));
        else
            expect(graph_->build_operation_graph());
        expect(graph_->create_execution_plans({fe::HeurMode_t::A}));
        expect(graph_->check_support());
        expect(graph_->build_plans());
        std::int64_t bytes = 0;
        expect(graph_->get_workspace_size(bytes));
        workspace_bytes_ = static_cast<std::size_t>(bytes);
    }

    sdpa_key const& key() const { return key_; }

    /// What a run needs, aligned to 64.
    std::size_t workspace_bytes() const { return workspace_bytes_; }

    /// Enqueues the plan on the handle's stream.
    /// *Throws* `functor_failed` with cuDNN's own words.
    void run(cudnnHandle_t handle, std::unordered_map<std::int64_t, void*>& operands,
             void* workspace) const {
        auto const result = graph_->execute(handle, operands, workspace);
        if (result.is_bad())
            raise(errc::functor_failed, where{}, "cudnn", "a plan can be enqueued", key_.text(),
                  "; ", one_line(result.err_msg));
    }

   private:
    using tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
    using sizes = std::vector<std::int64_t>;

    static fe::DataType_t frontend_type(dtype type) {
        switch (type) {
            case dtype::f16: return fe::DataType_t::HALF;
            case dtype::bf16: return fe::DataType_t::BFLOAT16;
            case dtype::f32: return fe::DataType_t::FLOAT;
            case dtype::f64:
            case dtype::none: break;
        }
        raise(errc::unsupported, where{}, "cudnn", "elements are bf16 or f16", name(type));
    }

    static std::string one_line(std::string text) {
        for (auto& c : text)
            if (c == '\n') c = ' ';
        return text;
    }

    void place(fe::graph::Tensor_attributes& to, sdpa_operand which, sizes const& extents,
               sizes const& strides, fe::DataType_t type) const {
        to.set_uid(static_cast<std::int64_t>(which))
            .set_dim(extents)
            .set_stride(strides)
            .set_data_type(type);
    }
    tensor input(sdpa_operand which, sizes const& extents, sizes const& strides,
                 fe::DataType_t type) const {
        fe::graph::Tensor_attributes attributes;
        attributes.set_name("t" + std::to_string(static_cast<std::int64_t>(which)));
        place(attributes, which, extents, strides, type);
        return graph_->tensor(attributes);
    }
    void output(tensor const& to, sdpa_operand which, sizes const& extents, sizes const& strides,
                fe::DataType_t type) const {
        place(*to, which, extents, strides, type);
        to->set_output(true);
    }

    /// cuDNN's order is [batch, head, token, dim].
    static sizes in_order(row_strides const& strides) {
        return {strides[0], strides[2], strides[1], 1};
    }
    static sizes packed(sizes const& extents) {
        return {extents[1] * extents[2] * extents[3], extents[2] * extents[3], extents[3], 1};
    }
    sizes query_extents(std::int64_t dim) const { return {key_.batch, key_.heads, key_.rows, dim}; }
    sizes key_extents(std::int64_t dim) const {
        return {key_.batch, key_.kv_heads, key_.keys, dim};
    }
    sizes head_extents() const { return {1, key_.heads, 1, 1}; }

    /// What is said alike forward and backward.
    template <class Attributes>
    Attributes asked() const {
        Attributes attributes;
        attributes.set_name("attention").set_attn_scale(static_cast<float>(key_.scale));
        auto const& band = key_.band;
        if (band != sdpa_band{})
            attributes.set_diagonal_alignment(band.from_last ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                             : fe::DiagonalAlignment_t::TOP_LEFT);
        if (band.left >= 0) attributes.set_diagonal_band_left_bound(static_cast<int>(band.left));
        if (band.right >= 0) attributes.set_diagonal_band_right_bound(static_cast<int>(band.right));
        if (key_.bias_type != dtype::none) {
            auto const& [b, i, h, j] = key_.bias_extents;
            auto const& steps = key_.bias_strides;
            attributes.set_bias(input(sdpa_operand::bias, {b, h, i, j},
                                      {steps[0], steps[2], steps[1], steps[3]},
                                      frontend_type(key_.bias_type)));
        }
        if (key_.sinks)
            attributes.set_sink_token(input(sdpa_operand::sinks, head_extents(),
                                            packed(head_extents()), fe::DataType_t::FLOAT));
        if (key_.dropout > 0) {
            sizes const one{1, 1, 1, 1};
            attributes.set_dropout(static_cast<float>(key_.dropout),
                                   input(sdpa_operand::seed, one, one, fe::DataType_t::INT64),
                                   input(sdpa_operand::offset, one, one, fe::DataType_t::INT64));
        }
        return attributes;
    }

    void add_forward(fe::DataType_t type) const {
        auto const q = input(sdpa_operand::q, query_extents(key_.head_dim), in_order(key_.q), type);
        auto const k = input(sdpa_operand::k, key_extents(key_.head_dim), in_order(key_.k), type);
        auto const v = input(sdpa_operand::v, key_extents(key_.value_dim), in_order(key_.v), type);
        auto attributes = asked<fe::graph::SDPA_attributes>();
        attributes.set_generate_stats(true);
        auto const results = graph_->sdpa(q, k, v, std::move(attributes));
        output(results[0], sdpa_operand::o, query_extents(key_.value_dim), in_order(key_.o), type);
        output(results[1], sdpa_operand::lse, query_extents(1), in_order(key_.lse),
               fe::DataType_t::FLOAT);
    }

    void add_backward(fe::DataType_t type) const {
        auto const rows = query_extents(key_.head_dim), outs = query_extents(key_.value_dim);
        auto const q = input(sdpa_operand::q, rows, in_order(key_.q), type);
        auto const k = input(sdpa_operand::k, key_extents(key_.head_dim), in_order(key_.k), type);
        auto const v = input(sdpa_operand::v, key_extents(key_.value_dim), in_order(key_.v), type);
        auto const o = input(sdpa_operand::o, outs, in_order(key_.o), type);
        auto const dout = input(sdpa_operand::dout, outs, in_order(key_.dout), type);
        auto const lse =
            input(sdpa_operand::lse, query_extents(1), in_order(key_.lse), fe::DataType_t::FLOAT);
        auto attributes = asked<fe::graph::SDPA_backward_attributes>();
        attributes.set_deterministic_algorithm(key_.deterministic);
        if (key_.sinks) {
            auto const dsinks = input(sdpa_operand::dsinks, head_extents(), packed(head_extents()),
                                      fe::DataType_t::FLOAT);
            dsinks->set_output(true);
            attributes.set_dsink_token(dsinks);
        }
        auto const results = graph_->sdpa_backward(q, k, v, o, dout, lse, std::move(attributes));
        output(results[0], sdpa_operand::dq, rows, in_order(key_.dq), type);
        output(results[1], sdpa_operand::dk, key_extents(key_.head_dim),
               packed(key_extents(key_.head_dim)), type);
        output(results[2], sdpa_operand::dv, key_extents(key_.value_dim),
               packed(key_extents(key_.value_dim)), type);
    }

    sdpa_key key_;
    std::unique_ptr<fe::graph::Graph> graph_;
    std::size_t workspace_bytes_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI
