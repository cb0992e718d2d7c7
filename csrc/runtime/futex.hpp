// The two futex calls that this room needs, on words that may be shared between processes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <ctime>

#include "engine/types.hpp"

namespace expertwire::runtime {

// Sleeps while the word is `expected`, for at most `timeout_ns`. Returns early on a wake-up or a signal.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t expected, TimeNs timeout_ns) {
    const timespec timeout{static_cast<time_t>(timeout_ns / 1'000'000'000),
                           static_cast<long>(timeout_ns % 1'000'000'000)};
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

inline void futex_wake(std::atomic<std::uint32_t>& word, int count) {
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE, count, nullptr, nullptr, 0);
}

}  // namespace expertwire::runtime
