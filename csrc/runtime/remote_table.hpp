// Regions that peers have announced, under numbers that name nothing any more once they were given back. Pure.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/types.hpp"

namespace expertwire::runtime {

struct RemoteRegion {
    std::uint32_t rank = 0;
    std::string name;
    std::uint64_t bytes = 0;
};

// A row is used again, under its next generation; one that has had them all is not, so that no number comes twice:
// 4,095 times as many regions as there are rows.
class RemoteTable {
  public:
    explicit RemoteTable(std::uint32_t rows_max) : rows_max_(rows_max) {}

    // None: all rows hold a region.
    std::optional<RemoteRegionId> add(RemoteRegion region) {
        std::uint32_t row = static_cast<std::uint32_t>(rows_.size());
        if (!free_.empty()) {
            row = free_.back();
            free_.pop_back();
        } else if (row < rows_max_) {
            rows_.emplace_back();
        } else {
            return std::nullopt;
        }
        rows_[row].region = std::move(region);
        ++live_;
        return remote_region_id(row, rows_[row].generation);
    }

    void remove(RemoteRegionId id) {
        if (find(id) == nullptr) return;
        Row& row = rows_[row_of(id)];
        row.region.reset();
        --live_;
        if (++row.generation < remote_generations) free_.push_back(row_of(id));
    }

    // Null: of another generation, or never given.
    const RemoteRegion* find(RemoteRegionId id) const {
        if (!id.valid() || row_of(id) >= rows_.size()) return nullptr;
        const Row& row = rows_[row_of(id)];
        return row.region && row.generation == generation_of(id) ? &*row.region : nullptr;
    }

    std::uint32_t live() const { return live_; }
    std::uint32_t rows_max() const { return rows_max_; }

  private:
    struct Row {
        std::uint32_t generation = 0;
        std::optional<RemoteRegion> region;
    };

    std::uint32_t rows_max_;
    std::uint32_t live_ = 0;
    std::deque<Row> rows_;
    std::vector<std::uint32_t> free_;
};

}  // namespace expertwire::runtime
