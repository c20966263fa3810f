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
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

/// Plans of cuDNN's attention, forward and backward, and of the sums beside it, from their keys.
namespace ulysses::inline ULYSSES_ABI {

namespace detail {

/// A graph of cuDNN and the plan that was made of it.
class cudnn_graph {
   public:
    using tensor = std::shared_ptr<fe::graph::Tensor_attributes>;
    using sizes = std::vector<std::int64_t>;

    explicit cudnn_graph(cudnn_device const& device)
        : graph_(std::make_unique<fe::graph::Graph>()) {
        graph_->set_intermediate_data_type(fe::DataType_t::FLOAT)
            .set_compute_data_type(fe::DataType_t::FLOAT);
        device.describe_to(*graph_);
    }

    fe::graph::Graph& graph() const { return *graph_; }

    static fe::DataType_t frontend_type(dtype type) {
        switch (type) {
            case dtype::f16: return fe::DataType_t::HALF;
            case dtype::bf16: return fe::DataType_t::BFLOAT16;
            case dtype::f32: return fe::DataType_t::FLOAT;
            case dtype::f64:
            case dtype::none: break;
        }
        raise(errc::unsupported, where{}, "cudnn", "elements are bf16, f16 or f32", name(type));
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

    /// Makes the plan; returns the bytes of workspace that it needs.
    std::size_t make(cudnn_device const& device, std::string const& text, where at) const {
        auto const expect = [&](fe::error_t const& result) {
            if (result.is_bad())
                raise(errc::unsupported, at, "cudnn", "a plan exists for what is asked", text, "; ",
                      one_line(result.err_msg));
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
        return static_cast<std::size_t>(bytes);
    }

    void run(cudnnHandle_t handle, sdpa_operands const& operands, void* workspace,
             std::string const& text) const {
        std::unordered_map<std::int64_t, void*> given;
        for (auto i = static_cast<std::int64_t>(sdpa_operand::q);
             i < static_cast<std::int64_t>(sdpa_operand::count); ++i)
            if (auto* const data = operands[static_cast<sdpa_operand>(i)]) given[i] = data;
        auto const result = graph_->execute(handle, given, workspace);
        if (result.is_bad())
            raise(errc::functor_failed, where{}, "cudnn", "a plan can be enqueued", text, "; ",
                  one_line(result.err_msg));
    }

   private:
    static std::string one_line(std::string text) {
        for (auto& c : text)
            if (c == '\n') c = ' ';
        return text;
    }
    static void place(fe::graph::Tensor_attributes& to, sdpa_operand which, sizes const& extents,
                      sizes const& strides, fe::DataType_t type) {
        to.set_uid(static_cast<std::int64_t>(which))
            .set_dim(extents)
            .set_stride(strides)
            .set_data_type(type);
    }

    std::unique_ptr<fe::graph::Graph> graph_;
};

/// What a plan does to scores where cuDNN has no option for it; then the mask is a part of it.
class score_change {
   public:
    using tensor = cudnn_graph::tensor;
    using graph = std::shared_ptr<fe::graph::Graph>;

    score_change(sdpa_key const& key, tensor slopes) : key_(key), slopes_(std::move(slopes)) {}

    tensor forward(graph const& to, tensor score) {
        if (key_.softcap > 0) score = softcap_.forward(to, score, constant(key_.softcap));
        if (key_.slopes) score = away_from_diagonal(to, score);
        auto const& band = key_.band;
        auto const bound = [](std::int64_t side) {
            return side < 0 ? std::optional<std::int64_t>{} : side;
        };
        if (band == sdpa_band{}) return score;
        return fe::graph::attn::score_modifiers::sliding_window_mask(
            to, score,
            band.from_last ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                           : fe::DiagonalAlignment_t::TOP_LEFT,
            bound(band.left), bound(band.right), key_.rows, key_.keys, nullptr, nullptr, nullptr,
            nullptr);
    }
    tensor backward(graph const& to, tensor const& gradient) {
        if (key_.softcap == 0) return gradient;
        return softcap_.backward(to, gradient, constant(key_.softcap));
    }

   private:
    static tensor constant(double value) {
        return std::make_shared<fe::graph::Tensor_attributes>(static_cast<float>(value));
    }
    static tensor pointwise(graph const& to, fe::PointwiseMode_t mode, char const* name,
                            tensor const& a, tensor const& b = nullptr, int axis = -1) {
        auto attributes = fe::graph::Pointwise_attributes().set_name(name).set_mode(mode);
        if (axis >= 0) attributes.set_axis(axis);
        auto const result =
            b != nullptr ? to->pointwise(a, b, attributes) : to->pointwise(a, attributes);
        result->set_data_type(fe::DataType_t::FLOAT);
        return result;
    }
    /// score - slope |row + diagonal - key|
    tensor away_from_diagonal(graph const& to, tensor const& score) const {
        using mode = fe::PointwiseMode_t;
        auto const row = pointwise(to, mode::GEN_INDEX, "row", score, nullptr, 2);
        auto const key = pointwise(to, mode::GEN_INDEX, "key", score, nullptr, 3);
        auto const position =
            pointwise(to, mode::ADD, "position", row, constant(static_cast<double>(key_.diagonal)));
        auto const difference = pointwise(to, mode::SUB, "difference", position, key);
        auto const distance = pointwise(to, mode::ABS, "distance", difference);
        auto const penalty = pointwise(to, mode::MUL, "penalty", distance, slopes_);
        return pointwise(to, mode::SUB, "less_penalty", score, penalty);
    }

    sdpa_key key_;
    tensor slopes_;
    fe::graph::attn::score_modifiers::Softcap softcap_;
};

}  // namespace detail

/// A plan of attention. Operands lie where the key says.
class sdpa_plan {
   public:
    /// *Blocking*: up to seconds, while cuDNN compiles.
    /// *Throws* `unsupported` with cuDNN's own words where it has no plan for the key.
    sdpa_plan(sdpa_key const& key, cudnn_device const& device, where at = where::here())
        : key_(key), graph_(device) {
        auto const type = graph_.frontend_type(key.type);
        graph_.graph().set_io_data_type(type);
        if (key.backward)
            add_backward(type);
        else
            add_forward(type);
        workspace_bytes_ = graph_.make(device, key.text(), at);
    }

    sdpa_key const& key() const { return key_; }

    /// What a run needs, aligned to 64.
    std::size_t workspace_bytes() const { return workspace_bytes_; }

    /// Enqueues the plan on the handle's stream.
    /// *Throws* `functor_failed` with cuDNN's own words.
    void run(cudnnHandle_t handle, sdpa_operands const& operands, void* workspace) const {
        graph_.run(handle, operands, workspace, key_.text());
    }

   private:
    using tensor = detail::cudnn_graph::tensor;
    using sizes = detail::cudnn_graph::sizes;

    /// cuDNN's order is [batch, head, token, dim].
    sizes strides_of(row_strides const& strides, std::int64_t tokens) const {
        return {key_.varied ? tokens * strides[1] : strides[0], strides[2], strides[1], 1};
    }
    static sizes packed(sizes const& extents) {
        return {extents[1] * extents[2] * extents[3], extents[2] * extents[3], extents[3], 1};
    }
    sizes rows_of(std::int64_t dim) const { return {key_.batch, key_.heads, key_.rows, dim}; }
    sizes keys_of(std::int64_t dim) const { return {key_.batch, key_.kv_heads, key_.keys, dim}; }
    sizes one_a_head() const { return {1, key_.heads, 1, 1}; }

    /// A list with one number for each of `count`.
    tensor list(sdpa_operand which, std::int64_t count, fe::DataType_t type) const {
        return graph_.input(which, {count, 1, 1, 1}, {1, 1, 1, 1}, type);
    }
    /// Says where the entries of a varied batch begin in an operand.
    void let_vary(tensor const& operand, sdpa_operand firsts) const {
        if (key_.varied)
            operand->set_ragged_offset(list(firsts, key_.batch + 1, fe::DataType_t::INT64));
    }
    tensor input(sdpa_operand which, sdpa_operand firsts, sizes const& extents,
                 row_strides const& strides, fe::DataType_t type) const {
        auto const result = graph_.input(which, extents, strides_of(strides, extents[2]), type);
        let_vary(result, firsts);
        return result;
    }
    void output(tensor const& to, sdpa_operand which, sdpa_operand firsts, sizes const& extents,
                row_strides const& strides, fe::DataType_t type) const {
        graph_.output(to, which, extents, strides_of(strides, extents[2]), type);
        let_vary(to, firsts);
    }
    sizes lse_strides() const { return {key_.lse[0], key_.lse[2], key_.lse[1], 1}; }

    /// What is said alike forward and backward.
    template <class Attributes>
    Attributes asked() const {
        Attributes attributes;
        attributes.set_name("attention").set_attn_scale(static_cast<float>(key_.scale));
        if (key_.softcap > 0 || key_.slopes)
            change_scores(attributes);
        else
            mask_scores(attributes);
        if (key_.varied)
            attributes.set_padding_mask(true)
                .set_seq_len_q(list(sdpa_operand::row_counts, key_.batch, fe::DataType_t::INT32))
                .set_seq_len_kv(list(sdpa_operand::key_counts, key_.batch, fe::DataType_t::INT32));
        if (key_.bias_type != dtype::none)
            attributes.set_bias(graph_.input(sdpa_operand::bias, sizes_of(key_.bias_extents),
                                             bias_strides(), graph_.frontend_type(key_.bias_type)));
        if (key_.sinks)
            attributes.set_sink_token(graph_.input(sdpa_operand::sinks, one_a_head(),
                                                   packed(one_a_head()), fe::DataType_t::FLOAT));
        if (key_.dropout > 0)
            attributes.set_dropout(static_cast<float>(key_.dropout),
                                   list(sdpa_operand::seed, 1, fe::DataType_t::INT64),
                                   list(sdpa_operand::offset, 1, fe::DataType_t::INT64));
        return attributes;
    }

    template <class Attributes>
    void mask_scores(Attributes& attributes) const {
        auto const& band = key_.band;
        if (band != sdpa_band{})
            attributes.set_diagonal_alignment(band.from_last ? fe::DiagonalAlignment_t::BOTTOM_RIGHT
                                                             : fe::DiagonalAlignment_t::TOP_LEFT);
        if (band.left >= 0) attributes.set_diagonal_band_left_bound(static_cast<int>(band.left));
        if (band.right >= 0) attributes.set_diagonal_band_right_bound(static_cast<int>(band.right));
    }

    template <class Attributes>
    void change_scores(Attributes& attributes) const {
        tensor slopes;
        if (key_.slopes)
            slopes = graph_.input(sdpa_operand::slopes, one_a_head(), packed(one_a_head()),
                                  fe::DataType_t::FLOAT);
        auto const change = std::make_shared<detail::score_change>(key_, slopes);
        attributes.set_score_mod([change](auto const& graph, auto const& score) {
            return change->forward(graph, score);
        });
        if constexpr (requires { attributes.set_score_mod_bprop(nullptr); })
            if (key_.softcap > 0)
                attributes.set_score_mod_bprop([change](auto const& graph, auto const& gradient) {
                    return change->backward(graph, gradient);
                });
    }

    static sizes sizes_of(extents4 const& extents) { return {extents.begin(), extents.end()}; }
    /// Of an extent of 1, which has no stride, that of packed ones.
    sizes bias_strides() const {
        sizes const extents = sizes_of(key_.bias_extents);
        sizes strides(4);
        std::int64_t next = 1;
        for (std::size_t axis = 4; axis-- > 0; next *= extents[axis])
            strides[axis] = extents[axis] == 1 ? next : key_.bias_strides[axis];
        return strides;
    }

    void add_forward(fe::DataType_t type) const {
        auto const q =
            input(sdpa_operand::q, sdpa_operand::first_q, rows_of(key_.head_dim), key_.q, type);
        auto const k =
            input(sdpa_operand::k, sdpa_operand::first_k, keys_of(key_.head_dim), key_.k, type);
        auto const v =
            input(sdpa_operand::v, sdpa_operand::first_v, keys_of(key_.value_dim), key_.v, type);
        auto attributes = asked<fe::graph::SDPA_attributes>();
        attributes.set_generate_stats(true);
        auto const results = graph_.graph().sdpa(q, k, v, std::move(attributes));
        output(results[0], sdpa_operand::o, sdpa_operand::first_o, rows_of(key_.value_dim), key_.o,
               type);
        graph_.output(results[1], sdpa_operand::lse, rows_of(1), lse_strides(),
                      fe::DataType_t::FLOAT);
    }

    void add_backward(fe::DataType_t type) const {
        auto const rows = rows_of(key_.head_dim), outs = rows_of(key_.value_dim);
        auto const keys = keys_of(key_.head_dim), values = keys_of(key_.value_dim);
        auto const q = input(sdpa_operand::q, sdpa_operand::first_q, rows, key_.q, type);
        auto const k = input(sdpa_operand::k, sdpa_operand::first_k, keys, key_.k, type);
        auto const v = input(sdpa_operand::v, sdpa_operand::first_v, values, key_.v, type);
        auto const o = input(sdpa_operand::o, sdpa_operand::first_o, outs, key_.o, type);
        auto const dout =
            input(sdpa_operand::dout, sdpa_operand::first_dout, outs, key_.dout, type);
        auto const lse =
            graph_.input(sdpa_operand::lse, rows_of(1), lse_strides(), fe::DataType_t::FLOAT);
        auto attributes = asked<fe::graph::SDPA_backward_attributes>();
        attributes.set_deterministic_algorithm(key_.deterministic);
        if (key_.varied)
            attributes.set_max_total_seq_len_q(key_.row_places)
                .set_max_total_seq_len_kv(key_.key_places);
        if (key_.dbias_extents[0] > 0) {
            auto const extents = sizes_of(key_.dbias_extents);
            auto const dbias = graph_.input(sdpa_operand::dbias, extents, packed(extents), type);
            dbias->set_output(true);
            attributes.set_dbias(dbias);
        }
        if (key_.sinks) {
            auto const dsinks = graph_.input(sdpa_operand::dsinks, one_a_head(),
                                             packed(one_a_head()), fe::DataType_t::FLOAT);
            dsinks->set_output(true);
            attributes.set_dsink_token(dsinks);
        }
        auto const results =
            graph_.graph().sdpa_backward(q, k, v, o, dout, lse, std::move(attributes));
        output(results[0], sdpa_operand::dq, sdpa_operand::first_dq, rows, key_.dq, type);
        output(results[1], sdpa_operand::dk, sdpa_operand::first_dk, keys, key_.dk, type);
        output(results[2], sdpa_operand::dv, sdpa_operand::first_dv, values, key_.dv, type);
    }

    sdpa_key key_;
    detail::cudnn_graph graph_;
    std::size_t workspace_bytes_ = 0;
};

/// A plan of a sum.
class sum_plan {
   public:
    /// As `sdpa_plan`.
    sum_plan(sum_key const& key, cudnn_device const& device, where at = where::here())
        : key_(key), graph_(device) {
        // The dims of a row are cuDNN's second axis, as channels that lie side by side.
        detail::cudnn_graph::sizes const extents{key.batch, key.dim, key.heads, key.keys};
        auto const strides = [](row_strides const& of) {
            return detail::cudnn_graph::sizes{of[0], 1, of[2], of[1]};
        };
        auto const sum =
            graph_.input(sdpa_operand::sum, extents, strides(key.to), fe::DataType_t::FLOAT);
        auto const addend = graph_.input(sdpa_operand::addend, extents, strides(key.from),
                                         graph_.frontend_type(key.type));
        auto const result = graph_.graph().pointwise(
            sum, addend,
            fe::graph::Pointwise_attributes().set_name("sum").set_mode(fe::PointwiseMode_t::ADD));
        graph_.output(result, sdpa_operand::result, extents, strides(key.to),
                      fe::DataType_t::FLOAT);
        workspace_bytes_ = graph_.make(device, key.text(), at);
    }

    std::size_t workspace_bytes() const { return workspace_bytes_; }

    void run(cudnnHandle_t handle, sdpa_operands operands, void* workspace) const {
        operands[sdpa_operand::result] = operands[sdpa_operand::sum];
        graph_.run(handle, operands, workspace, key_.text());
    }

   private:
    sum_key key_;
    detail::cudnn_graph graph_;
    std::size_t workspace_bytes_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI
