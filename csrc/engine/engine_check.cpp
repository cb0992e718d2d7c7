// Looking at the engine from outside: quiet, statistics, and DESIGN's "What must always hold" as checks.
#include <algorithm>

#include "engine/engine.hpp"

namespace expertwire {

QueuePairView Engine::view(QueuePairId queue_pair) const {
    if (queue_pair.value >= lanes_.size()) return {};
    const QueuePair& lane = lanes_[queue_pair.value];
    const Line& data = lane.line(LineKind::data);
    return {lane.peer,     lane.endpoint, lane.state,   lane.error,     lane.code,   lane.generation,
            data.accepted, data.posted,   data.retired, lane.in_flight, lane.entries};
}

Status Engine::peer_error(PeerId peer) const {
    if (peer.value >= peers_.size() || peers_[peer.value].state == PeerState::closed) return Status::closed;
    return peers_[peer.value].error;
}

bool Engine::reached(std::uint64_t mark) const {
    return std::all_of(peers_.begin(), peers_.end(), [&](const Peer& peer) {
        return peer.first_request == no_index || requests_[peer.first_request].serial > mark;
    });
}

Status Engine::quiet(std::uint64_t mark) const {
    if (!reached(mark)) return Status::pending;
    const std::uint64_t kept = std::min<std::uint64_t>(failures_seen_, failures_kept);
    const std::uint64_t first = failures_seen_ - kept;
    Status found = Status::ok;
    for (std::uint64_t i = first; i < failures_seen_; ++i) {
        const Failure& failure = failures_[i % failures_kept];
        if (failure.moment <= mark) continue;
        // Older failures than the first kept were overwritten and might have been covered: never look like success.
        const bool covered = failure.serial <= mark || (i == first && first > 0);
        if (!covered) continue;
        if (failure.status != Status::aborted) return failure.status;
        found = failure.status;  // behind something: the cause is better news, if it is covered too
    }
    return found;
}

bool Engine::idle() const {
    return counts_.requests_live == 0 && slots_.used() == 0;
}

std::uint32_t Engine::region_uses(RegionId region) const {
    return region.value < region_uses_.size() ? region_uses_[region.value] : 0;
}

EngineStatistics Engine::statistics() const {
    EngineStatistics snapshot = counts_;
    snapshot.slots_used = slots_.used();
    snapshot.slots_counted = counted_;
    snapshot.slots_quarantined = expired_;
    snapshot.operations_queued = postable_;
    snapshot.gates_closed = gate_.held();
    snapshot.queue_pairs_live = lanes_live_;
    snapshot.window = window_;
    snapshot.slots_short = lanes_live_ > limits_.outstanding_max;
    return snapshot;
}

// ---- invariants. Called between two calls of the engine, when everything has settled.

namespace {

std::string broken_rule(const char* rule, const char* what, std::uint64_t where) {
    return std::string("rule ") + rule + ": " + what + " (" + std::to_string(where) + ")";
}

}  // namespace

std::string Engine::check_invariants() const {
    if (illegal_transitions_ > 0)
        return broken_rule("1", "a request took a transition not in the table", illegal_transitions_);
    if (records_overwritten_ > 0) return broken_rule("1", "a terminal record was overwritten", records_overwritten_);
    if (early_signals_ > 0) return broken_rule("2", "a gate opened before its thresholds were met", early_signals_);
    if (failing_head_ != no_index || dirty_head_ != no_index) return broken_rule("5", "work left unsettled", 0);
    std::string fault = check_slots();
    for (std::uint32_t i = 0; fault.empty() && i < lanes_used_; ++i) fault = check_lane(i);
    for (std::uint32_t i = 0; fault.empty() && i < requests_.size(); ++i) fault = check_request(i);
    return fault.empty() ? check_regions() : fault;
}

std::string Engine::check_slots() const {
    std::uint32_t counted = 0, expired = 0;
    for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
        const SlotInfo& info = slot_info_[slot];
        if (!slots_.in_use(slot)) {
            if (info.operation != no_index) return broken_rule("3", "a free slot names an operation", slot);
            continue;
        }
        if (info.operation == no_index) return broken_rule("3", "a slot in use names no operation", slot);
        const Operation& operation = operations_[info.operation];
        if (operation.slot != slots_.ticket_of(slot)) return broken_rule("3", "slot and operation disagree", slot);
        const bool may_hold = operation.state == OperationState::taken || operation.state == OperationState::posted ||
                              (operation.state == OperationState::finished && operation.line == LineKind::data);
        if (!may_hold) return broken_rule("3", "an operation that is not in flight holds a slot", slot);
        if (info.timed != (operation.state == OperationState::posted && !info.expired)) {
            return broken_rule("5", "an operation in flight has no deadline", slot);
        }
        counted += info.counted;
        expired += info.expired;
        if (info.counted && info.expired) return broken_rule("5", "a quarantined slot is counted", slot);
    }
    if (counted != counted_ || expired != expired_) return broken_rule("5", "slot counts are wrong", counted);
    if (counted_ > limits_.outstanding_max) return broken_rule("5", "more in flight than the cap", counted_);
    return {};
}

std::string Engine::check_lane(std::uint32_t index) const {
    const QueuePair& lane = lanes_[index];
    if (lane.state == LaneState::closed) return {};
    for (const LineKind kind : {LineKind::data, LineKind::control}) {
        if (std::string fault = check_line(index, kind); !fault.empty()) return fault;
    }
    std::uint32_t entries = 0, in_flight = 0, counted = 0, ready = 0, waiting = 0;
    std::uint64_t weighed = 0;
    for (const LineKind kind : {LineKind::data, LineKind::control}) {
        for (std::uint32_t i = lane.line(kind).head; i != no_index; i = operations_[i].next_in_line) {
            const Operation& operation = operations_[i];
            ++entries;
            in_flight += operation.state == OperationState::posted;
            const bool counts = operation.slot.valid() && slot_info_[operation.slot.slot].counted;
            counted += counts;
            weighed += counts ? weight(operation) : 0;
            const bool unposted_control =
                operation.line == LineKind::control &&
                (operation.state == OperationState::queued || operation.state == OperationState::taken);
            waiting += unposted_control;
        }
    }
    for (std::uint32_t i = lane.ready_head; i != no_index; i = operations_[i].next_ready) ++ready;
    if (entries != lane.entries || in_flight != lane.in_flight || counted != lane.counted || weighed != lane.weight) {
        return broken_rule("5", "a lane's counts are wrong", index);
    }
    if (ready != waiting) return broken_rule("5", "a control whose gate is open was lost", index);
    if ((lane.state == LaneState::open) != (lane.error == Status::ok))
        return broken_rule("6", "a lane's error is not latched", index);
    return {};
}

std::string Engine::check_line(std::uint32_t queue_pair, LineKind kind) const {
    const Line& line = lanes_[queue_pair].line(kind);
    std::uint64_t position = line.retired, posted = line.retired;
    bool all_posted = true;
    std::uint32_t last = no_index;
    for (std::uint32_t i = line.head; i != no_index; i = operations_[i].next_in_line) {
        const Operation& operation = operations_[i];
        if (operation.position != position++) return broken_rule("4", "a line is out of order", queue_pair);
        if (operation.queue_pair != queue_pair || operation.line != kind)
            return broken_rule("4", "an operation stands in the wrong line", i);
        const bool unposted = operation.state != OperationState::posted && operation.state != OperationState::finished;
        if (unposted) all_posted = false;
        if (all_posted) ++posted;
        if (!all_posted && kind == LineKind::data && operation.state == OperationState::posted) {
            return broken_rule("4", "a chunk was posted before one in front of it", queue_pair);
        }
        if ((operation.state == OperationState::held) != (operation.gate != no_index))
            return broken_rule("2", "a held control has no gate", i);
        if (operation.state == OperationState::held) {
            const Gate::Record& record = gate_.record(operation.gate);
            const Threshold& threshold = gate_.thresholds(operation.gate)[record.waiting_on];
            if (record.operation != i) return broken_rule("2", "gate and control disagree", i);
            if (met(threshold, lanes_[threshold.queue_pair].line(threshold.line)))
                return broken_rule("2", "a gate was left closed", i);
        }
        last = i;
    }
    if (last != line.tail || position != line.accepted) return broken_rule("4", "a line lost an operation", queue_pair);
    if (posted != line.posted) return broken_rule("4", "the posted prefix is wrong", queue_pair);
    if (line.head != no_index && operations_[line.head].state == OperationState::finished) {
        return broken_rule("4", "a finished head was not retired", queue_pair);
    }
    return {};
}

std::string Engine::check_request(std::uint32_t index) const {
    const Request& request = requests_[index];
    const RecordView record = RecordView::unpack(records_[index].load(std::memory_order_acquire));
    if (record.generation != request_slots_.ticket_of(index).generation)
        return broken_rule("3", "a record is of another generation", index);
    if (record.is_terminal() != terminal(request.state)) return broken_rule("1", "record and request disagree", index);
    std::uint32_t owned = 0, unposted = 0;
    for (std::uint32_t i = request.first_operation; i != no_index; i = operations_[i].next_in_request) {
        const OperationState state = operations_[i].state;
        if (operations_[i].request != index) return broken_rule("1", "a request lists an operation of another", index);
        ++owned;
        unposted += state == OperationState::held || state == OperationState::queued || state == OperationState::taken;
    }
    if (request.state == RequestState::free) return {};
    if (owned != request.outstanding) return broken_rule("1", "a request lost an operation", index);
    if (terminal(request.state)) {
        if (owned > 0) return broken_rule("1", "a terminal request owns work", index);
        const bool done = record.status == Status::ok;
        if (done != (request.first_error == Status::ok))
            return broken_rule("6", "a failed request looks like success", index);
        return {};
    }
    if (unposted != request.unposted) return broken_rule("5", "a request's count of unposted work is wrong", index);
    if ((unposted == 0) != (request.state == RequestState::draining))
        return broken_rule("1", "a draining request is not", index);
    if (record.first_error != request.first_error)
        return broken_rule("6", "a latched error is not in the record", index);
    return {};
}

// Also: what is in flight without an owner must have left its local buffer (Level::local published early).
std::string Engine::check_regions() const {
    std::vector<std::uint32_t> uses(region_uses_.size());
    std::uint32_t queued = 0, out[2] = {0, 0};
    for (std::uint32_t i = 0; i < operations_.size(); ++i) {
        const Operation& operation = operations_[i];
        if (operation.state == OperationState::free) continue;
        queued += operation.state == OperationState::queued;
        if (operation.state == OperationState::posted && operation.request == no_index && !operation.locally_done) {
            return broken_rule("1", "work in flight that no request answers for", i);
        }
        if (operation.line != LineKind::data) continue;
        uses[operation.local.value] += operation.state != OperationState::finished;
        out[lanes_[operation.queue_pair].bulk_window > 0] +=
            operation.state == OperationState::taken || operation.state == OperationState::posted;
    }
    if (queued != postable_) return broken_rule("5", "the count of postable work is wrong", queued);
    if (out[0] != bulk_hold_.taken(false) || out[1] != bulk_hold_.taken(true))
        return broken_rule("5", "the counts of small and bulk on their way are wrong", out[0]);
    if (uses != region_uses_) return broken_rule("7", "a region's uses are wrong", 0);
    return {};
}

}  // namespace expertwire
