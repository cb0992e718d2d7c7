// What the files of `_simulation` offer to its module.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "engine/mutants.hpp"
#include "provider/simulated.hpp"
#include "rows/rows.hpp"

namespace expertwire {

NthFault nth_named(const std::string& name);   // throws ValueError for what is not one of nth_faults()
Mutant mutant_named(const std::string& name);  // throws ValueError for what is not one of mutants()
NetworkFaults network_faults_of(const nanobind::dict& options);  // by their names in NetworkFaults
void bind_engine_simulation(nanobind::module_& module);
void bind_exchange_simulation(nanobind::module_& module);
void bind_rails_simulation(nanobind::module_& module);
void bind_low_latency_simulation(nanobind::module_& module);
void bind_transfer_simulation(nanobind::module_& module);
rows::Isa isa_named(const std::string& name);  // baseline, avx2, avx512; throws ValueError for any other

}  // namespace expertwire
