// How much memory this process may still take. Allocating a memfd beyond it does not fail: the kernel kills somebody.
#pragma once

#include <cstdint>
#include <string>

namespace expertwire::runtime {

struct MemoryLimit {
    std::uint64_t available_bytes = 0;
    std::string source;  // "MemAvailable", or the cgroup's file
};

MemoryLimit memory_limit();

}  // namespace expertwire::runtime
