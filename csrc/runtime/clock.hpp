// The one clock of this room.
#pragma once

#include <ctime>

#include "engine/types.hpp"

namespace expertwire::runtime {

inline TimeNs now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<TimeNs>(time.tv_sec) * 1'000'000'000 + static_cast<TimeNs>(time.tv_nsec);
}

}  // namespace expertwire::runtime
