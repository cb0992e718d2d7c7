// Requests: the checks of their arguments, submission, and the wait for one.
#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "runtime/clock.hpp"
#include "runtime/context_state.hpp"

namespace expertwire::runtime {

namespace {

constexpr TimeNs caller_turn_ns = 20'000;  // SPEC T13
constexpr TimeNs spin_ns = 20'000;
constexpr TimeNs yields_least_ns = 200'000;   // after that, whoever else can run goes first …
constexpr TimeNs yields_most_ns = 1'000'000;  // … and, where completions come no closer than that, for so long
constexpr TimeNs slice_ns = 50'000'000;
constexpr TimeNs no_thread_sleep_ns = 200'000;  // nobody else makes progress while we sleep

[[noreturn]] void fail_argument(std::uint32_t rank, const std::string& what) {
    throw Failure(FailureKind::invalid_argument, what + " (request to rank " + std::to_string(rank) + ")");
}

void check_range(std::uint32_t rank, const char* what, const std::string& name, std::uint64_t offset,
                 std::uint64_t bytes, std::uint64_t limit) {
    if (offset <= limit && bytes <= limit - offset) return;
    fail_argument(rank, std::string(what) + " region '" + name + "' has " + std::to_string(limit) + " bytes; " +
                            std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
                            " do not lie within it");
}

// A submission is a caller's turn (SPEC T13): the thread stays away for a moment after it too, so that a burst of posts
// has the token. Where cores are short whoever is counted has to say that it leaves, which costs more than the turn.
class Inside {
  public:
    explicit Inside(ContextState& state) : state_(state), counted_(state.spin_allowed.load(std::memory_order_relaxed)) {
        if (counted_) state_.helpers.fetch_add(1, std::memory_order_seq_cst);
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
    ~Inside() {
        state_.last_help_ns.store(now_ns(), std::memory_order_relaxed);
        if (counted_) state_.helpers.fetch_sub(1, std::memory_order_seq_cst);
    }

  private:
    ContextState& state_;
    bool counted_;
};

}  // namespace

std::string_view status_name(Status status) {
    static constexpr std::string_view names[] = {"ok",        "pending", "would_block",  "cancelled", "aborted",
                                                 "peer_dead", "bad_key", "out_of_range", "timed_out", "refused",
                                                 "invalid",   "stale",   "closed",       "io_error"};
    const auto at = static_cast<std::size_t>(status);
    return at < std::size(names) ? names[at] : "unknown";
}

ChunkSpec Context::chunk(std::uint32_t rank, OpKind kind, RegionId local, std::uint64_t local_offset,
                         RemoteRegionId remote, std::uint64_t remote_offset, std::uint64_t bytes,
                         std::uint32_t lane) const {
    const std::shared_lock lock(state_->tables);
    const RemoteRegion& target = state_->remote_at(rank, remote);
    const RegionRecord& source = state_->region_at(local);
    if (bytes == 0) fail_argument(rank, "a chunk has 0 bytes; leave empty chunks out");
    check_range(rank, "local", source.name, local_offset, bytes, source.bytes);
    check_range(rank, "remote", target.name, remote_offset, bytes, target.bytes);
    if (target.name == "runtime")
        fail_argument(rank, "region 'runtime' belongs to the endpoint; no request may reach it");
    if (lane >= state_->options.lanes)
        fail_argument(rank, "lane is " + std::to_string(lane) + "; this endpoint has " +
                                std::to_string(state_->options.lanes) + " lanes per peer");
    return {state_->peers[rank].lanes[lane], kind, local, local_offset, remote, remote_offset, bytes};
}

std::vector<ChunkSpec> Context::chunks(std::uint32_t rank, OpKind kind, RegionId local,
                                       std::span<const std::uint64_t> local_offsets, RemoteRegionId remote,
                                       std::span<const std::uint64_t> remote_offsets, std::uint64_t bytes,
                                       std::uint32_t lane) const {
    if (local_offsets.size() != remote_offsets.size())
        fail_argument(rank, std::to_string(local_offsets.size()) + " local and " +
                                std::to_string(remote_offsets.size()) + " remote offsets do not pair");
    if (local_offsets.empty()) return {};
    // The first is checked in full; what the others share with it holds for them too.
    std::vector<ChunkSpec> specs(local_offsets.size(),
                                 chunk(rank, kind, local, local_offsets[0], remote, remote_offsets[0], bytes, lane));
    const std::shared_lock lock(state_->tables);
    const RemoteRegion& target = state_->remote_at(rank, remote);
    const RegionRecord& source = state_->region_at(local);
    for (std::size_t i = 1; i < specs.size(); ++i) {
        check_range(rank, "local", source.name, local_offsets[i], bytes, source.bytes);
        check_range(rank, "remote", target.name, remote_offsets[i], bytes, target.bytes);
        specs[i].local_offset = local_offsets[i];
        specs[i].remote_offset = remote_offsets[i];
    }
    return specs;
}

PreparedChunks Context::prepare(std::uint32_t rank, OpKind kind, const ChunkArrays& arrays, std::uint32_t lane) const {
    PreparedChunks prepared{rank, lane, {}, state_->tables_version.load(std::memory_order_acquire)};
    prepared.specs = chunks(rank, kind, arrays, lane);
    return prepared;
}

void Context::renew(PreparedChunks& prepared) const {
    if (prepared.tables_version == state_->tables_version.load(std::memory_order_acquire)) return;
    const std::shared_lock lock(state_->tables);
    const PeerRecord& peer = state_->peer_at(prepared.rank);
    for (ChunkSpec& spec : prepared.specs) {
        const RegionRecord& source = state_->region_at(spec.local);
        const RemoteRegion& target = state_->remote_at(prepared.rank, spec.remote);
        check_range(prepared.rank, "local", source.name, spec.local_offset, spec.bytes, source.bytes);
        check_range(prepared.rank, "remote", target.name, spec.remote_offset, spec.bytes, target.bytes);
        spec.queue_pair = peer.lanes[prepared.lane];
    }
    prepared.tables_version = state_->tables_version.load(std::memory_order_relaxed);
}

std::vector<ChunkSpec> Context::chunks(std::uint32_t rank, OpKind kind, const ChunkArrays& arrays,
                                       std::uint32_t lane) const {
    const std::size_t count = arrays.bytes.size();
    if (arrays.locals.size() != count || arrays.local_offsets.size() != count || arrays.remotes.size() != count ||
        arrays.remote_offsets.size() != count)
        fail_argument(rank, "the arrays of " + std::to_string(count) + " chunks do not all have that length");
    std::vector<ChunkSpec> specs(count);
    const std::shared_lock lock(state_->tables);
    const PeerRecord& peer = state_->peer_at(rank);
    if (lane >= state_->options.lanes) fail_argument(rank, "lane is " + std::to_string(lane) + ", too high");
    const RemoteRegion* target = nullptr;
    const RegionRecord* source = nullptr;
    for (std::size_t i = 0; i < count; ++i) {
        // Neighbours are of the same regions, mostly.
        if (i == 0 || arrays.remotes[i] != arrays.remotes[i - 1])
            target = &state_->remote_at(rank, RemoteRegionId{arrays.remotes[i]});
        if (i == 0 || arrays.locals[i] != arrays.locals[i - 1]) source = &state_->region_at(RegionId{arrays.locals[i]});
        const std::uint64_t bytes = arrays.bytes[i];
        if (bytes == 0) fail_argument(rank, "chunk " + std::to_string(i) + " has 0 bytes; leave empty chunks out");
        check_range(rank, "local", source->name, arrays.local_offsets[i], bytes, source->bytes);
        check_range(rank, "remote", target->name, arrays.remote_offsets[i], bytes, target->bytes);
        if (target->name == "runtime")
            fail_argument(rank, "region 'runtime' belongs to the endpoint; no request may reach it");
        specs[i] = {peer.lanes[lane],
                    kind,
                    RegionId{arrays.locals[i]},
                    arrays.local_offsets[i],
                    RemoteRegionId{arrays.remotes[i]},
                    arrays.remote_offsets[i],
                    bytes};
    }
    return specs;
}

ControlSpec Context::signal(std::uint32_t rank, RemoteRegionId remote, std::uint64_t offset, std::uint64_t operand,
                            Scope scope, std::uint32_t lane) const {
    const std::shared_lock lock(state_->tables);
    const RemoteRegion& target = state_->remote_at(rank, remote);
    if (offset % sizeof(std::uint64_t) != 0)
        fail_argument(rank, "a signal's offset is " + std::to_string(offset) + "; it must be a multiple of 8");
    if (target.name == "counters" && offset >= target.bytes)
        fail_argument(rank, "counter " + std::to_string(offset / 8) + " does not exist: rank " + std::to_string(rank) +
                                " was built with counters=" + std::to_string(target.bytes / 8));
    check_range(rank, "remote", target.name, offset, sizeof(std::uint64_t), target.bytes);
    if (target.name == "runtime")
        fail_argument(rank, "region 'runtime' belongs to the endpoint; no signal may reach it");
    if (scope > Scope::peer)
        fail_argument(rank, "scope is " + std::to_string(static_cast<int>(scope)) +
                                "; it must be 0 (request), 1 (queue pair) or 2 (peer)");
    if (lane >= state_->options.lanes)
        fail_argument(rank, "lane is " + std::to_string(lane) + "; this endpoint has " +
                                std::to_string(state_->options.lanes) + " lanes per peer");
    ControlSpec spec;
    spec.kind = OpKind::signal;
    spec.scope = scope;
    spec.queue_pair = state_->peers[rank].lanes[lane];
    spec.remote = remote;
    spec.remote_offset = offset;
    spec.operand = operand;
    return spec;
}

ControlSpec Context::notification(std::uint32_t rank, std::span<const std::byte> payload, Scope scope,
                                  std::uint32_t lane) const {
    const std::shared_lock lock(state_->tables);
    const PeerRecord& peer = state_->peer_at(rank);
    const std::uint64_t limit = state_->capabilities.notification_bytes_max;
    if (payload.empty() || payload.size() > limit)
        fail_argument(rank, "a notification has " + std::to_string(payload.size()) + " bytes; it must have 1 to " +
                                std::to_string(limit));
    if (lane >= state_->options.lanes) fail_argument(rank, "lane is " + std::to_string(lane) + ", too high");
    ControlSpec spec;
    spec.kind = OpKind::notification;
    spec.scope = scope;
    spec.queue_pair = peer.lanes[lane];
    spec.payload = payload.data();
    spec.bytes = payload.size();
    return spec;
}

Engine::Submitted Context::submit_held(std::uint32_t rank, std::span<const ChunkSpec> chunks,
                                       std::span<const ControlSpec> controls, Level level) {
    if (rank >= state_->options.size) return {Status::invalid, {}};
    return state_->submit_user(rank, chunks, controls, level, now_ns());
}

Engine::Submitted Context::submit(std::uint32_t rank, std::span<const ChunkSpec> chunks,
                                  std::span<const ControlSpec> controls, Level level, TimeNs until_ns,
                                  Posting posting) {
    ContextState& state = *state_;
    if (state.liveness->has_left(rank)) return {Status::peer_dead, {}};
    while (true) {
        const std::uint32_t seen = doorbell().seen();
        bool moved = false;
        {
            const Inside inside(state);
            const TokenGuard guard(*this, until_ns);
            if (guard) {
                const TimeNs now = now_ns();
                const Engine::Submitted submitted = state.submit_user(rank, chunks, controls, level, now);
                const bool taken = submitted.status != Status::would_block;
                const bool held_before = state.bulk_held;
                if (taken && posting == Posting::later && state.thread.running()) {
                    state.thread.rouse();
                    return submitted;
                }
                // One round posts it; whatever else is to do is for waits and the thread.
                if (taken && posting == Posting::alone) state.post_now(now);
                if (!taken || posting != Posting::alone || state.starved || state.capabilities.ends_at_post)
                    moved = state.turn(taken ? 0 : caller_turn_ns);
                if (taken) {
                    // Neither need end with an event: the thread has to look again by itself.
                    if (state.starved || (state.bulk_held && !held_before)) state.thread.rouse();
                    return submitted;
                }
            }
        }
        if (now_ns() >= until_ns) return {Status::would_block, {}};
        if (moved) continue;
        state.thread.unpark();
        const TimeNs most = state.thread.running() ? slice_ns : no_thread_sleep_ns;
        const TimeNs now = now_ns();
        if (now < until_ns) doorbell().wait(seen, std::min(most, until_ns - now));
    }
}

void Context::fail_full(std::uint32_t rank, std::int64_t timeout_ms) {
    const ControlGuard guard(*state_);
    const EngineStatistics statistics = state_->engine->statistics();
    throw Failure(
        FailureKind::deadline,
        "the request to rank " + std::to_string(rank) + " was not taken within " + std::to_string(timeout_ms) +
            " ms: " + std::to_string(statistics.requests_live) + " requests are alive and " +
            std::to_string(statistics.operations_queued) + " operations queue; at most " +
            std::to_string(state_->options.requests_max) +
            " handles are kept, those of finished requests too: nothing was taken, wait for some or release them");
}

void Context::fail_submit(std::uint32_t rank, Status status) const {
    const std::string to = "rank " + std::to_string(rank);
    if (status == Status::peer_dead) {
        if (state_->liveness->state(rank) == PeerState::left)
            throw Failure(FailureKind::peer,
                          "rank " + std::to_string(this->rank()) + ", submitting to " + to + ": " + to +
                              " has left: it closed its endpoint, and takes nothing any more",
                          static_cast<std::int32_t>(rank));
        const auto fault = fault_of(rank);
        raise_fault(fault ? *fault : Fault{rank, -1, "the engine holds it dead"}, "submitting to " + to);
    }
    if (status == Status::invalid)
        throw Failure(FailureKind::capacity,
                      "the request to " + to + " has more operations than the tables can ever hold; split it");
    throw Failure(status == Status::closed ? FailureKind::state : FailureKind::transfer,
                  "the request to " + to + " was refused: " + std::string(status_name(status)) +
                      " is latched; remove_peer() and add_peer() open it again");
}

Status Context::status(Ticket request) const {
    return state_->engine->status(request);
}

std::int32_t Context::error_code(Ticket request) {
    check_usable();
    const ControlGuard guard(*state_);
    return state_->engine->error_code(request);
}

bool Context::stalled(Ticket request) const {
    if (request.slot >= state_->options.requests_max) return false;
    const RecordView view = RecordView::unpack(state_->engine->record(request).load(std::memory_order_acquire));
    return view.generation == request.generation && (view.flags & RecordView::stalled) != 0;
}

void Context::mark_stalled(Ticket request) {
    const ControlGuard guard(*state_);
    state_->engine->mark_stalled(request);
}

void Context::release(Ticket request) {
    if (state_->fork_mark.forked()) return;
    if (state_->token.try_take()) {
        const TokenReturn back(state_->token);
        state_->give_up(request);
        return;
    }
    const std::lock_guard lock(state_->deferred_mutex);
    state_->deferred_releases.push_back(request);
    state_->deferred_any.store(true, std::memory_order_release);
}

void Context::release_held(Ticket request) {
    state_->give_up(request);
}

Status Context::cancel(Ticket request) {
    check_usable();
    const ControlGuard guard(*state_);
    return state_->engine->cancel(request);
}

Status Context::withhold_held(Ticket request) {
    return state_->engine->withhold(request);
}

Status Context::wait_slice(Ticket request, TimeNs until_ns) {
    ContextState& state = *state_;
    const Doorbell bell = doorbell();
    TimeNs moved_ns = 0;
    enter_help();
    while (true) {
        Status now_is = status(request);
        if (now_is != Status::pending) break;
        const std::uint32_t seen = bell.seen();
        const bool moved = turn(caller_turn_ns);
        now_is = status(request);
        if (now_is != Status::pending) break;
        const TimeNs now = now_ns();
        if (now >= until_ns) break;
        if (moved || moved_ns == 0) moved_ns = now;
        if (moved) continue;
        if (may_spin() && now - moved_ns < state.wait_yields_ns.load(std::memory_order_relaxed)) {
            if (now - moved_ns >= spin_ns) sched_yield();
            continue;
        }
        leave_help();
        const TimeNs most = state.thread.running() ? slice_ns : no_thread_sleep_ns;
        const bool rang = bell.wait(seen, std::min(most, until_ns - now));
        // The thread in our place costs two wake-ups a completion: better to have stayed, if that was all.
        state.wait_yields_ns.store(rang && now_ns() - moved_ns < yields_most_ns ? yields_most_ns : yields_least_ns,
                                   std::memory_order_relaxed);
        // Not rung: a signal of the OS, or the slice is over. The binder looks at both.
        if (!rang && status(request) == Status::pending && state.thread.running()) {
            raise_if_peer_died(request);
            return Status::pending;
        }
        enter_help();
    }
    leave_help(Leaving::done);
    return status(request);
}

// A request to a dead peer ends once nothing of it is in flight; where the provider never says so, the waiter is told
// all the same, and the memory stays with the request.
void Context::raise_if_peer_died(Ticket request) {
    const RecordView view = RecordView::unpack(state_->engine->record(request).load(std::memory_order_acquire));
    if (view.generation != request.generation || view.is_terminal() || view.first_error != Status::peer_dead) return;
    const auto fault = fault_of(state_->requests[request.slot].rank);
    if (fault) raise_fault(*fault, "waiting for a request that still owns its memory");
}

}  // namespace expertwire::runtime
