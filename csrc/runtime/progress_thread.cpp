#include "runtime/progress_thread.hpp"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>

#include "runtime/clock.hpp"
#include "runtime/context_state.hpp"

namespace expertwire::runtime {

namespace {

constexpr TimeNs turn_ns = 50'000;            // longer than a caller's: nobody waits for the thread's return
constexpr TimeNs spin_ns = 20'000;            // after something moved …
constexpr TimeNs stream_gap_ns = 200'000;     // woken again so soon: a stream of arrivals …
constexpr TimeNs stream_most_ns = 2'000'000;  // … beside which it yields, up to so long while it goes on
constexpr std::uint32_t passes_a_yield = 4;
constexpr TimeNs caller_stays_ns = 50'000;  // SPEC T13: parked for so long after a caller's last turn
constexpr TimeNs park_most_ns = 1'000'000;  // beside callers who stay and share its core
constexpr TimeNs park_told_ns = 5'000'000;  // beside a caller that says when it leaves; this bounds a lost word
constexpr TimeNs tick_ns = 250'000'000;
constexpr TimeNs busy_sleep_ns = 10'000'000;      // work is in flight and its completion wakes us: only a safety net
constexpr TimeNs starved_nap_ns = 200'000;        // AGAIN need not end with an event, nor does a hold on bulk
constexpr TimeNs no_descriptor_nap_ns = 500'000;  // bounded polling, about 1% of a core
constexpr std::uint32_t refused_sleeps_max = 64;

bool wait_readable(pollfd* entries, std::size_t count, TimeNs timeout_ns) {
    const timespec timeout{static_cast<time_t>(timeout_ns / 1'000'000'000),
                           static_cast<long>(timeout_ns % 1'000'000'000)};
    return ppoll(entries, count, &timeout, nullptr) > 0;
}

void drain_event(int fd) {
    std::uint64_t count = 0;
    while (read(fd, &count, sizeof count) < 0 && errno == EINTR) {
    }
}

}  // namespace

ProgressThread::ProgressThread() : event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (event_.get() < 0)
        throw Failure(FailureKind::capacity,
                      "eventfd failed: " + errno_text(errno) + "; raise the limit of open files (ulimit -n)");
}

void ProgressThread::start(ContextState& state) {
    if (thread_.joinable()) return;
    // Signals belong to the caller's threads: a Ctrl-C that landed here would interrupt nobody.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    running_.store(true, std::memory_order_release);
    try {
        thread_ = std::thread([this, &state] { loop(state); });
    } catch (const std::system_error& error) {
        running_.store(false, std::memory_order_release);
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw Failure(FailureKind::capacity, std::string("the progress thread could not be started: ") + error.what() +
                                                 "; raise the limit of processes (ulimit -u)");
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_setname_np(thread_.native_handle(), "ew-progress");
}

void ProgressThread::stop() {
    stopping_.store(true, std::memory_order_seq_cst);
    kick();
    if (thread_.joinable()) thread_.join();
    running_.store(false, std::memory_order_release);
}

void ProgressThread::kick() const {
    const std::uint64_t one = 1;
    // Full (EAGAIN) means that it is awake or will be: nothing is lost.
    while (write(event_.get(), &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void ProgressThread::loop(ContextState& state) {
    next_tick_ns_ = next_beat_ns_ = now_ns();
    while (!stopping_.load(std::memory_order_acquire)) {
        try {
            work(state);
        } catch (...) {
            // Nothing may leave this thread. What fails here is a table that could not grow: try again later.
            state.thread_failures.fetch_add(1, std::memory_order_relaxed);
            nap(busy_sleep_ns);
        }
    }
}

void ProgressThread::work(ContextState& state) {
    tick_if_due(state);
    if (caller_active(state) || !state.token.try_take()) return park(state);
    bool moved = false;
    {
        const TokenReturn back(state.token);
        moved = state.turn(turn_ns);
    }
    polled_ = true;
    const TimeNs now = now_ns();
    if (moved) last_moved_ns_ = now;
    // Who sleeps for a word that may just have arrived is told first: sleep() rings.
    if (Doorbell(state.shared.doorbell()).has_waiter()) woken_ = in_stream_ = false;
    if (std::exchange(woken_, false)) last_moved_ns_ = now;
    if (give_way(state, now - last_moved_ns_)) return;
    sleep(state);
}

bool ProgressThread::caller_active(const ContextState& state) {
    return state.helpers.load(std::memory_order_seq_cst) > 0 || state.token.held() ||
           now_ns() - state.last_help_ns.load(std::memory_order_relaxed) < caller_stays_ns;
}

// A caller drives progress: keep off its core, shortly at first, and longer where callers stay and the thread has no
// core of its own: there each end of a park takes a core from one of them.
void ProgressThread::park(ContextState& state) {
    parked_.store(true, std::memory_order_seq_cst);
    // Looked at again now that whoever leaves sees that it has to say so.
    const bool inside = state.helpers.load(std::memory_order_seq_cst) > 0;
    const bool told = inside && !state.spin_allowed;
    if (told)
        nap(park_told_ns);
    else if (caller_active(state))
        nap(park_ns_);
    parked_.store(false, std::memory_order_seq_cst);
    if (!caller_active(state))
        park_ns_ = caller_stays_ns;  // slept past its going
    else if (!state.thread_has_core)
        park_ns_ = std::min(2 * park_ns_, park_most_ns);
}

void ProgressThread::tick_if_due(ContextState& state) {
    const TimeNs now = now_ns();
    if (now < next_tick_ns_ && !state.pulse_due.load(std::memory_order_acquire)) return;
    const std::uint64_t deaths_before = state.liveness->decided();
    state.liveness->tick(now);
    const bool news = state.liveness->decided() != deaths_before;
    if (now >= next_beat_ns_ || news || state.pulse_due.exchange(false, std::memory_order_acq_rel)) {
        state.liveness->beat();
        state.broadcast_pulse.store(true, std::memory_order_release);  // sent by the next turn, whoever takes it
        next_beat_ns_ = now + state.options.heartbeat_ns;
    }
    next_tick_ns_ = now + std::min(tick_ns, state.options.heartbeat_ns);
    if (news) state.wake_all();
}

// True: do not sleep yet.
bool ProgressThread::give_way(const ContextState& state, TimeNs idle_ns) {
    if (idle_ns >= (in_stream_ ? stream_ns_ : spin_ns)) return false;
    // One turn in four: a yield that finds nobody costs as much as an empty turn.
    if (!state.spin_allowed || (idle_ns >= spin_ns && ++passes_ % passes_a_yield == 0)) sched_yield();
    return true;
}

void ProgressThread::sleep(ContextState& state) {
    // Remote writes give the target no completion: whoever sleeps on my doorbell looks for itself.
    if (std::exchange(polled_, false)) state.ring_own_if_waiting();
    if (!state.token.try_take()) return;
    const int fd = state.provider->wait_fd();
    const bool may_sleep = fd < 0 || state.provider->may_sleep();
    const bool starved = state.starved || state.bulk_held;
    const bool idle = state.engine->idle();
    const bool copying = state.provider->copying();
    state.token.give();
    if (copying) return;
    if (!may_sleep && ++refused_sleeps_ < refused_sleeps_max) return;
    refused_sleeps_ = 0;

    TimeNs timeout = next_tick_ns_ > now_ns() ? next_tick_ns_ - now_ns() : 0;
    if (!idle) timeout = std::min(timeout, busy_sleep_ns);
    if (starved || !may_sleep) timeout = std::min(timeout, starved_nap_ns);
    if (fd < 0) timeout = std::min(timeout, no_descriptor_nap_ns);
    state.thread_sleeps.fetch_add(1, std::memory_order_relaxed);
    park_ns_ = caller_stays_ns;

    std::vector<pollfd> entries{{event_.get(), POLLIN, 0}};
    if (fd >= 0 && may_sleep) entries.push_back({fd, POLLIN, 0});
    for (const int pidfd : state.liveness->pidfds()) entries.push_back({pidfd, POLLIN, 0});
    const TimeNs asleep_since = now_ns();
    in_stream_ = false;
    if (!wait_readable(entries.data(), entries.size(), timeout)) return;
    if (entries.front().revents) drain_event(event_.get());
    // A peer's writes are no completion here, and yet they come one behind the other: look for the next before
    // sleeping.
    woken_ = state.spin_allowed && fd >= 0 && may_sleep && entries[1].revents != 0;
    in_stream_ = woken_ && now_ns() - asleep_since < stream_gap_ns;
    // Each sleep within a stream costs the sender a wake-up of another core.
    stream_ns_ = in_stream_ ? std::min(2 * stream_ns_, stream_most_ns) : stream_gap_ns;
    const std::size_t first_pidfd = fd >= 0 && may_sleep ? 2 : 1;
    for (std::size_t i = first_pidfd; i < entries.size(); ++i)
        if (entries[i].revents) next_tick_ns_ = 0;  // somebody has exited: look now
}

void ProgressThread::nap(TimeNs timeout_ns) {
    pollfd entry{event_.get(), POLLIN, 0};
    if (wait_readable(&entry, 1, timeout_ns)) drain_event(event_.get());
}

}  // namespace expertwire::runtime
