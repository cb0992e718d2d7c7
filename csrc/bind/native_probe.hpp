// Pieces shared by native_provider.cpp and native_provider_probe.cpp.
#pragma once

#include <nanobind/nanobind.h>

#include "provider/capabilities.hpp"

namespace expertwire::bind {

ProviderSettings settings_from(const nanobind::dict& options);
nanobind::dict to_dict(const Capabilities& capabilities);
void bind_probe(nanobind::module_& module);

}  // namespace expertwire::bind
