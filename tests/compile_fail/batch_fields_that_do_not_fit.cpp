// SPDX-License-Identifier: Apache-2.0
// expect: ulysses: a sample's fields must have ids_field: they say how many tokens it has.
// expect: ulysses: labels are signed: that of a token that does not count is -100.
// expect: ulysses: the values of a token's field are numbers.
// expect: ulysses: a micro-batch has the fields that its adapter was given; add ids_field or labels_field.

#include <ulysses/ulysses.hpp>

#include <string>
#include <tuple>
#include <vector>

namespace uly = ulysses;

struct sample {
    std::vector<int> ids;
    std::vector<unsigned> bytes;
    std::vector<std::string> words;
};
using ranks = uly::mesh<uly::threads::communicator>;

template <class... Fields>
auto next(ranks const& group, std::vector<sample> const& own, std::tuple<Fields...> const& fields) {
    uly::batch_adapter batches{group, uly::range_source{own}, fields};
    typename decltype(batches)::batch_type batch;
    batches.next(batch);
    return batch;
}

void use(ranks const& group, std::vector<sample> const& own) {
    auto const ids = uly::ids_field(&sample::ids);
#if defined(ULYSSES_CONTROL)
    next(group, own, std::tuple{ids, uly::labels_field(&sample::ids)}).labels();
#else
    next(group, own, std::tuple{uly::values_field("ids", &sample::ids)});
    next(group, own, std::tuple{ids, uly::labels_field(&sample::bytes)});
    next(group, own, std::tuple{ids, uly::values_field("words", &sample::words, 1, std::string())});
    next(group, own, std::tuple{ids}).labels();
#endif
}
