// How many objects of the core are alive in this process. Nothing in the core looks at it: tests do, before and after,
// so that a handle which nobody closes is seen.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace expertwire {

enum class Live : std::uint8_t { context = 0, region, request, fabric_handle };
inline constexpr std::array<const char*, 4> live_names{"contexts", "regions", "requests", "fabric_handles"};

inline std::array<std::atomic<std::int64_t>, live_names.size()> live_counts{};

// A member that counts whoever has it.
template <Live what>
class Counted {
  public:
    Counted() { add(1); }
    Counted(const Counted&) { add(1); }
    Counted& operator=(const Counted&) { return *this; }
    ~Counted() { add(-1); }

  private:
    static void add(std::int64_t change) {
        live_counts[static_cast<std::size_t>(what)].fetch_add(change, std::memory_order_relaxed);
    }
};

}  // namespace expertwire
