#pragma once
// SPDX-License-Identifier: Apache-2.0

#include <ulysses/core/communicator.hpp>
#include <ulysses/core/error.hpp>
#include <ulysses/core/explain.hpp>
#include <ulysses/core/guarded.hpp>
#include <ulysses/core/index_range.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>

namespace ulysses::inline ULYSSES_ABI {

/// Rows, one a token, in tiles of equal size but the last ones: 125 rows in 4 tiles are 32, 32, 32,
/// 29. There is at least one tile, and there may be empty ones, where other ranks have more.
class tiling {
   public:
    /// At most `tiles` tiles; fewer where that leaves none empty: 5 rows in 4 tiles are 2, 2, 1.
    /// *Throws* `invalid_call`, as do all here.
    static tiling of(std::int64_t rows, std::int64_t tiles, where at = where::here()) {
        if (rows < 0 || tiles < 1)
            raise(errc::invalid_call, at, "tiling",
                  "a tiling has at least 1 tile of 0 or more rows", rows, " rows, ", tiles,
                  " tiles");
        return of_rows(rows, std::max<std::int64_t>(1, rows / tiles + (rows % tiles != 0)), at);
    }
    /// Tiles of at most `tile_rows` rows.
    static tiling of_rows(std::int64_t rows, std::int64_t tile_rows, where at = where::here()) {
        if (rows < 0 || tile_rows < 1)
            raise(errc::invalid_call, at, "tiling", "a tile has at least 1 of 0 or more rows",
                  tile_rows, " of ", rows);
        return {rows, tile_rows,
                std::max<std::int64_t>(1, rows / tile_rows + (rows % tile_rows != 0))};
    }
    /// Tiles of at most `tile_rows` rows, as many on every rank: for what is collective in a tile,
    /// such as parameters that are gathered there. *Blocking*: one small collective. *Throws* the
    /// same on every rank.
    template <class Comm>
    static tiling agree(Comm const& ranks, std::int64_t rows, std::int64_t tile_rows,
                        where at = where::here()) {
        static_assert(reduces<Comm> || explain_reduces<Comm>());
        fence_status status;
        tiling mine{0, 1, 1};
        guarded(status, [&] { mine = of_rows(rows, tile_rows, at); });
        std::array<std::int64_t, 2> most{mine.count_, status.code != errc::none ? 1 : 0};
        leaving_on_failure(ranks, [&] {
            ranks.all_reduce(std::span<std::int64_t>(most), reduction::max);
            if (most[1] != 0) ranks.fence(status);
        });
        mine.count_ = most[0];
        return mine;
    }

    std::int64_t rows() const { return rows_; }
    std::int64_t count() const { return count_; }
    /// Rows of the largest tile.
    std::int64_t tile_rows() const { return std::min(tile_rows_, rows_); }
    /// The rows of tile i.
    index_range operator[](std::int64_t i) const { return {row_of(i), row_of(i + 1)}; }

   private:
    tiling(std::int64_t rows, std::int64_t tile_rows, std::int64_t count)
        : rows_(rows), tile_rows_(tile_rows), count_(count) {}

    std::int64_t row_of(std::int64_t tile) const {
        return tile > rows_ / tile_rows_ ? rows_ : tile * tile_rows_;
    }

    std::int64_t rows_, tile_rows_, count_;
};

}  // namespace ulysses::inline ULYSSES_ABI
