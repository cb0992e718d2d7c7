// The exchange's half of `_simulation`: run seeds, give back what went wrong and what was covered; and the row kernels,
// for tests that compare their variants.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bind/simulation_bind.hpp"
#include "bind/simulation_exchange_timed.hpp"
#include "bind/simulation_exchange_world.hpp"
#include "bind/simulation_seeds.hpp"
#include "exchange/layout.hpp"
#include "rows/rows.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace expertwire {

namespace {

using simulation::Coverage;
using simulation::Result;

nb::dict run_exchange_seeds(std::uint64_t first, std::uint64_t count, const std::string& mutant_name, bool stop,
                            std::uint32_t trace_lines, std::uint64_t fail_at, const std::string& fail_how) {
    simulation::Options options;
    options.fail_at = fail_at;
    options.fail_how = nth_named(fail_how);
    options.mutant = mutant_named(mutant_name);
    options.trace_lines = trace_lines;
    Coverage coverage;
    return report_seeds(first, count, stop, coverage,
                        [&](std::uint64_t seed) { return simulation::simulate_exchange(seed, options, coverage); });
}

nb::dict run_exchange_nth(std::uint64_t seed, NthFault how, std::uint64_t stride) {
    Coverage coverage;
    simulation::Options options;
    options.fail_how = how;
    return report_nth(stride, coverage, [&](std::uint64_t n) {
        options.fail_at = n;
        return simulation::simulate_exchange(seed, options, coverage);
    });
}

nb::dict run_timed(const nb::dict& given) {
    simulation::TimedOptions options;
    std::size_t known = 0;
    const auto take = [&](const char* name, auto& into) {
        if (!given.contains(name)) return;
        into = nb::cast<std::decay_t<decltype(into)>>(given[name]);
        ++known;
    };
    bool synchronous = false;
    take("ranks", options.shape.ranks);
    take("ranks_per_node", options.shape.ranks_per_node);
    take("tokens", options.shape.tokens);
    take("row_bytes", options.shape.row_bytes);
    take("experts", options.shape.experts);
    take("topk", options.shape.topk);
    take("chunk_rows", options.shape.chunk_rows);
    take("ring_slots", options.shape.ring_slots);
    take("combine", options.shape.combine);
    take("latency_ns", options.network.latency_ns);
    take("bytes_per_ns", options.network.bytes_per_ns);
    take("operation_ns", options.network.operation_ns);
    take("rendezvous_bytes", options.network.rendezvous_bytes);
    take("transmit_queue", options.network.transmit_queue);
    take("synchronous", synchronous);
    take("gate", options.gate);
    take("seed", options.seed);
    take("row_bytes_on_wire", options.row_bytes_on_wire);
    take("setup_ns", options.setup_ns);
    take("pack_bytes_per_ns", options.pack_bytes_per_ns);
    take("proxies", options.proxies);
    take("outstanding", options.outstanding);
    if (known != given.size()) throw nb::value_error("run_exchange_timed: an option that there is not");
    if (synchronous) options.posting = simulation::Posting::synchronous;
    simulation::TimedResult result;
    {
        const nb::gil_scoped_release released;
        result = simulation::run_timed_exchange(options);
    }
    nb::dict out;
    out["error"] = result.error;
    out["call_ns"] = nb::cast(result.call_ns);
    out["chunks"] = result.chunks;
    out["wire_bytes"] = result.wire_bytes;
    out["trace_hash"] = result.trace_hash;
    return out;
}

template <class T>
T* pointer(std::uint64_t address) {
    return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

rows::Sum make_sum(const std::vector<std::uint64_t>& addresses, const std::vector<std::uint32_t>& ends,
                   std::uint64_t bias0, std::uint64_t bias1, std::vector<const std::byte*>& inputs) {
    for (const std::uint64_t address : addresses) inputs.push_back(pointer<const std::byte>(address));
    rows::Sum sum;
    sum.rows = inputs.data();
    sum.ends = ends.data();
    sum.groups = static_cast<std::uint32_t>(ends.size());
    sum.bias0 = pointer<const std::byte>(bias0);
    sum.bias1 = pointer<const std::byte>(bias1);
    return sum;
}

void bind_rows(nb::module_& module) {
    module.def(
        "rows_isas",
        [] {
            std::vector<std::string> names;
            for (const char* name : {"baseline", "avx2", "avx512"}) {
                if (rows::has(isa_named(name))) names.emplace_back(name);
            }
            return names;
        },
        "Instruction sets of the row kernels that this machine has.");
    module.def(
        "rows_reduce",
        [](const std::string& isa, std::uint64_t out, const std::vector<std::uint64_t>& inputs,
           const std::vector<std::uint32_t>& ends, std::uint64_t bias0, std::uint64_t bias1, std::uint64_t columns) {
            std::vector<const std::byte*> pointers;
            const rows::Sum sum = make_sum(inputs, ends, bias0, bias1, pointers);
            if (isa == "best") {
                rows::reduce(pointer<std::byte>(out), sum, columns, rows::Store::streaming);
                rows::fence();
            } else {
                rows::reduce_with(isa_named(isa), pointer<std::byte>(out), sum, columns);
            }
        },
        "isa"_a, "out"_a, "rows"_a, "ends"_a, "bias0"_a, "bias1"_a, "columns"_a,
        "One row of a combine. Addresses of bf16 rows, grouped by `ends`. 'best': what the core uses, streaming.");
    module.def(
        "rows_round",
        [](const std::string& isa, std::uint64_t out, std::uint64_t in, std::uint64_t columns) {
            rows::round_row_with(isa_named(isa), pointer<std::byte>(out), pointer<const float>(in), columns);
        },
        "isa"_a, "out"_a, "values"_a, "columns"_a, "f32[columns] rounded to bf16.");
    module.def(
        "rows_copy",
        [](std::uint64_t to, std::uint64_t from, std::uint64_t bytes, bool streaming) {
            const nb::gil_scoped_release released;
            rows::copy(pointer<std::byte>(to), pointer<const std::byte>(from), bytes,
                       streaming ? rows::Store::streaming : rows::Store::cached);
            rows::fence();
        },
        "to"_a, "source"_a, "bytes"_a, "streaming"_a, "One row's copy.");
}

nb::dict layout_numbers(std::uint32_t rank, const std::vector<std::uint32_t>& node_of, std::uint32_t local_experts_max,
                        std::uint32_t ring_slots, std::uint64_t slot_bytes) {
    const exchange::NodeTable nodes(node_of);
    const exchange::Layout layout(exchange::Shape{rank, nodes, local_experts_max, ring_slots, slot_bytes});
    nb::dict numbers;
    numbers["control_bytes"] = layout.control_bytes();
    numbers["staging_bytes"] = layout.staging_bytes(rank);
    nb::list entries;
    for (std::uint32_t node = 0; node < nodes.nodes(); ++node) entries.append(nodes.entry(rank, node));
    numbers["entries"] = entries;
    return numbers;
}

}  // namespace

rows::Isa isa_named(const std::string& name) {
    if (name == "baseline") return rows::Isa::baseline;
    if (name == "avx2") return rows::Isa::avx2;
    if (name == "avx512") return rows::Isa::avx512;
    throw nb::value_error(("no such instruction set: " + name).c_str());
}

void bind_exchange_simulation(nb::module_& module) {
    module.def(
        "run_exchange_seeds", &run_exchange_seeds, "first"_a, "count"_a, "mutant"_a = "none", "stop"_a = false,
        "trace_lines"_a = 0, "fail_at"_a = 0, "fail_how"_a = "operation",
        "Runs seeds first … first + count - 1. {'failures': [(seed, text)], 'trace_hashes': [int], 'coverage': {name: "
        "count}, 'trace': the last run's last `trace_lines` events in words}. `stop`: end at the first failure.");
    module.def(
        "run_exchange_nth",
        [](std::uint64_t seed, const std::string& how, std::uint64_t stride) {
            return run_exchange_nth(seed, nth_named(how), stride);
        },
        "seed"_a, "how"_a, "stride"_a = 1,
        "The n-th operation of the run fails (`how`: one of nth_faults()), and nothing else, for n = 1, 1 + stride, … "
        "until there is no n-th one. {'struck': how many there were, 'failures': [(n, text)], 'coverage': …}.");
    module.def(
        "run_exchange_timed", &run_timed, "options"_a,
        "One dispatch (and `combine`) of every rank in virtual time, each byte checked against the oracle. Options by "
        "name: ranks, ranks_per_node, tokens, row_bytes, experts, topk, chunk_rows, ring_slots, combine; latency_ns, "
        "bytes_per_ns, operation_ns, rendezvous_bytes, transmit_queue; synchronous, gate, seed, row_bytes_on_wire, "
        "setup_ns, pack_bytes_per_ns, proxies, outstanding. {'error', 'call_ns', 'chunks', 'wire_bytes', "
        "'trace_hash'}.");
    module.def("exchange_layout", &layout_numbers, "rank"_a, "node_of"_a, "local_experts_max"_a, "ring_slots"_a,
               "slot_bytes"_a,
               "Sizes of a rank's regions and its entry rank in every node, as the core computes them.");
    module.def(
        "exchange_chunk_rows",
        [](std::uint64_t slot_bytes, std::uint64_t row_bytes, std::uint32_t mask_words, std::uint32_t topk,
           std::uint32_t index_bytes, bool has_weights, std::uint32_t scale_bytes) {
            const exchange::RowShape row{row_bytes, scale_bytes, topk, index_bytes, has_weights};
            return exchange::dispatch_chunk(slot_bytes, row, mask_words).capacity;
        },
        "slot_bytes"_a, "row_bytes"_a, "mask_words"_a, "topk"_a, "index_bytes"_a, "has_weights"_a, "scale_bytes"_a,
        "Rows that fit a ring slot.");
    module.def(
        "exchange_extent",
        [](std::uint64_t rows, std::uint64_t row_bytes, std::uint32_t topk, std::uint32_t index_bytes, bool weights,
           std::uint32_t scale_bytes) {
            const exchange::Extent e =
                exchange::dispatch_extent(rows, {row_bytes, scale_bytes, topk, index_bytes, weights});
            return nb::make_tuple(e.rows, e.src_idx, e.indices, e.weights, e.scales, e.bytes);
        },
        "rows"_a, "row_bytes"_a, "topk"_a, "index_bytes"_a, "has_weights"_a, "scale_bytes"_a,
        "Offsets inside a dispatch's extent.");
    bind_rows(module);
}

}  // namespace expertwire
