// One snapshot of everything that is counted; fabric/stats.py gives it names and types.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "provider/provider.hpp"

namespace expertwire::runtime {

// Counted by the runtime itself, under the token.
struct RuntimeCounters {
    std::uint64_t turns = 0;                  // turns of the engine, by whomever
    std::uint64_t notifications = 0;          // arrived
    std::uint64_t notifications_dropped = 0;  // arrived while nobody took them and the queue was full
    std::uint64_t pulses_sent = 0;            // heartbeats over the fabric
    std::uint64_t endpoints_replaced = 0;     // SPEC T14: the old one is closed, its records are terminal
    std::uint64_t replacements_failed = 0;    // a new one could not be opened, or the old one not closed
    std::uint64_t thread_sleeps = 0;          // times the progress thread went to sleep
    std::uint64_t thread_failures = 0;        // exceptions that it caught
};

struct Statistics {
    EngineStatistics engine;
    ProviderCounters provider;
    RuntimeCounters runtime;
    std::uint64_t regions = 0;
    std::uint64_t region_bytes = 0;
    std::uint64_t peers = 0;
    std::uint64_t remote_regions = 0;  // of peers, that are known

    std::vector<std::pair<const char*, std::uint64_t>> rows() const;
};

}  // namespace expertwire::runtime
