// From the post to the record: posting, completion, retirement, gates, publication. What is posted next:
// engine_take.cpp.
#include "engine/engine.hpp"

#include <algorithm>

namespace expertwire {

namespace {

// Why an operation failed, as the provider says it. What is no failure, or says something of a record, is none of its.
Status as_failure(Status said) {
    switch (said) {
        case Status::ok:
        case Status::pending:
        case Status::would_block:
        case Status::cancelled:
        case Status::stale:
            return Status::io_error;
        default:
            return said;
    }
}

}  // namespace

Engine::Engine(const EngineLimits& limits, const GatePolicy& policy)
    : limits_(limits),
      policy_(policy),
      slots_(2 * limits.outstanding_max, limits.first_generation),
      request_slots_(limits.requests_max, limits.first_generation),
      slot_info_(2 * std::size_t{limits.outstanding_max}),
      requests_(limits.requests_max),
      records_(std::make_unique<std::atomic<std::uint64_t>[]>(limits.requests_max)),
      operations_(std::size_t{limits.queued_max} + 2 * std::size_t{limits.outstanding_max}),
      lanes_(limits.queue_pairs_max),
      peers_(limits.peers_max),
      gate_(limits.held_max, 2 * limits.queue_pairs_per_peer_max),
      scratch_(2 * std::size_t{limits.queue_pairs_per_peer_max}),
      region_uses_(limits.regions_max),
      bulk_hold_(limits.bulk_hold_ns, limits.bulk_quiet_ns, limits.bulk_wary_ns) {
    operations_free_ = static_cast<std::uint32_t>(operations_.size());
    for (std::uint32_t i = operations_free_; i-- > 0;) {
        operations_[i].next_in_line = free_operation_;
        free_operation_ = i;
    }
    for (Peer& peer : peers_) peer.queue_pairs.reserve(limits.queue_pairs_per_peer_max);
    for (std::uint32_t i = 0; i < limits.requests_max; ++i) {
        records_[i].store(RecordView{request_slots_.ticket_of(i).generation}.pack(), std::memory_order_relaxed);
    }
    recount_live();
}

// ---- records and the transition table

const std::atomic<std::uint64_t>& Engine::record(Ticket request) const {
    return records_[request.slot];
}

std::int32_t Engine::error_code(Ticket request) const {
    return request_slots_.current(request) ? requests_[request.slot].code : 0;
}

void Engine::advance(Request& request, RequestEvent event) {
    const std::uint8_t to = request_table[static_cast<std::size_t>(request.state)][static_cast<std::size_t>(event)];
    if (to == illegal_transition) {
        ++illegal_transitions_;
        return;
    }
    ++counts_.transitions[static_cast<std::size_t>(request.state)][to];
    request.state = static_cast<RequestState>(to);
}

void Engine::store_record(std::uint32_t index, Status status, std::uint8_t more_flags) {
    const Ticket ticket = request_slots_.ticket_of(index);
    const RecordView old = RecordView::unpack(records_[index].load(std::memory_order_relaxed));
    RecordView record{ticket.generation, requests_[index].first_error, more_flags, status};
    if (old.generation == ticket.generation) {
        record.flags |= old.flags;
        if (old.is_terminal()) {
            if (status != old.status) ++records_overwritten_;
            record.status = old.status;  // only flags may still change
            record.first_error = old.first_error;
        }
    }
    records_[index].store(record.pack(), std::memory_order_release);
}

void Engine::mark_stalled(Ticket request) {
    // One that has ended since keeps its record: the wait that passed its deadline finds it there.
    if (status(request) == Status::pending) store_record(request.slot, Status::pending, RecordView::stalled);
}

void Engine::publish_if_ended(std::uint32_t index) {
    Request& request = requests_[index];
    if (request.state != RequestState::draining) return;
    if (request.outstanding == 0) {
        publish(index);
    } else if (request.level == Level::local && request.first_error == Status::ok && request.local_left == 0) {
        detach_all(index);  // every local buffer is reusable; what is left is the delivery of bytes that have left
        publish(index);
    }
}

void Engine::publish(std::uint32_t index) {
    Request& request = requests_[index];
    const Status status = request.first_error;
    unlink_live(index);
    ++moment_;
    if (status == Status::ok) {
        advance(request, RequestEvent::end_ok);
        ++counts_.requests_done;
    } else if (status == Status::cancelled) {
        advance(request, RequestEvent::end_cancelled);
        ++counts_.requests_cancelled;
    } else {
        advance(request, RequestEvent::end_failed);
        ++counts_.requests_failed;
    }
    if (request.state == RequestState::failed)
        failures_[failures_seen_++ % failures_kept] = {request.serial, moment_, status};
    store_record(index, status);  // last, with release order
}

void Engine::detach_all(std::uint32_t index) {
    Request& request = requests_[index];
    while (request.first_operation != no_index) {
        const std::uint32_t operation = request.first_operation;
        unlink_operation(operation);
        operations_[operation].request = no_index;
    }
    request.outstanding = 0;
}

Status Engine::cancel(Ticket ticket) {
    if (!request_slots_.current(ticket)) return Status::stale;
    Request& request = requests_[ticket.slot];
    if (request.state != RequestState::queued || request.first_error != Status::ok) return Status::refused;
    for (std::uint32_t i = request.first_operation; i != no_index; i = operations_[i].next_in_request) {
        if (operations_[i].state == OperationState::taken) return Status::refused;
    }
    request.first_error = Status::cancelled;
    advance(request, RequestEvent::cancel);
    drop_unposted(ticket.slot);
    settle();
    return Status::ok;
}

Status Engine::withhold(Ticket ticket) {
    if (!request_slots_.current(ticket)) return Status::stale;
    const Request& request = requests_[ticket.slot];
    if (terminal(request.state)) return Status::ok;
    if (!request.signalled) {
        fail_request(ticket.slot, Status::cancelled, 0);
        settle();
        return Status::cancelled;
    }
    for (std::uint32_t i = request.first_operation; i != no_index; i = operations_[i].next_in_request) {
        if (operations_[i].line == LineKind::data && operations_[i].state != OperationState::finished)
            return Status::pending;
    }
    return Status::ok;
}

Status Engine::release(Ticket ticket) {
    if (!request_slots_.current(ticket)) return Status::stale;
    Request& request = requests_[ticket.slot];
    if (!terminal(request.state)) return Status::refused;
    advance(request, RequestEvent::release);
    request_slots_.retire(ticket);
    records_[ticket.slot].store(RecordView{request_slots_.ticket_of(ticket.slot).generation}.pack(),
                                std::memory_order_release);
    return Status::ok;
}

// ---- posting

bool Engine::may_post(const PostCommand& command) const {
    return slots_.current(command.ticket) &&
           operations_[slot_info_[command.ticket.slot].operation].state == OperationState::taken;
}

void Engine::on_posted(const PostCommand& command, PostResult result, TimeNs now) {
    if (!may_post(command)) {
        if (result.outcome == PostOutcome::posted) ++counts_.misuses;
        return;
    }
    const std::uint32_t index = slot_info_[command.ticket.slot].operation;
    QueuePair& lane = lanes_[operations_[index].queue_pair];
    if (result.outcome == PostOutcome::again) {
        ++counts_.posts_again;
        if (!lane.pushed_back) {
            lane.pushed_back = true;
            lane.again_since = now;
            ++lanes_pushed_back_;
        }
        if (!pushed_back_since_take_) round_robin_ = operations_[index].queue_pair;  // it goes first next time
        pushed_back_since_take_ = true;
        pull_back(lane);
        if (lane.again_since + limits_.hard_timeout_ns <= now) expire_refused(index);
        return;
    }
    if (lane.pushed_back) {
        lane.pushed_back = false;
        --lanes_pushed_back_;
    }
    if (result.outcome == PostOutcome::posted) {
        const Operation& operation = operations_[index];
        if (operation.line == LineKind::data && operation.position != lane.line(LineKind::data).posted)
            ++counts_.misuses;
        std::uint32_t at = index;
        for (std::uint32_t left = operation.joined + 1; left > 0; --left, at = operations_[at].next_in_line)
            accepted_by_provider(at, now);
    } else {
        result.status = as_failure(result.status);
        rejected_by_provider(index, result);
    }
    settle();
}

// Everything that was taken from the lane and is not posted goes back to its place, in order.
void Engine::pull_back(QueuePair& lane) {
    Line& data = lane.line(LineKind::data);
    for (std::uint32_t i = data.first_unposted; i != no_index; i = operations_[i].next_in_line) {
        if (operations_[i].state != OperationState::taken) continue;
        bulk_hold_.drop(lane.bulk_window > 0);
        forget_slot(operations_[i]);
        operations_[i].state = OperationState::queued;
        operations_[i].joined = 0;
        ++postable_;
    }
    data.cursor = data.first_unposted;
    for (std::uint32_t i = lane.ready_head; i != lane.ready_cursor; i = operations_[i].next_ready) {
        forget_slot(operations_[i]);
        operations_[i].state = OperationState::queued;
        ++postable_;
    }
    lane.ready_cursor = lane.ready_head;
}

void Engine::accepted_by_provider(std::uint32_t index, TimeNs now) {
    Operation& operation = operations_[index];
    QueuePair& lane = lanes_[operation.queue_pair];
    if (operation.line == LineKind::control) leave_ready(index);
    operation.state = OperationState::posted;
    ++lane.in_flight;
    ++counts_.operations_posted;
    const std::uint32_t slot = operation.slot.slot;
    SlotInfo& info = slot_info_[slot];
    info.posted_at = now;
    info.timed = true;
    info.previous = timed_tail_;
    (timed_tail_ == no_index ? timed_head_ : slot_info_[timed_tail_].next) = slot;
    timed_tail_ = slot;
    Request& request = requests_[operation.request];
    request.signalled = request.signalled || operation.line == LineKind::control;
    advance(request, --request.unposted == 0 ? RequestEvent::last_post : RequestEvent::post);
    mark_dirty(operation.queue_pair);
}

void Engine::rejected_by_provider(std::uint32_t index, const PostResult& result) {
    Operation& operation = operations_[index];
    ++counts_.posts_rejected;
    if (operation.line == LineKind::control) leave_ready(index);
    forget_slot(operation);
    --requests_[operation.request].unposted;
    const Status status = result.status == Status::ok ? Status::io_error : result.status;
    finish(index, status);
    fail_operation(index, status, result.code);
    account(index);
}

// ---- slots

void Engine::forget_slot(Operation& operation) {
    if (!operation.slot.valid()) return;
    const std::uint32_t slot = operation.slot.slot;
    uncount(slot);
    untime(slot);
    if (slot_info_[slot].expired) --expired_;
    slot_info_[slot] = SlotInfo{};
    slots_.retire(operation.slot);
    operation.slot = Ticket{};
}

void Engine::uncount(std::uint32_t slot) {
    SlotInfo& info = slot_info_[slot];
    if (!info.counted) return;
    info.counted = false;
    --counted_;
    const Operation& operation = operations_[info.operation];
    --lanes_[operation.queue_pair].counted;
    lanes_[operation.queue_pair].weight -= weight(operation);
}

void Engine::untime(std::uint32_t slot) {
    SlotInfo& info = slot_info_[slot];
    if (!info.timed) return;
    (info.previous == no_index ? timed_head_ : slot_info_[info.previous].next) = info.next;
    (info.next == no_index ? timed_tail_ : slot_info_[info.next].previous) = info.previous;
    info.timed = false;
    info.previous = info.next = no_index;
}

// ---- completion

void Engine::on_completion(const Completion& completion, TimeNs now) {
    const Ticket ticket = completion.ticket;
    if (ticket.slot >= slots_.size()) {
        ++counts_.completions_unknown;
        return;
    }
    const bool matched = slots_.current(ticket) || (mutant(Mutant::no_generation_check) && slots_.in_use(ticket.slot));
    if (!matched || operations_[slot_info_[ticket.slot].operation].state != OperationState::posted) {
        ++counts_.completions_stale;
        return;
    }
    const std::uint32_t index = slot_info_[ticket.slot].operation;
    const bool small = lanes_[operations_[index].queue_pair].bulk_window == 0;
    if (small && operations_[index].line == LineKind::data) bulk_hold_.small_completed(now);
    // What was posted with it has ended with it. Nothing of it has left its line before: that goes in order.
    std::uint32_t at = index;
    std::uint32_t left = mutant(Mutant::join_ends_one) ? 1 : operations_[index].joined + 1;
    for (; left > 0; --left, at = operations_[at].next_in_line)
        if (operations_[at].state == OperationState::posted) end_completed(at, completion);
    settle();
}

void Engine::end_completed(std::uint32_t index, const Completion& completion) {
    if (completion.status == Status::ok) {
        const Level needed = policy_.delivery_complete ? Level::delivered : Level::local;
        if (completion.level < needed && operations_[index].kind != OpKind::read) {
            locally_done(index);
        } else {
            end_posted(index, Status::ok);
        }
        return;
    }
    const Status status = as_failure(completion.status);
    end_posted(index, status);
    fail_operation(index, status, completion.code);
}

void Engine::finish(std::uint32_t index, Status result) {
    Operation& operation = operations_[index];
    QueuePair& lane = lanes_[operation.queue_pair];
    Line& line = lane.line(operation.line);
    if (operation.state == OperationState::queued) --postable_;
    const bool out = operation.state == OperationState::taken || operation.state == OperationState::posted;
    if (out && operation.line == LineKind::data) bulk_hold_.drop(lane.bulk_window > 0);
    if (operation.state == OperationState::posted) {
        --lane.in_flight;
        ++counts_.operations_finished;
        if (result != Status::ok) ++counts_.operations_failed;
    }
    operation.state = OperationState::finished;
    operation.result = result;
    ++line.finished;
    if (operation.line == LineKind::data) --region_uses_[operation.local.value];
    if (result != Status::ok && result != Status::cancelled) {
        line.failed_until = std::max(line.failed_until, operation.position + 1);
    }
    mark_dirty(operation.queue_pair);
}

// A posted operation has ended. A chunk keeps its slot, and its request waits for it, until everything before it in its
// line has ended too; a control's slot is free at once, and so is the account of a chunk whose lane is broken: it must
// not wait for what may never end.
void Engine::end_posted(std::uint32_t index, Status result) {
    Operation& operation = operations_[index];
    untime(operation.slot.slot);
    finish(index, result);
    if (operation.line == LineKind::control) {
        forget_slot(operation);
        if (result == Status::ok) account(index);
        return;
    }
    if (!broken(operation.queue_pair)) return;
    uncount(operation.slot.slot);
    if (result == Status::ok) account(index);
}

void Engine::locally_done(std::uint32_t index) {
    Operation& operation = operations_[index];
    if (operation.locally_done) return;
    operation.locally_done = true;
    if (operation.request == no_index) return;
    --requests_[operation.request].local_left;
    publish_if_ended(operation.request);
}

void Engine::account(std::uint32_t index) {
    Operation& operation = operations_[index];
    const std::uint32_t request = operation.request;
    if (request == no_index) return;
    unlink_operation(index);
    operation.request = no_index;
    --requests_[request].outstanding;
    if (!operation.locally_done) --requests_[request].local_left;
    publish_if_ended(request);
}

void Engine::unlink_operation(std::uint32_t index) {
    Operation& operation = operations_[index];
    Request& request = requests_[operation.request];
    const std::uint32_t before = operation.previous_in_request;
    const std::uint32_t after = operation.next_in_request;
    (before == no_index ? request.first_operation : operations_[before].next_in_request) = after;
    if (after != no_index) operations_[after].previous_in_request = before;
    operation.previous_in_request = operation.next_in_request = no_index;
}

void Engine::free_operation(std::uint32_t index) {
    operations_[index] = Operation{};
    operations_[index].next_in_line = free_operation_;
    free_operation_ = index;
    ++operations_free_;
}

// ---- settling: failures first, then the lanes on which something ended. Bounded: each operation is dropped, retired
// and released from its gate once.

void Engine::mark_dirty(std::uint32_t queue_pair) {
    QueuePair& lane = lanes_[queue_pair];
    if (lane.dirty) return;
    lane.dirty = true;
    lane.next_dirty = dirty_head_;
    dirty_head_ = queue_pair;
}

void Engine::settle() {
    if (settling_) return;
    settling_ = true;
    while (failing_head_ != no_index || dirty_head_ != no_index) {
        if (failing_head_ != no_index) {
            const std::uint32_t request = failing_head_;
            failing_head_ = requests_[request].next_failing;
            if (failing_head_ == no_index) failing_tail_ = no_index;
            requests_[request].next_failing = no_index;
            requests_[request].in_failing_list = false;
            drop_unposted(request);
        } else {
            const std::uint32_t lane = dirty_head_;
            dirty_head_ = lanes_[lane].next_dirty;
            lanes_[lane].dirty = false;
            settle_lane(lane);
        }
    }
    settling_ = false;
}

void Engine::settle_lane(std::uint32_t queue_pair) {
    QueuePair& lane = lanes_[queue_pair];
    for (const LineKind kind : {LineKind::data, LineKind::control}) {
        advance_posted(lane.line(kind));
        retire_prefix(lane, kind);
        release_waiters(lane.line(kind));
    }
    reopen_if_drained(lane);
    if (lane.pushed_back && lane.ready_head == no_index && lane.line(LineKind::data).first_unposted == no_index) {
        lane.pushed_back = false;  // nothing is left that the provider could take
        --lanes_pushed_back_;
    }
}

void Engine::advance_posted(Line& line) {
    while (line.first_unposted != no_index) {
        const Operation& operation = operations_[line.first_unposted];
        if (operation.state != OperationState::posted && operation.state != OperationState::finished) return;
        ++line.posted;
        line.first_unposted = operation.next_in_line;
    }
}

void Engine::retire_prefix(QueuePair& lane, LineKind kind) {
    Line& line = lane.line(kind);
    while (line.head != no_index && operations_[line.head].state == OperationState::finished) {
        const std::uint32_t index = line.head;
        Operation& operation = operations_[index];
        if (line.cursor == index) line.cursor = operation.next_in_line;
        line.head = operation.next_in_line;
        if (line.head == no_index) line.tail = no_index;
        ++line.retired;
        forget_slot(operation);
        account(index);
        --lane.entries;
        free_operation(index);
    }
}

void Engine::release_waiters(Line& line) {
    std::uint32_t index = line.first_waiter;
    while (index != no_index) {
        const std::uint32_t next = gate_.record(index).next;
        const Threshold& threshold = gate_.thresholds(index)[gate_.record(index).waiting_on];
        if (met(threshold, line)) {
            gate_.leave(index, line);
            try_gate(index);
        } else if (policy_.ordering == OrderingClass::delivery_gated || threshold.to > line.posted) {
            return;  // those behind it need more
        }
        index = next;
    }
}

// ---- gate

void Engine::try_gate(std::uint32_t index) {
    Gate::Record& record = gate_.record(index);
    const std::span<Threshold> thresholds = gate_.thresholds(index);
    for (; record.waiting_on < record.thresholds; ++record.waiting_on) {
        const Threshold& threshold = thresholds[record.waiting_on];
        Line& line = lanes_[threshold.queue_pair].line(threshold.line);
        if (met(threshold, line)) continue;
        gate_.wait(index, line);
        return;
    }
    for (const Threshold& threshold : thresholds) {
        const Line& line = lanes_[threshold.queue_pair].line(threshold.line);
        if (line.posted < threshold.to || line.retired < threshold.retired_to) ++early_signals_;
    }
    const std::uint32_t operation = record.operation;
    gate_.free(index);
    make_ready(operation);
}

void Engine::make_ready(std::uint32_t index) {
    Operation& operation = operations_[index];
    QueuePair& lane = lanes_[operation.queue_pair];
    operation.gate = no_index;
    operation.state = OperationState::queued;
    operation.next_ready = no_index;
    ++postable_;
    (lane.ready_tail == no_index ? lane.ready_head : operations_[lane.ready_tail].next_ready) = index;
    lane.ready_tail = index;
    if (lane.ready_cursor == no_index) lane.ready_cursor = index;
}

void Engine::leave_ready(std::uint32_t index) {
    QueuePair& lane = lanes_[operations_[index].queue_pair];
    std::uint32_t before = no_index;
    std::uint32_t at = lane.ready_head;
    while (at != no_index && at != index) {
        before = at;
        at = operations_[at].next_ready;
    }
    if (at == no_index) return;
    const std::uint32_t after = operations_[index].next_ready;
    (before == no_index ? lane.ready_head : operations_[before].next_ready) = after;
    if (lane.ready_tail == index) lane.ready_tail = before;
    if (lane.ready_cursor == index) lane.ready_cursor = after;
    operations_[index].next_ready = no_index;
}

}  // namespace expertwire
