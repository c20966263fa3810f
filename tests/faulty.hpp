#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/attention.hpp>
#include <ulysses/core/communicator.hpp>
#include <ulysses/core/gemm.hpp>
#include <ulysses/core/projection.hpp>

#include <array>
#include <atomic>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

/// Communicators and functors that fail where a test tells them to, and are what they wrap elsewhere.
namespace faults {

namespace uly = ulysses;
using clock = std::chrono::steady_clock;

enum class kind {
    none,
    throws,     ///< an exception that is not ours
    fails,      ///< an error as a communicator's own library reports it
    bad_alloc,  ///< no memory
    leaves,     ///< leaves the group, then throws
    silent,     ///< does not come back before another rank has ended
    delays,     ///< comes back late, before the deadline
};

constexpr std::string_view name(kind what) {
    constexpr std::string_view names[] = {"none",   "throws", "fails", "bad_alloc",
                                          "leaves", "silent", "delays"};
    return names[static_cast<std::size_t>(what)];
}

/// What the one rank does at the one point that the test chose. A point is a call that a rank makes
/// of what is wrapped; they are counted from 0.
struct fault {
    kind what = kind::none;
    int rank = -1;
    std::size_t point = 0;
    std::chrono::milliseconds delay{5};
    std::atomic<int> const* ended = nullptr;  ///< ranks that are done, for a silent one
};

/// One rank's points as they pass, shared by all copies of a wrapped handle or functor.
///
/// *Thread safety*: belongs to its rank's thread; `struck` is read after it.
class script {
   public:
    script() = default;
    script(int rank, fault const& given) : rank_(rank), fault_(given) {}

    /// Names the part of the program that the following points lie in.
    void stage(std::string_view name) { stage_ = name; }

    /// The names of all points so far.
    std::vector<std::string> const& points() const { return points_; }

    /// When the fault struck; none has where it did not.
    clock::time_point struck() const { return struck_; }

    /// A point: throws, waits or returns as the fault says. `leave` is how this rank leaves its group.
    template <class Leave>
    void pass(std::string_view call, Leave const& leave) {
        auto const point = points_.size();
        points_.push_back(stage_.empty() ? std::string(call) : uly::concat(stage_, ": ", call));
        if (fault_.what == kind::none || fault_.rank != rank_ || fault_.point != point) return;
        struck_ = clock::now();
        switch (fault_.what) {
            case kind::none: return;
            case kind::throws: throw std::runtime_error("injected");
            case kind::fails:
                uly::raise(uly::errc::transport, {}, call, "injected", "rank ", rank_);
            case kind::bad_alloc: throw std::bad_alloc();
            case kind::leaves: leave(); throw std::runtime_error("injected");
            case kind::delays: std::this_thread::sleep_for(fault_.delay); return;
            case kind::silent:
                while (*fault_.ended == 0)
                    std::this_thread::sleep_for(std::chrono::milliseconds(1));
                return;
        }
    }
    void pass(std::string_view call) {
        pass(call, [] {});
    }

   private:
    int rank_ = -1;
    fault fault_{};
    std::string stage_;
    std::vector<std::string> points_;
    clock::time_point struck_{};
};

template <class Comm>
struct window_of {};
template <class Comm>
    requires requires { typename Comm::window_type; }
struct window_of<Comm> {
    using window_type = typename Comm::window_type;
};
template <class Comm>
struct ticket_of {};
template <class Comm>
    requires requires { typename Comm::ticket_type; }
struct ticket_of<Comm> {
    using ticket_type = typename Comm::ticket_type;
};

/// A communicator, every call of which is a point of `events`. It has the capabilities of `Comm`.
template <uly::communicator Comm>
class faulty : public window_of<Comm>, public ticket_of<Comm> {
   public:
    using space_type = typename Comm::space_type;

    faulty(Comm inner, std::shared_ptr<script> events)
        : inner_(std::move(inner)), events_(std::move(events)) {}
    explicit faulty(Comm inner) : faulty(std::move(inner), std::make_shared<script>()) {}

    friend bool operator==(faulty const& a,
                           faulty const& b) requires std::equality_comparable<Comm> {
        return a.inner_ == b.inner_;
    }

    Comm const& inner() const { return inner_; }
    script& events() const { return *events_; }

    int rank() const noexcept { return inner_.rank(); }
    int size() const noexcept { return inner_.size(); }
    auto queue() const requires requires(Comm const& c) { c.queue(); }
    { return inner_.queue(); }

    std::uint64_t begin_call() const {
        point("begin_call");
        return inner_.begin_call();
    }
    void fence(uly::fence_status const& status) const {
        point("fence");
        inner_.fence(status);
    }

    auto make_window(std::size_t bytes) const requires uly::reaches_memory<Comm> {
        point("make_window");
        return inner_.make_window(bytes);
    }
    auto shared_window(uly::arena which,
                       std::size_t bytes) const requires uly::reaches_memory<Comm> {
        point("shared_window");
        return inner_.shared_window(which, bytes);
    }
    std::size_t shared_window_bytes(uly::arena which) const requires uly::reaches_memory<Comm> {
        return inner_.shared_window_bytes(which);
    }
    template <class Window>
    std::byte* address(Window const& window, int rank) const requires uly::reaches_memory<Comm> {
        return inner_.address(window, rank);
    }
    void close() const requires requires(Comm const& c) { c.close(); }
    { inner_.close(); }

    auto start(std::span<uly::outgoing const> out,
               std::span<uly::incoming const> in) const requires uly::sends_messages<Comm> {
        point("start");
        return inner_.start(out, in);
    }
    template <class Ticket>
    void wait(Ticket ticket) const requires uly::sends_messages<Comm> {
        point("wait");
        inner_.wait(std::move(ticket));
    }

    template <class T>
    void all_reduce(std::span<T> values, uly::reduction op) const requires uly::reduces<Comm> {
        point("all_reduce");
        inner_.all_reduce(values, op);
    }
    template <class... Status>
    void all_gather(std::span<std::byte const> mine, std::span<std::byte> all,
                    Status const&... status) const requires requires(Comm const& c) {
        c.all_gather(mine, all, status...);
    }
    {
        point("all_gather");
        inner_.all_gather(mine, all, status...);
    }
    void broadcast(std::span<std::byte> data, int root) const requires uly::gathers<Comm> {
        point("broadcast");
        inner_.broadcast(data, root);
    }
    faulty split(int color, int key) const requires uly::splits<Comm> {
        point("split");
        return {inner_.split(color, key), events_};
    }

    void leave(std::string_view text) const requires requires(Comm const& c) { c.leave(text); }
    { inner_.leave(text); }
    void finish() const requires requires(Comm const& c) { c.finish(); }
    { inner_.finish(); }

   private:
    void point(std::string_view call) const {
        events_->pass(call, [&] {
            if constexpr (requires { inner_.leave("injected"); }) inner_.leave("injected");
        });
    }

    Comm inner_;
    std::shared_ptr<script> events_;
};

/// An attention functor, every work item of which is a point.
template <class Attention>
class faulty_attention {
   public:
    using space_type = typename Attention::space_type;
    static constexpr uly::attention_features features = Attention::features;

    faulty_attention(Attention inner, std::shared_ptr<script> events)
        : inner_(std::move(inner)), events_(std::move(events)) {}

    auto row_multiple() const { return inner_.row_multiple(); }
    template <class T>
    std::size_t workspace_bytes(uly::attention_extents const& extents) const {
        return inner_.template workspace_bytes<T>(extents);
    }
    template <class T>
    void forward(uly::attention_call const& call, uly::head_view<T const> q,
                 uly::head_view<T const> k, uly::head_view<T const> v, uly::head_view<T> o,
                 uly::head_view<uly::accumulator_t<T>> lse) const {
        events_->pass("attention forward");
        inner_.template forward<T>(call, q, k, v, o, lse);
    }
    template <class T>
    void backward(uly::attention_call const& call,
                  uly::attention_backward_views<T> const& views) const {
        events_->pass("attention backward");
        inner_.template backward<T>(call, views);
    }

   private:
    [[no_unique_address]] Attention inner_;
    std::shared_ptr<script> events_;
};

/// A matrix product, every call of which is a point.
template <class Gemm>
class faulty_gemm {
   public:
    using space_type = typename Gemm::space_type;
    static constexpr bool rows_independent = Gemm::rows_independent;

    faulty_gemm(Gemm inner, std::shared_ptr<script> events)
        : inner_(std::move(inner)), events_(std::move(events)) {}

    template <class T>
        requires uly::gemm_for<Gemm, T>
    void operator()(uly::gemm_call<T> const& call) const {
        events_->pass("gemm");
        inner_(call);
    }

   private:
    [[no_unique_address]] Gemm inner_;
    std::shared_ptr<script> events_;
};

/// A projection, every call of which is a point.
template <class Projection>
class faulty_projection {
   public:
    using space_type = typename Projection::space_type;

    faulty_projection(Projection inner, std::shared_ptr<script> events)
        : inner_(std::move(inner)), events_(std::move(events)) {}

    void project_in(auto const&... x) const {
        events_->pass("project_in");
        inner_.project_in(x...);
    }
    void project_out(auto const&... x) const {
        events_->pass("project_out");
        inner_.project_out(x...);
    }
    void project_out_backward(auto const&... x) const {
        events_->pass("project_out_backward");
        inner_.project_out_backward(x...);
    }
    void project_out_gradients(auto const&... x) const {
        events_->pass("project_out_gradients");
        inner_.project_out_gradients(x...);
    }
    void project_in_backward(auto const&... x) const {
        events_->pass("project_in_backward");
        inner_.project_in_backward(x...);
    }

   private:
    [[no_unique_address]] Projection inner_;
    std::shared_ptr<script> events_;
};

}  // namespace faults
