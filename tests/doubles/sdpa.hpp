#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/adapters/cudnn/sdpa_key.hpp>
#include <ulysses/core/dropout.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/logits.hpp>
#include <ulysses/core/number.hpp>
#include <ulysses/space/host.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

/// A double of cuDNN for tests of the functor over it: plans are computed in host memory, in double, by
/// what their keys say, and are no attention's but the formula's. It reads and writes what a plan is
/// told to and nothing else; workspace, and log-sum-exps of rows that are not there, become NaN.
class sdpa_double {
   public:
    using space_type = ulysses::host_space;
    template <class T>
    static constexpr bool takes = !std::is_same_v<T, double>;
    static constexpr std::int64_t row_bytes = 2;

    std::size_t workspace_bytes(ulysses::sdpa_key const& key) {
        if (key.batch < 1 || key.rows < 1 || key.keys < 1 || key.band.left == 0)
            throw std::logic_error("sdpa_double: no plan for " + key.text());
        // cuDNN has none of these.
        if (!key.varied && key.band.left >= 0 && key.rows > key.keys)
            throw std::logic_error("sdpa_double: a window of more rows than keys: " + key.text());
        if (key.band.from_last && (key.bias_type != ulysses::dtype::none || key.dropout > 0))
            throw std::logic_error("sdpa_double: a band from the last: " + key.text());
        if (key.varied && (key.softcap > 0 || key.slopes || key.bias_type != ulysses::dtype::none))
            throw std::logic_error("sdpa_double: scores that change, of varied lengths: " +
                                   key.text());
        return note(key.text(), key.backward ? 192 : 64);
    }
    std::size_t workspace_bytes(ulysses::sum_key const& key) { return note(key.text(), 0); }

    void run(ulysses::host_space::queue, ulysses::sdpa_key const& key,
             ulysses::sdpa_operands const& operands, void* workspace) {
        std::memset(workspace, 0xff, key.backward ? 192 : 64);
        with(key.type, [&](auto element) {
            using T = decltype(element);
            plan<T> const of(key, operands);
            if (key.backward)
                of.backward();
            else
                of.forward();
        });
    }

    void run(ulysses::host_space::queue, ulysses::sum_key const& key,
             ulysses::sdpa_operands const& operands, void*) {
        with(key.type, [&](auto element) {
            using T = decltype(element);
            auto const* const from = static_cast<T const*>(operands[ulysses::sdpa_operand::addend]);
            auto* const to = static_cast<float*>(operands[ulysses::sdpa_operand::sum]);
            for (std::int64_t b = 0; b < key.batch; ++b)
                for (std::int64_t j = 0; j < key.keys; ++j)
                    for (std::int64_t h = 0; h < key.heads; ++h)
                        for (std::int64_t d = 0; d < key.dim; ++d)
                            to[place(key.to, b, j, h) + d] +=
                                static_cast<float>(from[place(key.from, b, j, h) + d]);
        });
    }

    void write(ulysses::host_space::queue, void* to, std::span<std::byte const> bytes) {
        std::memcpy(to, bytes.data(), bytes.size());
    }

    /// How many plans have been made.
    std::size_t plans() const { return plans_.size(); }
    bool has_planned(std::string const& part) const {
        for (auto const& text : plans_)
            if (text.find(part) != std::string::npos) return true;
        return false;
    }

   private:
    using operand = ulysses::sdpa_operand;

    static std::int64_t place(ulysses::row_strides const& strides, std::int64_t b, std::int64_t i,
                              std::int64_t h) {
        return b * strides[0] + i * strides[1] + h * strides[2];
    }

    template <class Use>
    static void with(ulysses::dtype type, Use const& use) {
        if (type == ulysses::dtype::f32) return use(float{});
        if (type == ulysses::dtype::f16) return use(ulysses::half{});
        use(ulysses::bf16{});
    }

    std::size_t note(std::string text, std::size_t bytes) {
        std::lock_guard const lock(noting_);
        plans_.insert(std::move(text));
        return bytes;
    }

    template <class T>
    struct plan {
        ulysses::sdpa_key const& key;
        ulysses::sdpa_operands const& given;

        plan(ulysses::sdpa_key const& k, ulysses::sdpa_operands const& o) : key(k), given(o) {}

        template <class U>
        U* at(operand which) const {
            if (given[which] == nullptr)
                throw std::logic_error("sdpa_double: an operand is missing: " +
                                       std::to_string(static_cast<int>(which)));
            return static_cast<U*>(given[which]);
        }
        template <class U = T>
        U* row(operand which, operand firsts, ulysses::row_strides const& strides, std::int64_t b,
               std::int64_t i, std::int64_t h) const {
            auto const sample = key.varied ? at<std::int64_t const>(firsts)[b] : b * strides[0];
            return at<U>(which) + sample + i * strides[1] + h * strides[2];
        }
        std::int64_t rows(std::int64_t b) const {
            return key.varied ? at<std::int32_t const>(operand::row_counts)[b] : key.rows;
        }
        std::int64_t keys(std::int64_t b) const {
            return key.varied ? at<std::int32_t const>(operand::key_counts)[b] : key.keys;
        }
        std::int64_t kv_head(std::int64_t h) const { return h / (key.heads / key.kv_heads); }
        float& lse(std::int64_t b, std::int64_t i, std::int64_t h) const {
            return at<float>(operand::lse)[place(key.lse, b, i, h)];
        }
        ulysses::bias_layout bias_layout() const {
            return {{key.bias_extents[0], key.bias_extents[1], key.bias_extents[2],
                     key.bias_extents[3]},
                    key.bias_strides};
        }

        double dot(T const* x, T const* y, std::int64_t dim) const {
            double sum = 0;
            for (std::int64_t d = 0; d < dim; ++d)
                sum += static_cast<double>(x[d]) * static_cast<double>(y[d]);
            return sum;
        }

        /// The score of a key that a row sees, -inf of others.
        struct scored {
            double value, slope = 1;  ///< by the scaled product
        };
        scored score(std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t j) const {
            if (!key.band.sees(i, j, rows(b), keys(b)))
                return {-std::numeric_limits<double>::infinity()};
            auto const* const q = row<T const>(operand::q, operand::first_q, key.q, b, i, h);
            auto const* const k =
                row<T const>(operand::k, operand::first_k, key.k, b, j, kv_head(h));
            scored s{key.scale * dot(q, k, key.head_dim)};
            if (key.softcap > 0) {
                auto const t = std::tanh(s.value / key.softcap);
                s = {key.softcap * t, 1 - t * t};
            }
            if (key.slopes)
                s.value -= static_cast<double>(at<float const>(operand::slopes)[h]) *
                           static_cast<double>(std::abs(i + key.diagonal - j));
            if (key.bias_type != ulysses::dtype::none)
                ulysses::detail::with_elements(
                    at<void>(operand::bias), key.bias_type, [&](auto const* bias) {
                        s.value += static_cast<double>(bias[bias_layout().at(b, h, i, j)]);
                    });
            return s;
        }
        double factor(std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t j) const {
            if (key.dropout == 0) return 1;
            double result = 1;
            auto const seed = static_cast<std::uint64_t>(*at<std::int64_t>(operand::seed) +
                                                         *at<std::int64_t>(operand::offset));
            ulysses::dropout_mask(key.dropout, {.seed = seed}).row(b, h, i, {j, j + 1}, &result);
            return result;
        }

        template <class Body>
        void for_each_row(Body const& body) const {
            for (std::int64_t b = 0; b < key.batch; ++b)
                for (std::int64_t h = 0; h < key.heads; ++h)
                    for (std::int64_t i = 0; i < rows(b); ++i) body(b, h, i);
        }

        void forward() const {
            for (std::int64_t b = 0; b < key.batch; ++b)
                for (std::int64_t h = 0; h < key.heads; ++h)
                    for (auto i = rows(b); i < key.rows; ++i)
                        lse(b, i, h) = std::numeric_limits<float>::quiet_NaN();
            for_each_row([&](auto b, auto h, auto i) {
                std::vector<double> s(static_cast<std::size_t>(keys(b)));
                auto largest = -std::numeric_limits<double>::infinity();
                for (std::size_t j = 0; j < s.size(); ++j)
                    largest = std::max(largest,
                                       s[j] = score(b, i, h, static_cast<std::int64_t>(j)).value);
                if (largest == -std::numeric_limits<double>::infinity())
                    throw std::logic_error("sdpa_double: a row sees no key: " + key.text());
                double sum = 0;
                if (key.sinks) {
                    auto const sink = static_cast<double>(at<float const>(operand::sinks)[h]);
                    largest = std::max(largest, sink);
                    sum = std::exp(sink - largest);
                }
                for (auto& x : s) sum += x = std::exp(x - largest);
                std::vector<double> o(static_cast<std::size_t>(key.value_dim));
                for (std::size_t j = 0; j < s.size(); ++j) {
                    auto const key_row = static_cast<std::int64_t>(j);
                    if (s[j] == 0) continue;
                    auto const p = s[j] / sum * factor(b, i, h, key_row);
                    auto const* const v =
                        row<T const>(operand::v, operand::first_v, key.v, b, key_row, kv_head(h));
                    for (std::size_t d = 0; d < o.size(); ++d)
                        o[d] += p * static_cast<double>(v[d]);
                }
                auto* const to = row(operand::o, operand::first_o, key.o, b, i, h);
                for (std::size_t d = 0; d < o.size(); ++d)
                    to[d] = static_cast<T>(static_cast<float>(o[d]));
                lse(b, i, h) = static_cast<float>(largest + std::log(sum));
            });
        }

        /// cuDNN sums a gradient beside it, as it lies, in room for so many rows.
        void check_places(operand firsts, ulysses::row_strides const& strides, std::int64_t b,
                          std::int64_t count, std::int64_t places) const {
            auto const last = at<std::int64_t const>(firsts)[b] + (count - 1) * strides[1];
            if (count > 0 && last > (places - 1) * strides[1])
                throw std::logic_error("sdpa_double: a row lies beyond its places: " + key.text());
        }
        void backward() const {
            for (std::int64_t b = 0; key.varied && b < key.batch; ++b) {
                check_places(operand::first_dq, key.dq, b, rows(b), key.row_places);
                check_places(operand::first_dk, key.dk, b, keys(b), key.key_places);
                check_places(operand::first_dv, key.dv, b, keys(b), key.key_places);
            }
            auto const dims = key.head_dim + key.value_dim;
            auto const key_rows = key.batch * key.kv_heads * key.keys;
            std::vector<double> sums(static_cast<std::size_t>(key_rows * dims));
            auto const sum_of = [&](std::int64_t b, std::int64_t j, std::int64_t h) {
                return sums.data() + ((b * key.kv_heads + kv_head(h)) * key.keys + j) * dims;
            };
            auto const& [db, dh, di, dj] = key.dbias_extents;
            std::vector<double> dbias(static_cast<std::size_t>(db * dh * di * dj));
            if (key.sinks)
                std::memset(at<float>(operand::dsinks), 0,
                            static_cast<std::size_t>(key.heads) * sizeof(float));
            for_each_row([&](auto b, auto h, auto i) { backward_row(b, h, i, sum_of, dbias); });
            for (std::size_t i = 0; i < dbias.size(); ++i)
                at<T>(operand::dbias)[i] = static_cast<T>(static_cast<float>(dbias[i]));
            for (std::int64_t b = 0; b < key.batch; ++b)
                for (std::int64_t g = 0; g < key.kv_heads; ++g)
                    for (std::int64_t j = 0; j < keys(b); ++j) {
                        auto const* const from = sum_of(b, j, g * (key.heads / key.kv_heads));
                        auto* const dk = row(operand::dk, operand::first_dk, key.dk, b, j, g);
                        auto* const dv = row(operand::dv, operand::first_dv, key.dv, b, j, g);
                        for (std::int64_t d = 0; d < key.head_dim; ++d)
                            dk[d] = static_cast<T>(static_cast<float>(from[d]));
                        for (std::int64_t d = 0; d < key.value_dim; ++d)
                            dv[d] = static_cast<T>(static_cast<float>(from[key.head_dim + d]));
                    }
        }

        template <class SumOf>
        void backward_row(std::int64_t b, std::int64_t h, std::int64_t i, SumOf const& sum_of,
                          std::vector<double>& dbias) const {
            auto const* const q = row<T const>(operand::q, operand::first_q, key.q, b, i, h);
            auto const* const o = row<T const>(operand::o, operand::first_o, key.o, b, i, h);
            auto const* const dout =
                row<T const>(operand::dout, operand::first_dout, key.dout, b, i, h);
            auto const delta = dot(dout, o, key.value_dim);
            auto const row_lse = static_cast<double>(lse(b, i, h));
            std::vector<double> dq(static_cast<std::size_t>(key.head_dim));
            for (std::int64_t j = 0; j < keys(b); ++j) {
                auto const s = score(b, i, h, j);
                auto const p = std::exp(s.value - row_lse);
                if (p == 0) continue;
                auto const* const k =
                    row<T const>(operand::k, operand::first_k, key.k, b, j, kv_head(h));
                auto const* const v =
                    row<T const>(operand::v, operand::first_v, key.v, b, j, kv_head(h));
                auto const kept = factor(b, i, h, j);
                auto const change = p * (kept * dot(dout, v, key.value_dim) - delta);
                auto const ds = change * s.slope;
                auto* const sums = sum_of(b, j, h);
                for (std::int64_t d = 0; d < key.head_dim; ++d) {
                    dq[static_cast<std::size_t>(d)] += key.scale * ds * static_cast<double>(k[d]);
                    sums[d] += key.scale * ds * static_cast<double>(q[d]);
                }
                for (std::int64_t d = 0; d < key.value_dim; ++d)
                    sums[key.head_dim + d] += kept * p * static_cast<double>(dout[d]);
                if (dbias.empty()) continue;
                ulysses::bias_layout const layout(key.dbias_extents,
                                                  ulysses::packed_strides(key.dbias_extents));
                dbias[static_cast<std::size_t>(layout.at(b, h, i, j))] += change;
            }
            auto* const to = row(operand::dq, operand::first_dq, key.dq, b, i, h);
            for (std::size_t d = 0; d < dq.size(); ++d)
                to[d] = static_cast<T>(static_cast<float>(dq[d]));
            if (key.sinks) {
                auto const sink = static_cast<double>(at<float const>(operand::sinks)[h]);
                at<float>(operand::dsinks)[h] -=
                    static_cast<float>(std::exp(sink - row_lse) * delta);
            }
        }
    };

    std::set<std::string> plans_;
    std::mutex noting_;
};
