#include "runtime/memory_limit.hpp"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

namespace expertwire::runtime {

namespace {

constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();

std::optional<std::uint64_t> number_in(const std::string& path) {
    std::ifstream file(path);
    std::uint64_t value = 0;
    if (!(file >> value)) return std::nullopt;  // absent, or "max"
    return value;
}

// The value after a key, as in "MemAvailable: 12 kB" or "inactive_file 12".
std::uint64_t field_in(const std::string& path, const std::string& key) {
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string word;
        std::uint64_t value = 0;
        if (words >> word >> value && word == key) return value;
    }
    return 0;
}

std::uint64_t left_of(const std::string& folder, const char* limit_name, const char* used_name) {
    const auto limit = number_in(folder + limit_name);
    const auto used = number_in(folder + used_name);
    if (!limit || !used) return unlimited;
    // Cached files count as used there, and go when they are needed.
    const std::uint64_t reclaimable = field_in(folder + "/memory.stat", "inactive_file");
    const std::uint64_t held = *used - std::min(*used, reclaimable);
    return *limit - std::min(*limit, held);
}

void tighten(MemoryLimit& limit, std::uint64_t bytes, const std::string& source) {
    if (bytes < limit.available_bytes) limit = {bytes, source};
}

}  // namespace

MemoryLimit memory_limit() {
    MemoryLimit limit{unlimited, "no limit known"};
    const std::uint64_t free_kib = field_in("/proc/meminfo", "MemAvailable:");
    if (free_kib > 0) tighten(limit, free_kib * 1024, "MemAvailable of /proc/meminfo");
    std::ifstream groups("/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        const bool unified = line.rfind("0::", 0) == 0;
        const bool memory = line.find(":memory:") != std::string::npos;
        if (!unified && !memory) continue;
        const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        std::string path = line.substr(line.rfind(':') + 1);
        while (true) {
            const std::string folder = root + (path == "/" ? "" : path);
            tighten(limit,
                    unified ? left_of(folder, "/memory.max", "/memory.current")
                            : left_of(folder, "/memory.limit_in_bytes", "/memory.usage_in_bytes"),
                    "the limit of cgroup " + folder);
            if (path.size() <= 1) break;
            path = path.substr(0, std::max<std::size_t>(path.rfind('/'), 1));
        }
    }
    return limit;
}

}  // namespace expertwire::runtime
