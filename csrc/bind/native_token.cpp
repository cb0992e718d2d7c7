// TokenProbe: the progress token alone, without an endpoint behind it.
#include <nanobind/nanobind.h>

#include "bind/native_bind.hpp"
#include "runtime/clock.hpp"
#include "runtime/token.hpp"

namespace nb = nanobind;

namespace expertwire {

void bind_token(nb::module_& module) {
    using namespace nb::literals;
    using runtime::Token;
    nb::class_<Token>(module, "TokenProbe", "A progress token that no endpoint has; for tests.")
        .def(nb::init<>())
        .def(
            "take_within",
            [](Token& token, std::uint64_t timeout_ms) {
                const nb::gil_scoped_release unlocked;
                return token.take_until(runtime::now_ns() + timeout_ms * 1'000'000);
            },
            "timeout_ms"_a, "Whether it was taken by then.")
        .def("wanted", &Token::wanted, "Whether somebody sleeps for it.")
        .def("give", &Token::give);
}

}  // namespace expertwire
