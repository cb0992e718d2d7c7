#include <nanobind/nanobind.h>

#include "bind/simulation_bind.hpp"

// The pure rooms once more, compiled with the kept mutants, and driven by the simulated network.
NB_MODULE(_simulation, module) {
    module.doc() = "Expertwire's deterministic simulation. Use expertwire.testing; this module's names may change.";
    expertwire::bind_engine_simulation(module);
    expertwire::bind_exchange_simulation(module);
    expertwire::bind_rails_simulation(module);
    expertwire::bind_low_latency_simulation(module);
    expertwire::bind_transfer_simulation(module);
}
