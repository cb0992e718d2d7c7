// What the files of `_simulation` offer to its module.
#pragma once

#include <nanobind/nanobind.h>

namespace expertwire {

void bind_engine_simulation(nanobind::module_& module);
void bind_exchange_simulation(nanobind::module_& module);

}  // namespace expertwire
