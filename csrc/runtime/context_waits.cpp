// Progress by callers, and the waits that are not for one request: doorbell, words, quiet, barrier, liveness.
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>

#include "runtime/clock.hpp"
#include "runtime/context_state.hpp"

namespace expertwire::runtime {

namespace {

constexpr TimeNs caller_turn_ns = 20'000;
constexpr TimeNs slice_ns = 50'000'000;
constexpr TimeNs no_thread_sleep_ns = 200'000;
constexpr TimeNs tell_slice_ns = 1'000'000;
constexpr TimeNs shared_bell_sleep_ns = 5'000'000;  // several threads sleep on one bell: each may take the other's ring

std::string rank_text(std::uint32_t rank) {
    return "rank " + std::to_string(rank);
}

}  // namespace

Token& Context::token() {
    return state_->token;
}

bool Context::turn_held(TimeNs budget_ns) {
    return state_->turn(budget_ns);
}

void Context::post_held() {
    state_->post_now(now_ns());
}

bool Context::turn(TimeNs budget_ns) {
    return state_->caller_turn(budget_ns, {});
}

Status Context::turn_for(Ticket request, TimeNs budget_ns) {
    if (const Status now_is = status(request); now_is != Status::pending) return now_is;
    if (state_->fork_mark.forked()) check_usable();  // it would never end here
    state_->caller_turn(budget_ns, request);
    return status(request);
}

bool ContextState::caller_turn(TimeNs budget_ns, Ticket until) {
    if (fork_mark.forked()) return false;  // its sockets are the parent's
    if (!token.try_take()) return false;
    const TokenReturn back(token);
    const bool moved = turn(budget_ns, until);
    // Who stays says when it leaves.
    if (helpers.load(std::memory_order_relaxed) == 0) last_help_ns.store(now_ns(), std::memory_order_relaxed);
    return moved;
}

void Context::enter_help() {
    state_->helpers.fetch_add(1, std::memory_order_seq_cst);
}

void Context::leave_help(Leaving why) {
    // Who goes home is often back at once with the next request, and must not find the token taken nor pay for a
    // wake-up. Where cores are short the thread parks for longer, and is told.
    const bool quietly = why == Leaving::done && may_spin();
    state_->last_help_ns.store(quietly ? now_ns() : 0, std::memory_order_relaxed);
    state_->helpers.fetch_sub(1, std::memory_order_seq_cst);
    if (!quietly) state_->thread.unpark();
}

void Context::step_aside() {
    if (state_->fork_mark.forked()) return;
    state_->last_help_ns.store(0, std::memory_order_relaxed);
    state_->thread.unpark();
}

bool Context::may_spin() const {
    return state_->spin_allowed.load(std::memory_order_relaxed);
}

Doorbell Context::doorbell() const {
    return Doorbell(state_->shared.doorbell());
}

void Context::ring(std::uint32_t rank) {
    if (rank == state_->options.rank) return doorbell().ring();
    if (rank < state_->options.size && state_->peers[rank].shared.present())
        Doorbell(state_->peers[rank].shared.doorbell()).ring();
}

bool Context::doorbell_slice(std::uint32_t seen, TimeNs until_ns) {
    if (closed()) check_usable();
    if (doorbell().seen() != seen) return true;
    turn(caller_turn_ns);
    step_aside();
    const TimeNs now = now_ns();
    if (now >= until_ns) return doorbell().seen() != seen;
    const TimeNs most = state_->thread.running() ? slice_ns : no_thread_sleep_ns;
    return doorbell().wait(seen, std::min(most, until_ns - now));
}

bool Context::word_slice(RegionId region, std::uint64_t offset, std::uint64_t at_least, TimeNs until_ns) {
    std::byte* base = nullptr;
    {
        const std::shared_lock lock(state_->tables);
        const RegionRecord& record = state_->region_at(region);
        if (offset % 8 != 0 || offset + 8 > record.bytes)
            throw Failure(FailureKind::invalid_argument, "offset " + std::to_string(offset) +
                                                             " is no 8-byte word of region '" + record.name + "' of " +
                                                             std::to_string(record.bytes) + " bytes");
        base = record.address;
    }
    const std::atomic_ref<std::uint64_t> word(*reinterpret_cast<std::uint64_t*>(base + offset));
    const auto here = [&] { return word.load(std::memory_order_acquire) >= at_least; };
    return wait_until(here, until_ns, "waiting for a word");
}

// Helps and sleeps until `here()`, the end of the slice, or a signal of the OS.
template <class Here>
bool Context::wait_until(Here here, TimeNs until_ns, const char* doing) {
    while (true) {
        if (here()) return true;
        if (closed()) check_usable();  // by another thread, while we wait
        if (has_fault()) {
            if (const auto dead = fault()) raise_fault(*dead, doing);
        }
        enter_help();
        const std::uint32_t seen = doorbell().seen();
        const bool moved = turn(caller_turn_ns);
        const bool done = here();
        leave_help();
        if (done) return true;
        const TimeNs now = now_ns();
        if (now >= until_ns) return false;
        if (moved) continue;
        const TimeNs most = state_->thread.running() ? shared_bell_sleep_ns : no_thread_sleep_ns;
        if (!doorbell().wait(seen, std::min(most, until_ns - now)) && state_->thread.running()) return here();
    }
}

int Context::watch_open() {
    check_usable();
    const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (fd < 0)
        throw Failure(FailureKind::capacity,
                      "eventfd failed: " + errno_text(errno) + "; raise the limit of open files (ulimit -n)");
    const std::lock_guard lock(state_->watches_mutex);
    state_->watches.emplace_back(fd);
    state_->watch_count.fetch_add(1, std::memory_order_release);
    return fd;
}

void Context::watch_close(int fd) {
    if (state_->fork_mark.forked()) return;
    const std::lock_guard lock(state_->watches_mutex);
    auto& watches = state_->watches;
    const auto found =
        std::find_if(watches.begin(), watches.end(), [&](const Descriptor& watch) { return watch.get() == fd; });
    if (found == watches.end()) return;
    watches.erase(found);
    state_->watch_count.fetch_sub(1, std::memory_order_release);
}

// ------------------------------------------------------------------------------------------------- quiet and barrier

Context::Quiet Context::quiet_begin() {
    check_usable();
    const ControlGuard guard(*state_);
    return {state_->engine->quiet_mark()};
}

bool Context::quiet_slice(Quiet quiet, TimeNs until_ns) {
    bool reached = false;
    Status ended = Status::pending;
    const auto here = [&] {
        const TokenGuard guard(*this, until_ns);
        if (!guard) return false;
        ended = state_->engine->quiet(quiet.mark);
        return reached = state_->engine->reached(quiet.mark);
    };
    const bool done = wait_until(here, until_ns, "quiet");
    if (ended == Status::closed) check_usable();
    if (done && reached && ended != Status::ok && ended != Status::pending)
        throw Failure(FailureKind::transfer, "quiet: a request submitted before it failed: " +
                                                 std::string(status_name(ended)) + "; its handle tells more");
    return done;
}

void Context::fail_quiet(Quiet, std::int64_t timeout_ms) {
    const ControlGuard guard(*state_);
    const EngineStatistics now = state_->engine->statistics();
    throw Failure(FailureKind::deadline, "quiet: after " + std::to_string(timeout_ms) + " ms " +
                                             std::to_string(now.requests_live) + " requests are alive, " +
                                             std::to_string(now.slots_used) + " operations in flight, " +
                                             std::to_string(now.operations_queued) + " queued, " +
                                             std::to_string(now.gates_closed) + " signals held");
}

std::uint64_t Context::barrier_begin(TimeNs until_ns) {
    check_usable();
    ContextState& state = *state_;
    if (state.options.independent)
        throw Failure(FailureKind::state,
                      "an independent endpoint has peers, not a job: there is nothing to be at a barrier with");
    const std::lock_guard barrier(state.barrier_mutex);
    {
        const std::shared_lock lock(state.tables);
        for (std::uint32_t rank = 0; rank < state.options.size; ++rank)
            if (rank != state.options.rank && !state.liveness->unreachable(rank)) state.peer_at(rank);
    }
    const std::uint64_t epoch = state.barrier_epoch + 1;
    {
        const ControlGuard guard(state);
        state.barrier_mark = state.engine->quiet_mark();
        state.barrier_target = epoch;
        for (std::uint32_t rank = 0; rank < state.options.size; ++rank) {
            PeerRecord& peer = state.peers[rank];
            if (rank == state.options.rank || !peer.added.load(std::memory_order_acquire)) continue;
            peer.barrier_tried = false;
            peer.barrier_lanes = state.lane_generations(rank);
        }
    }
    for (bool taken = false; !taken;) {
        {
            const ControlGuard guard(state);
            taken = state.send_barriers(now_ns());
            state.turn(caller_turn_ns);
        }
        if (!taken && now_ns() >= until_ns)
            throw Failure(FailureKind::deadline,
                          "barrier: the words for the other ranks were not all taken before the deadline; the same "
                          "barrier may be tried again");
    }
    state.barrier_epoch = epoch;
    return epoch;
}

// Who maps us is told by a store, once everything that went to them before has landed.
void Context::store_barrier(std::uint64_t epoch) {
    ContextState& state = *state_;
    const std::lock_guard barrier(state.barrier_mutex);
    if (state.barrier_stored >= epoch) return;
    {
        const TokenGuard guard(*this);
        if (!guard || !state.engine->reached(state.barrier_mark)) return;
    }
    state.barrier_stored = state.barrier_epoch.load();
    state.liveness->publish_barrier(state.barrier_stored);
}

bool Context::barrier_slice(std::uint64_t epoch, TimeNs until_ns) {
    const auto here = [&] {
        store_barrier(epoch);
        return state_->barrier_stored >= epoch && barrier_missing(epoch).empty();
    };
    return wait_until(here, until_ns, "barrier");
}

std::vector<std::uint32_t> Context::barrier_missing(std::uint64_t epoch) const {
    return state_->liveness->missing_at(epoch);
}

void Context::fail_barrier(std::uint64_t epoch, std::int64_t timeout_ms) {
    std::string who;
    for (const std::uint32_t rank : barrier_missing(epoch)) {
        const PeerPulse last = pulse(rank);
        who += (who.empty() ? "" : ", ") + rank_text(rank) + " (last heard " + std::to_string(last.age_ns / 1'000'000) +
               " ms ago)";
    }
    throw Failure(FailureKind::deadline,
                  "barrier " + std::to_string(epoch) + " of " + rank_text(rank()) + ": after " +
                      std::to_string(timeout_ms) + " ms these have not arrived: " +
                      (who.empty() ? "none, but earlier traffic from here has not landed" : who));
}

// --------------------------------------------------------------------------------------------------------- liveness

std::optional<Fault> Context::fault() {
    return state_->liveness->fault();
}

// Among ranks of a job the root cause; else what happened to that peer.
std::optional<Fault> Context::fault_of(std::uint32_t rank) const {
    return state_->options.independent ? state_->liveness->fault_of(rank) : state_->liveness->fault();
}

bool Context::has_fault() const {
    return state_->liveness->has_fault();
}

bool Context::unreachable(std::uint32_t rank) const {
    return state_->liveness->unreachable(rank);
}

void Context::raise_fault(const Fault& fault, std::string_view doing) const {
    std::string message =
        rank_text(rank()) + ", " + std::string(doing) + ": " + rank_text(fault.rank) + " is dead: " + fault.why;
    if (fault.rank == rank()) message += " (this rank was stopped or cut off for too long)";
    throw Failure(FailureKind::peer, message, static_cast<std::int32_t>(fault.rank));
}

void Context::publish_call(std::uint64_t sequence, std::uint64_t phase) {
    state_->liveness->publish_call(sequence, phase);
}

void Context::publish_low_latency(std::uint64_t call, std::span<const std::uint64_t> told, bool now) {
    state_->liveness->publish_low_latency(call, told);
    if (!now) return;
    state_->broadcast_pulse.store(true, std::memory_order_release);
    state_->thread.unpark();
}

std::uint64_t Context::low_latency_told(std::uint32_t rank) const {
    return state_->liveness->low_latency_told(rank);
}

bool Context::ended(std::uint32_t rank) const {
    return state_->liveness->ended(rank);
}

bool Context::intact(std::uint32_t rank) const {
    const std::vector<QueuePairId>& lanes = state_->peers[rank].lanes;
    return std::all_of(lanes.begin(), lanes.end(), [&](QueuePairId lane) {
        const QueuePairView view = state_->engine->view(lane);
        return view.state == LaneState::open && view.generation == 1;
    });
}

bool Context::publish_verdict(std::uint32_t dead_rank, TimeNs until_ns) {
    state_->liveness->publish_verdict(dead_rank);
    return tell(until_ns);
}

// Our verdict and our farewell, to all who can be reached; true: they hold them.
bool Context::tell(TimeNs until_ns) {
    ContextState& state = *state_;
    state.broadcast_pulse.store(true, std::memory_order_release);
    if (!state.thread.running()) return false;  // not started: nobody listens yet
    const Doorbell bell(state.shared.doorbell());
    while (true) {
        const std::uint32_t seen = bell.seen();
        {
            const TokenGuard guard(*this, until_ns);
            if (guard) state.turn(caller_turn_ns);
            if (guard && state.news_told()) return true;
        }
        if (now_ns() >= until_ns) return false;
        state.thread.unpark();
        bell.wait(seen, tell_slice_ns);
    }
}

bool Context::undecided(std::uint32_t rank, TimeNs since) const {
    return state_->liveness->undecided(rank, since);
}

PeerPulse Context::pulse(std::uint32_t rank) const {
    if (rank >= state_->options.size) return {};
    return state_->liveness->pulse(rank, now_ns());
}

std::vector<Notification> Context::take_notifications() {
    check_usable();
    turn(caller_turn_ns);
    const std::lock_guard lock(state_->arrivals_mutex);
    std::vector<Notification> taken(std::make_move_iterator(state_->arrivals.begin()),
                                    std::make_move_iterator(state_->arrivals.end()));
    state_->arrivals.clear();
    return taken;
}

Statistics Context::statistics() {
    ContextState& state = *state_;
    if (state.fork_mark.forked()) check_usable();
    const std::shared_lock lock(state.tables);
    const ControlGuard guard(state);
    Statistics result;
    result.engine = state.engine->statistics();
    result.provider = state.provider->counters();
    result.runtime = state.counters;
    result.runtime.thread_sleeps = state.thread_sleeps.load(std::memory_order_relaxed);
    result.runtime.thread_failures = state.thread_failures.load(std::memory_order_relaxed);
    for (const RegionRecord& region : state.regions) {
        if (!region.address) continue;
        ++result.regions;
        result.region_bytes += region.bytes;
    }
    for (const PeerRecord& peer : state.peers) result.peers += peer.added.load(std::memory_order_relaxed);
    result.remote_regions = state.remotes.live();
    return result;
}

std::vector<std::pair<const char*, std::uint64_t>> Statistics::rows() const {
    return {
        {"requests_submitted", engine.requests_submitted},
        {"requests_done", engine.requests_done},
        {"requests_failed", engine.requests_failed},
        {"requests_cancelled", engine.requests_cancelled},
        {"requests_live", engine.requests_live},
        {"submissions_pushed_back", engine.submissions_pushed_back},
        {"operations_posted", engine.operations_posted},
        {"operations_finished", engine.operations_finished},
        {"operations_failed", engine.operations_failed},
        {"operations_dropped", engine.operations_dropped},
        {"operations_queued", engine.operations_queued},
        {"posts_again", engine.posts_again},
        {"posts_rejected", engine.posts_rejected},
        {"completions_stale", engine.completions_stale},
        {"completions_unknown", engine.completions_unknown},
        {"controls_held", engine.controls_held},
        {"gates_closed", engine.gates_closed},
        {"lanes_reopened", engine.lanes_reopened},
        {"quarantines", engine.quarantines},
        {"misuses", engine.misuses},
        {"slots_used", engine.slots_used},
        {"slots_counted_peak", engine.slots_counted_peak},
        {"slots_quarantined", engine.slots_quarantined},
        {"queue_pairs_live", engine.queue_pairs_live},
        {"window", engine.window},
        {"slots_short", engine.slots_short},
        {"provider_posted", provider.posted},
        {"provider_again", provider.again},
        {"provider_completed", provider.completed},
        {"provider_failed", provider.failed},
        {"provider_unattributed_errors", provider.unattributed_errors},
        {"provider_dropped_messages", provider.dropped_messages},
        {"provider_signals_applied", provider.signals_applied},
        {"turns", runtime.turns},
        {"notifications", runtime.notifications},
        {"notifications_dropped", runtime.notifications_dropped},
        {"pulses_sent", runtime.pulses_sent},
        {"endpoints_replaced", runtime.endpoints_replaced},
        {"replacements_failed", runtime.replacements_failed},
        {"thread_sleeps", runtime.thread_sleeps},
        {"thread_failures", runtime.thread_failures},
        {"regions", regions},
        {"region_bytes", region_bytes},
        {"peers", peers},
        {"remote_regions", remote_regions},
    };
}

}  // namespace expertwire::runtime
