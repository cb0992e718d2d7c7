// What one seed of the engine's simulation is about: the cluster, its limits, and which faults strike how often.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "provider/simulated_engine.hpp"

namespace expertwire {

// Everything that a seed decides before the run begins.
struct EnginePlan {
    std::uint32_t ranks = 2, lanes = 2, endpoints = 1, requests = 0;
    EngineLimits limits;
    GatePolicy policy;
    NetworkModel model;
    NetworkFaults faults;
    bool closes_regions = false, wrong_ranges = false, freezes = false, kills = false, endpoint_errors = false,
         cancels = false, local_levels = false;
    std::uint32_t bulk_window = 0;   // above 0: lanes but the first are bulk lanes, and neighbours are posted as one
    double served = 1;               // how often a rank gets its turn
    std::vector<std::string> swarm;  // what is switched on
    bool errors_possible() const {
        const bool nth_fails = faults.fail_at > 0 && faults.fail_how != NthFault::again;
        return faults.failed_post > 0 || faults.failed_operation > 0 || faults.lost_completion > 0 || nth_fails ||
               closes_regions || wrong_ranges || freezes || kills || endpoint_errors;
    }
};

EnginePlan make_engine_plan(const EngineSimulationOptions& options, Random& random);

}  // namespace expertwire
