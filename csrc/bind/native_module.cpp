#include "bind/native_bind.hpp"

NB_MODULE(_native, module) {
    module.doc() = "Expertwire's native core. Use expertwire.fabric and expertwire.ep; this module's names may change.";
    expertwire::bind_context(module);
    expertwire::bind_provider(module);
    expertwire::bind_exchange(module);
}
