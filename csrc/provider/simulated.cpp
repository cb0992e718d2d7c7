#include "provider/simulated.hpp"

#include <algorithm>
#include <cstring>

namespace expertwire {

namespace {

constexpr TimeNs completion_retry_ns = 200;

}  // namespace

std::uint64_t mix64(std::uint64_t value) {
    value ^= value >> 30;
    value *= 0xbf58476d1ce4e5b9ull;
    value ^= value >> 27;
    value *= 0x94d049bb133111ebull;
    return value ^ (value >> 31);
}

Random::Random(std::uint64_t seed) : state_{} {
    for (std::uint64_t& word : state_) word = mix64(seed += 0x9e3779b97f4a7c15ull);
}

std::uint64_t Random::next() {
    const auto rotate = [](std::uint64_t x, int by) { return (x << by) | (x >> (64 - by)); };
    const std::uint64_t result = rotate(state_[1] * 5, 7) * 9;
    const std::uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = rotate(state_[3], 45);
    return result;
}

const char* name_of(NetworkFault fault) {
    static constexpr std::array<const char*, network_faults> names{
        "again",      "late_delivery", "late_completion",  "early_local",  "failed_post",    "failed_operation",
        "failed_kth", "duplicate",     "wrong_generation", "null_context", "dead_peer",      "reported_death",
        "silence",    "stale_region",  "out_of_range",     "full_queue",   "lost_completion"};
    return names[static_cast<std::size_t>(fault)];
}

// ---- network: clock and events

SimulatedNetwork::SimulatedNetwork(std::uint32_t ranks, const NetworkModel& model, const NetworkFaults& faults,
                                   std::uint64_t seed)
    : model_(model),
      faults_(faults),
      random_(seed),
      link_free_(ranks * std::max<std::size_t>(model.rails.size(), 1)),
      ordered_arrival_(std::size_t{ranks} * ranks),
      in_flight_(ranks),
      again_left_(ranks),
      dead_(ranks),
      death_reported_(ranks),
      frozen_(ranks) {
    for (std::uint32_t rank = 0; rank < ranks; ++rank) {
        providers_.push_back(std::make_unique<SimulatedProvider>(*this, rank));
    }
}

SimulatedNetwork::~SimulatedNetwork() = default;

void SimulatedNetwork::connect_all(std::uint32_t regions) {
    for (std::uint32_t from = 0; from < ranks(); ++from) {
        for (std::uint32_t to = 0; to < ranks(); ++to) {
            provider(from).add_peer(PeerId{to}, provider(to).address(EndpointId{0}));
            for (std::uint32_t region = 0; region < regions; ++region) {
                provider(from).add_remote_region(PeerId{to}, remote_region(to, region, regions),
                                                 provider(to).region_key(RegionId{region}));
            }
        }
    }
}

std::optional<TimeNs> SimulatedNetwork::next_event() const {
    if (queue_.empty()) return std::nullopt;
    return std::max(now_, queue_.top().at);
}

bool SimulatedNetwork::run_next() {
    if (queue_.empty()) return false;
    const Event event = queue_.top();
    queue_.pop();
    now_ = std::max(now_, event.at);
    apply(event);
    return true;
}

void SimulatedNetwork::run_until(TimeNs when) {
    while (!queue_.empty() && queue_.top().at <= when) run_next();
    now_ = std::max(now_, when);
}

void SimulatedNetwork::schedule(TimeNs at, EventKind kind, std::uint32_t flight) {
    Event event{at, sequence_++, kind, flight, 0};
    if (kind != EventKind::stray && kind != EventKind::message) {
        event.flight_number = flights_[flight].number;
        ++flights_[flight].events;
    }
    queue_.push(event);
}

void SimulatedNetwork::apply(const Event& event) {
    ++events_;
    if (event.kind == EventKind::stray) {
        const auto& [rank, completion] = strays_[event.flight];
        trace(now_, 99, completion.ticket.pack());
        if (!dead_[rank]) provider(rank).completions_.push_back(completion);
        return;
    }
    if (event.kind == EventKind::message) return arrive(event);
    Flight& flight = flights_[event.flight];
    if (!flight.used || flight.number != event.flight_number) return;  // ended by close() or remove_peer()
    if (frozen_[flight.source] || frozen_[flight.target]) {
        held_.push_back(event);
        return;
    }
    const bool completes = event.kind == EventKind::complete || event.kind == EventKind::complete_local;
    if (completes && provider(flight.source).completions_.size() >= model_.completion_queue) {
        Event later = event;  // the queue is full until the rank polls
        later.at = now_ + completion_retry_ns;
        queue_.push(later);
        return;
    }
    --flight.events;
    trace(now_, static_cast<std::uint64_t>(event.kind), flight.command.ticket.pack());
    switch (event.kind) {
        case EventKind::pull:
            flight.pulled = true;
            depart(event.flight, false);
            break;
        case EventKind::deliver:
            deliver(event.flight);
            break;
        case EventKind::deliver_read:
            deliver_read(event.flight);
            break;
        case EventKind::complete_local:
            capture(flight);
            complete(event.flight, Level::local);
            break;
        case EventKind::complete:
            complete(event.flight, Level::delivered);
            break;
        case EventKind::stray:
        case EventKind::message:
            break;
    }
    if (flights_[event.flight].events == 0) end_or_stick(event.flight);
}

void SimulatedNetwork::trace(std::uint64_t a, std::uint64_t b, std::uint64_t c) {
    hash_ = mix64(hash_ ^ (a * 0x9e3779b97f4a7c15ull) ^ (b << 56)) + mix64(c + 0x2545f4914f6cdd1dull);
}

void SimulatedNetwork::say(const std::string& line) {
    if (trace_lines_ == 0) return;
    trace_text_.push_back("t " + std::to_string(now_) + " ns: " + line);
    if (trace_text_.size() > trace_lines_) trace_text_.pop_front();
}

void SimulatedNetwork::tell(const char* what, std::uint32_t rank, std::uint32_t target, const PostCommand& command,
                            Status status) {
    if (trace_lines_ == 0) return;
    static constexpr std::array<const char*, 4> kinds{"write", "read", "signal", "notification"};
    std::string line = "rank " + std::to_string(rank) + " -> " + std::to_string(target) + ": " + what + " " +
                       kinds[static_cast<std::size_t>(command.kind)] + " " + std::to_string(command.ticket.slot) + "." +
                       std::to_string(command.ticket.generation) + " on endpoint " +
                       std::to_string(command.endpoint.value);
    if (command.kind != OpKind::notification) {
        line +=
            ", remote region " + std::to_string(command.remote.value) + " + " + std::to_string(command.remote_offset);
    }
    line += command.kind == OpKind::signal ? ", add " + std::to_string(command.operand)
                                           : ", " + std::to_string(command.bytes) + " B";
    if (status != Status::ok) line += ", status " + std::to_string(static_cast<int>(status));
    say(line);
}

// ---- posting

PostResult SimulatedNetwork::post(std::uint32_t rank, const PostCommand& command, const Extra& extra) {
    SimulatedProvider& provider_of_rank = provider(rank);
    trace(now_, 64 + rank, command.ticket.pack());
    const auto& closed = provider_of_rank.closed_endpoints_;
    const bool endpoint_closed = std::find(closed.begin(), closed.end(), command.endpoint) != closed.end();
    if (provider_of_rank.closed_ || endpoint_closed || dead_[rank]) return {PostOutcome::failed, Status::closed, 0};
    if (faults_.fail_how == NthFault::again && posts_ + 1 == faults_.fail_at && !nth_again_done_) {
        nth_again_done_ = true;
        note(NetworkFault::again);
        again_left_[rank] = faults_.again_burst_max;
    }
    const bool known =
        command.peer.value < provider_of_rank.peers_.size() && provider_of_rank.peers_[command.peer.value].has_value();
    if (!known) return {PostOutcome::failed, Status::refused, 0};
    if (push_back(rank)) return {PostOutcome::again, Status::ok, 11};
    ++posts_;
    const std::uint32_t target = *provider_of_rank.peers_[command.peer.value];
    if (nth(NthFault::post) || random_.chance(faults_.failed_post)) {
        note(nth(NthFault::post) ? NetworkFault::failed_kth : NetworkFault::failed_post);
        tell("post refused", rank, target, command, Status::io_error);
        return {PostOutcome::failed, Status::io_error, 5};
    }
    Status outcome = check(rank, target, command);
    if (outcome == Status::ok && (nth(NthFault::operation) || random_.chance(faults_.failed_operation))) {
        note(nth(NthFault::operation) ? NetworkFault::failed_kth : NetworkFault::failed_operation);
        outcome = Status::io_error;
    }
    tell("post", rank, target, command, outcome);
    launch(rank, target, command, extra, outcome, outcome == Status::ok ? 0 : 5);
    return {};
}

bool SimulatedNetwork::push_back(std::uint32_t rank) {
    if (again_left_[rank] > 0) {
        --again_left_[rank];
        return true;
    }
    if (in_flight_[rank] >= model_.transmit_queue) {
        note(NetworkFault::full_queue);
        return true;
    }
    if (!random_.chance(faults_.again)) return false;
    note(NetworkFault::again);
    again_left_[rank] = static_cast<std::uint32_t>(random_.below(faults_.again_burst_max));
    return true;
}

// What the target would say of it now; asked again when it arrives.
Status SimulatedNetwork::check(std::uint32_t rank, std::uint32_t target, const PostCommand& command) {
    if (command.kind == OpKind::notification) return Status::ok;
    const SimulatedProvider& from = provider(rank);
    const SimulatedProvider& to = provider(target);
    if (command.remote.value >= from.remotes_.size()) return Status::bad_key;
    const SimulatedProvider::Remote& remote = from.remotes_[command.remote.value];
    if (!remote.known || remote.rank != target) return Status::bad_key;
    static const SimulatedProvider::Registered never;
    const bool exists = remote.region.value < to.regions_.size();
    const SimulatedProvider::Registered& region = exists ? to.regions_[remote.region.value] : never;
    if (!region.open || region.generation != remote.generation) {
        note(NetworkFault::stale_region);
        return Status::bad_key;
    }
    const std::uint64_t bytes = command.kind == OpKind::signal ? 8 : command.bytes;
    bool inside = command.remote_offset <= region.spec.bytes && bytes <= region.spec.bytes - command.remote_offset;
    if (command.kind != OpKind::signal) {
        const std::byte* local = from.memory(command.local, command.local_offset);
        const std::uint64_t size = local == nullptr ? 0 : from.regions_[command.local.value].spec.bytes;
        inside = inside && local != nullptr && command.bytes <= size - command.local_offset;
    }
    if (inside) return Status::ok;
    note(NetworkFault::out_of_range);
    return Status::out_of_range;
}

TimeNs SimulatedNetwork::departure(std::uint32_t rank, std::uint64_t bytes, EndpointId endpoint) {
    const std::size_t rails = std::max<std::size_t>(model_.rails.size(), 1);
    const std::size_t rail = endpoint.value % rails;
    const double rate = model_.rails.empty() ? model_.bytes_per_ns : model_.rails[rail].bytes_per_ns;
    const auto wire = static_cast<TimeNs>(static_cast<double>(bytes) / rate);
    TimeNs& busy_until = link_free_[rank * rails + rail];
    busy_until = std::max(busy_until, now_) + std::max(model_.operation_ns, wire);
    return busy_until;
}

TimeNs SimulatedNetwork::latency(EndpointId endpoint) const {
    return model_.rails.empty() ? model_.latency_ns : model_.rails[endpoint.value % model_.rails.size()].latency_ns;
}

TimeNs SimulatedNetwork::arrival(std::uint32_t rank, std::uint32_t target, const PostCommand& command,
                                 TimeNs departed) {
    TimeNs at = departed + latency(command.endpoint);
    if (random_.chance(faults_.late_delivery)) {
        note(NetworkFault::late_delivery);
        at += random_.between(1, faults_.late_delivery_max_ns);
    }
    if (model_.ordering == OrderingClass::ordered && command.kind != OpKind::read) {
        TimeNs& last =
            ordered_arrival_[std::size_t{rank} * ranks() + target];  // all endpoints: more order than promised
        at = std::max(at, last + 1);
        last = at;
    }
    return at;
}

void SimulatedNetwork::launch(std::uint32_t rank, std::uint32_t target, const PostCommand& command, const Extra& extra,
                              Status outcome, std::int32_t code) {
    const std::uint32_t index = new_flight();
    Flight& flight = flights_[index];
    flight.source = rank;
    flight.target = target;
    flight.command = command;
    flight.outcome = outcome;
    flight.code = code;
    flight.immediate = extra.immediate;
    flight.counts = !extra.message.empty();
    flight.bytes.assign(extra.message.begin(), extra.message.end());
    if (nth(NthFault::lost) || random_.chance(faults_.lost_completion)) {
        note(NetworkFault::lost_completion);
        flight.lost = true;
    }
    ++in_flight_[rank];
    if (command.kind == OpKind::notification && command.bytes > 0) {
        flight.bytes.assign(command.payload, command.payload + command.bytes);
    }
    if (command.kind == OpKind::write && command.bytes >= model_.rendezvous_bytes) {
        // A request to send, there and back; then the bytes queue for the link like everybody's.
        schedule(arrival(rank, target, command, departure(rank, 8)) + model_.latency_ns, EventKind::pull, index);
        return;
    }
    depart(index, true);
}

// The bytes take the link. `late`: the fault may strike on this way.
void SimulatedNetwork::depart(std::uint32_t index, bool late) {
    Flight& flight = flights_[index];
    const PostCommand& command = flight.command;
    const bool small = command.kind == OpKind::read || command.kind == OpKind::signal;
    const std::uint64_t bytes = small ? 8 : wire_bytes ? wire_bytes(flight.source, command) : command.bytes;
    bytes_on_links_ += bytes;
    const TimeNs departed = departure(flight.source, bytes, command.endpoint);
    const TimeNs arrives =
        late ? arrival(flight.source, flight.target, command, departed) : departed + model_.latency_ns;
    const bool early = command.kind == OpKind::write && flight.outcome == Status::ok &&
                       (command.level == Level::local || random_.chance(faults_.early_local));
    if (early) {
        if (command.level == Level::delivered) note(NetworkFault::early_local);
        complete_later(index, departed, EventKind::complete_local);
    }
    schedule(arrives, EventKind::deliver, index);
}

std::uint32_t SimulatedNetwork::new_flight() {
    if (free_flights_.empty()) {
        flights_.emplace_back();
        free_flights_.push_back(static_cast<std::uint32_t>(flights_.size() - 1));
    }
    const std::uint32_t index = free_flights_.back();
    free_flights_.pop_back();
    flights_[index] = Flight{};
    flights_[index].used = true;
    flights_[index].number = ++sequence_;
    return index;
}

// ---- arriving

void SimulatedNetwork::capture(Flight& flight) {
    if (flight.captured || flight.command.kind != OpKind::write) return;
    flight.captured = true;
    const std::byte* from = provider(flight.source).memory(flight.command.local, flight.command.local_offset);
    if (from != nullptr && flight.command.bytes > 0) flight.bytes.assign(from, from + flight.command.bytes);
}

void SimulatedNetwork::deliver(std::uint32_t index) {
    Flight& flight = flights_[index];
    if (dead_[flight.target]) {
        if (flight.outcome == Status::ok) note(NetworkFault::dead_peer);
        if (!death_reported_[flight.target]) return;  // silence: its owner hears nothing, ever
        note(NetworkFault::reported_death);
        flight.outcome = Status::peer_dead;
        flight.code = 113;
        schedule(now_ + 2 * model_.latency_ns, EventKind::complete, index);
        return;
    }
    if (flight.outcome == Status::ok) flight.outcome = check(flight.source, flight.target, flight.command);
    if (flight.command.kind == OpKind::read && flight.outcome == Status::ok) {
        const SimulatedProvider::Remote& remote = provider(flight.source).remotes_[flight.command.remote.value];
        const std::byte* from = provider(flight.target).memory(remote.region, flight.command.remote_offset);
        flight.bytes.assign(from, from + flight.command.bytes);
        const TimeNs departed = departure(flight.target, flight.command.bytes);
        schedule(departed + model_.latency_ns, EventKind::deliver_read, index);
        return;
    }
    if (flight.counts && flight.outcome == Status::ok) {  // it lands when its target has counted
        flight.waits = true;
        provider(flight.target).inbox_.push_back({flight.source, flight.target, flight.bytes});
        return;
    }
    capture(flight);
    tell(flight.outcome == Status::ok ? "landed" : "failed", flight.source, flight.target, flight.command,
         flight.outcome);
    if (flight.outcome == Status::ok) {
        land(flight);
        if (flight.immediate) provider(flight.target).immediates_.push_back(*flight.immediate);
    } else if (flight.outcome == Status::io_error && flight.command.kind == OpKind::write) {
        flight.bytes.resize(flight.bytes.size() * random_.below(3) / 2);  // nothing, a torn half, or all of it
        land(flight);
    }
    if (flight.outcome != Status::ok && on_failure) on_failure({flight.source, flight.target, flight.command});
    TimeNs at = now_ + latency(flight.command.endpoint);
    if (random_.chance(faults_.late_completion)) {
        note(NetworkFault::late_completion);
        at += random_.between(1, faults_.late_completion_max_ns);
    }
    if (flight.command.level == Level::delivered || flight.outcome != Status::ok) {
        complete_later(index, at, EventKind::complete);
    } else if (flight.command.kind != OpKind::write) {
        complete_later(index, at, EventKind::complete_local);
    }
}

// Its last completion, unless it is lost: then the operation stays in flight, as far as its owner can know, until its
// endpoint or its peer is closed.
void SimulatedNetwork::complete_later(std::uint32_t index, TimeNs at, EventKind kind) {
    Flight& flight = flights_[index];
    const bool last = kind == EventKind::complete || flight.command.level == Level::local;
    if (flight.lost && last) return;
    schedule(at, kind, index);
}

void SimulatedNetwork::land(Flight& flight) {
    const PostCommand& command = flight.command;
    if (command.kind == OpKind::notification) {
        provider(flight.target).arrivals_.push_back({PeerId{flight.source}, flight.bytes});
    } else {
        const SimulatedProvider::Remote& remote = provider(flight.source).remotes_[command.remote.value];
        std::byte* to = provider(flight.target).memory(remote.region, command.remote_offset);
        if (to == nullptr) return;  // a torn write, and the region has gone since
        if (command.kind == OpKind::signal) {
            std::uint64_t word = 0;
            std::memcpy(&word, to, sizeof word);
            word += command.operand;
            std::memcpy(to, &word, sizeof word);
        } else if (!flight.bytes.empty()) {
            std::memcpy(to, flight.bytes.data(), flight.bytes.size());
        }
    }
    bytes_delivered_ += flight.bytes.size();
    flight.landed = flight.outcome == Status::ok;
    if (flight.landed && on_landing) on_landing({flight.source, flight.target, command});
}

void SimulatedNetwork::deliver_read(std::uint32_t index) {
    Flight& flight = flights_[index];
    std::byte* to = provider(flight.source).memory(flight.command.local, flight.command.local_offset);
    if (to != nullptr && !flight.bytes.empty()) std::memcpy(to, flight.bytes.data(), flight.bytes.size());
    bytes_delivered_ += flight.bytes.size();
    flight.landed = true;
    if (on_landing) on_landing({flight.source, flight.target, flight.command});
    TimeNs at = now_;
    if (random_.chance(faults_.late_completion)) {
        note(NetworkFault::late_completion);
        at += random_.between(1, faults_.late_completion_max_ns);
    }
    complete_later(index, at, EventKind::complete);
}

// ---- completing

void SimulatedNetwork::complete(std::uint32_t index, Level level) {
    Flight& flight = flights_[index];
    flight.completed = level == Level::delivered || flight.command.level == Level::local;
    if (dead_[flight.source]) return;
    const Completion completion{flight.command.ticket, flight.outcome, level, flight.code};
    tell(level == Level::delivered ? "completed" : "left", flight.source, flight.target, flight.command,
         flight.outcome);
    SimulatedProvider& source = provider(flight.source);
    if (flight.immediate) {
        source.left(completion, *flight.immediate);
    } else {
        source.completions_.push_back(completion);
    }
    ++(flight.outcome == Status::ok ? source.counters_.completed : source.counters_.failed);
    add_noise(flight.source, completion);
}

void SimulatedNetwork::stray(std::uint32_t rank, const Completion& completion) {
    strays_.emplace_back(rank, completion);
    const TimeNs at = now_ + random_.between(0, faults_.late_completion_max_ns);
    schedule(at, EventKind::stray, static_cast<std::uint32_t>(strays_.size() - 1));
}

void SimulatedNetwork::add_noise(std::uint32_t rank, const Completion& completion) {
    if (completion.level == Level::delivered && random_.chance(faults_.duplicate)) {
        note(NetworkFault::duplicate);
        stray(rank, completion);
    }
    if (random_.chance(faults_.wrong_generation)) {
        note(NetworkFault::wrong_generation);
        Completion wrong = completion;
        // An older one, or one that will not be reached here: a generation still to come would be believed, rightly.
        wrong.ticket.generation +=
            random_.chance(0.5) ? 1'000'000u : 0u - static_cast<std::uint32_t>(random_.between(1, 3));
        wrong.status = random_.chance(0.5) ? Status::ok : Status::io_error;
        wrong.level = Level::delivered;
        stray(rank, wrong);
    }
    if (random_.chance(faults_.null_context)) {
        note(NetworkFault::null_context);
        stray(rank, {Ticket{}, Status::io_error, Level::delivered, -5});
    }
}

void SimulatedNetwork::end(std::uint32_t index) {
    Flight& flight = flights_[index];
    if (!flight.used) return;
    flight.used = false;
    flight.bytes.clear();
    --in_flight_[flight.source];
    free_flights_.push_back(index);
}

void SimulatedNetwork::end_or_stick(std::uint32_t index) {
    Flight& flight = flights_[index];
    if (flight.waits) return;
    const bool unheard = dead_[flight.target] && !death_reported_[flight.target];
    if (flight.used && (unheard || flight.lost) && !flight.completed) {
        flight.stuck = true;  // still holds its place in the queue and, as far as anyone may know, its buffer
        return;
    }
    end(index);
}

void SimulatedNetwork::drop_flights(const std::function<bool(const Flight&)>& which) {
    for (std::uint32_t i = 0; i < flights_.size(); ++i) {
        if (flights_[i].used && which(flights_[i])) end(i);
    }
}

std::size_t SimulatedNetwork::touching(std::uint32_t rank, RegionId region, std::uint64_t offset,
                                       std::uint64_t bytes) const {
    std::size_t count = 0;
    for (const Flight& flight : flights_) {
        const PostCommand& command = flight.command;
        if (!flight.used || flight.source != rank || command.local != region) continue;
        if (command.kind != OpKind::write && command.kind != OpKind::read) continue;
        if (command.local_offset >= offset + bytes || offset >= command.local_offset + command.bytes) continue;
        count += command.kind == OpKind::write ? !flight.captured : !flight.landed;
    }
    return count;
}

std::size_t SimulatedNetwork::flying(std::uint32_t rank, RemoteRegionId remote, std::uint64_t offset,
                                     std::uint64_t bytes) const {
    std::size_t count = 0;
    for (const Flight& flight : flights_) {
        const PostCommand& command = flight.command;
        if (!flight.used || flight.source != rank || command.remote != remote) continue;
        const std::uint64_t size = command.kind == OpKind::signal ? 8 : command.bytes;
        count += command.remote_offset < offset + bytes && offset < command.remote_offset + size;
    }
    return count;
}

// ---- death and silence

void SimulatedNetwork::kill(std::uint32_t rank, bool reported) {
    dead_[rank] = true;
    death_reported_[rank] = reported;
    trace(now_, 97, rank);
    say("rank " + std::to_string(rank) + " died");
    for (std::uint32_t i = 0; reported && i < flights_.size(); ++i) {  // whose signals wait there
        Flight& flight = flights_[i];
        if (!flight.used || !flight.waits || flight.target != rank) continue;
        flight.waits = false;
        flight.outcome = Status::peer_dead;
        flight.code = 113;
        complete_later(i, now_ + 2 * model_.latency_ns, EventKind::complete);
    }
    // What it had posted last may never have left; where order is promised, nothing leaves without what came before it.
    const bool ordered = model_.ordering == OrderingClass::ordered;
    std::uint64_t oldest = sequence_;
    for (const Flight& flight : flights_) {
        if (flight.used && flight.source == rank) oldest = std::min(oldest, flight.number);
    }
    const std::uint64_t cut = random_.between(oldest, sequence_);
    drop_flights([&](const Flight& flight) {
        return flight.source == rank && (ordered ? flight.number >= cut : random_.chance(0.5));
    });
}

void SimulatedNetwork::freeze(std::uint32_t rank) {
    note(NetworkFault::silence);
    trace(now_, 96, rank);
    say("rank " + std::to_string(rank) + " froze");
    frozen_[rank] = true;
}

void SimulatedNetwork::thaw(std::uint32_t rank) {
    trace(now_, 95, rank);
    say("rank " + std::to_string(rank) + " woke");
    frozen_[rank] = false;
    std::vector<Event> held;
    held.swap(held_);
    for (Event& event : held) {
        event.at = std::max(event.at, now_);  // in their old order: what one flight does stays in sequence
        queue_.push(event);                   // of another frozen rank: it will be held again
    }
}

}  // namespace expertwire
