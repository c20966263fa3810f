// SPDX-License-Identifier: Apache-2.0
// Inference with a key-value cache: prompts of different length go into it in chunks, then every sample gets one token
// after the other; a sample that has ended makes room for another. On any number of ranks, by tokens or by heads.

#include <ulysses/ulysses.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <map>
#include <tuple>
#include <vector>

namespace uly = ulysses;
using std::int64_t;

namespace {

constexpr uly::shape shape{.heads = 8,
                           .kv_heads = 2,
                           .head_dim = 16,
                           .mask = uly::mask::causal,
                           .assignment = uly::assignment::whole_heads};
constexpr int64_t samples = 3, capacity = 32;
using attention = uly::blocked_attention<uly::builtin_gemm>;
using layer_type = uly::pipeline<uly::threads::communicator, uly::sequence_local, attention>;
using heads_type = uly::pipeline<uly::threads::communicator, uly::head_local, attention>;
using cache_type = layer_type::cache_type;

/// An operand [B, n, heads, dim] that a rank has in memory.
struct operand {
    std::vector<float> memory;
    std::array<int64_t, 4> sizes;
    explicit operand(std::array<int64_t, 4> const& given)
        : memory(static_cast<std::size_t>(given[0] * given[1] * given[2] * given[3])),
          sizes(given) {}
    float* data() const { return const_cast<float*>(memory.data()); }
    std::array<int64_t, 4> const& extents() const { return sizes; }
    float& at(int64_t b, int64_t s, int64_t h, int64_t d) {
        return memory[static_cast<std::size_t>(((b * sizes[1] + s) * sizes[2] + h) * sizes[3] + d)];
    }
};

/// Where one rank's results go, by sample, position and head; the same rows at any rank count.
using rows = std::map<std::tuple<int64_t, int64_t, int64_t>, std::vector<float>>;

/// One rank. Its projections are stood in for by numbers that depend on sample, position and head.
struct engine {
    uly::threads::communicator ranks;
    layer_type layer{ranks, uly::sequence_local{}, attention{}, shape};
    heads_type decode{ranks, uly::head_local{}, attention{}, shape};
    // [snippet make]
    cache_type cache = layer.make_cache<float>(samples, capacity);
    // [/snippet]
    uly::sequence step{};
    rows results{};

    int64_t share(int64_t tokens) const {
        return tokens * (ranks.rank() + 1) / ranks.size() - tokens * ranks.rank() / ranks.size();
    }

    /// Numbers for `heads` heads from `head` on, of `tokens` tokens from the step's `first` on.
    operand made(int kind, int64_t first, int64_t tokens, int64_t head, int64_t heads) const {
        operand x({samples, tokens, heads, shape.head_dim});
        for (int64_t b = 0; b < samples; ++b)
            for (int64_t s = 0; s < tokens; ++s)
                for (int64_t h = 0; h < heads; ++h)
                    for (int64_t d = 0; d < shape.head_dim; ++d) {
                        auto const position =
                            cache.lengths()[static_cast<std::size_t>(b)] + first + s;
                        auto const number = kind + 3 * b + 7 * position + 5 * (head + h) + 11 * d;
                        x.at(b, s, h, d) = static_cast<float>(number * number % 97 - 48) / 48;
                    }
        return x;
    }

    void keep(operand& o, std::vector<int64_t> const& past, std::vector<int64_t> const& counted,
              int64_t first, int64_t head) {
        for (int64_t b = 0; b < samples; ++b)
            for (int64_t s = 0; s < o.sizes[1]; ++s)
                for (int64_t h = 0; h < o.sizes[2]; ++h) {
                    auto const place = static_cast<std::size_t>(b);
                    if (first + s >= counted[place]) continue;
                    auto* const row = &o.at(b, s, h, 0);
                    results[{b, past[place] + first + s, head + h}].assign(row,
                                                                           row + shape.head_dim);
                }
    }

    /// `tokens` new tokens, spread over the ranks, of which `counted` are there in each sample.
    void attend(int64_t tokens, std::vector<int64_t> const& counted) {
        auto const first = tokens * ranks.rank() / ranks.size(), own = share(tokens);
        std::vector<int64_t> const past(cache.lengths().begin(), cache.lengths().end());
        auto const q = made(1, first, own, 0, shape.heads);
        auto const k = made(2, first, own, 0, shape.kv_heads),
                   v = made(3, first, own, 0, shape.kv_heads);
        operand o(q.sizes);
        // [snippet step]
        step.renew(ranks, {.batch = samples,
                           .tokens = own,
                           .packing = {.lengths = counted, .past = cache.lengths()}});
        layer.attend(step, cache, q, k, v, o);  // [B, own, H, D]
        // [/snippet]
        keep(o, past, counted, first, 0);
    }

    // [snippet prefill]
    /// Prompts of different length, `chunk` tokens of each at a time.
    void prefill(std::vector<int64_t> const& prompts, int64_t chunk) {
        auto const longest = *std::max_element(prompts.begin(), prompts.end());
        for (int64_t begin = 0; begin < longest; begin += chunk) {
            auto const tokens = std::min(chunk, longest - begin);
            std::vector<int64_t> counted;
            for (auto const prompt : prompts)
                counted.push_back(std::clamp<int64_t>(prompt - begin, 0, tokens));
            attend(tokens, counted);
        }
    }
    // [/snippet]

    // [snippet heads]
    /// One token of each sample. Every rank knows the step, and has the operands of its own heads.
    void attend_by_heads() {
        auto const own = cache.share();
        step = uly::sequence::split(ranks.size(), samples, 1);
        step.pack({.past = cache.lengths()});
        auto const q = made(1, 0, 1, own.head_begin, own.heads());  // [B, 1, h, D]
        auto const k = made(2, 0, 1, own.kv_begin, own.kv_heads()),
                   v = made(3, 0, 1, own.kv_begin, own.kv_heads());
        operand o(q.sizes);
        std::vector<int64_t> const past(cache.lengths().begin(), cache.lengths().end());
        decode.attend(step, cache, q, k, v, o);  // no fence, no exchange
        keep(o, past, {1, 1, 1}, 0, own.head_begin);
    }
    // [/snippet]

    void run(int64_t chunk, bool by_heads) {
        prefill({9, 4, 6}, chunk);
        for (int i = 0; i < 5; ++i) by_heads ? attend_by_heads() : attend(1, {1, 1, 1});
        // [snippet reuse]
        cache.truncate(1, 0);       // this one has ended
        prefill({0, 7, 0}, chunk);  // its place is another's, the others wait
        // [/snippet]
        for (int i = 0; i < 3; ++i) by_heads ? attend_by_heads() : attend(1, {1, 1, 1});
    }
};

rows run(int ranks, int64_t chunk, bool by_heads) {
    rows all;
    std::vector<rows> parts(static_cast<std::size_t>(ranks));
    uly::threads::run(ranks, [&](uly::threads::communicator group) {
        engine mine{group};
        mine.run(chunk, by_heads);
        parts[static_cast<std::size_t>(group.rank())] = mine.results;
    });
    for (auto& part : parts) all.merge(part);
    return all;
}

}  // namespace

int main() {
    auto const expected = run(1, capacity, false);  // every prompt at once
    auto same = expected.size() == static_cast<std::size_t>((17 + 10 + 14) * shape.heads);
    for (int const ranks : {1, 2, 4, 8})
        for (int64_t const chunk : {3, 32})
            for (bool const by_heads : {false, true})
                same = same && run(ranks, chunk, by_heads) == expected;
    std::printf("1, 2, 4 and 8 ranks, in chunks or at once, by tokens or by heads: %s\n",
                same ? "the same bits" : "DIFFERENT");
    return same ? 0 : 1;
}
