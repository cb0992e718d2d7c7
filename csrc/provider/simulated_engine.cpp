#include "provider/simulated_engine.hpp"

#include <algorithm>
#include <optional>

#include "engine/pump.hpp"
#include "provider/simulated_plan.hpp"

namespace expertwire {

const char* name_of(SimulationEvent event) {
    static constexpr std::array<const char*, simulation_events> names{
        "would_block",   "cancelled",         "cancel_refused",   "peer_declared_dead",
        "peer_reopened", "endpoint_replaced", "endpoint_failed",  "quiet_ok",
        "quiet_failed",  "local_published",   "quarantined",      "aborted",
        "lane_reopened", "doomed_signal",     "endpoint_drained", "endpoint_healed"};
    return names[static_cast<std::size_t>(event)];
}

namespace {

class EngineSimulation {
  public:
    explicit EngineSimulation(const EngineSimulationOptions& options)
        : options_(options),
          random_(options.seed),
          plan_(make_engine_plan(options, random_)),
          network_(plan_.ranks, plan_.model, plan_.faults, random_.next()),
          oracle_(network_, random_.next()) {
        network_.keep_trace(options.trace_lines);
        oracle_.errors_possible = plan_.errors_possible();
        members_.resize(plan_.ranks);
        for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
            Member& member = members_[rank];
            member.engine = std::make_unique<Engine>(plan_.limits, plan_.policy);
            member.lanes.resize(plan_.ranks);
            for (std::uint32_t peer = 0; peer < plan_.ranks; ++peer) open_lanes(rank, peer);
        }
        result_.seed = options.seed;
        result_.swarm = plan_.swarm;
        result_.ranks = plan_.ranks;
        result_.queue_pairs_per_peer = plan_.lanes;
        result_.ordered = plan_.policy.ordering == OrderingClass::ordered;
    }

    EngineSimulationResult run() {
        if (plan_.freezes) schedule_freeze();
        if (plan_.kills) kill_at_ = random_.between(5'000, 60'000);
        if (plan_.closes_regions) close_region_at_ = random_.between(2'000, 30'000);
        while (failure().empty() && !submitted_all()) turn(true);
        heal();
        const TimeNs limit = healed_at_ + 40 * plan_.limits.hard_timeout_ns;
        while (failure().empty() && !converged()) {
            turn(false);
            if (network_.now() > limit) oracle_.fail("did not converge after the network had healed", stuck_rank(), 0);
        }
        if (failure().empty()) check_end_state();
        return summary();
    }

  private:
    struct QuietWatch {
        bool armed = false;
        bool failed = false;
        std::uint64_t mark = 0;
        std::vector<std::uint32_t> open;  // places that the mark covers and that have not ended
    };
    struct Member {
        std::unique_ptr<Engine> engine;
        std::vector<std::vector<QueuePairId>> lanes;  // [peer]; empty: closed
        std::vector<Arrival> arrivals;
        std::uint32_t submitted = 0;
        std::uint32_t next_endpoint = 16;
        std::optional<EndpointId> draining;  // has been replaced, and is closed when it has drained
        std::uint32_t again_turns = 0;       // of its own turns, the last ones in which it was pushed back
        bool frozen = false;
        QuietWatch quiet;
        struct Watch {
            std::uint64_t posted = 0;  // of the lane
            std::uint64_t at = 0;      // of the rank, when that was so
        };
        std::vector<Watch> watches;  // [peer][lane]
    };

    const std::string& failure() const { return oracle_.failure(); }
    Engine& engine(std::uint32_t rank) { return *members_[rank].engine; }
    bool runs(std::uint32_t rank) const { return !network_.dead(rank) && !members_[rank].frozen; }
    void note(SimulationEvent event) { ++result_.events[static_cast<std::size_t>(event)]; }

    bool open_lanes(std::uint32_t rank, std::uint32_t peer);
    void turn(bool submitting);
    void serve(std::uint32_t rank, bool submitting);
    void look_at_jobs(std::uint32_t rank);
    void look_at_quiet(std::uint32_t rank);
    void look_for_starvation(std::uint32_t rank);
    void submit_one(std::uint32_t rank);
    void draw_job(EngineOracle::Job& job, std::uint32_t peer);
    Engine::Submitted submit_job(std::uint32_t rank, std::uint32_t place);
    void repair(std::uint32_t rank);
    void repair_peer(std::uint32_t rank, std::uint32_t peer);
    void replace(std::uint32_t rank, EndpointId full);
    void close_drained(std::uint32_t rank);
    void release_lost(std::uint32_t rank);
    void misfortune();
    void schedule_freeze();
    bool tries_again();
    void advance();
    void heal();
    bool submitted_all() const;
    bool converged();
    std::uint32_t stuck_rank();
    void check_end_state();
    EngineSimulationResult summary();

    EngineSimulationOptions options_;
    Random random_;
    EnginePlan plan_;
    SimulatedNetwork network_;
    EngineOracle oracle_;
    std::vector<Member> members_;
    EngineSimulationResult result_;
    std::optional<TimeNs> kill_at_, verdict_at_, freeze_at_, thaw_at_, close_region_at_;
    std::uint32_t killed_ = 0, frozen_ = 0;
    bool false_verdict_ = false;
    TimeNs healed_at_ = 0;  // 0: not yet
};

bool EngineSimulation::open_lanes(std::uint32_t rank, std::uint32_t peer) {
    Member& member = members_[rank];
    member.lanes[peer].clear();
    for (std::uint32_t lane = 0; lane < plan_.lanes; ++lane) {
        const EndpointId endpoint{member.next_endpoint == 16 ? lane % plan_.endpoints : member.next_endpoint};
        const QueuePairId id = engine(rank).open_queue_pair(PeerId{peer}, endpoint, lane > 0 ? plan_.bulk_window : 0);
        if (!id.valid()) return false;
        member.lanes[peer].push_back(id);
    }
    return true;
}

void EngineSimulation::turn(bool submitting) {
    ++result_.steps;
    misfortune();
    for (std::uint32_t rank = 0; rank < plan_.ranks && failure().empty(); ++rank) {
        if (runs(rank) && (healed_at_ > 0 || random_.chance(plan_.served))) serve(rank, submitting);
    }
    if (result_.steps % 256 == 0) oracle_.check_memory();
    advance();
    if (result_.steps > 400'000) oracle_.fail("too many steps", stuck_rank(), 0);
}

void EngineSimulation::serve(std::uint32_t rank, bool submitting) {
    Member& member = members_[rank];
    if (submitting && member.submitted < plan_.requests && random_.chance(0.4)) submit_one(rank);
    const PumpResult pumped = pump(engine(rank), network_.provider(rank), member.arrivals, network_.now(), 2);
    member.again_turns = pumped.again > 0 ? member.again_turns + 1 : 0;
    for (const Arrival& arrival : member.arrivals) oracle_.check_notification(rank, arrival);
    member.arrivals.clear();
    look_at_jobs(rank);
    look_at_quiet(rank);
    if (options_.squeeze) look_for_starvation(rank);
    repair(rank);
    if (!options_.check_engine) return;
    const std::string broken = engine(rank).check_invariants();
    if (!broken.empty()) oracle_.fail("invariant: " + broken, rank, 0);
}

void EngineSimulation::look_at_jobs(std::uint32_t rank) {
    Member& member = members_[rank];
    for (std::uint32_t place = 0; place < EngineOracle::jobs_per_rank; ++place) {
        EngineOracle::Job& job = oracle_.job(rank, place);
        if (job.active && plan_.cancels && random_.chance(0.02)) {
            const Status status = engine(rank).cancel(job.ticket);
            if (status == Status::ok) oracle_.cancelled(rank, place);
            note(status == Status::ok ? SimulationEvent::cancelled : SimulationEvent::cancel_refused);
        }
        Status status = Status::pending;
        if (!oracle_.check_end(rank, place, engine(rank), status)) continue;
        if (job.flying) note(SimulationEvent::local_published);
        if (status == Status::aborted) {
            note(job.has_control && job.scope != Scope::request && job.chunk_count == 0 ? SimulationEvent::doomed_signal
                                                                                        : SimulationEvent::aborted);
        }
        QuietWatch& quiet = member.quiet;
        const auto open = std::find(quiet.open.begin(), quiet.open.end(), place);
        if (open == quiet.open.end()) continue;
        quiet.open.erase(open);
        quiet.failed |= status != Status::ok && status != Status::cancelled;
    }
}

// quiet() against the same question asked of the records one by one.
void EngineSimulation::look_at_quiet(std::uint32_t rank) {
    QuietWatch& quiet = members_[rank].quiet;
    if (quiet.armed) {
        const Status status = engine(rank).quiet(quiet.mark);
        if (status == Status::pending) {
            if (quiet.open.empty()) oracle_.fail("quiet still waits, although all that it covers has ended", rank, 0);
            return;
        }
        if (!quiet.open.empty()) oracle_.fail("quiet before everything that it covers has ended", rank, quiet.open[0]);
        if ((status == Status::ok) == quiet.failed)
            oracle_.fail("quiet reports another outcome than the records", rank, 0);
        note(status == Status::ok ? SimulationEvent::quiet_ok : SimulationEvent::quiet_failed);
        quiet.armed = false;
    }
    if (!random_.chance(0.05)) return;
    quiet = {true, false, engine(rank).quiet_mark(), {}};
    for (std::uint32_t place = 0; place < EngineOracle::jobs_per_rank; ++place) {
        if (oracle_.job(rank, place).active) quiet.open.push_back(place);
    }
}

// No lane that could post lets more than a few rounds of the others' posts pass.
void EngineSimulation::look_for_starvation(std::uint32_t rank) {
    Member& member = members_[rank];
    member.watches.resize(std::size_t{plan_.ranks} * plan_.lanes);
    const std::uint64_t posted = engine(rank).statistics().operations_posted;
    for (std::size_t i = 0; i < member.watches.size(); ++i) {
        const QueuePairView view = engine(rank).view(member.lanes[i / plan_.lanes][i % plan_.lanes]);
        if (plan_.bulk_window > 0 && i % plan_.lanes > 0) continue;  // served after the others, and held back
        Member::Watch& watch = member.watches[i];
        const bool waits = view.accepted > view.posted && view.in_flight == 0;
        if (!waits || view.posted != watch.posted) watch = {view.posted, posted};
        result_.longest_wait = std::max(result_.longest_wait, posted - watch.at);
        if (posted - watch.at > 4 * member.watches.size())
            oracle_.fail("a lane starves", rank, static_cast<std::uint32_t>(i));
    }
}

void EngineSimulation::draw_job(EngineOracle::Job& job, std::uint32_t peer) {
    job.peer = peer;
    job.level = plan_.local_levels && random_.chance(0.4) ? Level::local : Level::delivered;
    job.chunk_count = static_cast<std::uint32_t>(random_.below(EngineOracle::chunks_max + 1));
    job.has_control = job.chunk_count == 0 ? random_.chance(0.9) : random_.chance(0.7);
    job.control = random_.chance(0.3) ? OpKind::notification : OpKind::signal;
    job.scope = static_cast<Scope>(random_.chance(0.5) ? 0 : random_.between(1, 2));
    job.control_lane = static_cast<std::uint32_t>(random_.below(plan_.lanes));
    if (job.has_control) ++result_.scopes[static_cast<std::size_t>(job.scope)];
    const bool reads = random_.chance(0.2);
    if (options_.counted && job.chunk_count > 0 && random_.chance(0.5)) {
        job.has_control = true;
        job.control = OpKind::signal;
        job.scope = Scope::request;
    }
    for (std::uint32_t c = 0; c < job.chunk_count; ++c) {
        EngineOracle::Chunk& chunk = job.chunks[c];
        chunk = {};
        chunk.kind = reads ? OpKind::read : OpKind::write;
        chunk.bytes = static_cast<std::uint32_t>(random_.between(1, EngineOracle::chunk_bytes_max));
        chunk.lane = static_cast<std::uint32_t>(random_.below(plan_.lanes));
        if (plan_.bulk_window == 0) continue;  // else often what can be posted with the one before
        if (random_.chance(0.8)) chunk.bytes = EngineOracle::chunk_bytes_max;
        if (c > 0 && random_.chance(0.8)) chunk.lane = job.chunks[c - 1].lane;
    }
}

Engine::Submitted EngineSimulation::submit_job(std::uint32_t rank, std::uint32_t place) {
    EngineOracle::Job& job = oracle_.job(rank, place);
    const std::vector<QueuePairId>& lanes = members_[rank].lanes[job.peer];
    std::vector<ChunkSpec> chunks;
    for (std::uint32_t c = 0; c < job.chunk_count; ++c) {
        EngineOracle::Chunk& chunk = job.chunks[c];
        const bool write = chunk.kind == OpKind::write;
        ChunkSpec spec;
        spec.queue_pair = lanes[chunk.lane];
        spec.kind = chunk.kind;
        spec.local = RegionId{write ? EngineOracle::outbox : EngineOracle::reads};
        spec.local_offset = EngineOracle::piece(place, c);
        spec.remote = oracle_.remote(job.peer, write ? EngineOracle::inbox : EngineOracle::library);
        spec.remote_offset = write ? oracle_.inbox_piece(rank, place, c) : EngineOracle::piece(place, c);
        spec.bytes = chunk.bytes;
        if (write && plan_.wrong_ranges && random_.chance(0.04)) {
            chunk.hopeless = true;
            spec.remote_offset = ~std::uint64_t{0} - 7;
        } else if (write && plan_.closes_regions && !close_region_at_ && random_.chance(0.05)) {
            chunk.hopeless = true;  // every rank's fragile region is closed by now
            spec.remote = oracle_.remote(job.peer, EngineOracle::fragile);
            spec.remote_offset = 0;
            spec.bytes = std::min<std::uint64_t>(spec.bytes, 64);
        }
        chunks.push_back(spec);
    }
    std::vector<ControlSpec> controls;
    if (job.has_control) {
        ControlSpec spec;
        spec.kind = job.control;
        spec.scope = job.scope;
        spec.queue_pair = lanes[job.control_lane];
        if (job.control == OpKind::notification) {
            spec.payload = reinterpret_cast<const std::byte*>(job.note.data());
            spec.bytes = sizeof job.note;
        } else {
            spec.remote = oracle_.remote(job.peer, EngineOracle::words);
            spec.remote_offset = EngineOracle::word(rank, place);
            spec.operand = job.epoch;
        }
        controls.push_back(spec);
    }
    const bool counts = network_.provider(rank).counts(PeerId{job.peer});
    return engine(rank).submit(PeerId{job.peer}, chunks, controls, job.level, network_.now(), counts);
}

void EngineSimulation::submit_one(std::uint32_t rank) {
    Member& member = members_[rank];
    const auto place = static_cast<std::uint32_t>(random_.below(EngineOracle::jobs_per_rank));
    EngineOracle::Job& job = oracle_.job(rank, place);
    const auto peer = static_cast<std::uint32_t>(random_.below(plan_.ranks));  // oneself as well
    if (job.active || job.flying || member.lanes[peer].size() < plan_.lanes) return;
    draw_job(job, peer);
    oracle_.prepare(rank, place);
    oracle_.cover(rank, place, engine(rank));
    const Engine::Submitted submitted = submit_job(rank, place);
    if (submitted.status == Status::would_block) {
        note(SimulationEvent::would_block);
        return;
    }
    ++member.submitted;
    if (submitted.status == Status::ok) {
        ++result_.requests;
        oracle_.start(rank, place, submitted.request);
    } else if (!plan_.errors_possible()) {
        oracle_.fail("submission refused without a cause: status " + std::to_string(static_cast<int>(submitted.status)),
                     rank, place);
    }
}

// ---- what a runtime does about failures

void EngineSimulation::repair(std::uint32_t rank) {
    close_drained(rank);
    if (const auto full = engine(rank).endpoint_to_replace()) replace(rank, *full);
    if (healed_at_ > 0) release_lost(rank);
    for (std::uint32_t peer = 0; peer < plan_.ranks; ++peer) repair_peer(rank, peer);
}

void EngineSimulation::replace(std::uint32_t rank, EndpointId full) {
    Member& member = members_[rank];
    if (member.draining) return;
    const EndpointId fresh{member.next_endpoint == 16 ? 17 : member.next_endpoint + 1};
    member.next_endpoint = fresh.value;
    network_.say("rank " + std::to_string(rank) + " replaces endpoint " + std::to_string(full.value));
    engine(rank).replace_endpoint(full, fresh);
    note(SimulationEvent::endpoint_replaced);
    // In two phases, as the runtime does; now and then at once, as where an endpoint is lost.
    if ((options_.seed + fresh.value) % 4 != 0) {
        member.draining = full;
        return;
    }
    network_.provider(rank).close_endpoint(full);
    engine(rank).on_endpoint_closed(full, network_.now());
}

// The close ends nothing but what was quarantined: that has an error of its own.
void EngineSimulation::close_drained(std::uint32_t rank) {
    Member& member = members_[rank];
    if (!member.draining || !engine(rank).drained(*member.draining)) return;
    std::vector<std::uint32_t> pending;
    for (std::uint32_t place = 0; place < EngineOracle::jobs_per_rank; ++place) {
        const EngineOracle::Job& job = oracle_.job(rank, place);
        if (!job.active || engine(rank).status(job.ticket) != Status::pending) continue;
        // One that was open on an endpoint closed at once, and on this one too, has its error from there.
        const RecordView record = RecordView::unpack(engine(rank).record(job.ticket).load());
        if (record.first_error != Status::closed) pending.push_back(place);
    }
    network_.say("rank " + std::to_string(rank) + " closes endpoint " + std::to_string(member.draining->value));
    network_.provider(rank).close_endpoint(*member.draining);
    engine(rank).on_endpoint_closed(*member.draining, network_.now());
    member.draining.reset();
    note(SimulationEvent::endpoint_drained);
    for (const std::uint32_t place : pending) {
        if (engine(rank).status(oracle_.job(rank, place).ticket) == Status::closed)
            oracle_.fail("the close of a drained endpoint ended work that was not quarantined", rank, place);
    }
}

// Operations whose completion was lost, too few to have their endpoint replaced: whoever wants their records to end
// (remove_peer, close) asks for it (SPEC T14). Liveness: with the network healed, every ticket ends.
void EngineSimulation::release_lost(std::uint32_t rank) {
    if (network_.now() < healed_at_ + 2 * plan_.limits.hard_timeout_ns) return;
    for (const std::vector<QueuePairId>& lanes : members_[rank].lanes) {
        for (const QueuePairId lane : lanes) {
            const QueuePairView view = engine(rank).view(lane);
            if (view.state != LaneState::quarantined) continue;
            replace(rank, view.endpoint);
            note(SimulationEvent::endpoint_healed);
            return;
        }
    }
}

// A lane that failed stays failed until its peer is closed and opened again.
void EngineSimulation::repair_peer(std::uint32_t rank, std::uint32_t peer) {
    Member& member = members_[rank];
    bool failed = engine(rank).peer_error(PeerId{peer}) != Status::ok;
    for (const QueuePairId lane : member.lanes[peer]) failed |= engine(rank).view(lane).state == LaneState::failed;
    if (!failed || member.lanes[peer].empty() || !random_.chance(0.3)) return;
    SimulatedProvider& provider = network_.provider(rank);
    provider.remove_peer(PeerId{peer});
    engine(rank).on_peer_closed(PeerId{peer}, network_.now());
    if (engine(rank).close_peer(PeerId{peer}, network_.now()) != Status::ok) {
        oracle_.fail("a peer whose work has ended could not be closed", rank, peer);
        return;
    }
    provider.add_peer(PeerId{peer}, network_.provider(peer).address(EndpointId{0}));
    member.lanes[peer].clear();
    if (network_.dead(peer)) return;
    if (!open_lanes(rank, peer)) oracle_.fail("a closed peer could not be opened again", rank, peer);
    note(SimulationEvent::peer_reopened);
}

// ---- what goes wrong

void EngineSimulation::schedule_freeze() {
    freeze_at_ = network_.now() + random_.between(3'000, 40'000);
    frozen_ = static_cast<std::uint32_t>(random_.below(plan_.ranks));
    false_verdict_ = random_.chance(0.3);
}

void EngineSimulation::misfortune() {
    const TimeNs now = network_.now();
    if (close_region_at_ && now >= *close_region_at_) {
        close_region_at_.reset();
        for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
            network_.provider(rank).deregister_region(RegionId{EngineOracle::fragile});
        }
    }
    if (kill_at_ && now >= *kill_at_) {
        kill_at_.reset();
        killed_ = static_cast<std::uint32_t>(random_.below(plan_.ranks));
        network_.kill(killed_, random_.chance(0.4));
        verdict_at_ = now + random_.between(10'000, 2 * plan_.limits.hard_timeout_ns);
    }
    if (freeze_at_ && now >= *freeze_at_) {
        freeze_at_.reset();
        network_.freeze(frozen_);
        members_[frozen_].frozen = true;
        thaw_at_ = now + random_.between(50'000, 3 * plan_.limits.hard_timeout_ns);
    }
    const auto declare_dead = [&](std::uint32_t victim) {
        for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
            if (rank != victim && !network_.dead(rank)) engine(rank).on_peer_dead(PeerId{victim}, now);
        }
        note(SimulationEvent::peer_declared_dead);
    };
    if (verdict_at_ && now >= *verdict_at_) {
        verdict_at_.reset();
        declare_dead(killed_);
    }
    if (thaw_at_ && now >= *thaw_at_) {
        thaw_at_.reset();
        if (false_verdict_) declare_dead(frozen_);  // it lives, and wakes to find itself fenced off
        network_.thaw(frozen_);
        members_[frozen_].frozen = false;
    }
    if (plan_.endpoint_errors && random_.chance(0.003)) {
        const auto rank = static_cast<std::uint32_t>(random_.below(plan_.ranks));
        if (runs(rank)) engine(rank).on_endpoint_error(EndpointId{0}, Status::io_error, 5, now);
        note(SimulationEvent::endpoint_failed);
    }
}

// Somebody was pushed back in its own last turn, and not for longer than any burst. Who has no turn now still waits for
// one: the clock must not run to its deadline meanwhile.
bool EngineSimulation::tries_again() {
    for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
        const std::uint32_t turns = members_[rank].again_turns;
        if (runs(rank) && turns > 0 && turns <= 100) return true;
        if (runs(rank) && network_.provider(rank).has_counting_to_do()) return true;
        if (runs(rank) && engine(rank).bulk_held()) return true;  // it goes on when a short time has passed
    }
    return false;
}

void EngineSimulation::advance() {
    if (random_.chance(0.5) && network_.next_event() && *network_.next_event() <= network_.now() + 2'000) {
        network_.run_next();
        return;
    }
    TimeNs next = network_.now() + random_.between(1, 2'000);
    if (!network_.next_event() && submitted_all() && !tries_again()) {
        // Nothing is on its way, nor tried again in vain for longer than any burst: go to what happens next by the
        // clock.
        std::optional<TimeNs> soonest;
        const auto consider = [&](std::optional<TimeNs> at) {
            if (at && (!soonest || *at < *soonest)) soonest = at;
        };
        for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
            if (runs(rank)) consider(engine(rank).next_deadline());
        }
        for (const auto& at : {kill_at_, verdict_at_, freeze_at_, thaw_at_}) consider(at);
        const TimeNs release_at = healed_at_ + 2 * plan_.limits.hard_timeout_ns;
        if (healed_at_ > 0 && release_at > network_.now()) consider(release_at);
        if (soonest && *soonest > next) next = *soonest;
    }
    network_.run_until(next);
}

void EngineSimulation::heal() {
    healed_at_ = std::max<TimeNs>(network_.now(), 1);
    network_.say("the network heals");
    network_.set_faults({});
    plan_.endpoint_errors = plan_.cancels = false;
    kill_at_.reset();
    freeze_at_.reset();
    if (thaw_at_) thaw_at_ = std::min(*thaw_at_, network_.now() + 2 * plan_.limits.hard_timeout_ns);
}

bool EngineSimulation::submitted_all() const {
    for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
        if (runs(rank) && members_[rank].submitted < plan_.requests) return false;
    }
    return true;
}

bool EngineSimulation::converged() {
    if (verdict_at_ || thaw_at_ || network_.next_event()) return false;
    return stuck_rank() == plan_.ranks;
}

std::uint32_t EngineSimulation::stuck_rank() {
    for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
        if (network_.dead(rank)) continue;
        if (!engine(rank).idle()) return rank;
        for (std::uint32_t place = 0; place < EngineOracle::jobs_per_rank; ++place) {
            if (oracle_.job(rank, place).active) return rank;
        }
    }
    return plan_.ranks;
}

void EngineSimulation::check_end_state() {
    oracle_.check_memory();
    for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
        if (network_.dead(rank)) continue;
        const EngineStatistics end = engine(rank).statistics();
        if (end.slots_used + end.slots_quarantined + end.gates_closed + end.operations_queued > 0) {
            oracle_.fail("something is left in the tables at the end", rank, 0);
        }
        for (std::uint32_t region = 0; region < EngineOracle::regions; ++region) {
            if (engine(rank).region_uses(RegionId{region}) > 0) oracle_.fail("a region is still in use", rank, region);
        }
        for (std::uint32_t place = 0; place < EngineOracle::jobs_per_rank; ++place) {
            if (oracle_.job(rank, place).active) oracle_.fail("a request never ended", rank, place);
        }
        if (end.misuses > 0) oracle_.fail("the engine was misused", rank, 0);
        if (end.slots_counted_peak > plan_.limits.outstanding_max) oracle_.fail("more in flight than the cap", rank, 0);
    }
}

EngineSimulationResult EngineSimulation::summary() {
    result_.failure = failure();
    result_.trace_hash = network_.trace_hash();
    result_.virtual_ns = network_.now();
    result_.posts = network_.posts();
    result_.trace = network_.trace_text();
    result_.landings = oracle_.landings();
    result_.controls = oracle_.controls_checked();
    for (std::size_t i = 0; i < network_faults; ++i) result_.faults[i] = network_.count(static_cast<NetworkFault>(i));
    for (std::uint32_t rank = 0; rank < plan_.ranks; ++rank) {
        const Counting* counted = network_.provider(rank).counted();
        if (counted == nullptr) continue;
        result_.counting.immediates += counted->counters().immediates;
        result_.counting.signals_added += counted->counters().signals_added;
        result_.counting.signals_waited += counted->counters().signals_waited;
        result_.counting.signals_aborted += counted->counters().signals_aborted;
        result_.counting.strays += counted->counters().strays;
        result_.counting.dropped += counted->counters().dropped;
    }
    for (const Member& member : members_) {
        const EngineStatistics statistics = member.engine->statistics();
        for (std::size_t from = 0; from < request_states; ++from) {
            for (std::size_t to = 0; to < request_states; ++to) {
                result_.transitions[from][to] += statistics.transitions[from][to];
            }
        }
        result_.events[static_cast<std::size_t>(SimulationEvent::quarantined)] += statistics.quarantines;
        result_.events[static_cast<std::size_t>(SimulationEvent::lane_reopened)] += statistics.lanes_reopened;
    }
    return result_;
}

}  // namespace

EngineSimulationResult run_engine_simulation(const EngineSimulationOptions& options) {
    return EngineSimulation(options).run();
}

}  // namespace expertwire
