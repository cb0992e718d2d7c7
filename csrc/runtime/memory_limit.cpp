#include "runtime/memory_limit.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <string_view>

namespace expertwire::runtime {

namespace {

constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();

// Plain read(2) and from_chars: beside a library that brings a C++ runtime of its own (torch 2.11's CUDA build),
// `stream >> number` was seen to take "max" for 0, and every Buffer was refused for want of memory.
std::string text_of(const std::string& path) {
    std::string text;
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return text;
    std::array<char, 4096> part;
    for (ssize_t got; (got = ::read(file, part.data(), part.size())) > 0;)
        text.append(part.data(), static_cast<std::size_t>(got));
    ::close(file);
    return text;
}

std::optional<std::uint64_t> number_at(std::string_view text) {
    while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{}) return std::nullopt;
    return value;
}

// Calls `each(line)` without its end, until it says false.
template <typename Each>
void for_lines(std::string_view text, Each&& each) {
    while (!text.empty()) {
        const std::size_t end = std::min(text.find('\n'), text.size());
        if (!each(text.substr(0, end))) return;
        text.remove_prefix(std::min(end + 1, text.size()));
    }
}

// The value after a key, as in "MemAvailable: 12 kB" or "inactive_file 12".
std::uint64_t field(const std::string& text, const std::string& key) {
    std::uint64_t found = 0;
    for_lines(text, [&](std::string_view line) {
        if (line.substr(0, key.size()) != key || line.size() == key.size()) return true;
        const char next = line[key.size()];
        if (next != ' ' && next != '\t') return true;
        found = number_at(line.substr(key.size())).value_or(0);
        return false;
    });
    return found;
}

std::uint64_t left(const std::string& limit_text, const std::string& used_text, const std::string& stat_text) {
    const auto limit = number_at(limit_text);
    const auto used = number_at(used_text);
    if (!limit || !used) return unlimited;  // absent, or "max"
    // Cached files count as used there, and go when they are needed.
    const std::uint64_t reclaimable = field(stat_text, "inactive_file") + field(stat_text, "active_file");
    const std::uint64_t held = *used - std::min(*used, reclaimable);
    return *limit - std::min(*limit, held);
}

std::uint64_t left_of(const std::string& folder, const char* limit_name, const char* used_name) {
    return left(text_of(folder + limit_name), text_of(folder + used_name), text_of(folder + "/memory.stat"));
}

void tighten(MemoryLimit& limit, std::uint64_t bytes, const std::string& source) {
    if (bytes < limit.available_bytes) limit = {bytes, source};
}

}  // namespace

MemoryLimit memory_limit() {
    MemoryLimit limit{unlimited, "no limit known"};
    const std::uint64_t free_kib = field(text_of("/proc/meminfo"), "MemAvailable:");
    if (free_kib > 0) tighten(limit, free_kib * 1024, "MemAvailable of /proc/meminfo");
    for_lines(text_of("/proc/self/cgroup"), [&](std::string_view line) {
        const bool unified = line.rfind("0::", 0) == 0;
        const bool memory = line.find(":memory:") != std::string_view::npos;
        if (!unified && !memory) return true;
        const std::string root = unified ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        std::string path(line.substr(line.rfind(':') + 1));
        while (true) {
            const std::string folder = root + (path == "/" ? "" : path);
            tighten(limit,
                    unified ? left_of(folder, "/memory.max", "/memory.current")
                            : left_of(folder, "/memory.limit_in_bytes", "/memory.usage_in_bytes"),
                    "the limit of cgroup " + folder);
            if (path.size() <= 1) break;
            path = path.substr(0, std::max<std::size_t>(path.rfind('/'), 1));
        }
        return true;
    });
    return limit;
}

}  // namespace expertwire::runtime
