#include "bind/native_bind.hpp"

NB_MODULE(_native, module) {
    // Objects that are alive when the interpreter ends are the user's choice (SPEC E14), not a leak of ours.
    nanobind::set_leak_warnings(false);
    module.doc() = "Expertwire's native core. Use expertwire.fabric and expertwire.ep; this module's names may change.";
    expertwire::bind_context(module);
    expertwire::bind_provider(module);
    expertwire::bind_exchange(module);
    expertwire::bind_liveness(module);
}
