// What a family of seeds reports to Python, whatever it simulates.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace expertwire {

// `simulate(seed)` gives a result with trace_hash, error and trace; `coverage` is filled by it. Without the GIL.
template <class Coverage, class Simulate>
nanobind::dict report_seeds(std::uint64_t first, std::uint64_t count, bool stop, const Coverage& coverage,
                            const Simulate& simulate) {
    std::vector<decltype(simulate(first))> results;
    {
        const nanobind::gil_scoped_release released;
        for (std::uint64_t seed = first; seed < first + count; ++seed) {
            results.push_back(simulate(seed));
            if (stop && !results.back().error.empty()) break;
        }
    }
    nanobind::list hashes;
    nanobind::list failures;
    for (std::size_t at = 0; at < results.size(); ++at) {
        hashes.append(results[at].trace_hash);
        if (!results[at].error.empty()) failures.append(nanobind::make_tuple(first + at, results[at].error));
    }
    nanobind::dict out;
    out["failures"] = failures;
    out["trace_hashes"] = hashes;
    out["coverage"] = nanobind::cast(coverage);
    out["trace"] = nanobind::cast(results.empty() ? std::vector<std::string>{} : results.back().trace);
    return out;
}

// `simulate(n)` lets the n-th operation of a run fail, for n = 1, 1 + stride, …: until one sees no n-th operation.
template <class Coverage, class Simulate>
nanobind::dict report_nth(std::uint64_t stride, const Coverage& coverage, const Simulate& simulate) {
    std::vector<std::pair<std::uint64_t, std::string>> failures;
    std::uint64_t struck = 0;
    {
        const nanobind::gil_scoped_release released;
        for (std::uint64_t n = 1;; n += stride) {
            const auto result = simulate(n);
            if (!result.error.empty()) failures.emplace_back(n, result.error);
            if (result.posts < n || failures.size() >= 10) break;
            ++struck;
        }
    }
    nanobind::dict out;
    out["struck"] = struck;
    out["failures"] = nanobind::cast(failures);
    out["coverage"] = nanobind::cast(coverage);
    return out;
}

}  // namespace expertwire
