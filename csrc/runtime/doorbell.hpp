// One shared word per rank on which its callers sleep, and which every local writer rings (DESIGN "Waits and cores").
//
// Writer:  store the flag (release) → ring(): seq_cst fence, bump, wake if the waiter bit is set.
// Waiter:  seen = bell.seen() → look at every flag → nothing there: wait(seen, timeout).
// A ring between seen() and wait() changes the word, so the wait returns at once: no wake-up is ever lost. Wake-ups may
// be spurious; the caller looks at its flags again.
#pragma once

#include <atomic>
#include <cstdint>

#include "engine/types.hpp"

namespace expertwire::runtime {

// Lives in a rank's shared "runtime" region (zeroed memory is a valid, silent bell). Bit 0: somebody sleeps; the rest
// counts rings.
struct alignas(64) DoorbellWord {
    std::atomic<std::uint32_t> word;
};
static_assert(sizeof(DoorbellWord) == 64 && std::atomic<std::uint32_t>::is_always_lock_free);

// A view of a DoorbellWord: mine, or that of a rank whose "runtime" region is mapped here.
class Doorbell {
  public:
    Doorbell() = default;
    explicit Doorbell(DoorbellWord* word) : word_(word) {}
    bool present() const { return word_ != nullptr; }

    // The count to hand to wait(); read it before looking at the flags.
    std::uint32_t seen() const;

    // Sleeps until the bell has rung since `seen`, a signal arrives, or the time is over. True: it rang.
    bool wait(std::uint32_t seen, TimeNs timeout_ns) const;

    // Any thread, any process that maps the word. Costs a fence and one atomic; a system call only if somebody sleeps.
    void ring() const;

    // True while somebody sleeps on it: the progress thread then tells what it has seen arrive.
    bool has_waiter() const;

  private:
    DoorbellWord* word_ = nullptr;
};

}  // namespace expertwire::runtime
