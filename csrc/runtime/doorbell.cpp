#include "runtime/doorbell.hpp"

#include <climits>

#include "runtime/futex.hpp"

namespace expertwire::runtime {

namespace {
constexpr std::uint32_t waiter_bit = 1;
}

std::uint32_t Doorbell::seen() const {
    return word_->word.load(std::memory_order_seq_cst) & ~waiter_bit;
}

bool Doorbell::has_waiter() const {
    return (word_->word.load(std::memory_order_relaxed) & waiter_bit) != 0;
}

bool Doorbell::wait(std::uint32_t seen, TimeNs timeout_ns) const {
    std::uint32_t expected = seen;
    if (!word_->word.compare_exchange_strong(expected, seen | waiter_bit, std::memory_order_seq_cst) &&
        expected != (seen | waiter_bit))
        return true;
    futex_wait(word_->word, seen | waiter_bit, timeout_ns);
    // A bit that is left behind after a timeout costs the next writer one needless wake-up.
    return (word_->word.load(std::memory_order_acquire) & ~waiter_bit) != seen;
}

void Doorbell::ring() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::uint32_t before = word_->word.load(std::memory_order_relaxed);
    while (!word_->word.compare_exchange_weak(before, (before & ~waiter_bit) + 2, std::memory_order_seq_cst)) {
    }
    if (before & waiter_bit) futex_wake(word_->word, INT_MAX);
}

}  // namespace expertwire::runtime
