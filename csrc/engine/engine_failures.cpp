// What goes wrong: failing requests, latched lanes, hard deadlines and quarantine, dead peers, closed endpoints.
#include <algorithm>

#include "engine/engine.hpp"

namespace expertwire {

void Engine::recount_live() {
    lanes_live_ = 0;
    for (std::uint32_t i = 0; i < lanes_used_; ++i) {
        lanes_live_ += lanes_[i].state == LaneState::open || lanes_[i].state == LaneState::aborting;
    }
    window_ = std::max(1u, limits_.outstanding_max / std::max(1u, lanes_live_));
}

// ---- one request. The first error wins; what was not posted is dropped by settle(), so that callers may be walking
// lists.

void Engine::fail_request(std::uint32_t index, Status status, std::int32_t code) {
    Request& request = requests_[index];
    if (terminal(request.state) || request.first_error != Status::ok) return;
    request.first_error = status;
    request.code = code;
    advance(request, RequestEvent::fail);
    store_record(index, Status::pending);
    request.in_failing_list = true;
    (failing_tail_ == no_index ? failing_head_ : requests_[failing_tail_].next_failing) = index;
    failing_tail_ = index;
}

void Engine::drop_unposted(std::uint32_t index) {
    Request& request = requests_[index];
    std::uint32_t at = request.first_operation;
    while (at != no_index) {
        const std::uint32_t next = operations_[at].next_in_request;
        const OperationState state = operations_[at].state;
        if (state == OperationState::held || state == OperationState::queued || state == OperationState::taken) {
            drop(at, request.first_error);
        }
        at = next;
    }
    const bool freed_early = mutant(Mutant::publish_before_drain) ||
                             (mutant(Mutant::buffer_freed_at_timeout) && request.first_error == Status::timed_out);
    if (freed_early && !terminal(request.state)) detach_all(index);
    publish_if_ended(index);
}

void Engine::drop(std::uint32_t index, Status status) {
    Operation& operation = operations_[index];
    if (operation.state == OperationState::held) {
        const Gate::Record& record = gate_.record(operation.gate);
        const Threshold& threshold = gate_.thresholds(operation.gate)[record.waiting_on];
        gate_.leave(operation.gate, lanes_[threshold.queue_pair].line(threshold.line));
        gate_.free(operation.gate);
        operation.gate = no_index;
    } else if (operation.line == LineKind::control) {
        leave_ready(index);
    }
    forget_slot(operation);
    ++counts_.operations_dropped;
    --requests_[operation.request].unposted;
    finish(index, status);
    if (status != Status::cancelled) doom_covering(operation);
    account(index);
}

// A control of scope queue_pair or peer says that everything it covers has arrived. That has become untrue.
void Engine::doom_covering(const Operation& operation) {
    for (std::uint32_t i = gate_.first_wide(); i != no_index; i = gate_.record(i).next_wide) {
        for (const Threshold& threshold : gate_.thresholds(i)) {
            if (threshold.queue_pair != operation.queue_pair || threshold.line != operation.line) continue;
            if (operation.position < threshold.from || operation.position >= threshold.to) continue;
            fail_request(operations_[gate_.record(i).operation].request, Status::aborted, 0);
        }
    }
}

// A posted (or rejected) operation has ended with an error.
void Engine::fail_operation(std::uint32_t index, Status status, std::int32_t code) {
    Operation& operation = operations_[index];
    doom_covering(operation);
    if (operation.request == no_index) {
        ++counts_.errors_after_publish;
    } else {
        fail_request(operation.request, status, code);
        if (operation.line == LineKind::control || broken(operation.queue_pair)) account(index);
    }
    latch_aborting(operation.queue_pair, operation.serial, status, code);
}

// ---- lanes

bool Engine::broken(std::uint32_t queue_pair) const {
    const LaneState state = lanes_[queue_pair].state;
    return state == LaneState::quarantined || state == LaneState::failed;
}

// Fails the requests accepted after `serial` that have something on this lane that was not posted.
void Engine::abort_behind(std::uint32_t queue_pair, std::uint64_t serial, Status status, std::int32_t code) {
    for (const LineKind kind : {LineKind::data, LineKind::control}) {
        for (std::uint32_t i = lanes_[queue_pair].line(kind).head; i != no_index; i = operations_[i].next_in_line) {
            const Operation& operation = operations_[i];
            const bool unposted = operation.state == OperationState::held ||
                                  operation.state == OperationState::queued || operation.state == OperationState::taken;
            if (!unposted || operation.request == no_index || operation.serial <= serial) continue;
            fail_request(operation.request, status, code);
        }
    }
}

void Engine::latch_aborting(std::uint32_t queue_pair, std::uint64_t serial, Status status, std::int32_t code) {
    QueuePair& lane = lanes_[queue_pair];
    if (lane.state != LaneState::open && lane.state != LaneState::aborting) return;
    abort_behind(queue_pair, serial, Status::aborted, 0);
    if (lane.state == LaneState::open) {
        lane.state = LaneState::aborting;
        lane.error = status;
        lane.code = code;
    }
    lane.reopen_at = lane.line(LineKind::data).accepted;
    mark_dirty(queue_pair);
}

// Its slots no longer count (SPEC T2), and chunks that have ended wait no longer for those before them.
void Engine::take_out_of_count(std::uint32_t queue_pair) {
    QueuePair& lane = lanes_[queue_pair];
    for (const LineKind kind : {LineKind::data, LineKind::control}) {
        for (std::uint32_t i = lane.line(kind).head; i != no_index; i = operations_[i].next_in_line) {
            const Operation& operation = operations_[i];
            if (operation.state == OperationState::posted) uncount(operation.slot.slot);
            if (operation.state != OperationState::finished) continue;
            if (operation.slot.valid()) uncount(operation.slot.slot);
            if (operation.request != no_index) account(i);
        }
    }
}

void Engine::quarantine_lane(std::uint32_t queue_pair) {
    QueuePair& lane = lanes_[queue_pair];
    if (lane.state != LaneState::open && lane.state != LaneState::aborting) return;
    lane.state = LaneState::quarantined;
    lane.error = Status::timed_out;
    lane.code = 0;
    lane.reopen_at = lane.line(LineKind::data).accepted;
    take_out_of_count(queue_pair);
    abort_behind(queue_pair, 0, Status::aborted, 0);
    recount_live();
    mark_dirty(queue_pair);
}

void Engine::fail_lane(std::uint32_t queue_pair, Status status, std::int32_t code) {
    QueuePair& lane = lanes_[queue_pair];
    if (lane.state == LaneState::closed || lane.state == LaneState::failed) return;
    lane.state = LaneState::failed;
    lane.error = status;
    lane.code = code;
    take_out_of_count(queue_pair);
    for (const LineKind kind : {LineKind::data, LineKind::control}) {
        for (std::uint32_t i = lane.line(kind).head; i != no_index; i = operations_[i].next_in_line) {
            if (operations_[i].state == OperationState::posted) expire(operations_[i].slot.slot, status, code);
        }
    }
    abort_behind(queue_pair, 0, status, code);
    recount_live();
    mark_dirty(queue_pair);
}

void Engine::reopen_if_drained(QueuePair& lane) {
    if (lane.state != LaneState::aborting && lane.state != LaneState::quarantined) return;
    if (lane.line(LineKind::data).retired < lane.reopen_at || mutant(Mutant::never_reopens)) return;
    if (lane.state == LaneState::quarantined && lane.in_flight > 0) return;
    lane.state = LaneState::open;
    lane.error = Status::ok;
    lane.code = 0;
    ++lane.generation;
    ++counts_.lanes_reopened;
    recount_live();
}

// ---- time

// The slot is quarantined: still owned, no longer counted; its request fails, and ends when this has drained.
void Engine::expire(std::uint32_t slot, Status status, std::int32_t code) {
    SlotInfo& info = slot_info_[slot];
    uncount(slot);
    untime(slot);
    if (!info.expired) {
        info.expired = true;
        ++expired_;
        ++counts_.quarantines;
    }
    const Operation& operation = operations_[info.operation];
    doom_covering(operation);
    if (operation.request == no_index) return;
    const std::uint32_t request = operation.request;
    fail_request(request, status, code);
    store_record(request, Status::pending, RecordView::quarantined);
}

bool Engine::has_caught_up(std::uint32_t completions) {
    unjudged_ += completions;
    if (completions != 0 && unjudged_ < slots_.size()) return false;
    unjudged_ = 0;
    return true;
}

void Engine::step(TimeNs now) {
    bool any = false;
    while (timed_head_ != no_index && slot_info_[timed_head_].posted_at + limits_.hard_timeout_ns <= now) {
        lanes_[operations_[slot_info_[timed_head_].operation].queue_pair].overdue = true;
        expire(timed_head_, Status::timed_out, 0);
        any = true;
    }
    // After all of them: what has timed out itself must not be called aborted behind another.
    for (std::uint32_t i = 0; any && i < lanes_used_; ++i) {
        if (lanes_[i].overdue) quarantine_lane(i);
        lanes_[i].overdue = false;
    }
    settle();
}

// The provider has said AGAIN for as long as the hard deadline, and now once more: what could not be posted fails; the
// lane goes on. Never by the clock alone: a process that did not run in between was not refused, it did not ask.
void Engine::expire_refused(std::uint32_t index) {
    const Operation& operation = operations_[index];
    QueuePair& lane = lanes_[operation.queue_pair];
    lane.pushed_back = false;
    --lanes_pushed_back_;
    if (operation.request == no_index) return;
    fail_request(operation.request, Status::timed_out, 0);
    latch_aborting(operation.queue_pair, operation.serial, Status::timed_out, 0);
    settle();
}

std::optional<TimeNs> Engine::next_deadline() const {
    std::optional<TimeNs> next;
    if (timed_head_ != no_index) next = slot_info_[timed_head_].posted_at + limits_.hard_timeout_ns;
    for (std::uint32_t i = 0; lanes_pushed_back_ > 0 && i < lanes_used_; ++i) {
        if (!lanes_[i].pushed_back) continue;
        const TimeNs at = lanes_[i].again_since + limits_.hard_timeout_ns;
        next = next ? std::min(*next, at) : at;
    }
    return next;
}

// ---- peers and endpoints

void Engine::on_peer_error(PeerId id, Status status, std::int32_t code, TimeNs) {
    if (id.value >= peers_.size()) return;
    Peer& peer = peers_[id.value];
    if (peer.state != PeerState::open) return;
    peer.state = PeerState::failed;
    peer.error = status;
    peer.code = code;
    for (const std::uint32_t lane : peer.queue_pairs) fail_lane(lane, status, code);
    settle();
}

void Engine::on_endpoint_error(EndpointId endpoint, Status status, std::int32_t code, TimeNs) {
    for (std::uint32_t i = 0; i < lanes_used_; ++i) {
        if (lanes_[i].endpoint == endpoint) fail_lane(i, status, code);
    }
    settle();
}

void Engine::end_in_flight(std::uint32_t index) {
    Operation& operation = operations_[index];
    const Status status = operation.request == no_index || requests_[operation.request].first_error == Status::ok
                              ? Status::closed
                              : requests_[operation.request].first_error;
    untime(operation.slot.slot);
    finish(index, status);
    doom_covering(operation);
    if (operation.request != no_index) fail_request(operation.request, status, 0);
    if (operation.line == LineKind::control) forget_slot(operation);
    account(index);
}

void Engine::on_peer_closed(PeerId peer, TimeNs) {
    for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
        if (!slots_.in_use(slot)) continue;
        const std::uint32_t index = slot_info_[slot].operation;
        if (operations_[index].state != OperationState::posted) continue;
        if (lanes_[operations_[index].queue_pair].peer == peer) end_in_flight(index);
    }
    settle();
}

void Engine::on_endpoint_closed(EndpointId endpoint, TimeNs) {
    for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
        if (!slots_.in_use(slot) || slot_info_[slot].endpoint != endpoint) continue;
        const std::uint32_t index = slot_info_[slot].operation;
        if (operations_[index].state == OperationState::posted) end_in_flight(index);
    }
    for (std::uint32_t i = 0; i < lanes_used_; ++i) {
        if (lanes_[i].endpoint == endpoint) fail_lane(i, Status::closed, 0);  // it was not replaced
        // Class A: controls that were to follow their data on it by order alone cannot, and the data may be lost.
        for (std::uint32_t at = lanes_[i].ready_head; at != no_index; at = operations_[at].next_ready) {
            if (operations_[at].endpoint == endpoint) fail_request(operations_[at].request, Status::closed, 0);
        }
    }
    settle();
}

Status Engine::close_peer(PeerId id, TimeNs) {
    if (id.value >= peers_.size()) return Status::invalid;
    Peer& peer = peers_[id.value];
    if (peer.state == PeerState::closed) return Status::ok;
    if (peer.state != PeerState::closing) {
        peer.state = PeerState::closing;
        if (peer.error == Status::ok) peer.error = Status::closed;
        for (const std::uint32_t lane : peer.queue_pairs) abort_behind(lane, 0, peer.error, peer.code);
        settle();
    }
    bool drained = peer.first_request == no_index;
    for (const std::uint32_t lane : peer.queue_pairs) drained = drained && lanes_[lane].entries == 0;
    if (!drained) return Status::pending;
    for (const std::uint32_t index : peer.queue_pairs) {
        QueuePair& lane = lanes_[index];
        lanes_pushed_back_ -= lane.pushed_back;
        lane.pushed_back = false;
        lane.state = LaneState::closed;
        ++lane.generation;
    }
    peer.queue_pairs.clear();
    peer.state = PeerState::closed;
    recount_live();
    return Status::ok;
}

std::optional<EndpointId> Engine::endpoint_to_replace() const {
    const std::uint32_t limit = std::max(1u, limits_.outstanding_max / 2);
    if (expired_ < limit) return std::nullopt;
    for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
        if (!slots_.in_use(slot) || !slot_info_[slot].expired) continue;
        const EndpointId endpoint = slot_info_[slot].endpoint;
        std::uint32_t count = 0;
        for (std::uint32_t other = slot; other < slots_.size(); ++other) {
            count += slots_.in_use(other) && slot_info_[other].expired && slot_info_[other].endpoint == endpoint;
        }
        if (count >= limit) return endpoint;
    }
    return std::nullopt;
}

bool Engine::drained(EndpointId endpoint) const {
    for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
        const SlotInfo& info = slot_info_[slot];
        if (!slots_.in_use(slot) || info.expired || info.endpoint != endpoint) continue;
        if (operations_[info.operation].state != OperationState::finished) return false;
    }
    for (std::uint32_t i = 0; i < lanes_used_; ++i) {
        if (lanes_[i].state != LaneState::open && lanes_[i].state != LaneState::aborting) continue;
        for (std::uint32_t at = lanes_[i].ready_head; at != no_index; at = operations_[at].next_ready) {
            if (operations_[at].endpoint == endpoint) return false;
        }
    }
    return true;
}

void Engine::regate(std::uint32_t index, EndpointId endpoint) {
    Operation& control = operations_[index];
    control.endpoint = endpoint;
    Gate::Record& record = gate_.record(control.gate);
    const std::span<Threshold> thresholds = gate_.thresholds(control.gate);
    const Threshold& unmet = thresholds[record.waiting_on];
    gate_.leave(control.gate, lanes_[unmet.queue_pair].line(unmet.line));
    for (Threshold& threshold : thresholds) threshold.retired_to = threshold.to;
    record.waiting_on = 0;
    try_gate(control.gate);
}

// Controls that are held are reckoned anew for the new endpoint: nothing posted on the old one is ordered with it.
// Those whose gate has opened by order alone (class A) go out on the old one, behind their data.
void Engine::replace_endpoint(EndpointId old_endpoint, EndpointId new_endpoint) {
    for (std::uint32_t i = 0; i < lanes_used_; ++i) {
        QueuePair& lane = lanes_[i];
        if (lane.state == LaneState::closed || lane.endpoint != old_endpoint) continue;
        lane.endpoint = new_endpoint;
        lane.ordered_from = lane.line(LineKind::data).accepted;
        for (std::uint32_t at = lane.line(LineKind::control).head; at != no_index; at = operations_[at].next_in_line) {
            Operation& control = operations_[at];
            const bool held = control.state == OperationState::held;
            const bool ready = control.state == OperationState::queued;
            if (ready && policy_.ordering != OrderingClass::ordered) control.endpoint = new_endpoint;
            if (held) regate(at, new_endpoint);
        }
    }
}

}  // namespace expertwire
