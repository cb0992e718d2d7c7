// The low-latency mode's part of `_simulation`: seeds, its sizes, and its row kernels, for tests that compare their
// variants.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "bind/simulation_bind.hpp"
#include "bind/simulation_low_latency_world.hpp"
#include "bind/simulation_seeds.hpp"
#include "rows/fp8.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace expertwire {

namespace {

template <class T>
T* pointer(std::uint64_t address) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

rows::ScaleKind kind_of(bool power_of_two) {
    return power_of_two ? rows::ScaleKind::power_of_two : rows::ScaleKind::exact;
}

void bind_rows(nb::module_& module) {
    module.def(
        "rows_quantise",
        [](const std::string& isa, std::uint64_t out, std::uint64_t scales, std::uint64_t row, std::uint64_t columns,
           bool power_of_two) {
            rows::quantise_with(isa_named(isa), pointer<std::byte>(out), pointer<float>(scales),
                                pointer<const std::byte>(row), columns, kind_of(power_of_two));
        },
        "isa"_a, "out"_a, "scales"_a, "row"_a, "columns"_a, "power_of_two"_a,
        "bf16[columns] as e4m3fn[columns] and f32[ceil(columns / 128)].");
    module.def(
        "rows_pack_ue8m0",
        [](std::uint64_t words, std::uint64_t scales, std::uint64_t blocks) {
            rows::pack_ue8m0(pointer<std::uint32_t>(words), pointer<const float>(scales), blocks);
        },
        "words"_a, "scales"_a, "blocks"_a, "f32[blocks] as i32[ceil(blocks / 4)].");
    module.def(
        "rows_reduce_weighted",
        [](const std::string& isa, std::uint64_t out, const std::vector<std::uint64_t>& inputs,
           const std::vector<float>& weights, std::uint64_t columns) {
            std::vector<const std::byte*> pointers;
            for (const std::uint64_t address : inputs) pointers.push_back(pointer<const std::byte>(address));
            rows::reduce_weighted_with(isa_named(isa), pointer<std::byte>(out), pointers.data(), weights.data(),
                                       static_cast<std::uint32_t>(inputs.size()), columns);
        },
        "isa"_a, "out"_a, "rows"_a, "weights"_a, "columns"_a, "One row of a low-latency combine.");
}

nb::dict run_seeds(std::uint64_t first, std::uint64_t count, const std::string& mutant, bool stop,
                   std::uint32_t trace_lines, std::uint64_t fail_at, const std::string& fail_how) {
    simulation::Options options;
    options.fail_at = fail_at;
    options.fail_how = nth_named(fail_how);
    options.mutant = mutant_named(mutant);
    options.trace_lines = trace_lines;
    simulation::Coverage coverage;
    return report_seeds(first, count, stop, coverage,
                        [&](std::uint64_t seed) { return simulation::simulate_low_latency(seed, options, coverage); });
}

nb::dict run_nth(std::uint64_t seed, const std::string& how, std::uint64_t stride) {
    simulation::Options options;
    options.fail_how = nth_named(how);
    simulation::Coverage coverage;
    return report_nth(stride, coverage, [&](std::uint64_t n) {
        options.fail_at = n;
        return simulation::simulate_low_latency(seed, options, coverage);
    });
}

}  // namespace

void bind_low_latency_simulation(nb::module_& module) {
    bind_rows(module);
    module.def("run_low_latency_seeds", &run_seeds, "first"_a, "count"_a, "mutant"_a = "none", "stop"_a = false,
               "trace_lines"_a = 0, "fail_at"_a = 0, "fail_how"_a = "operation",
               "Runs seeds of the low-latency mode; as run_exchange_seeds.");
    module.def("run_low_latency_nth", &run_nth, "seed"_a, "how"_a, "stride"_a = 1,
               "The n-th operation of a run of the low-latency mode fails; as run_exchange_nth.");
}

}  // namespace expertwire
