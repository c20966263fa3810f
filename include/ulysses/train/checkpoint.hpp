#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/buffer.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/fence.hpp>
#include <ulysses/core/guarded.hpp>
#include <ulysses/core/space.hpp>
#include <ulysses/space/host.hpp>
#include <ulysses/train/agree.hpp>
#include <ulysses/train/rows.hpp>

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

/// Layers that are computed again in backward: of each segment of them only the input is kept, where
/// they compute or elsewhere. On top of the keep policies, which say what attention keeps of a layer.
///
///     ulysses::checkpoint<float> saved{ranks, count, {.every = 2}};
///     embed(ids, saved.input(rows, width));
///     saved.forward(layers, y);
///     saved.backward(layers, d);  // the gradient of y, then of the input
namespace ulysses::inline ULYSSES_ABI {

/// Layers y = f_i(x) of equal width, x and y [n, C].
///
/// Requirements:
/// 1. `forward(i, x, y)` overwrites y and keeps nothing.
/// 2. `forward_keeping(i, place, x, y)` does so with the same bits, and keeps in `place`, one of
///    `every`, what backward needs besides x.
/// 3. `backward(i, place, x, d)` consumes what is there and turns d, the gradient of y, into that of x.
template <class L, class T>
concept checkpointed_layers = requires(L& layers, std::int64_t i, row_view<T const> x,
                                       row_view<T> y) {
    layers.forward(i, x, y);
    layers.forward_keeping(i, i, x, y);
    layers.backward(i, i, x, y);
};

/// Moves inputs of layers between the space where they compute and memory elsewhere.
///
/// Requirements:
/// 1. `space_type` is where layers compute; `store_type` allocates and frees memory elsewhere, as a
///    space does. Copies that are ordered on a queue may be under way when it frees: it waits for them,
///    as cudaFreeHost does.
/// 2. `start(queue, to, from, bytes)` begins a copy, either way, behind what is ordered on the queue,
///    and returns a ticket.
/// 3. `wait(queue, ticket)`: what is ordered on the queue from then on is behind the copy.
template <class C>
concept copier = std::movable<C> &&
    requires(C& copy, typename C::space_type::queue queue, std::byte* to, std::byte const* from,
             std::size_t bytes, typename C::ticket_type ticket) {
    requires std::semiregular<typename C::ticket_type>;
    { C::store_type::allocate(typename C::store_type::queue{}, bytes) } -> std::same_as<void*>;
    C::store_type::deallocate(typename C::store_type::queue{}, static_cast<void*>(to), bytes);
    { copy.start(queue, to, from, bytes) } -> std::same_as<typename C::ticket_type>;
    copy.wait(queue, ticket);
};

/// Between places of host memory, at once.
struct host_copier {
    using space_type = host_space;
    using store_type = host_space;
    struct ticket_type {};

    ticket_type start(host_space::queue, std::byte* to, std::byte const* from,
                      std::size_t bytes) const {
        if (bytes > 0) std::memcpy(to, from, bytes);
        return {};
    }
    void wait(host_space::queue, ticket_type) const {}
};

namespace detail {

template <class C>
consteval bool explain_copier() {
    static_assert(
        copier<C>,
        "ulysses: a copier has `space_type`, `store_type`, `ticket_type`, "
        "`start(queue, to, from, bytes)` that returns a ticket, and `wait(queue, ticket)`.");
    return false;
}
template <class L, class T>
consteval bool explain_checkpointed_layers() {
    static_assert(checkpointed_layers<L, T>,
                  "ulysses: layers of a checkpoint have `forward(i, x, y)`, `forward_keeping(i, "
                  "place, x, y)` and `backward(i, place, x, d)` on row_views.");
    return false;
}

}  // namespace detail

struct checkpoint_options {
    std::int64_t every = 1;  ///< layers of a segment; as many as there are: none is computed again
    std::int64_t resident = 0;  ///< inputs, at most, where layers compute; at least 2, or 0: all

    friend constexpr bool operator==(checkpoint_options const&,
                                     checkpoint_options const&) = default;
};

/// *Thread safety*: one per rank.
template <class T, class Copier = host_copier>
class checkpoint {
    static_assert(copier<Copier> || detail::explain_copier<Copier>());

   public:
    using space_type = typename Copier::space_type;
    using queue_type = typename space_type::queue;

    /// Layers that are collective, as those with a pipeline, are computed again in the same order on
    /// every rank. *Blocking*: collective. *Throws* the same on every rank: `disagreement`,
    /// `invalid_config`.
    template <class Comm>
    checkpoint(Comm const& ranks, std::int64_t layers, checkpoint_options const& options = {},
               Copier copy = {}, queue_type queue = {}, where at = where::here())
        : layers_(layers), every_(options.every), copy_(std::move(copy)), queue_(queue) {
        fence_status status;
        guarded(status, [&] {
            check(options, at);
            segments_ = (layers - 1) / every_ + 1;
            resident_ = options.resident == 0 ? segments_ : std::min(options.resident, segments_);
            flights_.resize(static_cast<std::size_t>(segments_ - resident_));
        });
        agree_on(ranks, "checkpoint",
                 std::array<std::string_view, 3>{"the number of layers", "every", "resident"},
                 std::array{layers, options.every, options.resident}, status, at);
    }
    checkpoint(checkpoint const&) = delete;
    checkpoint& operator=(checkpoint const&) = delete;
    ~checkpoint() {
        fence_status ignored;
        for (std::int64_t j = 0; moves(j); ++j) guarded(ignored, [&] { finish(j); });
    }

    /// Memory for the input of the first layer, [rows, width], to be written before `forward`. What a
    /// forward without its backward has left is forgotten. *Throws* `invalid_call`.
    row_view<T> input(std::int64_t rows, std::int64_t width, where at = where::here()) {
        if (rows < 0 || width < 1 || rows > std::numeric_limits<std::int64_t>::max() / width / 4096)
            raise(errc::invalid_call, at, "checkpoint",
                  "an input has 0 or more rows of 1 or more "
                  "numbers",
                  rows, " rows of ", width);
        settle();
        stage_ = stage::empty;
        rows_ = rows;
        width_ = width;
        bytes_ = static_cast<std::size_t>(rows * width) * sizeof(T);
        pitch_ = (bytes_ + 63) / 64 * 64;
        // A segment that is computed again has an output as well, which nobody reads.
        between_ = segments_ == 1 ? every_ - 1 : every_;
        memory_.reserve(static_cast<std::size_t>(resident_ + between_) * pitch_, queue_);
        store_.reserve(flights_.size() * pitch_);
        stage_ = stage::begun;
        return slot(0);
    }

    /// y [n, C] = all layers, one after the other. *Throws* `invalid_call` without `input`,
    /// `invalid_tensor`, and what layers throw.
    template <class Layers>
    void forward(Layers& layers, row_view<T> y, where at = where::here()) {
        static_assert(checkpointed_layers<Layers, T> ||
                      detail::explain_checkpointed_layers<Layers, T>());
        if (stage_ != stage::begun)
            raise(errc::invalid_call, at, "checkpoint",
                  "forward needs an input, which it takes once", reached());
        enter(y, at);
        for (std::int64_t j = 0; j < segments_; ++j) {
            auto const last = j + 1 == segments_;
            if (moves(j)) start(j, stored(j), slot_bytes(j));
            if (!last && j + 1 >= resident_) finish(j + 1 - resident_);
            run(layers, j, last, last ? y : slot(j + 1));
        }
        stage_ = stage::filled;
    }

    /// d [n, C], the gradient of y, becomes that of the input; layers add to the gradients of their
    /// weights. *Throws* `invalid_call` without `forward`, `invalid_tensor`, and what layers throw.
    template <class Layers>
    void backward(Layers& layers, row_view<T> d, where at = where::here()) {
        if (stage_ != stage::filled)
            raise(errc::invalid_call, at, "checkpoint", "backward needs a forward before it",
                  reached());
        enter(d, at);
        for (auto j = segments_; j-- > 0;) {
            if (moves(j)) finish(j);
            if (j + 1 < segments_) run(layers, j, true, between(every_ - 1));
            for (auto i = end_of(j); i-- > j * every_;)
                layers.backward(i, i - j * every_, row_view<T const>(input_of(i)), d);
            if (j >= resident_) start(j - resident_, slot_bytes(j), stored(j - resident_));
        }
    }

    /// Inputs, and what is between the layers of a segment, where layers compute.
    std::size_t bytes() const { return memory_.bytes(); }
    /// Inputs elsewhere.
    std::size_t stored_bytes() const { return store_.bytes(); }

   private:
    enum class stage : std::uint8_t { empty, begun, filled };
    struct flight {
        typename Copier::ticket_type ticket{};
        bool pending = false;
    };

    void check(checkpoint_options const& given, where at) const {
        if (layers_ < 1 || given.every < 1 || given.every > layers_)
            raise(errc::invalid_config, at, "checkpoint",
                  "there is at least 1 layer, and a segment has at least 1 of them", given.every,
                  " of ", layers_);
        if (given.resident != 0 && given.resident < 2)
            raise(errc::invalid_config, at, "checkpoint",
                  "at least 2 inputs are resident, or 0 for all", given.resident);
    }
    std::string_view reached() const {
        constexpr std::string_view names[] = {"there is none", "there is an input",
                                              "forward has run"};
        return names[static_cast<std::size_t>(stage_)];
    }
    /// A call that throws leaves nothing to go on with.
    void enter(row_view<T> operand, where at) {
        detail::check_rows("checkpoint", operand, rows_, width_, at);
        stage_ = stage::empty;
    }

    std::int64_t end_of(std::int64_t segment) const {
        return std::min(layers_, (segment + 1) * every_);
    }
    /// Whether the input of a segment goes elsewhere; the last ones stay.
    bool moves(std::int64_t segment) const {
        return segment < static_cast<std::int64_t>(flights_.size());
    }
    template <class Layers>
    void run(Layers& layers, std::int64_t segment, bool keeping, row_view<T> last) {
        for (auto i = segment * every_; i < end_of(segment); ++i) {
            row_view<T const> const x = input_of(i);
            auto const place = i - segment * every_;
            auto const y = i + 1 == end_of(segment) ? last : between(place);
            if (keeping)
                layers.forward_keeping(i, place, x, y);
            else
                layers.forward(i, x, y);
        }
    }

    std::byte* part(std::int64_t i) const {
        return memory_.data() + static_cast<std::size_t>(i) * pitch_;
    }
    row_view<T> view(std::int64_t i) const {
        return {reinterpret_cast<T*>(part(i)), rows_, width_};
    }
    std::byte* slot_bytes(std::int64_t segment) const { return part(segment % resident_); }
    row_view<T> slot(std::int64_t segment) const { return view(segment % resident_); }
    row_view<T> between(std::int64_t i) const { return view(resident_ + i); }
    row_view<T> input_of(std::int64_t layer) const {
        auto const place = layer % every_;
        return place == 0 ? slot(layer / every_) : between(place - 1);
    }
    std::byte* stored(std::int64_t segment) const {
        return store_.data() + static_cast<std::size_t>(segment) * pitch_;
    }

    void start(std::int64_t segment, std::byte* to, std::byte const* from) {
        auto& own = flights_[static_cast<std::size_t>(segment)];
        own.ticket = copy_.start(queue_, to, from, bytes_);
        own.pending = true;
    }
    void finish(std::int64_t segment) {
        auto& own = flights_[static_cast<std::size_t>(segment)];
        if (!std::exchange(own.pending, false)) return;
        copy_.wait(queue_, own.ticket);
    }
    void settle() {
        for (std::int64_t j = 0; moves(j); ++j) finish(j);
    }

    std::int64_t layers_, every_, segments_ = 1, resident_ = 1, between_ = 0;
    Copier copy_;
    queue_type queue_;
    std::vector<flight> flights_;  ///< of the segments whose inputs move
    std::int64_t rows_ = 0, width_ = 0;
    std::size_t bytes_ = 0, pitch_ = 0;
    stage stage_ = stage::empty;
    buffer<typename Copier::store_type> store_;
    buffer<space_type> memory_;
};

}  // namespace ulysses::inline ULYSSES_ABI
