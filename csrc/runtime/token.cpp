#include "runtime/token.hpp"

#include <sched.h>

#include "runtime/clock.hpp"
#include "runtime/futex.hpp"

namespace expertwire::runtime {

namespace {
enum Word : std::uint32_t { free_word = 0, held_word = 1, wanted_word = 2 };
constexpr int spins = 64;
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
    while (word_.exchange(wanted_word, std::memory_order_acquire) != free_word) {
        const TimeNs now = now_ns();
        if (now >= deadline_ns) return false;
        futex_wait(word_, wanted_word, deadline_ns - now);
    }
    return true;
}

void Token::give() {
    if (word_.exchange(free_word, std::memory_order_release) == wanted_word) futex_wake(word_, 1);
}

}  // namespace expertwire::runtime
