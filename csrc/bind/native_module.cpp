#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "bind/native_bind.hpp"
#include "runtime/memory_limit.hpp"

NB_MODULE(_native, module) {
    // Objects that are alive when the interpreter ends are the user's choice (SPEC E14), not a leak of ours.
    nanobind::set_leak_warnings(false);
    module.doc() = "Expertwire's native core. Use expertwire.fabric and expertwire.ep; this module's names may change.";
    expertwire::bind_context(module);
    expertwire::bind_provider(module);
    expertwire::bind_exchange(module);
    expertwire::bind_low_latency(module);
    expertwire::bind_liveness(module);
    expertwire::bind_token(module);
    module.def(
        "memory_available",
        [] {
            const expertwire::runtime::MemoryLimit limit = expertwire::runtime::memory_limit();
            return std::pair<std::uint64_t, std::string>(limit.available_bytes, limit.source);
        },
        "(bytes, where that is written): how much memory this process may still take. Allocating a region beyond it "
        "does "
        "not fail, the kernel kills somebody.");
}
