// Acceptance: arguments, room, places in the lines, what a control covers.
#include <algorithm>

#include "engine/engine.hpp"

namespace expertwire {

QueuePairId Engine::open_queue_pair(PeerId peer, EndpointId endpoint, std::uint32_t bulk_window) {
    if (peer.value >= peers_.size() || !endpoint.valid()) return {};
    Peer& owner = peers_[peer.value];
    if (owner.state != PeerState::closed && owner.state != PeerState::open) return {};
    if (owner.queue_pairs.size() >= limits_.queue_pairs_per_peer_max) return {};
    const auto unused =
        std::find_if(lanes_.begin(), lanes_.end(), [](const QueuePair& q) { return q.state == LaneState::closed; });
    if (unused == lanes_.end()) return {};
    const auto index = static_cast<std::uint32_t>(unused - lanes_.begin());
    const std::uint32_t generation = unused->generation;
    *unused = QueuePair{};
    unused->generation = generation;
    unused->state = LaneState::open;
    unused->peer = peer;
    unused->endpoint = endpoint;
    unused->bulk_window = bulk_window;
    bulk_lanes_ = bulk_lanes_ || bulk_window > 0;
    owner.state = PeerState::open;
    owner.error = Status::ok;
    owner.code = 0;
    owner.queue_pairs.push_back(index);
    lanes_used_ = std::max(lanes_used_, index + 1);
    recount_live();
    return QueuePairId{index};
}

Status Engine::check_lane(PeerId peer, QueuePairId queue_pair) const {
    if (queue_pair.value >= lanes_.size()) return Status::invalid;
    const QueuePair& lane = lanes_[queue_pair.value];
    if (lane.state == LaneState::closed || lane.peer != peer) return Status::invalid;
    if (lane.state == LaneState::quarantined || lane.state == LaneState::failed) return lane.error;
    return Status::ok;
}

Status Engine::check_chunk(PeerId peer, const ChunkSpec& spec) const {
    if (spec.kind != OpKind::write && spec.kind != OpKind::read) return Status::invalid;
    if (spec.local.value >= limits_.regions_max || !spec.remote.valid()) return Status::invalid;
    return check_lane(peer, spec.queue_pair);
}

Status Engine::check_control(PeerId peer, const ControlSpec& spec) const {
    if (spec.kind != OpKind::signal && spec.kind != OpKind::notification) return Status::invalid;
    if (spec.kind == OpKind::signal && (!spec.remote.valid() || spec.remote_offset % 8 != 0)) return Status::invalid;
    if (spec.kind == OpKind::notification && spec.payload == nullptr && spec.bytes > 0) return Status::invalid;
    return check_lane(peer, spec.queue_pair);
}

// A lane may fill its share of the table, or take one request of any size while it is empty: one that does not move
// must not leave the others without room (SPEC T2).
bool Engine::room_for(std::span<const ChunkSpec> chunks, std::span<const ControlSpec> controls) {
    if (operations_free_ < chunks.size() + controls.size() || gate_.available() < controls.size()) return false;
    const auto share = static_cast<std::uint32_t>(operations_.size() / std::max(1u, lanes_live_));
    for (const ChunkSpec& spec : chunks) ++lanes_[spec.queue_pair.value].arriving;
    for (const ControlSpec& spec : controls) ++lanes_[spec.queue_pair.value].arriving;
    bool room = true;
    const auto settle_lane_share = [&](QueuePairId id) {
        QueuePair& lane = lanes_[id.value];
        if (lane.entries > 0 && lane.entries + lane.arriving > share) room = false;
        lane.arriving = 0;
    };
    for (const ChunkSpec& spec : chunks) settle_lane_share(spec.queue_pair);
    for (const ControlSpec& spec : controls) settle_lane_share(spec.queue_pair);
    return room;
}

namespace {

// A target counts the writes of one request for the one signal behind them; what else there is has to be known to have
// arrived before anything leaves.
bool countable(std::span<const ChunkSpec> chunks, std::span<const ControlSpec> controls) {
    if (chunks.empty() || controls.size() != 1) return false;
    if (controls[0].kind != OpKind::signal || controls[0].scope != Scope::request) return false;
    return std::all_of(chunks.begin(), chunks.end(), [](const ChunkSpec& spec) { return spec.kind == OpKind::write; });
}

}  // namespace

Engine::Submitted Engine::submit(PeerId peer, std::span<const ChunkSpec> chunks, std::span<const ControlSpec> controls,
                                 Level level, TimeNs, bool counts) {
    if (peer.value >= peers_.size()) return {Status::invalid, {}};
    const Peer& owner = peers_[peer.value];
    if (owner.state == PeerState::failed) return {owner.error, {}};
    if (owner.state != PeerState::open) return {Status::closed, {}};
    if (chunks.size() + controls.size() > operations_.size()) return {Status::invalid, {}};
    for (const ChunkSpec& spec : chunks) {
        if (const Status status = check_chunk(peer, spec); status != Status::ok) return {status, {}};
    }
    for (const ControlSpec& spec : controls) {
        if (const Status status = check_control(peer, spec); status != Status::ok) return {status, {}};
    }
    const Ticket ticket = room_for(chunks, controls) ? request_slots_.mint() : Ticket{};
    if (!ticket.valid()) {
        ++counts_.submissions_pushed_back;
        return {Status::would_block, {}};
    }
    Request& request = requests_[ticket.slot];
    const auto operations = static_cast<std::uint32_t>(chunks.size() + controls.size());
    request = Request{};
    request.level = level;
    request.peer = peer;
    request.counted = counts && policy_.ordering == OrderingClass::counted_immediates && countable(chunks, controls);
    request.serial = ++moment_;
    request.unposted = request.outstanding = request.local_left = operations;
    advance(request, RequestEvent::submit);
    ++counts_.requests_submitted;
    link_live(ticket.slot);
    store_record(ticket.slot, Status::pending);
    for (const ChunkSpec& spec : chunks) accept_chunk(ticket.slot, spec);
    for (const ControlSpec& spec : controls) accept_control(ticket.slot, spec);
    if (operations == 0) {
        advance(request, RequestEvent::last_post);
        publish_if_ended(ticket.slot);
    }
    settle();
    return {Status::ok, ticket};
}

std::uint32_t Engine::new_operation(std::uint32_t request, QueuePairId queue_pair, OpKind kind, LineKind kind_of_line) {
    const std::uint32_t index = free_operation_;
    free_operation_ = operations_[index].next_in_line;
    --operations_free_;
    QueuePair& lane = lanes_[queue_pair.value];
    Line& line = lane.line(kind_of_line);
    Operation& operation = operations_[index];
    operation = Operation{};
    operation.kind = kind;
    operation.line = kind_of_line;
    operation.request = request;
    operation.queue_pair = queue_pair.value;
    operation.position = line.accepted++;
    operation.serial = requests_[request].serial;
    operation.endpoint = lane.endpoint;
    (line.tail == no_index ? line.head : operations_[line.tail].next_in_line) = index;
    line.tail = index;
    if (line.first_unposted == no_index) line.first_unposted = index;
    ++lane.entries;
    Request& owner = requests_[request];
    operation.next_in_request = owner.first_operation;
    if (owner.first_operation != no_index) operations_[owner.first_operation].previous_in_request = index;
    owner.first_operation = index;
    return index;
}

void Engine::accept_chunk(std::uint32_t request, const ChunkSpec& spec) {
    const std::uint32_t index = new_operation(request, spec.queue_pair, spec.kind, LineKind::data);
    Operation& operation = operations_[index];
    operation.local = spec.local;
    operation.local_offset = spec.local_offset;
    operation.remote = spec.remote;
    operation.remote_offset = spec.remote_offset;
    operation.bytes = spec.bytes;
    operation.state = OperationState::queued;
    ++postable_;
    ++region_uses_[spec.local.value];
    QueuePair& lane = lanes_[spec.queue_pair.value];
    if (lane.line(LineKind::data).cursor == no_index) lane.line(LineKind::data).cursor = index;
    if (spec.kind == OpKind::read || spec.bytes > policy_.ordered_bytes_max) lane.ordered_from = operation.position + 1;
}

void Engine::accept_control(std::uint32_t request, const ControlSpec& spec) {
    const bool failed = cover(request, spec);  // before it takes its own place: it does not cover itself
    const std::uint32_t index = new_operation(request, spec.queue_pair, spec.kind, LineKind::control);
    Operation& operation = operations_[index];
    operation.remote = spec.remote;
    operation.remote_offset = spec.remote_offset;
    operation.operand = spec.operand;
    operation.payload = spec.payload;
    operation.bytes = spec.bytes;
    operation.state = OperationState::held;
    operation.gate =
        gate_.acquire(index, std::span<const Threshold>(scratch_.data(), scratch_used_), spec.scope != Scope::request);
    try_gate(operation.gate);
    if (operations_[index].state == OperationState::held) ++counts_.controls_held;
    if (failed) fail_request(request, Status::aborted, 0);
}

// Fills scratch_ with what the control covers. True: something covered has failed already, so it must never leave.
bool Engine::cover(std::uint32_t request, const ControlSpec& spec) {
    scratch_used_ = 0;
    const EndpointId endpoint = lanes_[spec.queue_pair.value].endpoint;
    bool failed = false;
    if (spec.scope == Scope::queue_pair) {
        failed |= cover_line(spec.queue_pair.value, LineKind::data, endpoint);
        failed |= cover_line(spec.queue_pair.value, LineKind::control, endpoint);
        return failed;
    }
    if (spec.scope == Scope::peer) {
        for (const std::uint32_t lane : peers_[requests_[request].peer.value].queue_pairs) {
            failed |= cover_line(lane, LineKind::data, endpoint);
            failed |= cover_line(lane, LineKind::control, endpoint);
        }
        return failed;
    }
    for (std::uint32_t i = requests_[request].first_operation; i != no_index; i = operations_[i].next_in_request) {
        const Operation& chunk = operations_[i];
        if (chunk.line != LineKind::data) continue;
        const auto end = scratch_.begin() + scratch_used_;
        const auto known =
            std::find_if(scratch_.begin(), end, [&](const Threshold& t) { return t.queue_pair == chunk.queue_pair; });
        if (known == end) {
            // Ends at the last accepted chunk: this request's.
            cover_line(chunk.queue_pair, LineKind::data, endpoint, requests_[request].counted);
        }
    }
    return false;
}

bool Engine::cover_line(std::uint32_t queue_pair, LineKind kind, EndpointId endpoint, bool counted) {
    const QueuePair& lane = lanes_[queue_pair];
    const Line& line = lane.line(kind);
    if (line.retired == line.accepted) return false;  // nothing unfinished: covers nothing
    Threshold& threshold = scratch_[scratch_used_++];
    threshold.queue_pair = queue_pair;
    threshold.line = kind;
    threshold.from = line.retired;
    threshold.to = line.accepted;
    threshold.retired_to = counted ? 0 : retired_needed(policy_, lane, kind, endpoint, line.accepted);
    return line.failed_until > line.retired;
}

void Engine::link_live(std::uint32_t index) {
    Request& request = requests_[index];
    Peer& peer = peers_[request.peer.value];
    request.previous = peer.last_request;
    (peer.last_request == no_index ? peer.first_request : requests_[peer.last_request].next) = index;
    peer.last_request = index;
    ++counts_.requests_live;
}

void Engine::unlink_live(std::uint32_t index) {
    Request& request = requests_[index];
    Peer& peer = peers_[request.peer.value];
    (request.previous == no_index ? peer.first_request : requests_[request.previous].next) = request.next;
    (request.next == no_index ? peer.last_request : requests_[request.next].previous) = request.previous;
    request.previous = request.next = no_index;
    --counts_.requests_live;
}

}  // namespace expertwire
