#include "bind/simulation_exchange_world.hpp"

#include <algorithm>
#include <cstring>

#include "engine/pump.hpp"
#include "exchange/words.hpp"

namespace expertwire::simulation {

using exchange::Kind;
using exchange::Step;

namespace {

constexpr std::uint32_t kRegions = 3;  // control, staging, data: RegionId as in exchange::Region
constexpr std::uint64_t kStepsMax = 2'000'000;
constexpr std::uint32_t kLanesMax = 3;
constexpr std::uint64_t kGuardBytes = 64;
constexpr std::byte kGuard{0x5A};
constexpr TimeNs kHardTimeoutNs = 1'000'000'000;  // longer than any run lasts by itself
constexpr std::uint32_t kSweepsMax = 100;         // without any movement: longer than any burst of AGAIN

}  // namespace

// ---- port

SimulatedPort::SimulatedPort(std::uint32_t rank, std::uint32_t ranks, Engine& engine, SimulatedNetwork& network,
                             Random& random)
    : rank_(rank), engine_(engine), network_(network), random_(random), memory_(ranks), lanes_(ranks) {}

void SimulatedPort::open_lanes(std::uint32_t rank, std::uint32_t lanes) {
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
        lanes_[rank].push_back(engine_.open_queue_pair(PeerId{rank}, EndpointId{lane}));
    }
}

ControlSpec SimulatedPort::signal_of(std::uint32_t rank, std::uint64_t word_offset, std::uint64_t delta,
                                     QueuePairId lane) {
    ControlSpec control;
    control.kind = OpKind::signal;
    control.scope = Scope::request;
    control.queue_pair = lane;
    control.remote = SimulatedNetwork::remote_region(rank, 0, kRegions);
    control.remote_offset = word_offset;
    control.operand = delta;
    return control;
}

ChunkSpec SimulatedPort::chunk_of(std::uint32_t rank, const Piece& piece, QueuePairId lane) {
    ChunkSpec chunk;
    chunk.queue_pair = lane;
    chunk.local = RegionId{static_cast<std::uint32_t>(piece.from)};
    chunk.local_offset = piece.from_offset;
    chunk.remote = SimulatedNetwork::remote_region(rank, static_cast<std::uint32_t>(piece.to), kRegions);
    chunk.remote_offset = piece.to_offset;
    chunk.bytes = piece.bytes;
    return chunk;
}

std::optional<Ticket> SimulatedPort::put(const Put& put) {
    std::vector<ChunkSpec> chunks;
    for (const Piece& piece : {put.head, put.tail}) {
        if (piece.bytes > 0) chunks.push_back(chunk_of(put.rank, piece, any_lane(put.rank)));
    }
    for (const Piece& piece : put.more) chunks.push_back(chunk_of(put.rank, piece, any_lane(put.rank)));
    const ControlSpec control = signal_of(put.rank, put.word_offset, put.delta, any_lane(put.rank));
    const Engine::Submitted result =
        engine_.submit(PeerId{put.rank}, chunks, {&control, 1}, Level::delivered, network_.now());
    if (result.status != Status::ok) {
        ++pushed_back_;
        return std::nullopt;
    }
    ++puts_;
    return result.request;
}

bool SimulatedPort::add(std::uint32_t rank, std::uint64_t word_offset, std::uint64_t delta) {
    const ControlSpec control = signal_of(rank, word_offset, delta, any_lane(rank));
    const Engine::Submitted result = engine_.submit(PeerId{rank}, {}, {&control, 1}, Level::delivered, network_.now());
    if (result.status != Status::ok) {
        ++pushed_back_;
        return false;
    }
    adds_.push_back(result.request);
    return true;
}

Status SimulatedPort::status(Ticket ticket) {
    const Status status = engine_.status(ticket);
    if (status != Status::pending) engine_.release(ticket);
    return status;
}

void SimulatedPort::reap() {
    std::erase_if(adds_, [&](Ticket ticket) {
        const Status status = engine_.status(ticket);
        if (status == Status::pending) return false;
        add_failed_ |= status != Status::ok;
        engine_.release(ticket);
        return true;
    });
}

// ---- building

World::World(std::uint64_t seed, Coverage& coverage, const Options& options)
    : random_(seed),
      coverage_(coverage),
      options_(options),
      script_(make_script(random_, coverage)),
      nodes_(script_.node_of) {
    Setup setup;
    NetworkModel& model = setup.model;
    model.latency_ns = random_.between(100, 10'000);
    model.bytes_per_ns = 0.1 + static_cast<double>(random_.below(100)) / 10;
    model.transmit_queue = static_cast<std::uint32_t>(random_.between(2, 64));
    if (random_.chance(0.3)) model.rendezvous_bytes = random_.below(512);
    coverage_["rendezvous"] += model.rendezvous_bytes < 512;
    draw_first_epoch();
    setup.faults = choose_faults();
    setup.outstanding = static_cast<std::uint32_t>(random_.between(4, 64));
    setup.lanes = static_cast<std::uint32_t>(random_.between(1, kLanesMax));
    build(setup);
}

// Epochs lie above 28 bits of a word: they cross 2^31 and 2^32 in some runs, and end in others.
void World::draw_first_epoch() {
    const std::uint64_t back = random_.between(1, script_.calls.size());
    const std::uint64_t which = random_.below(6);
    if (which == 0) first_epoch_ = (std::uint64_t{1} << 31) - back;
    if (which == 1) first_epoch_ = (std::uint64_t{1} << 32) - back;
    if (which == 2) first_epoch_ = exchange::kEpochMax - back;
    coverage_["epochs_across_2_31"] += which == 0;
    coverage_["epochs_across_2_32"] += which == 1;
}

// Every rank is refused at the same call, by a sentence that says what to do.
bool World::epochs_used_up(std::uint32_t rank, const std::string& wrong) {
    Member& member = members_[rank];
    if (first_epoch_ + member.call < exchange::kEpochMax || wrong.find("make a new Buffer") == std::string::npos)
        return false;
    member.call = script_.calls.size();
    ++coverage_["epochs_used_up"];
    return true;
}

// Swarm: each kind is on or off, and strikes often or seldom, as the seed says.
NetworkFaults World::choose_faults() {
    NetworkFaults faults;
    static constexpr double steps[] = {1, 1. / 3, 1. / 9};
    const auto maybe = [&](double most) {
        return random_.chance(0.5) ? most * steps[random_.below(std::size(steps))] : 0.0;
    };
    faults.again = maybe(0.3);
    faults.late_delivery = maybe(0.5);
    faults.late_completion = maybe(0.5);
    faults.early_local = maybe(0.5);
    faults.duplicate = maybe(0.2);
    faults.wrong_generation = maybe(0.2);
    faults.null_context = maybe(0.1);
    puts_may_fail_ = random_.chance(0.1);
    const std::uint64_t how = random_.below(3);
    if (puts_may_fail_ && how == 0) faults.failed_operation = 0.04;
    if (puts_may_fail_ && how == 1) faults.failed_post = 0.04;
    if (puts_may_fail_ && how == 2) faults.lost_completion = 0.04;
    if (options_.fail_at == 0) return faults;
    puts_may_fail_ = options_.fail_how != NthFault::again;
    NetworkFaults only;
    only.fail_at = options_.fail_at;
    only.fail_how = options_.fail_how;
    return only;
}

void World::build(const Setup& setup) {
    const auto ranks = nodes_.ranks();
    network_ = std::make_unique<SimulatedNetwork>(ranks, setup.model, setup.faults, random_.next());
    network_->keep_trace(options_.trace_lines);
    network_->on_landing = [this](const SimulatedNetwork::Landing& landing) { check_landing(landing); };
    members_.resize(ranks);
    verdicts_.resize(script_.calls.size());
    for (std::uint32_t rank = 0; rank < ranks; ++rank) build_member(rank, setup);
    network_->connect_all(kRegions);
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        for (std::uint32_t other = 0; other < ranks; ++other) {
            Member& peer = members_[other];
            if (nodes_.node_of(other) == nodes_.node_of(rank)) {
                members_[rank].port->map(other, {peer.control.data(), peer.staging.data(), peer.data.data()});
            } else {
                members_[rank].port->open_lanes(other, setup.lanes);
            }
        }
    }
    coverage_["lanes_" + std::to_string(setup.lanes)] += nodes_.nodes() > 1;
}

void World::build_member(std::uint32_t rank, const Setup& setup) {
    Member& member = members_[rank];
    const exchange::Shape shape{rank, nodes_, script_.local_experts_max, script_.ring_slots, script_.slot_bytes};
    const exchange::Layout layout(shape);
    member.control.resize(layout.control_bytes());
    member.staging.resize(std::max<std::uint64_t>(layout.staging_bytes(rank), 64));
    member.data.resize(script_.data_bytes + script_.slack_bytes);
    for (std::byte& byte : member.data) byte = static_cast<std::byte>(random_.next());
    Bytes* const regions[kRegions] = {&member.control, &member.staging, &member.data};
    for (std::uint32_t region = 0; region < kRegions; ++region) {
        RegionSpec spec;
        spec.bytes = regions[region]->size();
        // Behind control and staging nothing may be written by anyone; the data region has its slack.
        if (region != 2) regions[region]->resize(spec.bytes + kGuardBytes, kGuard);
        spec.address = regions[region]->data();
        network_->provider(rank).register_region(RegionId{region}, spec);
    }
    EngineLimits limits;
    limits.hard_timeout_ns = kHardTimeoutNs;
    if (random_.chance(0.3)) limits.first_generation = ~std::uint32_t{0} - static_cast<std::uint32_t>(random_.below(4));
    limits.peers_max = nodes_.ranks();
    limits.queue_pairs_max = std::max(setup.lanes, kLanesMax) * nodes_.ranks();
    limits.queue_pairs_per_peer_max = std::max(setup.lanes, kLanesMax);
    limits.outstanding_max = setup.outstanding;
    limits.requests_max = static_cast<std::uint32_t>(random_.between(4, 128));
    limits.queued_max = static_cast<std::uint32_t>(random_.between(8, 128));
    if (setup.timed != nullptr) limits.requests_max = limits.queued_max = 8192;
    member.engine = std::make_unique<Engine>(limits, policy_of(setup));
    member.port = make_port(rank, *member.engine, setup);
    member.exchange = std::make_unique<exchange::Exchange>(shape, *member.port, script_.data_bytes);
    member.exchange->start_after(first_epoch_);
    member.handles.resize(script_.calls.size());
}

// ---- calls

exchange::DispatchRequest World::dispatch_request(std::uint32_t rank, std::shared_ptr<const exchange::Handle> handle) {
    Member& member = members_[rank];
    const Call& call = script_.calls[member.call];
    const RankCall& part = call.ranks[rank];
    exchange::DispatchRequest request;
    request.x = part.x.data();
    request.tokens = part.tokens;
    request.row_bytes = part.row_bytes;
    request.scales = part.scales.data();
    request.scale_bytes = call.scale_bytes;
    if (call.scale_bytes > 0) request.scale_element = exchange::Element::float32;
    request.handle = std::move(handle);
    request.offer_offset = part.offer_offset;
    request.offer_capacity = part.offer_capacity;
    request.allocate = [this, &member](std::uint64_t bytes) {
        ++coverage_["dispatch_in_rounds"];
        member.spill.assign(bytes, std::byte{0x3C});
        return member.spill.data();
    };
    static const float no_weight = 0;  // stands for a tensor of no rows
    if (!request.handle) {
        request.in_rank = part.in_rank.data();
        request.topk_idx = part.topk_idx.data();
        request.index_bytes = call.index_bytes;
        request.topk = call.topk;
        if (part.has_weights) request.topk_weights = part.tokens > 0 ? part.weights.data() : &no_weight;
        request.rows_max = part.rows_max;
        request.num_experts = call.num_experts;
        request.expert_first = call.expert_first;
    }
    return request;
}

void World::begin(std::uint32_t rank) {
    Member& member = members_[rank];
    const Call& call = script_.calls[member.call];
    const RankCall& part = call.ranks[rank];
    std::string wrong;
    std::shared_ptr<const exchange::Handle> handle;
    if (call.routing >= 0) handle = member.handles[static_cast<std::size_t>(call.routing)];
    if (call.kind == Kind::dispatch) {
        member.before = member.data;
        std::unique_ptr<exchange::Dispatch> made = member.exchange->dispatch(dispatch_request(rank, handle), wrong);
        member.dispatch = made.get();
        member.operation = std::move(made);
    } else {
        exchange::CombineRequest request;
        request.x = part.x.data();
        request.weights = call.topk > 0 ? part.weights.data() : nullptr;
        if (part.x_in_place && !part.x.empty()) {
            std::memcpy(member.data.data() + part.x_offset, part.x.data(), part.x.size());
            request.x = member.data.data() + part.x_offset;
        }
        if (part.weights_in_place && !part.weights.empty()) {
            std::byte* const at = member.data.data() + part.weights_offset;
            std::memcpy(at, part.weights.data(), part.weights.size() * sizeof(float));
            request.weights = reinterpret_cast<const float*>(at);
        }
        request.rows = part.x.size() / call.row_bytes;
        request.row_bytes = call.row_bytes;
        request.topk = call.topk;
        if (part.biases > 0) request.bias0 = part.bias0.data();
        if (part.biases > 1) request.bias1 = part.bias1.data();
        member.out.assign(part.tokens * call.row_bytes, std::byte{0xA5});
        member.out_weights.assign(part.tokens * call.topk, -1.0f);
        request.out = member.out.data();
        request.out_weights = member.out_weights.data();
        request.handle = handle;
        request.offer_offset = part.offer_offset;
        request.offer_capacity = part.offer_capacity;
        member.before = member.data;
        member.dispatch = nullptr;
        member.operation = member.exchange->combine(request, wrong);
    }
    if (!member.operation) {
        if (!epochs_used_up(rank, wrong)) fail(rank, "refused its arguments: " + wrong);
        return;
    }
    for (const Member& other : members_) coverage_["began_while_others_were_behind"] += other.call < member.call;
}

void World::finish(std::uint32_t rank, Step outcome) {
    Member& member = members_[rank];
    const Call& call = script_.calls[member.call];
    std::string wrong;
    if (outcome == Step::failed) {
        wrong = check_failure(rank);
        if (member.gave_up) return;
    } else if (call.outcome != Outcome::success) {
        wrong = "succeeded where every rank must fail";
    } else {
        wrong = call.kind == Kind::dispatch ? check_dispatch(rank) : check_combine(rank);
        if (call.kind == Kind::dispatch) member.handles[member.call] = member.dispatch->handle();
    }
    if (wrong.empty()) wrong = check_guards(rank);
    if (!wrong.empty()) fail(rank, wrong);
    mix(rank * 1'000'003 + member.call);
    ++calls_ended_;
    member.operation.reset();
    ++member.call;
}

std::string World::check_failure(std::uint32_t rank) {
    Member& member = members_[rank];
    const exchange::Failure& failure = member.operation->failure();
    if (failure.reason == exchange::FailureReason::put && puts_may_fail_) {
        put_failed_ = member.gave_up = true;
        return {};
    }
    const Outcome expected = script_.calls[member.call].outcome;
    const bool right = (failure.reason == exchange::FailureReason::mismatch && expected == Outcome::mismatch) ||
                       (failure.reason == exchange::FailureReason::capacity && expected == Outcome::capacity);
    if (!right) return "failed: " + failure.text;
    std::string& verdict = verdicts_[member.call];
    if (verdict.empty()) verdict = failure.text;
    if (verdict != failure.text) return "said '" + failure.text + "' where another rank said '" + verdict + "'";
    return check_untouched(rank, 0, 0);
}

// ---- stepping

bool World::step(std::uint32_t rank, std::uint64_t budget) {
    Member& member = members_[rank];
    if (member.call == script_.calls.size() || !error_.empty() || member.gave_up) return false;
    if (!member.operation) {
        begin(rank);
        return error_.empty();
    }
    const Step outcome = member.operation->step(budget);
    mix(rank * 8 + static_cast<std::uint64_t>(outcome));
    ++steps_;
    if (steps_ % 64 == 0) mix(member.operation->progress().size());
    if (outcome == Step::done || outcome == Step::failed) finish(rank, outcome);
    return outcome != Step::waiting;
}

bool World::turn(std::uint32_t rank) {
    Member& member = members_[rank];
    const bool moved = pump(*member.engine, network_->provider(rank), member.arrivals, network_->now()).moved();
    member.port->reap();
    put_failed_ |= member.port->add_failed();
    return moved;
}

// Everything once, in order: whoever can move does. False: nothing will ever move again.
bool World::sweep() {
    bool moved = false;
    for (std::uint32_t rank = 0; rank < members_.size(); ++rank) {
        moved = step(rank, 1 << 20) || moved;
        moved = turn(rank) || moved;
    }
    return network_->run_next() || moved;
}

bool World::all_ended() const {
    return std::all_of(members_.begin(), members_.end(),
                       [&](const Member& member) { return member.call == script_.calls.size(); });
}

// Safety first: with faults, whatever ends well is right, and nothing hangs that no fault holds up. Then the network
// heals, and every ticket must end.
Result World::run() {
    std::uint32_t idle = 0;
    while (error_.empty() && !all_ended()) {
        const auto rank = static_cast<std::uint32_t>(random_.below(members_.size()));
        const std::uint64_t choice = random_.below(10);
        bool moved = false;
        if (choice < 5) {
            moved = step(rank, random_.chance(0.3) ? 1 : random_.between(1, 20'000));
        } else if (choice < 8) {
            moved = turn(rank);
        } else {
            moved = network_->run_next();
        }
        idle = moved ? 0 : idle + 1;
        if (idle > 20 && sweep()) idle = 0;
        if (idle > 20 + kSweepsMax) {
            if (all_ended() || !error_.empty() || puts_may_fail_) break;
            fail(0, "nothing moves any more");
        }
        if (steps_ > kStepsMax) fail(rank, "does not end");
    }
    if (error_.empty()) drain();
    note_end();
    Result result;
    result.error = error_;
    mix(network_->trace_hash());
    result.trace_hash = hash_;
    result.steps = steps_;
    result.calls = calls_ended_;
    result.posts = network_->posts();
    result.trace = network_->trace_text();
    return result;
}

// Heals the network and demands that every ticket ends: by itself, or, where its completion was lost, with its
// endpoint.
void World::drain() {
    network_->set_faults({});
    network_->say("the network heals");
    std::vector<bool> replaced(members_.size(), false);
    std::uint32_t idle = 0;
    const auto busy = [&] {
        return std::any_of(members_.begin(), members_.end(), [](const Member& m) { return !m.engine->idle(); });
    };
    while (busy() && error_.empty()) {
        bool moved = network_->run_next();
        for (std::uint32_t rank = 0; rank < members_.size(); ++rank) {
            moved = step(rank, 1 << 20) || moved;
            moved = turn(rank) || moved;
        }
        idle = moved ? 0 : idle + 1;
        if (idle == kSweepsMax) network_->run_until(network_->now() + kHardTimeoutNs + 1);
        for (std::uint32_t rank = 0; rank < members_.size() && idle == kSweepsMax + 5; ++rank) {
            if (!replaced[rank]) replaced[rank] = replace_quarantined(rank);
        }
        if (idle > 2 * kSweepsMax) fail(0, "a ticket did not end after the network had healed");
    }
}

// What a runtime does for whoever needs its records to end (SPEC T14).
bool World::replace_quarantined(std::uint32_t rank) {
    Member& member = members_[rank];
    for (std::uint32_t endpoint = 0; endpoint < kLanesMax && !member.engine->idle(); ++endpoint) {
        const EndpointId fresh{member.next_endpoint.value++};
        member.engine->replace_endpoint(EndpointId{endpoint}, fresh);
        network_->provider(rank).close_endpoint(EndpointId{endpoint});
        member.engine->on_endpoint_closed(EndpointId{endpoint}, network_->now());
        ++coverage_["endpoints_replaced"];
    }
    return true;
}

void World::fail(std::uint32_t rank, const std::string& text) {
    if (!error_.empty()) return;
    error_ = "rank " + std::to_string(rank) + ", call " + std::to_string(members_[rank].call) + ": " + text;
    for (std::uint32_t other = 0; other < members_.size(); ++other) {
        const Member& member = members_[other];
        if (!member.operation) continue;
        error_ += "\n  rank " + std::to_string(other) + " in call " + std::to_string(member.call) + ", phase " +
                  exchange::phase_name(member.operation->phase());
        for (const exchange::PeerProgress& peer : member.operation->progress()) {
            if (!peer.missing.empty()) error_ += "; rank " + std::to_string(peer.rank) + ": " + peer.missing;
        }
    }
}

void World::note_end() {
    coverage_["put_failures"] += put_failed_;
    coverage_["calls"] += calls_ended_;
    coverage_["bytes_over_fabric"] += network_->bytes_delivered();
    for (std::size_t fault = 0; fault < network_faults; ++fault) {
        const auto kind = static_cast<NetworkFault>(fault);
        coverage_[std::string("fault_") + name_of(kind)] += network_->count(kind);
    }
    for (const Member& member : members_) {
        coverage_["puts"] += member.port->puts();
        coverage_["submissions_pushed_back"] += member.port->pushed_back();
        const std::string broken = member.engine->check_invariants();
        if (!broken.empty() && error_.empty()) error_ = "engine: " + broken;
    }
}

Result simulate_exchange(std::uint64_t seed, const Options& options, Coverage& coverage) {
#ifdef EXPERTWIRE_MUTANTS
    active_mutant = options.mutant;
    World world(seed, coverage, options);
    Result result = world.run();
    active_mutant = Mutant::none;
    return result;
#else
    World world(seed, coverage, options);
    return world.run();
#endif
}

}  // namespace expertwire::simulation
