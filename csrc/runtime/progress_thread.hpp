// The native thread that drives a context while no caller does (SPEC T10, T13). It catches everything, spins at most 20
// us and only where there are cores for it, else yields, then sleeps on the provider's descriptor and an eventfd.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "engine/types.hpp"
#include "runtime/memory.hpp"

namespace expertwire::runtime {

struct ContextState;

class ProgressThread {
  public:
    ProgressThread();  // throws Failure(capacity) where there is no descriptor left
    ProgressThread(const ProgressThread&) = delete;
    ProgressThread& operator=(const ProgressThread&) = delete;
    ~ProgressThread() { stop(); }

    void start(ContextState& state);  // `state` outlives the thread
    void stop();                      // joins; idempotent
    bool running() const { return running_.load(std::memory_order_acquire); }

    void kick() const;    // wakes it, wherever it sleeps
    void rouse() const {  // wakes it where it sleeps; parked it soon looks by itself
        if (!parked_.load(std::memory_order_seq_cst)) kick();
    }
    void unpark() const {  // wakes it only if it has parked in favour of a caller
        if (parked_.load(std::memory_order_seq_cst)) kick();
    }

  private:
    void loop(ContextState& state);
    void work(ContextState& state);
    static bool caller_active(const ContextState& state);
    void park(ContextState& state);
    void tick_if_due(ContextState& state);
    bool give_way(const ContextState& state, TimeNs idle_ns);
    void sleep(ContextState& state);
    void nap(TimeNs timeout_ns);

    Descriptor event_;
    std::thread thread_;
    std::atomic<bool> running_{false};
    std::atomic<bool> stopping_{false};
    std::atomic<bool> parked_{false};

    // The thread's own.
    TimeNs next_tick_ns_ = 0;
    TimeNs next_beat_ns_ = 0;
    TimeNs last_moved_ns_ = 0;
    std::uint32_t refused_sleeps_ = 0;
    TimeNs park_ns_ = 50'000;
    TimeNs stream_ns_ = 200'000;  // yields for so long after the last wake-up of a stream of arrivals
    std::uint32_t passes_ = 0;
    bool polled_ = false;     // since the doorbell was last rung
    bool woken_ = false;      // by the provider's descriptor
    bool in_stream_ = false;  // woken so soon after it fell asleep that the next arrival is near
};

}  // namespace expertwire::runtime
