#include "bind/simulation_exchange_timed.hpp"

#include <algorithm>
#include <cstring>

#include "engine/pump.hpp"

namespace expertwire::simulation {

using exchange::Step;

// ---- port

TimedPort::TimedPort(std::uint32_t rank, std::uint32_t ranks, Engine& engine, SimulatedNetwork& network, Random& random,
                     const TimedOptions& options)
    : SimulatedPort(rank, ranks, engine, network, random), options_(options), proxies_(options.proxies) {}

// Of the real shape: what a chunk's rows count for is told by its header.
std::uint64_t TimedPort::put_bytes(const Put& put) const {
    const std::uint64_t bytes = put.head.bytes + put.tail.bytes;
    if (options_.row_bytes_on_wire == 0) return bytes;
    exchange::ChunkHeader header;
    std::memcpy(&header, memory_[rank_].staging + put.head.from_offset, sizeof header);
    return bytes + header.rows * (options_.row_bytes_on_wire - options_.shape.row_bytes);
}

std::optional<Ticket> TimedPort::put(const Put& put) {
    Entry entry;
    entry.put = put;
    const bool chunk = put.head.from == exchange::Region::staging;
    if (chunk) {
        // Filling a slot takes as long as its bytes take; one slot is filled after the other.
        const auto pack = static_cast<TimeNs>(static_cast<double>(put_bytes(put)) / options_.pack_bytes_per_ns);
        pack_free_ = std::max(pack_free_, network_.now()) + pack;
        entry.ready_at = pack_free_;
    }
    entries_.push_back(entry);
    const auto index = static_cast<std::uint32_t>(entries_.size() - 1);
    proxies_[turn_++ % proxies_.size()].waiting.push_back(index);
    ++puts_;
    return Ticket{index, 1};
}

bool TimedPort::add(std::uint32_t rank, std::uint64_t word_offset, std::uint64_t delta) {
    Entry entry;
    entry.adds = true;
    entry.put.rank = rank;
    entry.put.word_offset = word_offset;
    entry.put.delta = delta;
    entries_.push_back(entry);
    proxies_[turn_++ % proxies_.size()].waiting.push_back(static_cast<std::uint32_t>(entries_.size() - 1));
    return true;
}

Status TimedPort::status(Ticket ticket) {
    return entries_[ticket.slot].result;
}

std::optional<TimeNs> TimedPort::next_wake() const {
    std::optional<TimeNs> next;
    for (const Proxy& proxy : proxies_) {
        if (proxy.waiting.empty()) continue;
        const TimeNs at = entries_[proxy.waiting.front()].ready_at;
        if (at > network_.now() && (!next || at < *next)) next = at;
    }
    return next;
}

bool TimedPort::submit(Entry& entry, std::uint32_t lane, bool with_write, bool with_signal) {
    const std::uint32_t to = entry.put.rank;
    const QueuePairId queue_pair = lanes_[to][lane % lanes_[to].size()];
    std::vector<ChunkSpec> chunks;
    for (const Piece& piece : {entry.put.head, entry.put.tail}) {
        if (with_write && piece.bytes > 0) chunks.push_back(chunk_of(to, piece, queue_pair));
    }
    const ControlSpec control = signal_of(to, entry.put.word_offset, entry.put.delta, queue_pair);
    const Engine::Submitted result =
        engine_.submit(PeerId{to}, chunks, std::span<const ControlSpec>(&control, with_signal ? 1 : 0),
                       Level::delivered, network_.now());
    if (result.status != Status::ok) return false;
    entry.engine = result.request;
    return true;
}

// Moves those whose request has ended on to `to`. True: something has.
bool TimedPort::advance(std::vector<std::uint32_t>& entries, Phase to) {
    const std::size_t before = entries.size();
    std::erase_if(entries, [&](std::uint32_t index) {
        Entry& entry = entries_[index];
        if (entry.phase == to) return false;
        const Status status = engine_.status(entry.engine);
        if (status == Status::pending) return false;
        engine_.release(entry.engine);
        entry.phase = to;
        if (to == Phase::ended || status != Status::ok) entry.result = status;
        return to == Phase::ended;
    });
    return entries.size() != before;
}

bool TimedPort::serve(std::uint32_t number) {
    Proxy& proxy = proxies_[number];
    bool moved = advance(proxy.signals, Phase::ended);
    const bool waits = options_.posting == Posting::synchronous;
    if (waits && !proxy.writes.empty()) {
        advance(proxy.writes, Phase::written);
        const auto written = [&](std::uint32_t index) { return entries_[index].phase >= Phase::written; };
        if (!std::all_of(proxy.writes.begin(), proxy.writes.end(), written)) return moved;
        while (!proxy.writes.empty()) {
            Entry& entry = entries_[proxy.writes.front()];
            if (!submit(entry, number, false, true)) return moved;
            entry.phase = Phase::signalling;
            proxy.signals.push_back(proxy.writes.front());
            proxy.writes.erase(proxy.writes.begin());
            moved = true;
        }
    }
    while (!proxy.waiting.empty() && entries_[proxy.waiting.front()].ready_at <= network_.now()) {
        const std::uint32_t index = proxy.waiting.front();
        Entry& entry = entries_[index];
        if (!submit(entry, number, !entry.adds, !waits || entry.adds)) return moved;
        proxy.waiting.pop_front();
        entry.phase = waits && !entry.adds ? Phase::writing : Phase::signalling;
        (entry.phase == Phase::writing ? proxy.writes : proxy.signals).push_back(index);
        moved = true;
    }
    return moved;
}

bool TimedPort::serve() {
    bool moved = false;
    for (std::uint32_t proxy = 0; proxy < proxies_.size(); ++proxy) moved = serve(proxy) || moved;
    return moved;
}

// ---- the cluster

// Rows count on the wire as those of the real shape would; header and row numbers as they are. (Nodes of several ranks:
// a chunk is one write, which begins with its header.)
std::uint64_t World::bytes_on_wire(std::uint32_t source, const PostCommand& command) const {
    if (command.kind != OpKind::write || row_bytes_on_wire_ == 0) return command.bytes;
    if (command.local.value != static_cast<std::uint32_t>(exchange::Region::staging)) return command.bytes;
    exchange::ChunkHeader header;
    std::memcpy(&header, members_[source].staging.data() + command.local_offset, sizeof header);
    return command.bytes + header.rows * (row_bytes_on_wire_ - script_.calls.front().row_bytes);
}

bool World::serve_timed(std::uint32_t rank) {
    Member& member = members_[rank];
    auto& port = static_cast<TimedPort&>(*member.port);
    bool moved = port.serve();
    moved = pump(*member.engine, network_->provider(rank), member.arrivals, network_->now()).moved() || moved;
    if (!member.operation || member.gave_up || !error_.empty()) return moved;
    const Step outcome = member.operation->step(1 << 20);
    if (outcome == Step::done || outcome == Step::failed) {
        chunks_ += member.operation->chunks_sent();
        finish(rank, outcome);
    }
    return outcome != Step::waiting || moved;
}

// All ranks call at once; the clock goes from one event to the next whenever nobody can move. False: nothing moves.
bool World::run_call(std::size_t call) {
    for (std::uint32_t rank = 0; rank < members_.size(); ++rank) {
        static_cast<TimedPort&>(*members_[rank].port).begin_call();
        begin(rank);
    }
    const auto under_way = [&] {
        return std::any_of(members_.begin(), members_.end(), [&](const Member& m) { return m.call == call; });
    };
    while (error_.empty() && under_way()) {
        bool moved = true;
        while (moved && error_.empty()) {
            moved = false;
            for (std::uint32_t rank = 0; rank < members_.size(); ++rank) moved = serve_timed(rank) || moved;
        }
        if (!under_way()) break;
        std::optional<TimeNs> next = network_->next_event();
        for (const Member& member : members_) {
            const std::optional<TimeNs> wake = static_cast<const TimedPort&>(*member.port).next_wake();
            if (wake && (!next || *wake < *next)) next = wake;
        }
        if (!next) return false;
        network_->run_until(*next);
    }
    return true;
}

TimedResult World::run_timed() {
    TimedResult result;
    for (std::size_t call = 0; call < script_.calls.size() && error_.empty(); ++call) {
        const TimeNs began = network_->now();
        if (!run_call(call)) fail(0, "nothing moves any more");
        result.call_ns.push_back(network_->now() - began);
        if (error_.empty()) drain();  // signals that nobody waits for
    }
    result.error = error_;
    result.chunks = chunks_;
    result.wire_bytes = network_->bytes_on_links();
    result.trace_hash = network_->trace_hash();
    return result;
}

World::World(const TimedOptions& options, Coverage& coverage)
    : random_(options.seed),
      coverage_(coverage),
      options_{},
      script_(make_shape(options.shape, random_, coverage)),
      nodes_(script_.node_of),
      row_bytes_on_wire_(options.row_bytes_on_wire) {
    Setup setup;
    setup.model = options.network;
    setup.outstanding = options.outstanding;
    setup.lanes = options.proxies;
    setup.timed = &options;
    build(setup);
    if (row_bytes_on_wire_ > 0) {
        network_->wire_bytes = [this](std::uint32_t rank, const PostCommand& command) {
            return bytes_on_wire(rank, command);
        };
    }
}

std::unique_ptr<SimulatedPort> World::make_port(std::uint32_t rank, Engine& engine, const Setup& setup) {
    if (setup.timed == nullptr)
        return std::make_unique<SimulatedPort>(rank, nodes_.ranks(), engine, *network_, random_);
    return std::make_unique<TimedPort>(rank, nodes_.ranks(), engine, *network_, random_, *setup.timed);
}

// Trusting order is what a gate that is off comes to: the signal goes out right behind its write, on the same endpoint.
GatePolicy World::policy_of(const Setup& setup) {
    GatePolicy policy;
    if (setup.timed != nullptr && !setup.timed->gate) policy.ordering = OrderingClass::ordered;
    return policy;
}

TimedResult run_timed_exchange(const TimedOptions& options) {
    Coverage coverage;
    return World(options, coverage).run_timed();
}

}  // namespace expertwire::simulation
