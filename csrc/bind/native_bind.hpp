// The parts of `_native`; one file per Python class.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "runtime/context.hpp"

namespace expertwire {

void bind_context(nanobind::module_& module);   // native_context.cpp; also registers Failure → expertwire.errors
void bind_provider(nanobind::module_& module);  // native_provider.cpp
void bind_exchange(nanobind::module_& module);  // native_exchange.cpp
void bind_liveness(nanobind::module_& module);  // native_liveness.cpp

namespace bind {

// What Python's `Context` holds; Exchange keeps a copy of the shared pointer, so that teardown may come in any order.
struct PyContext {
    std::shared_ptr<runtime::Context> context;
};

// Raises the pending KeyboardInterrupt, if any. Takes the GIL: call it between wait slices (≤ 50 ms apart).
void check_signals();

}  // namespace bind
}  // namespace expertwire
