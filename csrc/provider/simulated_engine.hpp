// The engine's simulation: N engines over a simulated network, a seeded workload with seeded faults, every invariant
// checked at every step, every landing and every record checked by the oracle; then the network heals, and everything
// must converge. One seed names one run: ranks, lanes, limits, ordering class and faults all come from it (swarm
// testing).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.hpp"
#include "provider/simulated.hpp"
#include "provider/simulated_oracle.hpp"

namespace expertwire {

struct EngineSimulationOptions {
    std::uint64_t seed = 0;
    std::uint32_t ranks = 0;              // 0: the seed decides (2 … 6, now and then 12)
    std::uint32_t requests_per_rank = 0;  // 0: the seed decides
    bool check_engine = true;             // false: only the oracle judges (kept mutants)
    bool own_faults = false;              // use `faults`, not the seed's choice; nobody dies or falls silent then
    NetworkFaults faults;
    bool squeeze = false;  // no fault but being pushed back: 4 slots for all lanes, both queues at their minimum
    std::uint32_t trace_lines = 0;  // the last so many events, in words
    bool counted = false;           // class C
};

enum class SimulationEvent : std::uint8_t {
    would_block = 0,
    cancelled,
    cancel_refused,
    peer_declared_dead,
    peer_reopened,
    endpoint_replaced,
    endpoint_failed,
    quiet_ok,
    quiet_failed,
    local_published,
    quarantined,
    aborted,
    lane_reopened,
    doomed_signal,
    endpoint_drained,  // replaced in two phases: closed once what may end there has ended
    endpoint_healed,   // replaced after the network had healed, for operations whose completion was lost
};
inline constexpr std::size_t simulation_events = 16;
const char* name_of(SimulationEvent event);

struct EngineSimulationResult {
    std::uint64_t seed = 0;
    std::string failure;  // empty: everything held
    std::uint64_t trace_hash = 0;
    std::uint64_t steps = 0;
    std::uint64_t virtual_ns = 0;
    std::uint32_t ranks = 0;
    std::uint32_t queue_pairs_per_peer = 0;
    bool ordered = false;  // class A
    std::uint64_t requests = 0, landings = 0, controls = 0, posts = 0;
    std::uint64_t longest_wait = 0;  // squeeze: posts of a rank that a lane which could go on had to let pass
    std::vector<std::string> swarm;  // the kinds of faults that this seed has switched on
    std::vector<std::string> trace;
    CountedCounters counting;  // class C: of all ranks
    std::array<std::uint64_t, 3> scopes{};
    std::array<std::uint64_t, network_faults> faults{};
    std::array<std::uint64_t, simulation_events> events{};
    std::array<std::array<std::uint64_t, request_states>, request_states> transitions{};
};

EngineSimulationResult run_engine_simulation(const EngineSimulationOptions& options);

}  // namespace expertwire
