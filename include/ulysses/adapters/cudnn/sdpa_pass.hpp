#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/sdpa_groups.hpp>
#include <ulysses/adapters/cudnn/sdpa_key.hpp>
#include <ulysses/adapters/cudnn/sdpa_lists.hpp>
#include <ulysses/adapters/cudnn/sdpa_parts.hpp>
#include <ulysses/attention/operands.hpp>
#include <ulysses/core/attention.hpp>
#include <ulysses/core/block.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/core/tensor_view.hpp>
#include <ulysses/core/view_copy.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace ulysses::inline ULYSSES_ABI::detail {

/// One call: which plans run on which addresses. Without `runs` nothing is enqueued, but plans are
/// made and workspace is counted.
template <class Engine, class T>
class sdpa_pass {
   public:
    using space = typename Engine::space_type;
    using queue_type = typename space::queue;
    using wide = accumulator_t<T>;

    sdpa_pass(Engine& engine, sdpa_options const& options, attention_call const& call,
              queue_type queue, bool runs)
        : engine_(engine),
          options_(options),
          call_(call),
          queue_(queue),
          runs_(runs),
          grouping_(options, call) {}

    /// Returns the bytes of workspace that it takes.
    std::size_t forward(head_view<T const> const& q, head_view<T const> const& k,
                        head_view<T const> const& v, head_view<T> const& o,
                        head_view<wide> const& lse) {
        check(q, k, v, o, head_view<wide const>(lse));
        for (auto const& group : groups_of(q)) {
            begin();
            if (group.band)
                forward_group(group, {q, k, v, o, o, o}, lse);
            else
                fill_unseen(group.parts[0], o, lse);
            end();
        }
        return most_;
    }

    std::size_t backward(attention_backward_views<T> const& views) {
        check(views.q, views.k, views.v, views.o, views.lse);
        check_gradients(views);
        auto const& [dsinks, dbias] = views.dlogits;
        if (!runs_) {
            expect_floats("gradient of sinks", dsinks.data(), std::ssize(dsinks));
            if (!dbias.empty())
                expect_memory("gradient of bias", dbias.data(), dbias.layout(), views.q.heads());
        }
        check_rows("dout", views.dout);
        check_rows("dq", views.dq);
        for (auto const& group : groups_of(views.q)) {
            begin();
            if (group.band)
                backward_group(group, views);
            else if (runs_)
                zero_view<space>(queue_, rows_of(group.parts[0], views.dq));
            end();
        }
        return most_;
    }

   private:
    /// The operands of a plan as T, sliced to what it is for.
    struct operand_views {
        head_view<T const> q, k, v, o, dout, dq;
    };

    template <class O, class L>
    void check(head_view<T const> const& q, head_view<T const> const& k,
               head_view<T const> const& v, O const& o, L const& lse) {
        check_attention(call_, q, k, v, o, lse, 0);
        check_rows("q", q);
        check_rows("k", k);
        check_rows("v", v);
        check_rows("o", o);
        if (!call_.visible.present.empty())
            raise(errc::unsupported, where{}, "cudnn", "keys that are there lie side by side",
                  call_.visible.present.size(), " keys with holes");
        for (auto const& values : {call_.sinks, call_.slopes})
            if (!values.empty() && values.type() != dtype::f32)
                raise(errc::unsupported, where{}, "cudnn", "sinks and slopes are float32",
                      name(values.type()));
        if (runs_) return;  // has been asked before
        expect_floats("sinks", call_.sinks.data(), call_.sinks.size());
        expect_floats("slopes", call_.slopes.data(), call_.slopes.size());
        detail::with_elements(call_.bias.data(), call_.bias.type(), [&](auto const* data) {
            expect_memory("bias", data, call_.bias.layout(), q.heads());
        });
    }

    /// Of elements from the first on, where that can be asked.
    template <class U>
    void expect_memory(std::string_view name, U const* first, std::int64_t last) const {
        if constexpr (requires { engine_.expect_memory(name, first, first); })
            engine_.expect_memory(name, first,
                                  reinterpret_cast<std::byte const*>(first + last + 1) - 1);
    }
    template <class U>
    void expect_memory(std::string_view name, U const* first, bias_layout const& layout,
                       std::int64_t heads) const {
        auto const& [b, h, i, j] = layout.extents;
        expect_memory(name, first, layout.at(b - 1, h == 1 ? 0 : heads - 1, i - 1, j - 1));
    }
    void expect_floats(std::string_view name, void const* first, std::int64_t count) const {
        if (count > 0) expect_memory(name, static_cast<float const*>(first), count - 1);
    }

    template <class U>
    static void check_rows(std::string_view name, head_view<U> const& view) {
        constexpr std::int64_t bytes = Engine::row_bytes, size = sizeof(U);
        if (view.size() == 0) return;
        auto const misplaced = static_cast<std::int64_t>(
            reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(bytes));
        auto const& [batch, token, head, dim] = view.strides;
        auto const odd = [&](std::size_t axis) {
            return view.extents[axis] > 1 && view.strides[axis] * size % bytes != 0;
        };
        if (misplaced != 0 || odd(0) || odd(1) || odd(2))
            raise(errc::unsupported, where{}, "cudnn",
                  concat("rows start on multiples of ", bytes, " bytes"), name, " at ", misplaced,
                  ", strides of batch, token, head ", batch, ", ", token, ", ", head,
                  " elements of ", size, " bytes");
    }

    std::vector<sdpa_group> groups_of(head_view<T const> const& q) {
        if (q.size() == 0) return {};
        return grouping_.groups(q.batch(), q.tokens());
    }

    template <class U>
    head_view<U> rows_of(sdpa_part const& part, head_view<U> const& view) const {
        return view.slice(0, part.sample, part.samples)
            .slice_tokens(part.rows.begin - call_.query_begin, part.rows.size());
    }
    template <class U>
    head_view<U> keys_of(sdpa_part const& part, head_view<U> const& view) const {
        return view.slice(0, part.sample, part.samples)
            .slice_tokens(part.keys.begin - call_.key_begin, part.keys.size());
    }
    operand_views sliced(sdpa_group const& group, operand_views const& all) const {
        if (group.varied) return all;
        auto const& part = group.parts[0];
        return {rows_of(part, all.q), keys_of(part, all.k),    keys_of(part, all.v),
                rows_of(part, all.o), rows_of(part, all.dout), rows_of(part, all.dq)};
    }

    template <class View>
    static row_strides strides_of(View const& view, bool varied) {
        if (!varied) return {view.strides[0], view.strides[1], view.strides[2]};
        // That of one token may be anything, but rows are counted by it.
        auto const token =
            view.tokens() > 1 ? view.strides[1] : std::max(view.strides[1], view.dim());
        return {0, token, view.strides[2]};
    }
    /// Rows of a head, a stride of tokens apart, from the first of the first sample to the last of the last.
    template <class View>
    static std::int64_t places_of(View const& view) {
        auto const token = strides_of(view, true)[1];
        return ((view.batch() - 1) * view.strides[0] + token - 1) / token + view.tokens();
    }

    /// What a group asks for, forward; its batch, rows and keys are the plan's.
    sdpa_key key_of(sdpa_group const& group, std::optional<varied_batch> const& batch,
                    operand_views const& views) const {
        sdpa_key key;
        key.type = dtype_of<T>;
        key.varied = group.varied;
        key.batch = batch ? batch->batch : views.q.batch();
        key.rows = batch ? batch->rows : views.q.tokens();
        key.keys = batch ? batch->keys : views.k.tokens();
        key.heads = views.q.heads();
        key.kv_heads = views.k.heads();
        key.head_dim = views.q.dim();
        key.value_dim = views.v.dim();
        key.scale = call_.scale;
        key.softcap = call_.softcap;
        if (!call_.slopes.empty()) {
            key.slopes = true;
            key.diagonal = group.parts[0].diagonal;
        }
        key.dropout = call_.dropout.rate();
        key.band = *group.band;
        key.sinks = !call_.sinks.empty();
        key.q = strides_of(views.q, key.varied);
        key.k = strides_of(views.k, key.varied);
        key.v = strides_of(views.v, key.varied);
        key.o = strides_of(views.o, key.varied);
        if (!call_.bias.empty()) add_bias(group.parts[0], key);
        return key;
    }

    /// The bias of a part's rows and keys.
    void add_bias(sdpa_part const& part, sdpa_key& key) const {
        auto const& layout = call_.bias.layout();
        auto const& [b, h, i, j] = layout.extents;
        key.bias_type = call_.bias.type();
        key.bias_extents = {b == 1 ? 1 : part.samples, h == 1 ? 1 : key.heads,
                            i == 1 ? 1 : part.rows.size(), j == 1 ? 1 : part.keys.size()};
        key.bias_strides = layout.strides;
    }

    sdpa_operands operands_of(sdpa_group const& group, operand_views const& views) {
        sdpa_operands operands;
        auto const give = [&](sdpa_operand which, void const* data) {
            operands[which] = const_cast<void*>(data);
        };
        give(sdpa_operand::q, views.q.data);
        give(sdpa_operand::k, views.k.data);
        give(sdpa_operand::v, views.v.data);
        give(sdpa_operand::o, views.o.data);
        if (!call_.slopes.empty()) give(sdpa_operand::slopes, call_.slopes.data());
        if (!call_.sinks.empty()) give(sdpa_operand::sinks, call_.sinks.data());
        if (!call_.bias.empty()) {
            auto const& part = group.parts[0];
            with_elements(call_.bias.data(), call_.bias.type(), [&](auto const* all) {
                give(sdpa_operand::bias,
                     all +
                         call_.bias.layout().at(part.sample, 0, part.rows.begin, part.keys.begin));
            });
        }
        return operands;
    }

    void forward_group(sdpa_group const& group, operand_views const& all,
                       head_view<wide> const& lse) {
        auto const views = sliced(group, all);
        auto const batch = batch_of(group);
        auto key = key_of(group, batch, views);
        auto operands = operands_of(group, views);
        std::optional<head_view<wide>> dense;  // [entry, row, head, 1]
        if (group.varied) {
            dense = dense_lse(key);
            key.lse = strides_of(*dense, false);
            operands[sdpa_operand::lse] = dense->data;
        } else {
            auto const own = rows_of(group.parts[0], lse);
            key.lse = strides_of(own, false);
            operands[sdpa_operand::lse] = own.data;
        }
        write_lists(group, batch, all, {}, key, operands);
        run(key, operands);
        if (dense) copy_lse(*batch, lse, *dense, false);
    }

    void backward_group(sdpa_group const& group, attention_backward_views<T> const& given) {
        operand_views const all{given.q, given.k, given.v, given.o, given.dout, given.dq};
        auto const views = sliced(group, all);
        auto const batch = batch_of(group);
        auto key = key_of(group, batch, views);
        key.backward = true;
        key.deterministic = options_.deterministic;
        key.dout = strides_of(views.dout, key.varied);
        key.dq = strides_of(views.dq, key.varied);
        auto operands = operands_of(group, views);
        operands[sdpa_operand::dout] = const_cast<T*>(views.dout.data);
        operands[sdpa_operand::dq] = const_cast<T*>(views.dq.data);
        give_lse(group, batch, given.lse, key, operands);
        // Where plans write dk and dv, and what they are added to.
        auto const dk = room_for_keys(group, given.dk), dv = room_for_keys(group, given.dv);
        key.dk = strides_of(dk, key.varied);
        key.dv = strides_of(dv, key.varied);
        if (key.varied) {
            key.row_places = places_of(views.dq);
            key.key_places = places_of(dk);
        }
        operands[sdpa_operand::dk] = dk.data;
        operands[sdpa_operand::dv] = dv.data;
        auto* const dsinks = key.sinks ? memory_.template take<float>(key.heads) : nullptr;
        operands[sdpa_operand::dsinks] = dsinks;
        auto const dbias = give_dbias(group, given.dlogits.bias, key, operands);
        if (group.varied && runs_) {
            zero_view<space>(queue_, dk);
            zero_view<space>(queue_, dv);
        }
        write_lists(group, batch, all, {dk, dv}, key, operands);
        run(key, operands);
        add_to(group.varied ? given.dk : keys_of(group.parts[0], given.dk), dk);
        add_to(group.varied ? given.dv : keys_of(group.parts[0], given.dv), dv);
        if (!given.dlogits.sinks.empty() && key.sinks)
            add_floats(given.dlogits.sinks.data(), dsinks, key.heads);
        if (dbias != nullptr) add_dbias(group.parts[0], given.dlogits.bias, key, dbias);
    }

    std::optional<varied_batch> batch_of(sdpa_group const& group) const {
        if (!group.varied) return std::nullopt;
        return varied_batch(group.parts, call_.query_begin, call_.key_begin);
    }

    /// Room for log-sum-exps, packed [entry, head, row].
    head_view<wide> dense_lse(sdpa_key const& key) {
        auto* const place = memory_.template take<wide>(key.batch * key.heads * key.rows);
        return {place, {key.batch, key.rows, key.heads, 1}, {key.heads * key.rows, 1, key.rows, 1}};
    }

    /// cuDNN reads log-sum-exps packed [batch, head, row].
    void give_lse(sdpa_group const& group, std::optional<varied_batch> const& batch,
                  head_view<wide const> const& lse, sdpa_key& key, sdpa_operands& operands) {
        if (!group.varied) {
            auto const own = rows_of(group.parts[0], lse);
            auto const packed = own.strides[1] == 1 && own.strides[2] == own.tokens() &&
                                (own.batch() == 1 || own.strides[0] == own.heads() * own.tokens());
            key.lse = {own.heads() * own.tokens(), 1, own.tokens()};
            operands[sdpa_operand::lse] = const_cast<wide*>(own.data);
            if (packed) return;
            auto const dense = dense_lse(key);
            operands[sdpa_operand::lse] = dense.data;
            if (runs_) copy_rows(dense, own);
            return;
        }
        auto const dense = dense_lse(key);
        key.lse = strides_of(dense, false);
        operands[sdpa_operand::lse] = dense.data;
        copy_lse(*batch, lse, dense, true);
    }

    /// Rows of one number, as one row of all where they lie side by side.
    static block_copy rows_copy(head_view<wide> const& to, head_view<wide const> const& from) {
        block_copy copy;
        copy.to = reinterpret_cast<std::byte*>(to.data);
        copy.from = reinterpret_cast<std::byte const*>(from.data);
        copy.extents = {from.batch(), from.tokens(), from.heads()};
        copy.to_strides = byte_strides(to);
        copy.from_strides = byte_strides(from);
        copy.row_bytes = sizeof(wide);
        if (to.strides[1] == 1 && from.strides[1] == 1) {
            copy.row_bytes *= copy.extents[1];
            copy.extents[1] = 1;
        }
        return copy;
    }
    void copy_rows(head_view<wide> const& to, head_view<wide const> const& from) {
        auto const copy = rows_copy(to, from);
        space::copy(queue_, {&copy, 1}, static_cast<std::size_t>(copy.bytes()));
    }
    /// Between log-sum-exps as the caller has them and those of the entries of a batch.
    template <class U>
    void copy_lse(varied_batch const& batch, head_view<U> const& lse, head_view<wide> const& dense,
                  bool to_dense) {
        if (!runs_) return;
        std::vector<block_copy> copies;
        std::size_t bytes = 0;
        for (std::size_t i = 0; i < batch.entries.size(); ++i) {
            auto const& entry = batch.entries[i];
            auto const own = lse.slice(0, entry.sample, 1).slice_tokens(entry.row, entry.rows);
            auto const packed =
                dense.slice(0, static_cast<std::int64_t>(i), 1).slice_tokens(0, entry.rows);
            if (to_dense)
                copies.push_back(rows_copy(packed, own));
            else if constexpr (!std::is_const_v<U>)
                copies.push_back(rows_copy(own, packed));
            bytes += static_cast<std::size_t>(copies.back().bytes());
        }
        space::copy(queue_, copies, bytes);
    }

    /// Room for gradients of the keys of a part, or of all keys, packed [sample, key, head]: where lengths
    /// vary, cuDNN lays those of all query heads likewise.
    head_view<T> room_for_keys(sdpa_group const& group, head_view<wide> const& like) {
        auto extents = like.extents;
        if (!group.varied) extents = keys_of(group.parts[0], like).extents;
        auto const [batch, keys, heads, dim] = extents;
        return {memory_.template take<T>(batch * keys * heads * dim), extents};
    }
    void add_to(head_view<wide> const& to, head_view<T> const& from) {
        sum_key key;
        key.type = dtype_of<T>;
        key.batch = to.batch(), key.keys = to.tokens(), key.heads = to.heads(), key.dim = to.dim();
        key.from = strides_of(from, false);
        key.to = strides_of(to, false);
        sdpa_operands operands;
        operands[sdpa_operand::addend] = from.data;
        operands[sdpa_operand::sum] = to.data;
        run(key, operands);
    }

    /// Room for the gradient of a bias where it is wanted, packed [batch, head, row, key].
    T* give_dbias(sdpa_group const& group, bias_gradient<wide> const& wanted, sdpa_key& key,
                  sdpa_operands& operands) {
        if (wanted.empty() || call_.bias.empty()) return nullptr;
        auto const& asked = wanted.layout();
        for (auto const axis : {std::size_t{2}, std::size_t{3}})
            if ((asked.extents[axis] == 1) != (call_.bias.layout().extents[axis] == 1))
                raise(errc::unsupported, where{}, "cudnn",
                      "the gradient of a bias has the bias's rows and keys", asked.extents[2],
                      " x ", asked.extents[3], ", the bias ", call_.bias.layout().extents[2], " x ",
                      call_.bias.layout().extents[3]);
        if (asked.extents[3] > 1 && asked.strides[3] != 1)
            raise(errc::unsupported, where{}, "cudnn", "keys of a bias's gradient lie side by side",
                  "stride ", asked.strides[3]);
        auto& [b, h, i, j] = key.dbias_extents;
        b = asked.extents[0] == 1 ? 1 : group.parts[0].samples;
        h = asked.extents[1] == 1 ? 1 : key.heads;
        i = key.bias_extents[2], j = key.bias_extents[3];
        auto* const room = memory_.template take<T>(b * h * i * j);
        operands[sdpa_operand::dbias] = room;
        return room;
    }
    void add_dbias(sdpa_part const& part, bias_gradient<wide> const& wanted, sdpa_key const& key,
                   T* from) {
        auto const& [b, h, i, j] = key.dbias_extents;
        auto const& layout = wanted.layout();
        auto const& steps = layout.strides;
        auto* const to =
            wanted.data() + layout.at(part.sample, 0, part.rows.begin, part.keys.begin);
        add_to(head_view<wide>(to, {b, i, h, j}, {steps[0], steps[2], steps[1], 1}),
               head_view<T>(from, {b, i, h, j}, {h * i * j, j, i * j, 1}));
    }

    void add_floats(float* to, float const* from, std::int64_t count) {
        if (!runs_) return;
        std::array<sum_source, 2> const sources{{{reinterpret_cast<std::byte const*>(to), {}},
                                                 {reinterpret_cast<std::byte const*>(from), {}}}};
        block_sum sum;
        sum.to = reinterpret_cast<std::byte*>(to);
        sum.from = sources;
        sum.extents = {1, 1, 1};
        sum.elements = count;
        space::template add<float, float>(queue_, {&sum, 1});
    }

    /// o of rows without keys is 0, and lse that of a sink alone or of nothing.
    void fill_unseen(sdpa_part const& part, head_view<T> const& o, head_view<wide> const& lse) {
        auto* const nothing = memory_.template take<wide>(1);
        if (!runs_) return;
        zero_view<space>(queue_, rows_of(part, o));
        auto const rows = rows_of(part, lse);
        head_view<wide const> from(nothing, rows.extents, {0, 0, 0, 1});
        if (call_.sinks.empty()) {
            auto const least = -std::numeric_limits<wide>::infinity();
            engine_.write(queue_, nothing, std::as_bytes(std::span(&least, 1)));
        } else {
            from.data = static_cast<wide const*>(call_.sinks.data());
            from.strides[2] = 1;
        }
        copy_rows(rows, from);
    }

    /// Lengths and first rows of a batch of varied lengths, and the seeds of dropout.
    void write_lists(sdpa_group const& group, std::optional<varied_batch> const& batch,
                     operand_views const& all, std::array<head_view<T>, 2> const& gradients,
                     sdpa_key const& key, sdpa_operands& operands) {
        host_lists lists;
        std::vector<std::pair<sdpa_operand, std::size_t>> places;
        auto const put = [&](sdpa_operand which, std::size_t begin) {
            places.emplace_back(which, begin);
        };
        if (group.varied) {
            using entry = varied_batch::entry;
            auto const rows = [&](sdpa_operand which, extents4 const& strides) {
                put(which, lists.put_firsts(*batch, strides, &entry::row, &entry::rows));
            };
            auto const keys = [&](sdpa_operand which, extents4 const& strides) {
                put(which, lists.put_firsts(*batch, strides, &entry::key, &entry::keys));
            };
            put(sdpa_operand::row_counts, lists.put_counts(*batch, &entry::rows));
            put(sdpa_operand::key_counts, lists.put_counts(*batch, &entry::keys));
            rows(sdpa_operand::first_q, all.q.strides);
            keys(sdpa_operand::first_k, all.k.strides);
            keys(sdpa_operand::first_v, all.v.strides);
            rows(sdpa_operand::first_o, all.o.strides);
            if (key.backward) {
                rows(sdpa_operand::first_dout, all.dout.strides);
                rows(sdpa_operand::first_dq, all.dq.strides);
                keys(sdpa_operand::first_dk, gradients[0].strides);
                keys(sdpa_operand::first_dv, gradients[1].strides);
            }
        }
        if (key.dropout > 0) {
            auto const seed = static_cast<std::int64_t>(seed_of(group.parts[0]));
            std::int64_t const offset = 0;
            put(sdpa_operand::seed, lists.put(std::span(&seed, 1)));
            put(sdpa_operand::offset, lists.put(std::span(&offset, 1)));
        }
        if (places.empty()) return;
        auto const bytes = lists.bytes();
        auto* const base =
            memory_.template take<std::byte>(static_cast<std::int64_t>(bytes.size()));
        if (!runs_) return;
        for (auto const& [which, begin] : places) operands[which] = base + begin;
        engine_.write(queue_, base, bytes);
    }

    /// Another for each part, the same forward and backward.
    std::uint64_t seed_of(sdpa_part const& part) const {
        auto seed = call_.dropout.key();
        for (auto const place : {call_.query_head, part.sample, part.rows.begin})
            seed = detail::mixed(seed + static_cast<std::uint64_t>(place));
        return seed >> 1;  // not negative as an int64
    }

    void begin() {
        memory_ = runs_ ? workspace_cursor(call_.workspace) : workspace_cursor();
        shared_ = 0;
    }
    void end() { most_ = std::max(most_, memory_.bytes() + shared_); }

    /// Plans of a group run one after the other, in the memory behind what they share.
    template <class Key>
    void run(Key const& key, sdpa_operands const& operands) {
        auto const bytes = engine_.workspace_bytes(key);
        shared_ = std::max(shared_, (bytes + 63) / 64 * 64);
        if (!runs_) return;
        engine_.run(queue_, key, operands, call_.workspace.data() + memory_.bytes());
    }

    Engine& engine_;
    sdpa_options const& options_;
    attention_call const& call_;
    queue_type queue_;
    bool runs_;
    sdpa_grouping grouping_;
    workspace_cursor memory_;
    std::size_t shared_ = 0, most_ = 0;
};

}  // namespace ulysses::inline ULYSSES_ABI::detail
