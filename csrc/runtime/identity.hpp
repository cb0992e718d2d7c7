// Who a process is, so that another can tell whether it may watch it by pidfd: same kernel (boot id), same pid
// namespace, and a pid that was not given to somebody else since (start time).
#pragma once

#include <cstdint>
#include <optional>

namespace expertwire::runtime {

struct ProcessIdentity {
    std::int32_t pid = 0;
    std::uint64_t start_time = 0;     // clock ticks since boot
    std::uint64_t boot = 0;           // hash of the boot id, 0: unknown
    std::uint64_t pid_namespace = 0;  // inode, 0: unknown
};

ProcessIdentity own_identity();
std::optional<std::uint64_t> start_time_of(std::int32_t pid);

// A pidfd of that very process, or -1 where it cannot be seen from here (or has already gone: then `gone` is set).
int open_pidfd(const ProcessIdentity& process, bool& gone);

}  // namespace expertwire::runtime
