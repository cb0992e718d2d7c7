// What runs under the progress token: turns, submission, releases, pulses. Never blocks.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "engine/pump.hpp"
#include "runtime/clock.hpp"
#include "runtime/context_state.hpp"

namespace expertwire::runtime {

namespace {

constexpr std::size_t reaped_per_turn = 64;
constexpr std::size_t leads_max = 256;  // in one request
constexpr TimeNs word_retry_ns = 1'000'000;
// A caller that asks for a request copies for so long, unless somebody wants the token: each time that it goes back to
// its interpreter between two pieces both find the caches taken by the other.
constexpr TimeNs copying_ns = 300'000;

// In the order in which they are told: whom we have removed before what may be said of us, the farewell last.
struct PulseWord {
    std::uint64_t offset;
    std::uint64_t Liveness::Own::* value;
};
constexpr PulseWord pulse_words[] = {
    {offsetof(PulseBlock, fenced), &Liveness::Own::fenced},
    {offsetof(PulseBlock, heartbeat), &Liveness::Own::heartbeat},
    {offsetof(PulseBlock, call_sequence), &Liveness::Own::call_sequence},
    {offsetof(PulseBlock, phase), &Liveness::Own::phase},
    {offsetof(PulseBlock, low_latency_call), &Liveness::Own::low_latency_call},
    {offsetof(PulseBlock, low_latency_told), &Liveness::Own::low_latency_told},
    {offsetof(PulseBlock, verdict), &Liveness::Own::verdict},
    {offsetof(PulseBlock, leaving), &Liveness::Own::leaving},
};

// The provider as pump() sees it: passes everything through, and notes which peer an error was about.
class Observed {
  public:
    Observed(ContextState& state, TimeNs now) : state_(state), now_(now) {}

    std::size_t poll(std::span<Completion> completions, std::vector<Arrival>& arrivals) {
        const std::size_t count = state_.provider->poll(completions, arrivals);
        for (const Completion& completion : completions.first(count)) {
            if (completion.status == Status::ok || completion.ticket.slot >= state_.rank_of_slot.size()) continue;
            state_.note_peer_error(state_.rank_of_slot[completion.ticket.slot], completion.status, completion.code,
                                   "a completion", now_);
        }
        return count;
    }

    PostResult post(const PostCommand& command) {
        state_.rank_of_slot[command.ticket.slot] = command.peer.value;
        const PostResult result = state_.provider->post(command);
        if (result.outcome == PostOutcome::failed)
            state_.note_peer_error(command.peer.value, result.status, result.code, "a post", now_);
        if (result.outcome == PostOutcome::posted && command.kind == OpKind::signal) note_word(command);
        return result;
    }

  private:
    // From here on it may arrive, however its request ends: it must not be added again. What was not posted was not
    // told.
    void note_word(const PostCommand& command) {
        PeerRecord& peer = state_.peers[command.peer.value];
        if (command.remote != peer.remote_runtime) return;
        const std::uint64_t base = state_.shared_layout.pulse_offset(peer.place);
        if (!state_.options.independent && command.remote_offset == state_.shared_layout.barrier_offset(peer.place))
            peer.barrier_told += command.operand;
        for (const PulseWord& word : pulse_words)
            if (command.remote_offset == base + word.offset) peer.told.*word.value += command.operand;
    }

    ContextState& state_;
    TimeNs now_;
};

bool holds_news(const PeerRecord& peer, const Liveness::Own& own) {
    return peer.told.verdict == own.verdict && peer.told.leaving == own.leaving && peer.told.fenced == own.fenced;
}

}  // namespace

bool ContextState::turn(TimeNs budget_ns, Ticket until) {
    const TimeNs begin = now_ns();
    const TimeNs end = begin + budget_ns;
    TimeNs now = begin;
    const std::uint64_t small_seen = engine->small_ended();
    bool moved = false;
    reap(now);
    moved = advance_replacement(now);
    const bool again = (pulses_due || barriers_due) && now >= next_words_ns;
    if (again) next_words_ns = now + word_retry_ns;
    const bool beat = broadcast_pulse.exchange(false, std::memory_order_acq_rel);
    if (beat && now >= next_repeat_ns) {  // not with each word that cannot wait for a beat
        next_repeat_ns = now + options.heartbeat_ns / 2;
        provider->greet_peers();
    }
    if (beat || (pulses_due && again)) send_pulses(now);
    if (barriers_due && again) send_barriers(now);
    while (true) {
        Observed observed(*this, now);
        PumpResult result;
        pump_polls(*engine, observed, arrivals_scratch, now, 1, pump_tables, result);
        // Who waits for what is small sees it before a chunk of bulk is posted, which takes longer than small ones do.
        const bool small_ended = engine->small_ended() != small_seen;
        pump_posts(*engine, observed, now, 1, pump_tables, result, !small_ended);
        starved = result.again > 0;
        bulk_held = engine->bulk_held();
        const bool arrived = !arrivals_scratch.empty();
        if (arrived) collect_arrivals();
        moved = moved || result.moved() || arrived;
        if (small_ended || (until.valid() && engine->status(until) != Status::pending)) break;
        const bool copying = provider->copying();
        if (!result.moved() && !copying) break;
        now = now_ns();
        if (now >= (copying && until.valid() ? begin + copying_ns : end) || token.wanted()) break;
    }
    ++counters.turns;
    if (moved) {
        ring_own_if_waiting();
        if (watch_count.load(std::memory_order_acquire) > 0) write_watches();
    }
    return moved;
}

// Before anything is looked at that came meanwhile: over tcp an empty look costs 3 µs, one at bulk its copies.
void ContextState::post_now(TimeNs now) {
    Observed observed(*this, now);
    PumpResult result;
    pump_posts(*engine, observed, now, 1, pump_tables, result);
    starved = result.again > 0;
    bulk_held = engine->bulk_held();
}

void ContextState::collect_arrivals() {
    const std::lock_guard lock(arrivals_mutex);
    for (Arrival& arrival : arrivals_scratch) {
        if (arrivals.size() >= options.notifications_max) {
            ++counters.notifications_dropped;
            continue;
        }
        ++counters.notifications;
        arrivals.push_back({arrival.peer.value, std::move(arrival.payload)});
    }
    arrivals_scratch.clear();
}

Engine::Submitted ContextState::submit_user(std::uint32_t rank, std::span<const ChunkSpec> chunks,
                                            std::span<const ControlSpec> controls, Level level, TimeNs now) {
    // SPEC T3: post, wait for all, then signal, then the next.
    if (options.sync_writes && sync_request.valid() && engine->status(sync_request) == Status::pending)
        return {Status::would_block, {}};
    const Engine::Submitted submitted = submit(rank, chunks, controls, level, now);
    if (options.sync_writes && submitted.status == Status::ok) sync_request = submitted.request;
    return submitted;
}

bool ContextState::is_bulk(std::uint32_t rank, QueuePairId queue_pair) const {
    const std::vector<QueuePairId>& lanes = peers[rank].lanes;
    for (std::uint32_t lane = 1; options.endpoints > 1 && lane < lanes.size(); ++lane)
        if (lanes[lane] == queue_pair) return is_bulk(lane);
    return false;
}

// False: all of them are small enough as they are.
bool ContextState::cut(std::uint32_t rank, std::span<const ChunkSpec> chunks, TimeNs now,
                       std::vector<ChunkSpec>& pieces) const {
    const std::uint64_t most = std::max<std::uint64_t>(capabilities.message_bytes_max, 1);
    const std::uint64_t bulk_most = std::min(most, options.bulk_chunk_bytes / (engine->bulk_wary(now) ? 2 : 1));
    const auto limit_of = [&](const ChunkSpec& chunk) { return is_bulk(rank, chunk.queue_pair) ? bulk_most : most; };
    if (std::none_of(chunks.begin(), chunks.end(),
                     [&](const ChunkSpec& chunk) { return chunk.bytes > limit_of(chunk); }))
        return false;
    // One more each where there is room: with the tables made for chunks of half the size they are not made for both.
    const bool leads = chunks.size() <= leads_max;
    for (ChunkSpec chunk : chunks) {
        const std::uint64_t limit = limit_of(chunk);
        std::uint64_t left = chunk.bytes, next = limit;
        if (leads && left > limit && is_bulk(rank, chunk.queue_pair)) {
            const std::uint64_t lead =
                provider->lead_bytes(chunk.kind, chunk.local, chunk.local_offset, chunk.remote, chunk.remote_offset);
            if (lead > 0) next = std::min(lead, limit);
        }
        for (; left > 0; next = limit) {
            chunk.bytes = std::min(left, next);
            pieces.push_back(chunk);
            chunk.local_offset += chunk.bytes;
            chunk.remote_offset += chunk.bytes;
            left -= chunk.bytes;
        }
    }
    return true;
}

Engine::Submitted ContextState::submit(std::uint32_t rank, std::span<const ChunkSpec> chunks,
                                       std::span<const ControlSpec> controls, Level level, TimeNs now) {
    std::vector<ChunkSpec> pieces;
    if (cut(rank, chunks, now, pieces)) chunks = pieces;
    // A payload must stay where it is until its request is terminal: the record keeps it.
    std::uint64_t payload_bytes = 0;
    for (const ControlSpec& control : controls) payload_bytes += control.payload ? control.bytes : 0;
    std::vector<std::byte> payload(payload_bytes);
    std::vector<ControlSpec> copies;
    if (payload_bytes > 0) {
        copies.assign(controls.begin(), controls.end());
        std::byte* next = payload.data();
        for (ControlSpec& control : copies) {
            if (!control.payload) continue;
            std::memcpy(next, control.payload, control.bytes);
            control.payload = next;
            next += control.bytes;
        }
        controls = copies;
    }
    const bool counts = capabilities.ordering == OrderingClass::counted_immediates && !chunks.empty() &&
                        !controls.empty() && provider->counts(PeerId{rank});
    const Engine::Submitted submitted = engine->submit(PeerId{rank}, chunks, controls, level, now, counts);
    if (submitted.status == Status::ok) {
        RequestRecord& record = requests[submitted.request.slot];
        record.ticket = submitted.request;
        record.rank = rank;
        record.payload = std::move(payload);
    }
    return submitted;
}

void ContextState::give_up(Ticket request) {
    const Status status = engine->status(request);
    if (status == Status::stale) return;
    if (status == Status::pending) {
        abandoned.push_back(request);
        return;
    }
    requests[request.slot].payload = {};
    engine->release(request);
}

void ContextState::reap(TimeNs now) {
    if (deferred_any.exchange(false, std::memory_order_acq_rel)) {
        std::vector<Ticket> taken;
        {
            const std::lock_guard lock(deferred_mutex);
            taken.swap(deferred_releases);
        }
        for (const Ticket request : taken) give_up(request);
    }
    // Oldest first; what is still in flight goes to the end.
    const std::size_t count = std::min(abandoned.size(), reaped_per_turn);
    if (count > 0) {
        std::vector<Ticket> front(abandoned.begin(), abandoned.begin() + static_cast<std::ptrdiff_t>(count));
        abandoned.erase(abandoned.begin(), abandoned.begin() + static_cast<std::ptrdiff_t>(count));
        for (const Ticket request : front) give_up(request);
    }
    if (liveness->has_deaths())
        for (const std::uint32_t rank : liveness->take_deaths()) engine->on_peer_dead(PeerId{rank}, now);
}

void ContextState::note_peer_error(std::uint32_t rank, Status status, std::int32_t code, const char* doing,
                                   TimeNs now) {
    if (status != Status::peer_dead || rank >= options.size) return;
    liveness->suspect(rank,
                      std::string("provider ") + capabilities.provider + " reported it unreachable on " + doing +
                          " (code " + std::to_string(code) + ")",
                      now);
}

// Not who reads our words where they are; nor one that we map, and see that it has not added us, or has removed us.
bool ContextState::hears_by_fabric(std::uint32_t rank) const {
    const PeerRecord& peer = peers[rank];
    if (!peer.shared.present()) return true;
    if (peer.shared.about(options.rank).has.load(std::memory_order_acquire) != instance) return false;
    return shared.about(rank).reader.load(std::memory_order_acquire) != peer.blob.instance;
}

bool ContextState::news_told() const {
    for (std::uint32_t rank = 0; rank < options.size; ++rank) {
        const PeerRecord& peer = peers[rank];
        if (!peer.added.load(std::memory_order_acquire) || !hears_by_fabric(rank)) continue;
        const Liveness::Own own = liveness->own(rank);
        if (liveness->state(rank) != PeerState::watched) continue;
        if (!holds_news(peer, own)) return false;
        if (peer.pulse_request.valid() && engine->status(peer.pulse_request) == Status::pending) return false;
    }
    return true;
}

// Words of my own pulse reach a peer that does not read them in my memory as adds of the difference (SPEC T22: one
// writer).
void ContextState::send_pulses(TimeNs now) {
    pulses_due = false;
    barriers_due = true;  // a peer may have ceased to read our words where they are
    for (std::uint32_t rank = 0; rank < options.size; ++rank) {
        const PeerRecord& peer = peers[rank];
        if (!peer.added.load(std::memory_order_acquire)) continue;
        if (liveness->unreachable(rank)) {
            provider->expect_nothing_of(PeerId{rank});
            continue;
        }
        if (!hears_by_fabric(rank)) continue;
        const Liveness::Own own = liveness->own(rank);
        const bool taken = send_pulse(rank, own, now);
        // A beat may be left out, a verdict or a farewell not: behind them the connection may end.
        if (!taken || !holds_news(peer, own)) pulses_due = true;
    }
}

// False: it waits for room.
bool ContextState::send_pulse(std::uint32_t rank, const Liveness::Own& own, TimeNs now) {
    PeerRecord& peer = peers[rank];
    if (peer.pulse_request.valid()) {
        if (engine->status(peer.pulse_request) == Status::pending) return true;
        give_up(peer.pulse_request);
        peer.pulse_request = {};
    }
    std::vector<ControlSpec> adds;
    for (const PulseWord& word : pulse_words) {
        if (peer.told.*word.value == own.*word.value) continue;
        ControlSpec spec;
        spec.kind = OpKind::signal;
        spec.queue_pair = peer.lanes.back();  // reserved for us: users cannot fill it and silence us
        spec.remote = peer.remote_runtime;
        spec.remote_offset = shared_layout.pulse_offset(peer.place) + word.offset;
        spec.operand = own.*word.value - peer.told.*word.value;
        adds.push_back(spec);
    }
    if (adds.empty()) return true;
    const Engine::Submitted submitted = submit(rank, {}, adds, Level::delivered, now);
    if (submitted.status != Status::ok) return submitted.status != Status::would_block;
    peer.pulse_request = submitted.request;
    ++counters.pulses_sent;
    return true;
}

// Of the lanes that users' work takes; lanes_broken: one of them has failed work on it.
std::uint64_t ContextState::lane_generations(std::uint32_t rank) const {
    std::uint64_t sum = 0;
    for (std::uint32_t lane = 0; lane < options.lanes; ++lane) {
        const QueuePairView view = engine->view(peers[rank].lanes[lane]);
        if (view.state != LaneState::open) return lanes_broken;
        sum += view.generation;
    }
    return sum;
}

// A word that was not posted is sent again, also after the barrier's caller has gone: a beat that passes its hard
// deadline, as where a connection takes longer than that, fails what stands behind it on the lane, and who waits for
// the word learns of our arrival in no other way. Not where work of users failed since the barrier began: the word
// says that all of it has arrived.
bool ContextState::send_barriers(TimeNs now) {
    bool taken = true;
    barriers_due = false;
    for (std::uint32_t rank = 0; rank < options.size; ++rank) taken = send_barrier(rank, now) && taken;
    return taken;
}

// False: it waits for room.
bool ContextState::send_barrier(std::uint32_t rank, TimeNs now) {
    PeerRecord& peer = peers[rank];
    if (rank == options.rank || !peer.added.load(std::memory_order_acquire)) return true;
    if (peer.barrier_request.valid()) {
        if (engine->status(peer.barrier_request) == Status::pending) {
            barriers_due = true;
            return peer.barrier_asked >= barrier_target || engine->view(peer.lanes.back()).state != LaneState::open;
        }
        give_up(peer.barrier_request);
        peer.barrier_request = {};
    }
    if (peer.barrier_told >= barrier_target || liveness->unreachable(rank)) return true;
    if (!hears_by_fabric(rank)) {
        peer.barrier_tried = true;  // the next beat looks again
        return true;
    }
    if (peer.barrier_tried && (peer.barrier_lanes == lanes_broken || lane_generations(rank) != peer.barrier_lanes))
        return true;
    barriers_due = true;
    ControlSpec spec;
    spec.kind = OpKind::signal;
    spec.scope = Scope::peer;  // behind everything that went to this peer before
    spec.queue_pair = peer.lanes.back();
    spec.remote = peer.remote_runtime;
    spec.remote_offset = shared_layout.barrier_offset(peer.place);
    spec.operand = barrier_target - peer.barrier_told;
    const Engine::Submitted submitted = submit(rank, {}, {&spec, 1}, Level::delivered, now);
    if (submitted.status == Status::would_block) return false;
    peer.barrier_tried = true;  // or the lane holds an error: it is open again once that has ended
    if (submitted.status == Status::ok) {
        peer.barrier_request = submitted.request;
        peer.barrier_asked = barrier_target;
    }
    return true;
}

void ContextState::ring_own_if_waiting() {
    const Doorbell bell(shared.doorbell());
    if (bell.has_waiter()) bell.ring();
}

void ContextState::wake_all() {
    Doorbell(shared.doorbell()).ring();
    write_watches();
}

void ContextState::write_watches() {
    const std::lock_guard lock(watches_mutex);
    const std::uint64_t one = 1;
    for (const Descriptor& watch : watches)
        if (write(watch.get(), &one, sizeof one) < 0) continue;  // full: it is readable, which is all that is wanted
}

}  // namespace expertwire::runtime
