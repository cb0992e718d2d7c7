// Chunks of one request over several NICs of a rank (rails): which piece goes over which. Pure: the rails' rates and
// latencies are data, the choice depends on nothing else, and the request's signal is gated over all of them anyhow.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/types.hpp"

namespace expertwire {

// One NIC, as its provider's capabilities or a measurement describe it.
struct Rail {
    double bytes_per_ns = 25.0;
    TimeNs latency_ns = 2'000;  // one way
    bool open = true;           // false: its endpoint has failed; nothing goes over it
};

struct RailPiece {
    std::uint32_t rail = 0;
    std::uint64_t offset = 0;  // bytes from the request's first
    std::uint64_t bytes = 0;
};

// Keeps what was handed to each rail and has not ended, so that requests share the rails.
class RailScheduler {
  public:
    explicit RailScheduler(std::span<const Rail> rails)
        : rails_(rails.begin(), rails.end()), backlog_(rails.size(), 0) {}

    void set_open(std::uint32_t rail, bool open) { rails_[rail].open = open; }
    void ended(std::uint32_t rail, std::uint64_t bytes) { backlog_[rail] -= std::min(bytes, backlog_[rail]); }
    std::uint64_t backlog(std::uint32_t rail) const { return backlog_[rail]; }

    // Cuts `bytes` into pieces of `chunk_bytes` (the last one smaller) and gives each to the open rail on which it
    // would be there first. In order of offset; neighbours on one rail are not joined, so that rails can be overtaken.
    // Empty: no rail is open, or there is nothing to send.
    std::vector<RailPiece> spread(std::uint64_t bytes, std::uint64_t chunk_bytes) {
        std::vector<RailPiece> pieces;
        chunk_bytes = std::max<std::uint64_t>(chunk_bytes, 1);
        for (std::uint64_t offset = 0; offset < bytes; offset += chunk_bytes) {
            const std::uint64_t size = std::min(chunk_bytes, bytes - offset);
            const std::size_t rail = soonest(size);
            if (rail == rails_.size()) return {};
            backlog_[rail] += size;
            pieces.push_back({static_cast<std::uint32_t>(rail), offset, size});
        }
        return pieces;
    }

  private:
    std::size_t soonest(std::uint64_t bytes) const {
        std::size_t best = rails_.size();
        double best_ns = 0;
        for (std::size_t i = 0; i < rails_.size(); ++i) {
            if (!rails_[i].open || rails_[i].bytes_per_ns <= 0) continue;
            const double there = static_cast<double>(rails_[i].latency_ns) +
                                 static_cast<double>(backlog_[i] + bytes) / rails_[i].bytes_per_ns;
            if (best != rails_.size() && there >= best_ns) continue;
            best = i;
            best_ns = there;
        }
        return best;
    }

    std::vector<Rail> rails_;
    std::vector<std::uint64_t> backlog_;  // bytes
};

}  // namespace expertwire
