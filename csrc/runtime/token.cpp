#include "runtime/token.hpp"

#include <sched.h>

#include <algorithm>

#include "runtime/clock.hpp"
#include "runtime/futex.hpp"

namespace expertwire::runtime {

namespace {
enum Word : std::uint32_t { free_word = 0, held_word = 1, wanted_word = 2 };
constexpr int spins = 64;
constexpr TimeNs look_ns = pause_ns / 2;
}  // namespace

bool Token::try_take() {
    std::uint32_t expected = free_word;
    return word_.compare_exchange_strong(expected, held_word, std::memory_order_acquire, std::memory_order_relaxed);
}

bool Token::take_until(TimeNs deadline_ns) {
    if (try_take()) return true;
    for (int i = 0; i < spins; ++i) {
        // The holder may be a thread that was scheduled off this very core: give way rather than burn its time.
        if (i % 16 == 15) sched_yield();
        if (!held() && try_take()) return true;
    }
    // Taking it as `wanted` may cost the next give() a needless wake-up, and never loses one.
    TimeNs looked = now_ns();
    TimeNs patience = deadline_ns - std::min(deadline_ns, looked);
    while (word_.exchange(wanted_word, std::memory_order_acquire) != free_word) {
        if (patience == 0) return false;
        futex_wait(word_, wanted_word, std::min(patience, look_ns));
        // While this process stood still its holder could not give it back.
        const TimeNs now = now_ns();
        patience -= std::min(patience, awake_ns(looked, now));
        looked = now;
    }
    return true;
}

void Token::give() {
    if (word_.exchange(free_word, std::memory_order_release) == wanted_word) futex_wake(word_, 1);
}

}  // namespace expertwire::runtime
