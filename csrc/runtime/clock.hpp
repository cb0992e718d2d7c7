// The one clock of this room.
#pragma once

#include <algorithm>
#include <ctime>

#include "engine/types.hpp"

namespace expertwire::runtime {

inline TimeNs now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<TimeNs>(time.tv_sec) * 1'000'000'000 + static_cast<TimeNs>(time.tv_nsec);
}

// What of the time between two looks at the clock counts against others. Between two that follow each other at once
// more is a pause of our own: a SIGSTOP, a debugger, a core that was taken away.
constexpr TimeNs pause_ns = 100'000'000;
inline TimeNs awake_ns(TimeNs before, TimeNs now) {
    return std::min(now - std::min(now, before), pause_ns);
}

}  // namespace expertwire::runtime
